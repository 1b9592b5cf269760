//! More panels: two tiles of rows by two panels (the paper's Algorithm 1), so that there are as many loads as products.
//!
//! With one pair of panels weights come from memory, and what follows in the same rows is prefetched. With more pairs
//! they are used again from the caches; meanwhile the next block's are fetched, by each pair its share of the rows.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::seam::SeamTile;
use super::super::{C_ROW, TILE, each, prefetch};
use super::{PANEL_STEP, Product, ROW_STEP, STEP};

/// How far ahead of the tile loads weights are prefetched, in bytes of each row.
const AHEAD: usize = 512;

/// Most steps of 32 k that more than two pairs of panels are multiplied with at a time: so much of 128 rows is a MiB. Measured on a Xeon
/// 6 with 14336 k: 46 % faster at 128 tokens, 50 % at 512, than whole rows; 16 steps, which would keep a pair of panels in L1, are
/// slower, and so are parts with two pairs.
const CHUNK: usize = 128;

/// Some of the steps; the last ones come with the seam.
struct Part {
    steps: Range<usize>,
    last: bool,
}

impl Product<'_> {
    /// All of C.
    ///
    /// # Safety
    /// As [`super::product`].
    // SAFETY: contract above.
    pub(super) unsafe fn reuse(&self) {
        let panels = self.panels.count();
        // Two panels at a time need all eight tiles in their full shape.
        let paired = if self.last_pairs == 0 && self.rows.n >= 2 * TILE { panels / 2 * 2 } else { 0 };
        // Where more than two pairs meet long rows, a part of k at a time stays in L2 for all of them.
        let parts = if paired > 4 { self.steps.div_ceil(CHUNK).max(1) } else { 1 };
        for i in 0..parts {
            let part = Part { steps: i * self.steps / parts..(i + 1) * self.steps / parts, last: i + 1 == parts };
            for p in (0..paired).step_by(2) {
                // SAFETY: the caller's contract; both panels exist.
                unsafe { self.two_panels(p, &part) };
            }
        }
        for p in paired..panels {
            // SAFETY: the caller's contract; the panel exists.
            unsafe { self.panel(p) };
        }
    }

    /// A part of the steps of C of panels `p` and `p + 1`.
    ///
    /// # Safety
    /// As [`super::product`], with no last step; the panels exist.
    // SAFETY: contract above.
    unsafe fn two_panels(&self, p: usize, part: &Part) {
        // SAFETY: the caller's contract.
        let seams = [0, 1].map(|i| unsafe { self.seam_panel(p + i) });
        for group in self.tiling.groups(2) {
            // SAFETY: the caller's contract; the group's tiles and both panels exist.
            unsafe {
                if group.len() == 2 && self.panels.count() == 2 {
                    self.two_by_two::<true>(&group, p, &seams, part);
                } else if group.len() == 2 {
                    self.two_by_two::<false>(&group, p, &seams, part);
                } else if part.last {
                    self.one_panel::<1>(&group, p, &seams[0]);
                    self.one_panel::<1>(&group, p + 1, &seams[1]);
                }
            }
        }
    }

    /// C of panel `p`.
    ///
    /// # Safety
    /// As [`super::product`]; the panel exists.
    // SAFETY: contract above.
    unsafe fn panel(&self, p: usize) {
        // SAFETY: the caller's contract.
        let seam = unsafe { self.seam_panel(p) };
        for group in self.tiling.groups(4) {
            // SAFETY: the caller's contract; the group's tiles and the panel exist.
            unsafe {
                match group.len() {
                    1 => self.one_panel::<1>(&group, p, &seam),
                    2 => self.one_panel::<2>(&group, p, &seam),
                    3 => self.one_panel::<3>(&group, p, &seam),
                    _ => self.one_panel::<4>(&group, p, &seam),
                }
            }
        }
    }

    /// The rows of the next block that the product of `tiles` with the pair of panels at `p` prefetches, a line each step: each
    /// pair has its share of the rows that stand where `tiles` do in this block.
    fn share(&self, tiles: &Range<usize>, p: usize) -> Range<usize> {
        let (first, pairs, rows) = (self.tiling.start(tiles.start), self.panels.count() / 2, 2 * TILE);
        first + p / 2 * rows / pairs..first + (p / 2 + 1) * rows / pairs
    }

    /// Loads a weight tile, `ONCE` with the hint that it will not be wanted again.
    ///
    /// # Safety
    /// `at` is inside the weights, a whole step before the rows' end.
    // SAFETY: contract above.
    #[inline(always)]
    unsafe fn load_weights<const T: u8, const ONCE: bool>(&self, at: *const u8) {
        // SAFETY: the caller's contract.
        unsafe {
            if ONCE {
                self.tiles.load_once::<T>(at, self.rows.stride)
            } else {
                self.tiles.load::<T>(at, self.rows.stride)
            }
        }
    }

    /// C for a group of `R` weight tiles and panel `p`: a step loads the panel once and each weight tile once.
    ///
    /// # Safety
    /// As [`Product::reuse`]; `R` is 1 to 4, and the tiles and the panel, whose seam is `seam`, exist.
    // SAFETY: contract above.
    unsafe fn one_panel<const R: usize>(&self, group: &Range<usize>, p: usize, seam: &SeamTile) {
        let (t, tiles, stride) = (group.start, &self.tiles, self.rows.stride);
        let mut w: [*const u8; 4] = std::array::from_fn(|i| self.weights(t + i).wrapping_add(self.head()));
        let c: [*mut u8; 4] = std::array::from_fn(|i| self.c(t + i, p));
        let mut x = self.steps_of(p);
        // SAFETY: the caller's contract. `steps` full steps lie inside each row and the panel, and the seam or the last step
        // beside them. C holds 16 lanes for each row of each tile.
        unsafe {
            each!(R, I => self.begin::<I>(c[I as usize], self.add));
            for _ in 0..self.steps {
                tiles.load::<5>(x, C_ROW);
                each!(R, I => {
                    tiles.load::<4>(w[I as usize], stride);
                    tiles.dp_bf16::<I, 4, 5>();
                });
                x = x.add(PANEL_STEP);
                w = w.map(|w| w.add(ROW_STEP));
            }
            if self.seam.is_some() {
                // Now that the lines were read by the full steps of these rows and of the rows before and behind.
                let weights: [SeamTile; R] = std::array::from_fn(|i| self.seam_weights(t + i));
                tiles.load::<5>(seam.at(), C_ROW);
                each!(R, I => {
                    tiles.load::<4>(weights[I as usize].at(), C_ROW);
                    tiles.dp_bf16::<I, 4, 5>();
                });
            }
            if self.last_pairs > 0 {
                tiles.load::<7>(x, C_ROW);
                each!(R, I => {
                    tiles.load::<6>(w[I as usize], stride);
                    tiles.dp_bf16::<I, 6, 7>();
                });
            }
            each!(R, I => tiles.store::<I>(c[I as usize], C_ROW));
        }
    }

    /// C for a group of two weight tiles and panels `p`, `p + 1`. `ALONG` prefetches along the rows.
    ///
    /// # Safety
    /// As [`Product::reuse`], with no last step; the tiles and the panels, whose seams are `seams`, exist.
    // SAFETY: contract above.
    unsafe fn two_by_two<const ALONG: bool>(&self, group: &Range<usize>, p: usize, seams: &[SeamTile; 2], part: &Part) {
        let (t, tiles, stride) = (group.start, &self.tiles, self.rows.stride);
        let first = part.steps.start;
        let mut w = [t, t + 1].map(|t| self.weights(t).wrapping_add(self.head() + first * ROW_STEP));
        let c = [self.c(t, p), self.c(t, p + 1), self.c(t + 1, p), self.c(t + 1, p + 1)];
        let mut x = [p, p + 1].map(|p| self.steps_of(p).wrapping_add(first * PANEL_STEP));
        let (share, jump, lines) = (self.share(group, p), self.jump(group.clone()), self.rows.k / STEP);
        let mut next = self.rows.next.wrapping_add(share.start * stride + first * ROW_STEP);
        // SAFETY: the caller's contract. `steps` full steps are all of each row and panel but the seam. C holds 16 lanes for
        // each row of each tile.
        unsafe {
            each!(4, I => self.begin::<I>(c[I as usize], self.add || first > 0));
            for step in part.steps.clone() {
                if ALONG {
                    let ahead = AHEAD.wrapping_add(if step + AHEAD / ROW_STEP < lines { 0 } else { jump });
                    w.iter().for_each(|w| prefetch::<false>(w.wrapping_add(ahead), stride));
                } else {
                    for row in 0..share.len() {
                        _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(row * stride).cast());
                    }
                }
                tiles.load::<5>(x[0], C_ROW);
                self.load_weights::<4, ALONG>(w[0]);
                tiles.dp_bf16::<0, 4, 5>();
                tiles.load::<7>(x[1], C_ROW);
                tiles.dp_bf16::<1, 4, 7>();
                self.load_weights::<6, ALONG>(w[1]);
                tiles.dp_bf16::<2, 6, 5>();
                tiles.dp_bf16::<3, 6, 7>();
                x = x.map(|x| x.add(PANEL_STEP));
                w = w.map(|w| w.add(ROW_STEP));
                next = next.wrapping_add(ROW_STEP);
            }
            if part.last && self.seam.is_some() {
                let weights = [self.seam_weights(t), self.seam_weights(t + 1)];
                tiles.load::<5>(seams[0].at(), C_ROW);
                tiles.load::<4>(weights[0].at(), C_ROW);
                tiles.dp_bf16::<0, 4, 5>();
                tiles.load::<7>(seams[1].at(), C_ROW);
                tiles.dp_bf16::<1, 4, 7>();
                tiles.load::<6>(weights[1].at(), C_ROW);
                tiles.dp_bf16::<2, 6, 5>();
                tiles.dp_bf16::<3, 6, 7>();
            }
            each!(4, I => tiles.store::<I>(c[I as usize], C_ROW));
        }
    }
}
