//! Many panels: weights made ready once for all of them.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, panel and token")]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use crate::kernels::passes::Ahead;
use crate::pack::{PANEL, Panels, Q8_PANEL_BLOCK};
use crate::tensor::{Q8_0_BYTES, QK8_0, Rows};

/// Blocks of 32 k that are prepared at a time: the tokens of a group of panels then stay in the L1 cache (10 KiB).
const K_BLOCKS: usize = 8;
/// Rows that are prepared at a time.
const ROWS: usize = 96;
/// Panels of a register block.
const BLOCK_PANELS: usize = 2;

/// Weights made ready: `w + 128` as `[row][block][32]`, the scales as `[block][row]`.
#[repr(C, align(64))]
struct Ready {
    w: [MaybeUninit<u8>; ROWS * K_BLOCKS * QK8_0],
    scales: [MaybeUninit<f32>; K_BLOCKS * ROWS],
}

/// Many panels, so that the arithmetic takes the time: columns in blocks, so that the tokens stay in the L1 cache.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
// SAFETY: as `panels`.
pub unsafe fn blocked(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
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
