//! BF16 weights in place times BF16 tokens, in f32 by `vdpbf16ps`.
//!
//! `vdpbf16ps` adds the products of a pair of k to each f32 lane, treats denormals as zero and rounds to even (SDM vol. 2C).

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, panel and token")]

use std::arch::x86_64::*;

use crate::isa::{Reading, l1_ways};
use crate::kernels::avx512::transpose::store_sums;
use crate::kernels::passes::{DotPass, PanelPass, Sweep, dots_by_passes, panels_by_passes};
use crate::pack::TokenRows;
use crate::tensor::Rows;

#[inline]
#[target_feature(enable = "avx512f")]
fn bh(v: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of plain data.
    unsafe { std::mem::transmute(v) }
}

panels_by_passes!(
    /// The panel form (see [`super::super::Engine::product`]).
    panels, "avx512f,avx512bw,avx512vl,avx512bf16", rows_of_one_panel(), [12], 8, 3, [1 2 3]
);

/// Rows side by side where there is one panel. Each is a stream, and streams are apart by what often is a multiple of 4 KiB, so that they
/// share a set of L1: Zen 4's has 8 ways, and 12 rows take 1.3 times as long as 8, whose sums are just enough for it. Zen 5's has 12, and
/// twice as many `vdpbf16ps` under way.
fn rows_of_one_panel() -> usize {
    if l1_ways() < 12 { 8 } else { 12 }
}

/// A group of `R` rows times `P` panels: R x P sums in registers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
// SAFETY: as `panels`.
unsafe fn pass<const R: usize, const P: usize>(pass: PanelPass<'_>) {
    let PanelPass { ref rows, group, mut x, x_stride, add, .. } = pass;
    let (k, w): (usize, [*const u8; R]) = (rows.k, pass.rows());
    let mut acc = [[_mm512_setzero_ps(); P]; R];
    if add {
        for r in 0..R {
            for p in 0..P {
                // SAFETY: sums of the pass.
                acc[r][p] = unsafe { _mm512_load_ps(pass.c(r, p)) };
            }
        }
    }
    let mut ahead = Sweep::new(rows, group, 64);
    // SAFETY: panels hold k rounded up to 32; weights are read pair by pair, up to k.
    unsafe {
        let step = |x: *const u8, pair: [__m512bh; R], acc: &mut [[__m512; P]; R]| {
            let panel: [__m512bh; P] = std::array::from_fn(|p| bh(_mm512_load_si512(x.add(p * x_stride).cast())));
            for r in 0..R {
                for p in 0..P {
                    acc[r][p] = _mm512_dpbf16_ps(acc[r][p], panel[p], pair[r]);
                }
            }
        };
        for j in 0..k / 32 {
            ahead.step();
            for u in 0..16 {
                let pair = |r: usize| w[r].add(j * 64 + u * 4).cast::<i32>().read_unaligned();
                step(x.add(u * 64), std::array::from_fn(|r| bh(_mm512_set1_epi32(pair(r)))), &mut acc);
            }
            x = x.add(1024);
        }
        for j in k / 32 * 16..k / 2 {
            let pair = |r: usize| w[r].add(j * 4).cast::<i32>().read_unaligned();
            step(x, std::array::from_fn(|r| bh(_mm512_set1_epi32(pair(r)))), &mut acc);
            x = x.add(64);
        }
        if k % 2 == 1 {
            let last = |r: usize| i32::from(w[r].add((k - 1) * 2).cast::<u16>().read_unaligned());
            step(x, std::array::from_fn(|r| bh(_mm512_set1_epi32(last(r)))), &mut acc);
        }
    }
    for r in 0..R {
        for p in 0..P {
            // SAFETY: as above.
            unsafe { _mm512_store_ps(pass.c(r, p), acc[r][p]) };
        }
    }
}

dots_by_passes!("avx512f,avx512bw,avx512vl,avx512bf16", 6, [1 2 3 4 5 6], 2, [1 2]);

/// The rows as the dot form best reads them with so many tokens: with more than two as a stretch. The FFN of Qwen3-30B-A3B on a Zen 4, by
/// streams instead: 0.92 of the time with one token, 1.05 with four, 1.4 with eight, whose second pass finds rows and tokens in the same sets
/// of L1.
pub fn in_order(rows: Rows<'_>, tokens: usize) -> Rows<'_> {
    if tokens > 2 { rows.by(Reading::Stretch) } else { rows }
}

/// A group of `R` rows (8, 6, 4 or 1) times `T` token rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
// SAFETY: as `dots`.
unsafe fn dot<const R: usize, const T: usize>(pass: DotPass<'_>) {
    let DotPass { ref rows, group, mut x, x_stride, skip, ref lines, .. } = pass;
    let mut k = rows.k;
    let mut w: [*const u8; R] = pass.rows();
    let mut acc = [[_mm512_setzero_ps(); T]; R];
    let mut ahead = Sweep::new(rows, group, 64);
    // SAFETY: whole vectors below k, then the last elements under a mask; token rows have whole groups of 32 k.
    unsafe {
        // Of the pairs, those that are `there`.
        let step = |x: *const u8, w: [__m512bh; R], there: __mmask16, acc: &mut [[__m512; T]; R]| {
            for t in 0..T {
                let x = bh(_mm512_load_si512(x.add(t * x_stride).cast()));
                for r in 0..R {
                    acc[r][t] = _mm512_mask_dpbf16_ps(acc[r][t], there, w[r], x);
                }
            }
        };
        // Up to 16 columns; zeros past them, where nothing is read.
        let half =
            |w: *const u8, n: usize| _mm256_maskz_loadu_epi16((1u32 << n).wrapping_sub(1) as __mmask16, w.cast());
        if skip > 0 {
            // Nothing before the row is touched, nor is the page that it may lie on.
            let upper = w.map(|w| bh(_mm512_inserti64x4::<1>(_mm512_setzero_si512(), half(w, k.min(16)))));
            step(x, upper, 0xFF00, &mut acc);
            (x, k) = (x.wrapping_add(64), k.saturating_sub(16));
            w = w.map(|w| w.wrapping_add(32));
        }
        for j in 0..k / 32 {
            lines.clone().for_each(|line| ahead.line(line));
            ahead.advance();
            let w = w.map(|w| bh(_mm512_loadu_si512(w.add(j * 64).cast())));
            step(x.wrapping_add(j * 64), w, 0xFFFF, &mut acc);
        }
        if !k.is_multiple_of(32) {
            // Nor what is behind the row.
            let (at, n) = (k / 32 * 64, k % 32);
            let last = w.map(|w| {
                let w = w.add(at);
                let whole = || _mm512_maskz_loadu_epi16((1u32 << n) - 1, w.cast());
                bh(if n > 16 { whole() } else { _mm512_zextsi256_si512(half(w, n)) })
            });
            step(x.wrapping_add(at), last, (1u32 << n.div_ceil(2)).wrapping_sub(1) as __mmask16, &mut acc);
        }
    }
    // SAFETY: the pass is the caller's.
    unsafe { store_sums(&acc, &pass) };
}
