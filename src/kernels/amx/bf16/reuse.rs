//! More panels than went by with the weights: two tiles of rows by two panels (the paper's Algorithm 1), so that there are as many loads
//! as products. The weights are in L2 by now.

use std::arch::x86_64::*;
use std::ops::Range;

use super::super::seam::SeamTile;
use super::super::{C_ROW, TILE, each};
use super::{PANEL_STEP, Product, ROW_STEP};

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
        for p in (0..paired).step_by(2) {
            // SAFETY: the caller's contract; both panels exist.
            unsafe { self.two_panels(p) };
        }
        for p in paired..panels {
            // SAFETY: the caller's contract; the panel exists.
            unsafe { self.panel(p) };
        }
    }

    /// C of panels `p` and `p + 1`.
    ///
    /// # Safety
    /// As [`super::product`], with no last step; the panels exist.
    // SAFETY: contract above.
    unsafe fn two_panels(&self, p: usize) {
        // SAFETY: the caller's contract.
        let seams = [0, 1].map(|i| unsafe { self.seam_panel(p + i) });
        for group in self.tiling.groups(2) {
            // SAFETY: the caller's contract; the group's tiles and both panels exist.
            unsafe {
                if group.len() == 2 {
                    self.two_by_two(&group, p, &seams);
                } else {
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

    /// C for a group of two weight tiles and panels `p`, `p + 1`.
    ///
    /// # Safety
    /// As [`Product::reuse`], with no last step; the tiles and the panels, whose seams are `seams`, exist.
    // SAFETY: contract above.
    unsafe fn two_by_two(&self, group: &Range<usize>, p: usize, seams: &[SeamTile; 2]) {
        let (t, tiles, stride) = (group.start, &self.tiles, self.rows.stride);
        let mut w = [t, t + 1].map(|t| self.weights(t).wrapping_add(self.head()));
        let c = [self.c(t, p), self.c(t, p + 1), self.c(t + 1, p), self.c(t + 1, p + 1)];
        let mut x = [p, p + 1].map(|p| self.steps_of(p));
        // Each group of rows brings its share of the next two panels to L2.
        let share = (TILE * 2 * TILE).div_ceil(self.rows.n);
        let more = p + 4 <= self.panels.count();
        let mut next = [p + 2, p + 3].map(|p| {
            let first = t / 2 * share * self.steps * 64;
            if more { self.steps_of(p).wrapping_add(first) } else { x[0] }
        });
        // SAFETY: the caller's contract. `steps` full steps are all of each row and panel but the seam. C holds 16 lanes for
        // each row of each tile.
        unsafe {
            each!(4, I => self.begin::<I>(c[I as usize], self.add));
            for _ in 0..self.steps {
                if more {
                    for line in 0..share {
                        next.iter().for_each(|next| _mm_prefetch::<_MM_HINT_T1>(next.wrapping_add(line * 64).cast()));
                    }
                    next = next.map(|next| next.wrapping_add(share * 64));
                }
                self.step(w, x, [stride, C_ROW]);
                x = x.map(|x| x.add(PANEL_STEP));
                w = w.map(|w| w.add(ROW_STEP));
            }
            if self.seam.is_some() {
                let weights = [self.seam_weights(t), self.seam_weights(t + 1)];
                self.step(weights.each_ref().map(SeamTile::at), seams.each_ref().map(SeamTile::at), [C_ROW; 2]);
            }
            each!(4, I => tiles.store::<I>(c[I as usize], C_ROW));
        }
    }

    /// A step of two tiles of weights at `w` and two of panels at `x`, whose rows are `strides` bytes apart.
    ///
    /// # Safety
    /// They are readable.
    // SAFETY: contract above.
    #[inline(always)]
    unsafe fn step(&self, w: [*const u8; 2], x: [*const u8; 2], strides: [usize; 2]) {
        let tiles = &self.tiles;
        // SAFETY: the caller's contract.
        unsafe {
            tiles.load::<5>(x[0], strides[1]);
            tiles.load::<4>(w[0], strides[0]);
            tiles.dp_bf16::<0, 4, 5>();
            tiles.load::<7>(x[1], strides[1]);
            tiles.dp_bf16::<1, 4, 7>();
            tiles.load::<6>(w[1], strides[0]);
            tiles.dp_bf16::<2, 6, 5>();
            tiles.dp_bf16::<3, 6, 7>();
        }
    }
}
