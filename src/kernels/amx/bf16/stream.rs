//! One panel: weights come from memory, each for its only use, so how they are read is all that counts.
//!
//! Sixteen rows at a time and four steps of each, so that few streams run through memory, in long pieces (64 rows side by side, a
//! step of each, read 10 to 20 % less a second on a Xeon 6). Each of the steps has sums of its own, as products that add to one
//! tile wait for each other.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::seam::SeamTile;
use super::super::{C_ROW, TILE, each, prefetch};
use super::{PANEL_STEP, Product, ROW_STEP, STEP};

/// Steps at a time, and C tiles that are added up in the end.
const DEPTH: usize = 4;
/// How far ahead of the tile loads weights are prefetched, in bytes of each row.
const AHEAD: usize = 1024;

/// C tiles that wait to be added up.
#[repr(align(64))]
struct Sums([[f32; TILE * TILE]; DEPTH]);

impl Product<'_> {
    /// All of C, for one panel.
    ///
    /// # Safety
    /// As [`super::product`]; there is one panel.
    // SAFETY: contract above.
    pub(super) unsafe fn stream(&self) {
        // SAFETY: the caller's contract.
        let seam = unsafe { self.seam_panel(0) };
        for t in 0..self.tiling.count() {
            // SAFETY: the caller's contract; the tile exists.
            unsafe { self.stream_tile(t, &seam) };
        }
    }

    /// C of tile `t`.
    ///
    /// # Safety
    /// As [`Product::stream`]; the tile exists, and the panel's seam is `seam`.
    // SAFETY: contract above.
    unsafe fn stream_tile(&self, t: usize, seam: &SeamTile) {
        let (tiles, stride) = (&self.tiles, self.rows.stride);
        let (jump, lines) = (self.jump(t..t + 1), self.rows.k / STEP);
        // Rows with gaps (a NUMA node's part of them) are better left to the hardware, which reads 16 streams ahead by itself: 15 to 20 %
        // faster on a Xeon 6.
        let along = self.rows.contiguous();
        let mut w = self.weights(t).wrapping_add(self.head());
        let mut x = self.steps_of(0);
        // SAFETY: the caller's contract. `steps` full steps lie inside each row and the panel, and the seam or the last step beside
        // them. C holds 16 lanes for each row of the tile.
        unsafe {
            self.begin::<0>(self.c(t, 0), self.add);
            tiles.zero::<1>();
            tiles.zero::<2>();
            tiles.zero::<3>();
            for step in (0..self.steps).step_by(DEPTH) {
                let count = DEPTH.min(self.steps - step);
                // Lines ahead in each row, or where the row ends, of that which is read after it.
                let ahead = AHEAD.wrapping_add(if step + AHEAD / ROW_STEP < lines { 0 } else { jump });
                each!(4, S => if (S as usize) < count {
                    let w = w.wrapping_add(S as usize * ROW_STEP);
                    if along {
                        prefetch::<false>(w.wrapping_add(ahead), stride);
                    }
                    tiles.load_once::<4>(w, stride);
                    tiles.load::<5>(x.add(S as usize * PANEL_STEP), C_ROW);
                    tiles.dp_bf16::<S, 4, 5>();
                });
                w = w.add(count * ROW_STEP);
                x = x.add(count * PANEL_STEP);
            }
            if self.seam.is_some() {
                // Now that the lines were read by the full steps of these rows and of the rows before and behind.
                let weights = self.seam_weights(t);
                tiles.load::<4>(weights.at(), C_ROW);
                tiles.load::<5>(seam.at(), C_ROW);
                tiles.dp_bf16::<0, 4, 5>();
            }
            if self.last_pairs > 0 {
                tiles.load::<6>(w, stride);
                tiles.load::<7>(x, C_ROW);
                tiles.dp_bf16::<0, 6, 7>();
            }
            let mut sums = Sums([[0.0; TILE * TILE]; DEPTH]);
            each!(4, I => tiles.store::<I>(sums.0[I as usize].as_mut_ptr().cast(), C_ROW));
            // A last tile that was moved back overlaps the one before it, whose rows are done.
            let fresh = t * TILE - self.tiling.start(t)..self.tiling.height;
            add_up(&sums, fresh, self.c(t, 0).cast());
        }
    }
}

/// `c[i] = (sums[0][i] + sums[2][i]) + (sums[1][i] + sums[3][i])` for some rows of a tile.
///
/// # Safety
/// `c` is 64-byte aligned and writable for these rows of 16 f32; AVX-512 F is there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f")]
unsafe fn add_up(sums: &Sums, rows: Range<usize>, c: *mut f32) {
    for row in rows {
        // SAFETY: row `row` of each tile and of C; the tiles are 64-byte aligned.
        unsafe {
            let [a, b, d, e] = [0, 1, 2, 3].map(|i| _mm512_load_ps(sums.0[i].as_ptr().add(row * TILE)));
            _mm512_store_ps(c.add(row * TILE), _mm512_add_ps(_mm512_add_ps(a, d), _mm512_add_ps(b, e)));
        }
    }
}
