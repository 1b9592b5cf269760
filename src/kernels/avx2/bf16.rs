//! BF16 weights in place times BF16 tokens by f32 fused multiply-adds.
//!
//! A BF16 value is the upper half of an f32, so of a vector of 16 values a shift gives those with even k and a mask
//! those with odd k. Both operands take their k in that order, so no shuffle is needed.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, half and token")]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::pieces::{Piece, ROWS, for_rows, pieces};
use super::sums::{settle, store_sums};
use crate::kernels::passes::{DotPass, Group, Sweep, dots_by_passes};
use crate::pack::{PANEL, Panels, TokenRows};
use crate::tensor::Rows;

/// Columns of a piece: of a panel they are 16 KiB, and of the widened rows 12.
const K_BLOCK: usize = 512;

/// 16 columns of up to [`ROWS`] rows, widened: of each row the 8 with even k, then the 8 with odd k.
type Step = [[[f32; 8]; 2]; ROWS];

/// Columns of a piece in steps, and room for one step more.
#[repr(C, align(64))]
struct Wide([Step; K_BLOCK / 16 + 1]);

/// Values with even k, widened.
#[inline]
#[target_feature(enable = "avx2")]
fn even(v: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(v))
}

/// Values with odd k, widened.
#[inline]
#[target_feature(enable = "avx2")]
fn odd(v: __m256i) -> __m256 {
    _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(0xFFFF_0000_u32 as i32)))
}

/// The panel form (see [`super::super::Engine::product`]).
///
/// # Safety
/// As `Engine::product`, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx2,fma")]
pub unsafe fn panels(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    let mut wide = MaybeUninit::<Wide>::uninit();
    for piece in pieces(rows, panels, K_BLOCK) {
        // SAFETY: `wide` has room for a piece; the C rows from row i on are the caller's.
        unsafe {
            for_rows!(piece.n, |R| all_panels::<R>(&piece, wide.as_mut_ptr().cast(), c.add(piece.i * PANEL), add))
        }
    }
}

/// A piece times all panels. Its rows are widened while they are multiplied with the first one.
#[inline]
#[target_feature(enable = "avx2,fma")]
// SAFETY: as `panels`; the piece has `R` rows, `wide` is room for it, `c` is that of its first row.
unsafe fn all_panels<const R: usize>(piece: &Piece<'_>, wide: *mut Step, c: *mut f32, add: bool) {
    let (rows, add) = (&piece.rows, add || piece.more);
    let mut last = [[0; 16]; R];
    let mut source = Source::<R> {
        rows: std::array::from_fn(|r| rows.row(piece.i + r)),
        at: 0,
        left: rows.k,
        last: &raw mut last,
        ahead: Sweep::new(rows, Group::neighbours(piece.i, R, rows.n), 64),
    };
    // SAFETY: the first panel leaves all columns widened; each panel has its own C block.
    unsafe {
        multiply::<R, true>(&mut source, wide, piece.panels.data, (rows.k, add), c);
        for p in 1..piece.panels.count() {
            multiply::<R, false>(&mut source, wide, piece.panels.panel(p), (rows.k, add), c.add(p * rows.n * PANEL));
        }
    }
}

/// Rows that are widened step by step.
struct Source<const R: usize> {
    /// In place, or such that `last` is at `at`.
    rows: [*const u8; R],
    /// Bytes of a row before the step in hand.
    at: usize,
    /// Columns from there on.
    left: usize,
    /// The last columns, if they are less than a step, then zeros.
    last: *mut [[u16; 16]; R],
    ahead: Sweep,
}

impl<const R: usize> Source<R> {
    /// Widens 16 columns of row `r`.
    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: there are columns left, and less than 16 are in `last`.
    unsafe fn widen(&self, r: usize, to: *mut Step) {
        // SAFETY: 16 values; row r of `to`.
        unsafe {
            let v = _mm256_loadu_si256(self.rows[r].wrapping_add(self.at).cast());
            let to = (&raw mut (*to)[r]).cast::<f32>();
            _mm256_store_ps(to, even(v));
            _mm256_store_ps(to.add(8), odd(v));
        }
    }

    /// Goes on to the next step, if there is one.
    #[inline]
    // SAFETY: the rows are readable.
    unsafe fn advance(&mut self) {
        if self.at.is_multiple_of(64) {
            self.ahead.step();
        }
        if self.left > 16 {
            (self.at, self.left) = (self.at + 32, self.left - 16);
            if self.left < 16 {
                // SAFETY: the caller's promise.
                unsafe { self.copy_last() };
            }
        }
    }

    /// Nothing past a row's end may be read.
    #[cold]
    // SAFETY: the rows are readable; less than 16 columns are left.
    unsafe fn copy_last(&mut self) {
        for (r, row) in self.rows.iter_mut().enumerate() {
            // SAFETY: what is left of the row; `last` lives as long as the source.
            unsafe {
                let last = (&raw mut (*self.last)[r]).cast::<u8>();
                row.add(self.at).copy_to_nonoverlapping(last, self.left * 2);
                *row = last.wrapping_sub(self.at);
            }
        }
    }
}

/// `R` rows times a panel, their sums in registers. With `WIDEN`, while 16 columns are multiplied the next 16 are
/// loaded and widened, so that memory does not wait for the arithmetic; without it, `wide` has them all.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
// SAFETY: the rows are readable and widened for `k` columns; the panel has them; `c` is that of the first row.
unsafe fn multiply<const R: usize, const WIDEN: bool>(
    source: &mut Source<R>,
    wide: *mut Step,
    mut x: *const u8,
    (k, add): (usize, bool),
    c: *mut f32,
) {
    // SAFETY: C row r.
    let c = |r: usize, h: usize| unsafe { c.add(r * PANEL + h * 8) };
    let mut acc = [[_mm256_setzero_ps(); 2]; R];
    if add {
        for r in 0..R {
            // SAFETY: as above.
            acc[r] = std::array::from_fn(|h| unsafe { _mm256_load_ps(c(r, h)) });
        }
    }
    // SAFETY: `wide` has room for all steps and one more; panels have whole groups of 32 k.
    unsafe {
        if WIDEN && k > 0 {
            if k < 16 {
                source.copy_last();
            }
            (0..R).for_each(|r| source.widen(r, wide));
        }
        for step in 0..k.div_ceil(16) {
            let (now, next) = (wide.add(step), wide.add(step + 1));
            if WIDEN {
                source.advance();
            }
            for pair in 0..8 {
                if WIDEN && pair < R {
                    source.widen(pair, next);
                }
                for half in 0..2 {
                    let load = |h: usize| _mm256_load_si256(x.add(h * 32).cast());
                    let x = [0, 1].map(|h| if half == 0 { even(load(h)) } else { odd(load(h)) });
                    for r in 0..R {
                        let w = _mm256_set1_ps((*now)[r][half][pair]);
                        acc[r] = std::array::from_fn(|h| _mm256_fmadd_ps(w, x[h], acc[r][h]));
                        settle!(acc[r]);
                    }
                }
                x = x.add(64);
            }
        }
    }
    for r in 0..R {
        for h in 0..2 {
            // SAFETY: as above.
            unsafe { _mm256_store_ps(c(r, h), acc[r][h]) };
        }
    }
}

// Three tokens and four rows: 12 sums.
dots_by_passes!("avx2,fma", 3, [1 2 3], 1, [1]);

/// A group of `R` rows (8, 6, 4 or 1) times `T` token rows.
#[inline(never)]
#[target_feature(enable = "avx2,fma")]
// SAFETY: as `dots`.
unsafe fn dot<const R: usize, const T: usize>(pass: DotPass<'_>) {
    let DotPass { ref rows, group, x, x_stride, skip, ref lines, .. } = pass;
    // As if the columns of the first group that are skipped were there.
    let k = rows.k + skip;
    let mut w: [*const u8; R] = pass.rows().map(|w: *const u8| w.wrapping_sub(skip * 2));
    let mut x: [*const u8; T] = std::array::from_fn(|t| x.wrapping_add(t * x_stride));
    let mut last = [[0u16; 32]; R];
    let mut acc = [[_mm256_setzero_ps(); T]; R];
    let mut ahead = Sweep::new(rows, group, 64).only(lines.clone());
    for at in (0..k).step_by(32) {
        ahead.step();
        let first = if at == 0 { skip } else { 0 };
        if at + 32 > k {
            for r in 0..R {
                // SAFETY: what is left of row i + r; nothing past it may be read.
                unsafe {
                    let (from, to) = (w[r].wrapping_add(first * 2), last[r].as_mut_ptr().add(first));
                    from.copy_to_nonoverlapping(to.cast(), (k - at - first) * 2);
                }
                w[r] = last[r].as_ptr().cast();
            }
        }
        for (h, half) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            // Neither what is skipped nor what belongs to the next view is multiplied.
            if h == 0 && first > 0 || h == 1 && at + 16 >= k {
                continue;
            }
            // SAFETY: 32 values of each row; token rows have whole groups of 32 k.
            unsafe {
                // Two tokens are in registers; there is none left for a third one.
                let load = |t: usize| _mm256_load_ps(x[t].add(half * 64 + h * 32).cast());
                let two: [__m256; 2] = std::array::from_fn(|t| if t < T { load(t) } else { _mm256_setzero_ps() });
                for r in 0..R {
                    let w = _mm256_loadu_si256(w[r].add(h * 32).cast());
                    let w = if half == 0 { even(w) } else { odd(w) };
                    for t in 0..T {
                        let x = if t < 2 { two[t] } else { load(t) };
                        acc[r][t] = _mm256_fmadd_ps(w, x, acc[r][t]);
                    }
                    settle!(acc[r]);
                }
            }
        }
        w = w.map(|w| w.wrapping_add(64));
        x = x.map(|x| x.wrapping_add(128));
    }
    // SAFETY: the pass is the caller's.
    unsafe { store_sums(&acc, &pass) };
}
