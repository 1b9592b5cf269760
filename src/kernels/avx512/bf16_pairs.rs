//! BF16 weights in place times BF16 tokens, in f32 by `vdpbf16ps`.
//!
//! `vdpbf16ps` adds the products of a pair of k to each f32 lane, treats denormals as zero and rounds to even (SDM vol. 2C).

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, panel and token")]

use std::arch::x86_64::*;

use crate::kernels::avx512::transpose::store_sums;
use crate::kernels::passes::{Ahead, DotPass, Sweep, dots_by_passes, even_group};
use crate::pack::{PANEL, Panels, TokenRows};
use crate::tensor::Rows;

/// Columns for which the panels of a register block stay in the L1 cache while the rows go by: 3 panels of 8 KiB.
const K_BLOCK: usize = 256;
/// Panels of a register block.
const BLOCK_PANELS: usize = 3;

#[inline]
#[target_feature(enable = "avx512f")]
fn bh(v: __m512i) -> __m512bh {
    // SAFETY: both are 64 bytes of plain data.
    unsafe { std::mem::transmute(v) }
}

/// The panel form (see [`super::super::Engine::product`]).
///
/// # Safety
/// As `Engine::product`, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub unsafe fn panels(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    let count = panels.count();
    let mut p = 0;
    while p < count {
        let group = even_group(count - p, BLOCK_PANELS);
        // With one group the rows stream past once: whole rows, in the order of memory. Else the group's columns stay in L1.
        let k_block = if count <= BLOCK_PANELS { rows.k } else { K_BLOCK };
        let mut k0 = 0;
        while k0 < rows.k || k0 == 0 {
            let k = k_block.min(rows.k - k0);
            let part = Block {
                w: rows.columns(k0, k),
                // SAFETY: panel p and column k0 (a multiple of 32) lie inside.
                x: unsafe { panels.panel(p).add(k0 / 2 * 4 * PANEL) },
                x_stride: panels.stride,
                // SAFETY: the caller's C block has room for all panels.
                c: unsafe { c.add(p * rows.n * PANEL) },
                add: add || k0 > 0,
            };
            // SAFETY: the group's panels, rows and C lie inside the caller's.
            unsafe {
                match group {
                    1 => part.run::<12, 1>(),
                    2 => part.run::<8, 2>(),
                    _ => part.run::<8, 3>(),
                }
            }
            k0 += k.max(1);
        }
        p += group;
    }
}

/// Some columns of a block of rows times up to three panels.
struct Block<'a> {
    w: Rows<'a>,
    x: *const u8,
    x_stride: usize,
    c: *mut f32,
    add: bool,
}

impl Block<'_> {
    /// All rows, `R` at a time, and the rest one by one.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    // SAFETY: as `panels`.
    unsafe fn run<const R: usize, const P: usize>(&self) {
        let mut i = 0;
        // SAFETY: rows below w.n.
        unsafe {
            while i + R <= self.w.n {
                self.rows::<R, P>(i);
                i += R;
            }
            while i + 4 <= self.w.n {
                self.rows::<4, P>(i);
                i += 4;
            }
            while i < self.w.n {
                self.rows::<1, P>(i);
                i += 1;
            }
        }
    }

    /// Rows `[i, i + R)` times `P` panels: R x P sums in registers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    // SAFETY: as `panels`.
    unsafe fn rows<const R: usize, const P: usize>(&self, i: usize) {
        let (n, k) = (self.w.n, self.w.k);
        let w: [*const u8; R] = std::array::from_fn(|r| self.w.row(i + r));
        // SAFETY: C rows i .. i + R of P panels.
        let c = |r: usize, p: usize| unsafe { self.c.add((p * n + i + r) * PANEL) };
        let mut acc = [[_mm512_setzero_ps(); P]; R];
        if self.add {
            for r in 0..R {
                for p in 0..P {
                    // SAFETY: as above.
                    acc[r][p] = unsafe { _mm512_load_ps(c(r, p)) };
                }
            }
        }
        let (mut ahead, ahead_step) = if self.w.contiguous() { (Ahead::of(&self.w).from(w[0]), 64) } else { (w[0], 0) };
        let mut x = self.x;
        // SAFETY: panels hold k rounded up to 32; weights are read pair by pair, up to k.
        unsafe {
            let step = |x: *const u8, pair: [__m512bh; R], acc: &mut [[__m512; P]; R]| {
                let panel: [__m512bh; P] =
                    std::array::from_fn(|p| bh(_mm512_load_si512(x.add(p * self.x_stride).cast())));
                for r in 0..R {
                    for p in 0..P {
                        acc[r][p] = _mm512_dpbf16_ps(acc[r][p], panel[p], pair[r]);
                    }
                }
            };
            for j in 0..k / 8 {
                for q in 0..R / 4 {
                    _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(q * ahead_step).cast());
                }
                ahead = ahead.wrapping_add(R / 4 * ahead_step);
                for u in 0..4 {
                    let pair = |r: usize| w[r].add(j * 16 + u * 4).cast::<i32>().read_unaligned();
                    step(x.add(u * 64), std::array::from_fn(|r| bh(_mm512_set1_epi32(pair(r)))), &mut acc);
                }
                x = x.add(256);
            }
            for j in k / 8 * 4..k / 2 {
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
                unsafe { _mm512_store_ps(c(r, p), acc[r][p]) };
            }
        }
    }
}

dots_by_passes!("avx512f,avx512bw,avx512vl,avx512bf16", 6, [1 2 3 4 5 6], 2, [1 2]);

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
