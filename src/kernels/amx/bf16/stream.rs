//! Up to four panels: weights come from memory, each for its only use, so how they are read is all that counts. A tile of weights is
//! multiplied with all panels, which stay in L2.
//!
//! Sixteen streams, a tile's rows, four steps of each at a time (64 rows side by side, a step of each, read 10 to 20 % less a second on a
//! Xeon 6). Products that add to one tile follow each other without a pause, so one tile of C is enough for each panel.

use std::arch::x86_64::*;

use super::super::seam::SeamTile;
use super::super::{C_ROW, Later, TILE, each, long_runs, store_fresh};
use super::{PANEL_STEP, Product, ROW_STEP, STEP};

/// Most panels: as many as there are tiles for C.
pub(super) const PANELS: usize = 4;
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

impl Product<'_> {
    /// All of C, for up to [`PANELS`] panels.
    ///
    /// # Safety
    /// As [`super::product`].
    // SAFETY: contract above.
    pub(super) unsafe fn stream(&self) {
        // SAFETY: the caller's contract.
        unsafe {
            match self.panels.count() {
                1 => self.stream_panels::<1>(),
                2 => self.stream_panels::<2>(),
                3 => self.stream_panels::<3>(),
                _ => self.stream_panels::<4>(),
            }
        }
    }

    /// All of C, for `P` panels.
    ///
    /// # Safety
    /// As [`Product::stream`]; there are `P` panels.
    // SAFETY: contract above.
    unsafe fn stream_panels<const P: usize>(&self) {
        // SAFETY: the caller's contract.
        let seams = std::array::from_fn(|p| unsafe { self.seam_panel(p) });
        let mut later = Later::of(&self.panels, self.tiling.count() * self.steps);
        for t in 0..self.tiling.count() {
            // SAFETY: the caller's contract; the tile exists.
            unsafe { self.stream_tile::<P>(t, &seams, &mut later) };
        }
    }

    /// C of tile `t`.
    ///
    /// # Safety
    /// As [`Product::stream_panels`]; the tile exists, and the panels' seams are `seams`.
    // SAFETY: contract above.
    unsafe fn stream_tile<const P: usize>(&self, t: usize, seams: &[SeamTile; P], later: &mut Later) {
        let (tiles, stride) = (&self.tiles, self.rows.stride * self.tiling.apart);
        let (jump, lines) = (self.jump(t..t + 1), self.rows.k / STEP);
        let along = long_runs(&self.rows);
        let mut w = self.weights(t).wrapping_add(self.head());
        let mut x: [*const u8; P] = std::array::from_fn(|p| self.steps_of(p));
        // SAFETY: the caller's contract. `steps` full steps lie inside each row and panel, and the seam or the last step beside
        // them. C holds 16 lanes for each row of the tile and panel.
        unsafe {
            each!(P, I => self.begin::<I>(self.c(t, I as usize), self.add));
            for step in (0..self.steps).step_by(DEPTH) {
                let count = DEPTH.min(self.steps - step);
                // Lines ahead in each row, or where the row ends, of that which is read after it.
                let ahead = AHEAD.wrapping_add(if step + AHEAD / ROW_STEP < lines { 0 } else { jump });
                each!(4, S => if (S as usize) < count {
                    // All that comes of a row at once, not a line of each row at each step: 2 % faster.
                    if along {
                        prefetch_rows(w.wrapping_add(S as usize * ROWS * stride).wrapping_add(ahead), stride);
                    }
                    later.step();
                    tiles.load_once::<4>(w.add(S as usize * ROW_STEP), stride);
                    each!(P, I => {
                        tiles.load::<5>(x[I as usize].add(S as usize * PANEL_STEP), C_ROW);
                        tiles.dp_bf16::<I, 4, 5>();
                    });
                });
                w = w.add(count * ROW_STEP);
                x = x.map(|x| x.add(count * PANEL_STEP));
            }
            if self.seam.is_some() {
                // Now that the lines were read by the full steps of these rows and of the rows before and behind.
                let weights = self.seam_weights(t);
                tiles.load::<4>(weights.at(), C_ROW);
                each!(P, I => {
                    tiles.load::<5>(seams[I as usize].at(), C_ROW);
                    tiles.dp_bf16::<I, 4, 5>();
                });
            }
            if self.last_pairs > 0 {
                tiles.load::<6>(w, stride);
                each!(P, I => {
                    tiles.load::<7>(x[I as usize], C_ROW);
                    tiles.dp_bf16::<I, 6, 7>();
                });
            }
            each!(P, I => self.end::<I>(t));
        }
    }

    /// Stores tile `I` as C of tile `t` and panel `I`.
    ///
    /// # Safety
    /// As [`Product::stream_tile`].
    // SAFETY: contract above.
    unsafe fn end<const I: u8>(&self, t: usize) {
        // SAFETY: the caller's contract: C holds 16 lanes for each row of the tile.
        unsafe {
            store_fresh::<I>(&self.tiles, self.c(t, I as usize), C_ROW * self.tiling.apart, self.tiling.fresh(t))
        };
    }
}
