//! Q8_0 weights in place times INT8 tokens, exact within a block of 32 k, then both scales in f32.
//!
//! Panels: `vpmaddwd` on weights and quants as 16-bit values. Of a vector of bytes two shifts give those with even k,
//! one those with odd k, so of four k a 32-bit lane holds (k0, k2) or (k1, k3); both operands take them in that order.
//!
//! Dots: `vpmaddubsw` of |w| and of the quants with w's sign. A pair's sum is at most 2 * 128 * 127: 16 bits hold it.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, half and token")]

use std::arch::x86_64::*;

use super::pieces::{Piece, ROWS, for_rows, pieces};
use super::sums::{settle, store_sums};
use crate::kernels::passes::{DotPass, Group, Sweep, dots_by_passes};
use crate::pack::{PANEL, Panels, Q8_PANEL_BLOCK, Q8_ROW_BLOCK, TokenRows};
use crate::tensor::{Q8_0_BYTES, QK8_0, Rows};

/// Blocks of a piece: of a panel they are 10 KiB, and of the rows that are made ready 7.
const K_BLOCKS: usize = 16;

/// A block of up to [`ROWS`] rows, made ready: 16-bit weights with even and with odd k, scales as f32 and as they are.
#[repr(C, align(64))]
struct Block {
    w: [[[i32; 8]; 2]; ROWS],
    scales: [f32; 8],
    halves: [u16; 8],
}

/// Of four bytes k0 to k3 in each 32-bit lane, k0 and k2 as 16-bit values.
#[inline]
#[target_feature(enable = "avx2")]
fn even(v: __m256i) -> __m256i {
    _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(v))
}

/// The same for k1 and k3.
#[inline]
#[target_feature(enable = "avx2")]
fn odd(v: __m256i) -> __m256i {
    _mm256_srai_epi16::<8>(v)
}

/// The panel form (see [`super::super::Engine::product`]).
///
/// # Safety
/// As `Engine::product`, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn panels(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    // One more than there are blocks: what is made ready last is not used.
    let mut ready = [const { Block { w: [[[0; 8]; 2]; ROWS], scales: [0.0; 8], halves: [0; 8] } }; K_BLOCKS + 1];
    for piece in pieces(rows, panels, K_BLOCKS * QK8_0) {
        // SAFETY: `ready` has room for a piece; the C rows from row i on are the caller's.
        unsafe { for_rows!(piece.n, all_panels(&piece, ready.as_mut_ptr(), c.add(piece.i * PANEL), add)) }
    }
}

/// A piece times all panels. Its rows are made ready while they are multiplied with the first one.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: as `panels`; the piece has `R` rows, `ready` is room for it, `c` is that of its first row.
unsafe fn all_panels<const R: usize>(piece: &Piece<'_>, ready: *mut Block, c: *mut f32, add: bool) {
    let (rows, add) = (&piece.rows, add || piece.more);
    let size = (rows.k / QK8_0, add);
    let mut source = Source::<R> {
        rows: std::array::from_fn(|r| rows.row(piece.i + r)),
        ahead: Sweep::new(rows, Group::neighbours(piece.i, R, rows.n), Q8_0_BYTES),
    };
    // SAFETY: the first panel leaves all blocks ready; each panel has its own C block.
    unsafe {
        multiply::<R, true>(&mut source, ready, piece.panels.data, size, c);
        for p in 1..piece.panels.count() {
            multiply::<R, false>(&mut source, ready, piece.panels.panel(p), size, c.add(p * rows.n * PANEL));
        }
    }
}

/// Rows that are made ready block by block.
struct Source<const R: usize> {
    rows: [*const u8; R],
    ahead: Sweep,
}

impl<const R: usize> Source<R> {
    /// Makes block `b` of row `r` ready, but for the scale.
    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: the row has block `b`.
    unsafe fn prepare(&self, r: usize, b: usize, to: *mut Block) {
        // SAFETY: the scale and 32 quants; row r of `to`.
        unsafe {
            let block = self.rows[r].add(b * Q8_0_BYTES);
            (*to).halves[r] = block.cast::<u16>().read_unaligned();
            let v = _mm256_loadu_si256(block.add(2).cast());
            let to = (&raw mut (*to).w[r]).cast::<__m256i>();
            _mm256_store_si256(to, even(v));
            _mm256_store_si256(to.add(1), odd(v));
        }
    }
}

/// `R` rows times a panel: a block's integer sums in registers, those of f32 in the C block. With `PREPARE`, while a
/// block is multiplied the next one is loaded and made ready, so that memory does not wait for the arithmetic; without
/// it, all are `ready`.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: the rows are readable or ready for `blocks` blocks; the panel has them; `c` is that of the first row.
unsafe fn multiply<const R: usize, const PREPARE: bool>(
    source: &mut Source<R>,
    ready: *mut Block,
    x: *const u8,
    (blocks, add): (usize, bool),
    c: *mut f32,
) {
    // SAFETY: C row r.
    let c = |r: usize, h: usize| unsafe { c.add(r * PANEL + h * 8) };
    // SAFETY: blocks below `blocks`, and in `ready` one more; rows and C rows below R.
    unsafe {
        if !add {
            (0..2 * R).for_each(|i| _mm256_store_ps(c(i / 2, i % 2), _mm256_setzero_ps()));
        }
        if PREPARE && blocks > 0 {
            (0..R).for_each(|r| source.prepare(r, 0, ready));
        }
        for b in 0..blocks {
            let (now, next) = (ready.add(b), ready.add(b + 1));
            let x = x.add(b * Q8_PANEL_BLOCK);
            if PREPARE {
                source.ahead.step();
                // The halves were stored a block ago: long enough for a load of all of them at once.
                let scales = _mm256_cvtph_ps(_mm_load_si128((&raw const (*now).halves).cast()));
                _mm256_store_ps((&raw mut (*now).scales).cast(), scales);
            }
            let mut sum = [[_mm256_setzero_si256(); 2]; R];
            for group in 0..8 {
                if PREPARE && group < R {
                    source.prepare(group, (b + 1).min(blocks - 1), next);
                }
                for half in 0..2 {
                    let load = |h: usize| _mm256_load_si256(x.add(group * 64 + h * 32).cast());
                    let x = [0, 1].map(|h| if half == 0 { even(load(h)) } else { odd(load(h)) });
                    for r in 0..R {
                        let w = _mm256_set1_epi32((*now).w[r][half][group]);
                        sum[r] = std::array::from_fn(|h| _mm256_add_epi32(sum[r][h], _mm256_madd_epi16(w, x[h])));
                        settle!(sum[r]);
                    }
                }
            }
            let scale = [0, 1].map(|h| _mm256_load_ps(x.add(QK8_0 * PANEL + h * 32).cast()));
            for r in 0..R {
                let w = _mm256_set1_ps((*now).scales[r]);
                for h in 0..2 {
                    let (sum, both) = (_mm256_cvtepi32_ps(sum[r][h]), _mm256_mul_ps(scale[h], w));
                    _mm256_store_ps(c(r, h), _mm256_fmadd_ps(sum, both, _mm256_load_ps(c(r, h))));
                }
            }
        }
    }
}

// Three tokens and four rows: 12 sums.
dots_by_passes!("avx2,fma,f16c", 3, [1 2 3], 1, [1]);

/// A group of `R` rows (8, 6, 4 or 1) times `T` token rows.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: as `dots`.
unsafe fn dot<const R: usize, const T: usize>(pass: DotPass<'_>) {
    let DotPass { ref rows, group, x, x_stride, ref lines, .. } = pass;
    let mut w: [*const u8; R] = pass.rows();
    let mut acc = [[_mm256_setzero_ps(); T]; R];
    let mut ahead = Sweep::new(rows, group, 2 * Q8_0_BYTES).only(lines.clone());
    for b in 0..rows.k / QK8_0 {
        if b % 2 == 0 {
            ahead.step();
        }
        // SAFETY: block b of the token rows, whose scales are 128 bytes after the quants, and of rows below R.
        unsafe {
            let x = x.add(b / 2 * Q8_ROW_BLOCK + b % 2 * QK8_0);
            for r in 0..R {
                let scale = _mm256_cvtph_ps(_mm_set1_epi16(w[r].cast::<i16>().read_unaligned()));
                let w = _mm256_loadu_si256(w[r].add(2).cast());
                for t in 0..T {
                    let x = x.add(t * x_stride);
                    let quants = _mm256_sign_epi8(_mm256_load_si256(x.cast()), w);
                    let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), quants);
                    let sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                    let both = _mm256_mul_ps(scale, _mm256_load_ps(x.add(128).cast()));
                    acc[r][t] = _mm256_fmadd_ps(sum, both, acc[r][t]);
                }
                settle!(acc[r]);
            }
        }
        w = w.map(|w| w.wrapping_add(Q8_0_BYTES));
    }
    // SAFETY: the pass is the caller's.
    unsafe { store_sums(&acc, &pass) };
}
