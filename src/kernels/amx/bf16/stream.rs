//! One panel: weights come from memory, each for its only use, so how they are read is all that counts.
//!
//! Sixteen streams, a tile's rows, four steps of each at a time (64 rows side by side, a step of each, read 10 to 20 % less a second on a
//! Xeon 6). Products that add to one tile follow each other without a pause, so that one tile holds C, and C is stored once.

use std::arch::x86_64::*;

use super::super::seam::SeamTile;
use super::super::{C_ROW, TILE, each};
use super::{PANEL_STEP, Product, ROW_STEP, STEP};

/// Steps at a time.
const DEPTH: usize = 4;
/// How far ahead of the tile loads weights are prefetched, in bytes of each row.
const AHEAD: usize = 512;

/// Rows that are prefetched at each step.
const ROWS: usize = TILE / DEPTH;

/// Prefetches [`DEPTH`] lines of each of [`ROWS`] rows. Never a fault, wherever that is.
#[inline(always)]
fn prefetch_rows(at: *const u8, stride: usize) {
    for row in 0..ROWS {
        for line in 0..DEPTH {
            // SAFETY: SSE is part of x86-64, and a prefetch only hints.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.wrapping_add(row * stride + line * ROW_STEP).cast()) };
        }
    }
}

/// C of a tile of which not all rows are wanted.
#[repr(align(64))]
struct Aside([[f32; TILE]; TILE]);

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
        let (tiles, apart) = (&self.tiles, self.tiling.apart);
        let stride = self.rows.stride * apart;
        let (jump, lines) = (self.jump(t..t + 1), self.rows.k / STEP);
        let mut w = self.weights(t).wrapping_add(self.head());
        let mut x = self.steps_of(0);
        // SAFETY: the caller's contract. `steps` full steps lie inside each row and the panel, and the seam or the last step beside
        // them. C holds 16 lanes for each row of the tile.
        unsafe {
            self.begin::<0>(self.c(t, 0), self.add);
            for step in (0..self.steps).step_by(DEPTH) {
                let count = DEPTH.min(self.steps - step);
                // Lines ahead in each row, or where the row ends, of that which is read after it.
                let ahead = AHEAD.wrapping_add(if step + AHEAD / ROW_STEP < lines { 0 } else { jump });
                each!(4, S => if (S as usize) < count {
                    // All that comes of a row at once, not a line of each row at each step: 2 % faster.
                    prefetch_rows(w.wrapping_add(S as usize * ROWS * stride).wrapping_add(ahead), stride);
                    tiles.load_once::<4>(w.add(S as usize * ROW_STEP), stride);
                    tiles.load::<5>(x.add(S as usize * PANEL_STEP), C_ROW);
                    tiles.dp_bf16::<0, 4, 5>();
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
            self.end(t);
        }
    }

    /// Stores tile 0 as C of tile `t`.
    ///
    /// # Safety
    /// As [`Product::stream_tile`].
    // SAFETY: contract above.
    unsafe fn end(&self, t: usize) {
        let (c, fresh) = (self.c(t, 0), self.tiling.fresh(t));
        // SAFETY: the caller's contract: C holds 16 lanes for each row of the tile.
        unsafe {
            if fresh.start == 0 {
                return self.tiles.store::<0>(c, C_ROW * self.tiling.apart);
            }
            // The rows before are done, and were added to.
            let mut aside = Aside([[0.0; TILE]; TILE]);
            self.tiles.store::<0>(aside.0.as_mut_ptr().cast(), C_ROW);
            let rows = aside.0[fresh.clone()].as_flattened();
            c.cast::<f32>().add(fresh.start * TILE).copy_from_nonoverlapping(rows.as_ptr(), rows.len());
        }
    }
}
