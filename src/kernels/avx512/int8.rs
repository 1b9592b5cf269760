//! Q8_0 weights in place times INT8 tokens: `vpdpbusd` within a block of 32 k, then both scales in f32.
//!
//! `vpdpbusd` wants one operand unsigned: that is `w + 128` (`w ^ 0x80` as bits), and each sum starts at `-128 * (sum of the
//! token's quants)`, which the packed tokens hold, so the integer sums are exact for all weights from -128 to 127.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, panel and token")]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::transpose::sums4;
use super::{Ahead, even_group};
use crate::pack::{PANEL, Panels, Q8_PANEL_BLOCK, Q8_ROW_BLOCK, TokenRows};
use crate::tensor::{Q8_0_BYTES, QK8_0, Rows};

/// Blocks of 32 k that are prepared at a time: the tokens of a group of panels then stay in the L1 cache (10 KiB).
const K_BLOCKS: usize = 8;
/// Rows that are prepared at a time.
const ROWS: usize = 96;
/// Panels of a register block.
const BLOCK_PANELS: usize = 2;
/// Token rows of a register block of the dot form.
const BLOCK_TOKENS: usize = 5;

/// Weights made ready: `w + 128` as `[row][block][32]`, the scales as `[block][row]`.
#[repr(C, align(64))]
struct Ready {
    w: [MaybeUninit<u8>; ROWS * K_BLOCKS * QK8_0],
    scales: [MaybeUninit<f32>; K_BLOCKS * ROWS],
}

/// The panel form (see [`super::super::Engine::product`]).
///
/// # Safety
/// As `Engine::product`, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
pub unsafe fn panels(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    let mut ready = MaybeUninit::<Ready>::uninit();
    let ready = ready.as_mut_ptr();
    // SAFETY: addresses of fields; they are 64-byte aligned.
    let (w, scales) = unsafe { ((&raw mut (*ready).w).cast::<u8>(), (&raw mut (*ready).scales).cast::<f32>()) };
    let blocks = rows.k / QK8_0;
    for i in (0..rows.n).step_by(ROWS) {
        let n = ROWS.min(rows.n - i);
        let mut ahead = Ahead::of(&rows).block_after(rows.row(i), n * rows.stride);
        for b in (0..blocks).step_by(K_BLOCKS) {
            let count = K_BLOCKS.min(blocks - b);
            // SAFETY: rows i .. i + n and blocks b .. b + count, into room for as many.
            unsafe { prepare(rows, i..i + n, b, count, w, scales) };
            for p in (0..panels.count()).step_by(BLOCK_PANELS) {
                let part = Part {
                    w,
                    scales,
                    // SAFETY: block b of panel p.
                    x: unsafe { panels.panel(p).add(b * Q8_PANEL_BLOCK) },
                    x_stride: panels.stride,
                    blocks: count,
                    n,
                    c_rows: rows.n,
                    add: add || b > 0,
                    ahead,
                    step: if p == 0 && rows.contiguous() { 64 } else { 0 },
                };
                // SAFETY: the group's panels, whose C rows are the caller's.
                unsafe {
                    let c = c.add((p * rows.n + i) * PANEL);
                    if panels.count() - p >= 2 { part.run::<6, 2>(c) } else { part.run::<12, 1>(c) }
                }
            }
            ahead = ahead.wrapping_add(n * count * Q8_0_BYTES);
        }
    }
}

/// Blocks `[b, b + count)` of some rows, made ready.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
// SAFETY: as `panels`.
unsafe fn prepare(rows: Rows<'_>, range: std::ops::Range<usize>, b: usize, count: usize, w: *mut u8, scales: *mut f32) {
    let n = range.len();
    let mut halves = [0u16; ROWS * K_BLOCKS];
    for (j, i) in range.enumerate() {
        // SAFETY: block b of row i.
        let row = unsafe { rows.row(i).add(b * Q8_0_BYTES) };
        for q in 0..count {
            // SAFETY: below the row's end; room for K_BLOCKS a row.
            unsafe {
                let block = row.add(q * Q8_0_BYTES);
                halves[q * ROWS + j] = block.cast::<u16>().read_unaligned();
                let quants = _mm256_loadu_si256(block.add(2).cast());
                let to = w.add((j * K_BLOCKS + q) * QK8_0);
                _mm256_store_si256(to.cast(), _mm256_xor_si256(quants, _mm256_set1_epi8(-128)));
            }
        }
    }
    for q in 0..count {
        for j in (0..n).step_by(16) {
            // SAFETY: ROWS is a multiple of 16, and so there is room for whole vectors.
            unsafe {
                let v = _mm256_loadu_si256(halves.as_ptr().add(q * ROWS + j).cast());
                _mm512_store_ps(scales.add(q * ROWS + j), _mm512_cvtph_ps(v));
            }
        }
    }
}

/// Prepared rows times a group of panels.
struct Part {
    w: *const u8,
    scales: *const f32,
    x: *const u8,
    x_stride: usize,
    blocks: usize,
    n: usize,
    c_rows: usize,
    add: bool,
    ahead: *const u8,
    step: usize,
}

impl Part {
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    // SAFETY: as `panels`; `c` is that of the first row and panel.
    unsafe fn run<const R: usize, const P: usize>(&self, c: *mut f32) {
        let mut i = 0;
        // SAFETY: rows below n.
        unsafe {
            while i + R <= self.n {
                self.rows::<R, P>(i, c);
                i += R;
            }
            while i + 4 <= self.n {
                self.rows::<4, P>(i, c);
                i += 4;
            }
            while i < self.n {
                self.rows::<1, P>(i, c);
                i += 1;
            }
        }
    }

    /// Rows `[i, i + R)` times P panels: R x P sums in registers, of integers within a block and of f32 over all.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    // SAFETY: as `panels`.
    unsafe fn rows<const R: usize, const P: usize>(&self, i: usize, c: *mut f32) {
        // SAFETY: C rows i .. i + R of P panels.
        let c = |r: usize, p: usize| unsafe { c.add((p * self.c_rows + i + r) * PANEL) };
        // SAFETY: row i.
        let w = unsafe { self.w.add(i * K_BLOCKS * QK8_0) };
        let mut ahead = self.ahead.wrapping_add(i * self.blocks * Q8_0_BYTES * (self.step / 64));
        let mut acc = [[_mm512_setzero_ps(); P]; R];
        if self.add {
            for r in 0..R {
                for p in 0..P {
                    // SAFETY: as above.
                    acc[r][p] = unsafe { _mm512_load_ps(c(r, p)) };
                }
            }
        }
        for b in 0..self.blocks {
            for _ in 0..R.div_ceil(2) {
                _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                ahead = ahead.wrapping_add(self.step);
            }
            // SAFETY: block b of P panels and of R rows.
            unsafe {
                let x: [*const u8; P] = std::array::from_fn(|p| self.x.add(p * self.x_stride + b * Q8_PANEL_BLOCK));
                let start: [__m512i; P] = std::array::from_fn(|p| _mm512_load_si512(x[p].add(9 * 64).cast()));
                let mut sum = [start; R];
                for g in 0..8 {
                    let v: [__m512i; P] = std::array::from_fn(|p| _mm512_load_si512(x[p].add(g * 64).cast()));
                    for r in 0..R {
                        let w = w.add((r * K_BLOCKS + b) * QK8_0 + g * 4).cast::<i32>();
                        let w = _mm512_set1_epi32(*w);
                        for p in 0..P {
                            sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], w, v[p]);
                        }
                    }
                }
                let scale: [__m512; P] = std::array::from_fn(|p| _mm512_load_ps(x[p].add(8 * 64).cast()));
                for r in 0..R {
                    let w = _mm512_set1_ps(*self.scales.add(b * ROWS + i + r));
                    for p in 0..P {
                        acc[r][p] =
                            _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][p]), _mm512_mul_ps(scale[p], w), acc[r][p]);
                    }
                }
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

/// The dot form (see [`super::dots`]).
///
/// # Safety
/// As [`super::dots`], on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")]
pub unsafe fn dots(rows: Rows<'_>, xs: TokenRows<'_>, y: *mut f32, ld: usize) {
    let mut i = 0;
    while i < rows.n {
        let n = if i + 4 <= rows.n { 4 } else { 1 };
        let mut t = 0;
        while t < xs.tokens {
            let group = even_group(xs.tokens - t, BLOCK_TOKENS);
            let x = (xs.row(t), xs.stride);
            // SAFETY: row i and token t of the caller's y.
            let y = unsafe { y.add(t * ld + i) };
            // SAFETY: rows i .. i + n and tokens t .. t + group lie inside.
            unsafe {
                match (n, group) {
                    (4, 1) => dot::<4, 1>(rows, i, x, y, ld),
                    (4, 2) => dot::<4, 2>(rows, i, x, y, ld),
                    (4, 3) => dot::<4, 3>(rows, i, x, y, ld),
                    (4, 4) => dot::<4, 4>(rows, i, x, y, ld),
                    (4, _) => dot::<4, 5>(rows, i, x, y, ld),
                    (_, 1) => dot::<1, 1>(rows, i, x, y, ld),
                    (_, 2) => dot::<1, 2>(rows, i, x, y, ld),
                    (_, 3) => dot::<1, 3>(rows, i, x, y, ld),
                    (_, 4) => dot::<1, 4>(rows, i, x, y, ld),
                    _ => dot::<1, 5>(rows, i, x, y, ld),
                }
            }
            t += group;
        }
        i += n;
    }
}

/// Two neighbouring blocks of a row: their quants as `w + 128`, and their scales, eight lanes each. With `both` unset the
/// second is not there: scale 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
// SAFETY: one or two blocks are readable at `block`.
unsafe fn two_blocks(block: *const u8, both: bool) -> (__m512i, __m512) {
    // SAFETY: the caller's promise.
    unsafe {
        let quants = |b: usize| _mm256_loadu_si256(block.add(b * Q8_0_BYTES + 2).cast());
        let half = |b: usize| u32::from(block.add(b * Q8_0_BYTES).cast::<u16>().read_unaligned());
        let (w, halves) = if both {
            (_mm512_inserti64x4::<1>(_mm512_castsi256_si512(quants(0)), quants(1)), half(0) | half(1) << 16)
        } else {
            (_mm512_zextsi256_si512(quants(0)), half(0))
        };
        let scales = _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi32_si128(halves as i32)));
        let each = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        (_mm512_xor_si512(w, _mm512_set1_epi8(-128)), _mm512_permutexvar_ps(each, scales))
    }
}

/// Rows `[i, i + R)` (R is 4 or 1) times `T` token rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")]
// SAFETY: as `dots`.
unsafe fn dot<const R: usize, const T: usize>(
    rows: Rows<'_>,
    i: usize,
    (x, x_stride): (*const u8, usize),
    y: *mut f32,
    ld: usize,
) {
    let w: [*const u8; R] = std::array::from_fn(|r| rows.row(i + r));
    let mut acc = [[_mm512_setzero_ps(); T]; R];
    // 68 bytes a row; the lines in between come as these are crossed.
    let mut ahead = Ahead::side_by_side(&rows, i, R, 2 * Q8_0_BYTES);
    let blocks = rows.k / QK8_0;
    for b in 0..blocks.div_ceil(2) {
        ahead.prefetch::<R>();
        let both = 2 * b + 1 < blocks;
        // SAFETY: blocks below the row's end; token rows have whole pairs of blocks.
        unsafe {
            let w: [(__m512i, __m512); R] = std::array::from_fn(|r| two_blocks(w[r].add(b * 2 * Q8_0_BYTES), both));
            for t in 0..T {
                let x = x.add(t * x_stride + b * Q8_ROW_BLOCK);
                let quants = _mm512_load_si512(x.cast());
                let start = _mm512_load_si512(x.add(64).cast());
                let scale = _mm512_load_ps(x.add(128).cast());
                for r in 0..R {
                    let sum = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, w[r].0, quants));
                    acc[r][t] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, w[r].1), acc[r][t]);
                }
            }
        }
    }
    for t in 0..T {
        let sums = sums4(std::array::from_fn(|r| if r < R { acc[r][t] } else { _mm512_setzero_ps() }));
        // SAFETY: R sums of token t.
        unsafe {
            match R {
                4 => _mm_storeu_ps(y.add(t * ld), sums),
                _ => _mm_store_ss(y.add(t * ld), sums),
            }
        }
    }
}
