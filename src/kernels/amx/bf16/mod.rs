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
//!
//! With few panels the weights come from memory and how they are read is all that counts: see `stream.rs`. With more see `reuse.rs`.
//!
//! A tile load whose rows straddle cache lines takes six times as long as one whose rows do not (measured on a Xeon 6: 51 cycles
//! against 8 from L1), and GGUF aligns tensors to 32 bytes only. So where all rows are off by the same bytes, the steps are shifted to
//! the cache lines, and the k before the first line and behind the last are one more step (see `seam.rs`).

mod reuse;
mod stream;

use std::arch::x86_64::*;
use std::ops::Range;

use super::seam::{Seam, SeamTile};
use super::tile::{Config, Session, Tiles};
use super::{C_ROW, TILE, Tiling, parts_of_k};
use crate::isa::{Amx, Reading};
use crate::pack::{PANEL, Panels};
use crate::tensor::Rows;

/// k of a full step: a tile's 64 bytes.
const STEP: usize = 32;
/// Bytes of a full step in a panel: a tile.
const PANEL_STEP: usize = STEP * PANEL * 2;
/// Bytes of a full step in a weight row.
const ROW_STEP: usize = STEP * 2;
/// Most k of the panels together that the weights meet on their way from memory: so much stays in L2 meanwhile, 1 MiB.
const MOST_K: usize = 32 << 10;
/// Most k of a row where more panels come back to the weights: so much of 128 rows is 1 MiB of L2. Measured on a Xeon 6 with
/// 14336 k: 46 % faster at 128 tokens, 50 % at 512, than whole rows; parts of 512 k, which would keep a pair of panels in L1, are slower.
const BACK_K: usize = 4096;

/// One product: its operands and how its k is cut: `steps` full steps from each row's first whole cache line on, then the
/// seam or the last step, where there is one.
struct Product<'a> {
    tiles: Tiles<'a>,
    rows: Rows<'a>,
    panels: Panels<'a>,
    c: *mut f32,
    add: bool,
    tiling: Tiling,
    seam: Option<Seam>,
    steps: usize,
    last_pairs: usize,
}

/// See [`super::Engine::product`].
///
/// # Safety
/// As [`super::Engine::product`], for BF16.
// SAFETY: contract above.
pub unsafe fn product(amx: Amx, session: &mut Session, rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    let most = if panels.count() > stream::PANELS { BACK_K } else { MOST_K / panels.count() };
    for (rows, panels, more) in parts_of_k(rows, panels, most, STEP) {
        // SAFETY: the caller's contract, for some columns of all rows and panels.
        unsafe { columns(amx, session, rows, panels, c, add || more) };
    }
}

/// The same for so few k that all stays in L2.
///
/// # Safety
/// As [`product`].
// SAFETY: contract above.
unsafe fn columns(amx: Amx, session: &mut Session, rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    let streamed = if rows.reading == Reading::Streams { panels.count().min(stream::PANELS) } else { 0 };
    let parts = [(0, streamed, Reading::Streams), (streamed, panels.count() - streamed, Reading::Stretch)];
    for (first, count, reading) in parts.into_iter().filter(|part| part.1 > 0) {
        let seam = Seam::of(amx.avx512(), &rows);
        let (steps, last_pairs) = seam.map_or((rows.k / STEP, rows.k % STEP / 2), |seam| (seam.steps(rows.k), 0));
        let tiling = if reading == Reading::Streams { Tiling::of(&rows) } else { Tiling::neighbours(rows.n) };
        let tiles = session.configure(&config(tiling.height, last_pairs));
        let panels = panels.some(first, count);
        // SAFETY: the caller's contract, for some of the panels and their part of C.
        unsafe {
            let c = c.add(first * rows.n * PANEL);
            let product = Product { tiles, rows, panels, c, add, tiling, seam, steps, last_pairs };
            if reading == Reading::Streams { product.stream() } else { product.reuse() }
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
    /// The seam's right operand for panel `p`; anything where there is no seam.
    ///
    /// # Safety
    /// As [`product`]; the panel exists.
    // SAFETY: contract above.
    #[inline]
    unsafe fn seam_panel(&self, p: usize) -> SeamTile {
        // SAFETY: the panel has all k of the rows.
        self.seam.map_or_else(SeamTile::unused, |seam| unsafe { seam.panel(self.panels.panel(p), self.rows.k) })
    }

    /// The seam's left operand for the rows of tile `t`; anything where there is no seam.
    ///
    /// # Safety
    /// As [`product`].
    // SAFETY: contract above.
    #[inline]
    unsafe fn seam_weights(&self, t: usize) -> SeamTile {
        let weights = |seam: Seam| {
            // SAFETY: the tile's rows are inside the block (of a `t` past the last: those of the last).
            unsafe { seam.weights(&self.rows, self.tiling.start(t), self.tiling.height, self.tiling.apart) }
        };
        self.seam.map_or_else(SeamTile::unused, weights)
    }

    /// Address of the weights of tile `t`.
    fn weights(&self, t: usize) -> *const u8 {
        self.rows.row(self.tiling.start(t))
    }

    /// Bytes of a row before the first full step.
    fn head(&self) -> usize {
        self.seam.map_or(0, |seam| seam.head_bytes())
    }

    /// Address of panel `p`'s first full step.
    fn steps_of(&self, p: usize) -> *const u8 {
        self.panels.panel(p).wrapping_add(self.head() * PANEL)
    }

    /// Address of C for tile `t` and panel `p`.
    fn c(&self, t: usize, p: usize) -> *mut u8 {
        let at = (p * self.rows.n + self.tiling.start(t)) * PANEL;
        // SAFETY: inside the C block, by the contract of `product`.
        unsafe { self.c.add(at).cast() }
    }

    /// Makes tile `T` zero, or where it is added to, what C holds at `c`.
    ///
    /// # Safety
    /// `c` is a tile's place in C.
    // SAFETY: contract above.
    #[inline(always)]
    unsafe fn begin<const T: u8>(&self, c: *const u8, add: bool) {
        if add {
            // SAFETY: the caller's contract.
            unsafe { self.tiles.load::<T>(c, C_ROW * self.tiling.apart) };
        } else {
            self.tiles.zero::<T>();
        }
    }

    /// How far from a row's end in the first of `tiles` that row begins which is read after it: the next tile's, or the next
    /// block's.
    fn jump(&self, tiles: Range<usize>) -> usize {
        let next = if tiles.end == self.tiling.count() { self.rows.next } else { self.weights(tiles.end) };
        next.addr().wrapping_sub(self.weights(tiles.start).addr() + self.rows.k * 2)
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
