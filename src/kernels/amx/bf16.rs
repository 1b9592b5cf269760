//! BF16 (`tdpbf16ps`): any k, any number of rows and tokens.
//!
//! | tiles | full k steps | last k step, k % 32 > 1 |
//! |---|---|---|
//! | 0 to 3 | C, up to four of 16 rows x 16 tokens | the same |
//! | 4 | weights, 16 rows x 32 k | |
//! | 5 | panel, 32 k x 16 tokens | |
//! | 6 | as 4 where there is no last step | weights, 16 rows x what is left of k |
//! | 7 | as 5 where there is no last step | panel, what is left of k x 16 tokens |
//!
//! So one configuration serves a whole product. A last step's weight tile is narrow because zeros in the panel do not hide an
//! Inf or NaN that follows in the next row. A single last k (k odd) is not a whole pair: the vectors add it.

use std::arch::x86_64::*;
use std::ops::Range;

use super::tile::{Config, Session, Tiles};
use super::{C_ROW, TILE, Tiling, each, prefetch};
use crate::isa::Amx;
use crate::pack::{PANEL, Panels};
use crate::tensor::Rows;

/// k of a full step: a tile's 64 bytes.
const STEP: usize = 32;
/// Bytes of a full step in a panel: a tile.
const PANEL_STEP: usize = STEP * PANEL * 2;
/// Bytes of a full step in a weight row.
const ROW_STEP: usize = STEP * 2;
/// How far ahead of the tile loads weights are prefetched, in bytes of each row.
const AHEAD: usize = 512;
/// With at most this many panels each weight is used once, so it need not stay in L1.
const STREAMED_PANELS: usize = 2;

/// One product: its operands and how its k is cut.
struct Product<'a> {
    tiles: Tiles<'a>,
    rows: Rows<'a>,
    panels: Panels<'a>,
    c: *mut f32,
    add: bool,
    tiling: Tiling,
    steps: usize,
    last_pairs: usize,
}

/// See [`super::Engine::product`].
///
/// # Safety
/// As [`super::Engine::product`], for BF16.
// SAFETY: contract above.
pub unsafe fn product(amx: Amx, session: &mut Session, rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    let tiling = Tiling::new(rows.n);
    let (steps, last_pairs) = (rows.k / STEP, rows.k % STEP / 2);
    let tiles = session.configure(&config(tiling.height, last_pairs));
    let streamed = panels.count() <= STREAMED_PANELS;
    let product = Product { tiles, rows, panels, c, add, tiling, steps, last_pairs };
    // SAFETY: the caller's contract.
    unsafe {
        if streamed {
            product.run::<true>();
        } else {
            product.run::<false>();
        }
    }
    if rows.k % 2 == 1 {
        let _avx512 = amx.avx512();
        // SAFETY: the caller's contract; the token proves AVX-512.
        unsafe { add_last_column(rows, panels, c) };
    }
}

fn config(height: usize, last_pairs: usize) -> Config {
    let (c, weights, panel) = ([height, C_ROW], [height, ROW_STEP], [TILE, C_ROW]);
    let (last_weights, last_panel) = match last_pairs {
        0 => (weights, panel),
        pairs => ([height, pairs * 4], [pairs, C_ROW]),
    };
    Config::new([c, c, c, c, weights, panel, last_weights, last_panel])
}

impl Product<'_> {
    /// All of C.
    ///
    /// # Safety
    /// As [`product`].
    // SAFETY: contract above.
    unsafe fn run<const STREAM: bool>(&self) {
        let panels = self.panels.count();
        // Two panels at a time need all eight tiles in their full shape.
        let paired = if self.last_pairs == 0 && self.rows.n >= 2 * TILE { panels / 2 * 2 } else { 0 };
        for p in (0..paired).step_by(2) {
            for group in self.tiling.groups(2) {
                // SAFETY: the caller's contract; the group's tiles and both panels exist.
                unsafe {
                    if group.len() == 2 {
                        self.two_by_two::<STREAM>(&group, p);
                    } else {
                        self.one_panel::<1, STREAM>(&group, p);
                        self.one_panel::<1, STREAM>(&group, p + 1);
                    }
                }
            }
        }
        for p in paired..panels {
            for group in self.tiling.groups(4) {
                // SAFETY: the caller's contract; the group's tiles and the panel exist.
                unsafe {
                    match group.len() {
                        1 => self.one_panel::<1, STREAM>(&group, p),
                        2 => self.one_panel::<2, STREAM>(&group, p),
                        3 => self.one_panel::<3, STREAM>(&group, p),
                        _ => self.one_panel::<4, STREAM>(&group, p),
                    }
                }
            }
        }
    }

    /// Address of the weights of tile `t`.
    fn weights(&self, t: usize) -> *const u8 {
        self.rows.row(self.tiling.start(t))
    }

    /// Address of C for tile `t` and panel `p`.
    fn c(&self, t: usize, p: usize) -> *mut u8 {
        let at = (p * self.rows.n + self.tiling.start(t)) * PANEL;
        // SAFETY: inside the C block, by the contract of `product`.
        unsafe { self.c.add(at).cast() }
    }

    /// Makes tile `T` zero, or what C holds at `c`.
    ///
    /// # Safety
    /// `c` is a tile's place in C.
    // SAFETY: contract above.
    #[inline(always)]
    unsafe fn begin<const T: u8>(&self, c: *const u8) {
        if self.add {
            // SAFETY: the caller's contract.
            unsafe { self.tiles.load::<T>(c, C_ROW) };
        } else {
            self.tiles.zero::<T>();
        }
    }

    /// How far from a row's end in tile `tiles.start` that row begins which is read after it: the next group's, or the
    /// next block's.
    fn jump(&self, tiles: &Range<usize>) -> usize {
        let last = tiles.end == self.tiling.count();
        let next = if last { self.rows.next } else { self.weights(tiles.end) };
        next.addr().wrapping_sub(self.weights(tiles.start).addr() + self.rows.k * 2)
    }

    /// Loads a full weight tile, and prefetches what is read `ahead` bytes from each of its rows.
    ///
    /// # Safety
    /// `at` is inside the weights, a whole step before the rows' end.
    // SAFETY: contract above.
    #[inline(always)]
    unsafe fn load_weights<const T: u8, const STREAM: bool>(&self, at: *const u8, ahead: usize) {
        if !STREAM {
            // SAFETY: the caller's contract.
            return unsafe { self.tiles.load::<T>(at, self.rows.stride) };
        }
        // SAFETY: the caller's contract.
        unsafe { self.tiles.load_once::<T>(at, self.rows.stride) };
        prefetch::<false>(at.wrapping_add(ahead), self.rows.stride);
    }

    /// C for a group of `R` weight tiles and panel `p`: a step loads the panel once and each weight tile once.
    ///
    /// # Safety
    /// As [`Product::run`]; `R` is 1 to 4, and the tiles and the panel exist.
    // SAFETY: contract above.
    unsafe fn one_panel<const R: usize, const STREAM: bool>(&self, group: &Range<usize>, p: usize) {
        let (t, jump) = (group.start, self.jump(group));
        let tiles = &self.tiles;
        let mut w: [*const u8; 4] = std::array::from_fn(|i| self.weights(t + i));
        let c: [*mut u8; 4] = std::array::from_fn(|i| self.c(t + i, p));
        let mut x = self.panels.panel(p);
        // SAFETY: the caller's contract. `steps` full steps lie inside each row and the panel, and the last step, of
        // `last_pairs` pairs, behind them. C holds 16 lanes for each row of each tile.
        unsafe {
            each!(R, I => self.begin::<I>(c[I as usize]));
            for step in 0..self.steps {
                let ahead = AHEAD.wrapping_add(if step + AHEAD / ROW_STEP < self.steps { 0 } else { jump });
                tiles.load::<5>(x, C_ROW);
                each!(R, I => {
                    self.load_weights::<4, STREAM>(w[I as usize], ahead);
                    tiles.dp_bf16::<I, 4, 5>();
                });
                x = x.add(PANEL_STEP);
                w = w.map(|w| w.add(ROW_STEP));
            }
            if self.last_pairs > 0 {
                tiles.load::<7>(x, C_ROW);
                each!(R, I => {
                    tiles.load::<6>(w[I as usize], self.rows.stride);
                    tiles.dp_bf16::<I, 6, 7>();
                });
            }
            each!(R, I => tiles.store::<I>(c[I as usize], C_ROW));
        }
    }

    /// C for a group of two weight tiles and panels `p`, `p + 1` (the paper's Algorithm 1): as many loads as products.
    ///
    /// # Safety
    /// As [`Product::run`], with no last step; the tiles and the panels exist.
    // SAFETY: contract above.
    unsafe fn two_by_two<const STREAM: bool>(&self, group: &Range<usize>, p: usize) {
        let (t, jump) = (group.start, self.jump(group));
        let tiles = &self.tiles;
        let mut w = [self.weights(t), self.weights(t + 1)];
        let c = [self.c(t, p), self.c(t, p + 1), self.c(t + 1, p), self.c(t + 1, p + 1)];
        let mut x = [self.panels.panel(p), self.panels.panel(p + 1)];
        // SAFETY: the caller's contract. `steps` full steps are all of each row and panel. C holds 16 lanes for each row
        // of each tile.
        unsafe {
            each!(4, I => self.begin::<I>(c[I as usize]));
            for step in 0..self.steps {
                let ahead = AHEAD.wrapping_add(if step + AHEAD / ROW_STEP < self.steps { 0 } else { jump });
                tiles.load::<5>(x[0], C_ROW);
                self.load_weights::<4, STREAM>(w[0], ahead);
                tiles.dp_bf16::<0, 4, 5>();
                tiles.load::<7>(x[1], C_ROW);
                tiles.dp_bf16::<1, 4, 7>();
                self.load_weights::<6, STREAM>(w[1], ahead);
                tiles.dp_bf16::<2, 6, 5>();
                tiles.dp_bf16::<3, 6, 7>();
                x = x.map(|x| x.add(PANEL_STEP));
                w = w.map(|w| w.add(ROW_STEP));
            }
            each!(4, I => tiles.store::<I>(c[I as usize], C_ROW));
        }
    }
}

/// Adds the last column of an odd k: `c[panel][row][lane] += w[row][k - 1] * x[k - 1][lane]`.
///
/// # Safety
/// As [`product`]; AVX-512 F is there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f")]
unsafe fn add_last_column(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32) {
    let last = rows.k - 1;
    for p in 0..panels.count() {
        // SAFETY: pair `last / 2` of the panel is 64 bytes; its low halves are x[last], its high halves padding. The
        // row's last element is inside the row. C has 16 lanes for each row and panel, 64-byte aligned.
        unsafe {
            let pairs = _mm512_load_si512(panels.panel(p).add(last / 2 * PANEL * 4).cast());
            let x = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs));
            for row in 0..rows.n {
                let w = rows.row(row).cast::<u16>().add(last).read_unaligned();
                let w = _mm512_set1_ps(f32::from_bits(u32::from(w) << 16));
                let at = c.add((p * rows.n + row) * PANEL);
                _mm512_store_ps(at, _mm512_fmadd_ps(w, x, _mm512_load_ps(at)));
            }
        }
    }
}
