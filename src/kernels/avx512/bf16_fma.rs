//! BF16 weights in place times BF16 tokens by f32 fused multiply-adds, for CPUs where `vdpbf16ps` is slow.
//!
//! A BF16 value is the upper half of an f32, so of a vector of 32 values a shift gives those with even k and a mask those with
//! odd k: two instructions for 32 weights. Both operands take their k in that order, so no shuffle is needed.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, panel and token")]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::transpose::sums4;
use super::{Ahead, even_group};
use crate::pack::{PANEL, Panels, TokenRows};
use crate::tensor::Rows;

/// Columns that are widened at a time: a group's tokens then stay in the L1 cache (16 KiB), the weights in the L2.
const K_BLOCK: usize = 128;
/// Rows that are widened at a time.
const ROWS: usize = 96;
/// Panels of a register block.
const BLOCK_PANELS: usize = 2;
/// Token rows of a register block of the dot form.
const BLOCK_TOKENS: usize = 6;

/// Operands widened to f32.
#[repr(C, align(64))]
struct Wide {
    /// `[panel pair][k][panel][16 lanes]`, k in the order even, odd of each 32.
    x: [MaybeUninit<f32>; BLOCK_PANELS * K_BLOCK * PANEL],
    /// `[row][k]`, k in the same order.
    w: [MaybeUninit<f32>; ROWS * K_BLOCK],
}

/// Values with even k, widened.
#[inline]
#[target_feature(enable = "avx512f")]
fn even(v: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(v))
}

/// Values with odd k, widened.
#[inline]
#[target_feature(enable = "avx512f")]
fn odd(v: __m512i) -> __m512 {
    _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(0xFFFF_0000_u32 as i32)))
}

/// Elements `[at, at + 32)` of a row of `k`; zeros past its end, where nothing is read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
// SAFETY: the row is readable for `k` elements, and `at` is below `k`.
unsafe fn load32(row: *const u8, at: usize, k: usize) -> __m512i {
    // SAFETY: whole below k, else masked.
    unsafe {
        let at_row = row.add(at * 2);
        if at + 32 <= k {
            _mm512_loadu_si512(at_row.cast())
        } else {
            _mm512_maskz_loadu_epi16((1u32 << (k - at)) - 1, at_row.cast())
        }
    }
}

/// The panel form (see [`super::super::Engine::product`]).
///
/// # Safety
/// As `Engine::product`, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,fma")]
pub unsafe fn panels(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    let mut wide = MaybeUninit::<Wide>::uninit();
    let wide = wide.as_mut_ptr();
    // SAFETY: addresses of fields; they are 64-byte aligned.
    let (x, w) = unsafe { ((&raw mut (*wide).x).cast::<f32>(), (&raw mut (*wide).w).cast::<f32>()) };
    for i in (0..rows.n).step_by(ROWS) {
        let n = ROWS.min(rows.n - i);
        let mut ahead = Ahead::of(&rows).block_after(rows.row(i), n * rows.stride);
        for k0 in (0..rows.k).step_by(K_BLOCK) {
            let k = K_BLOCK.min(rows.k - k0);
            // SAFETY: rows i .. i + n and columns k0 .. k0 + k, into room for as many.
            unsafe { widen_rows(rows, i..i + n, k0, k, w) };
            for p in (0..panels.count()).step_by(BLOCK_PANELS) {
                let group = BLOCK_PANELS.min(panels.count() - p);
                let part = Part {
                    w,
                    x,
                    k: k.next_multiple_of(32),
                    n,
                    c_rows: rows.n,
                    add: add || k0 > 0,
                    ahead,
                    step: if p == 0 && rows.contiguous() { 64 } else { 0 },
                };
                // SAFETY: panels p .. p + group, whose C rows are the caller's.
                unsafe {
                    let c = c.add((p * rows.n + i) * PANEL);
                    if group == 2 {
                        widen_panels::<2>(panels, p, k0, part.k, x);
                        part.run::<2>(c);
                    } else {
                        widen_panels::<1>(panels, p, k0, part.k, x);
                        part.run::<1>(c);
                    }
                }
            }
            ahead = ahead.wrapping_add(n * k * 2);
        }
    }
}

/// Rows `[i, i + n)`, columns `[k0, k0 + k)`, to `[row][K_BLOCK]`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
// SAFETY: as `panels`.
unsafe fn widen_rows(rows: Rows<'_>, range: std::ops::Range<usize>, k0: usize, k: usize, w: *mut f32) {
    for (j, i) in range.enumerate() {
        let row = rows.row(i);
        for at in (0..k).step_by(32) {
            // SAFETY: below k; room for K_BLOCK a row.
            unsafe {
                let v = load32(row, k0 + at, rows.k);
                _mm512_store_ps(w.add(j * K_BLOCK + at), even(v));
                _mm512_store_ps(w.add(j * K_BLOCK + at + 16), odd(v));
            }
        }
    }
}

/// Panels `[p, p + P)`, columns `[k0, k0 + k)` (a multiple of 32), to `[k][panel][16]`.
#[inline]
#[target_feature(enable = "avx512f")]
// SAFETY: as `panels`.
unsafe fn widen_panels<const P: usize>(panels: Panels<'_>, p: usize, k0: usize, k: usize, x: *mut f32) {
    for q in 0..P {
        // SAFETY: column k0 of the panel.
        let panel = unsafe { panels.panel(p + q).add(k0 * 2 * PANEL) };
        for pair in 0..k / 2 {
            // In each 32 k: the 16 even ones, then the 16 odd ones.
            let at = pair / 16 * 32 + pair % 16;
            // SAFETY: a panel has whole groups of 32 k; room for K_BLOCK.
            unsafe {
                let v = _mm512_load_si512(panel.add(pair * 64).cast());
                _mm512_store_ps(x.add((at * P + q) * PANEL), even(v));
                _mm512_store_ps(x.add(((at + 16) * P + q) * PANEL), odd(v));
            }
        }
    }
}

/// Widened rows times a group of widened panels.
struct Part {
    w: *const f32,
    x: *const f32,
    k: usize,
    n: usize,
    c_rows: usize,
    add: bool,
    ahead: *const u8,
    step: usize,
}

impl Part {
    #[inline]
    #[target_feature(enable = "avx512f,fma")]
    // SAFETY: as `panels`; `c` is that of the first row and panel.
    unsafe fn run<const P: usize>(&self, c: *mut f32) {
        let mut i = 0;
        // SAFETY: rows below n.
        unsafe {
            while i + 12 <= self.n {
                self.rows::<12, P>(i, c);
                i += 12;
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

    /// Rows `[i, i + R)` times P panels: R x P sums in registers.
    #[inline]
    #[target_feature(enable = "avx512f,fma")]
    // SAFETY: as `panels`.
    unsafe fn rows<const R: usize, const P: usize>(&self, i: usize, c: *mut f32) {
        // SAFETY: C rows i .. i + R of P panels.
        let c = |r: usize, p: usize| unsafe { c.add((p * self.c_rows + i + r) * PANEL) };
        // SAFETY: row i.
        let w = unsafe { self.w.add(i * K_BLOCK) };
        let mut ahead = self.ahead.wrapping_add(i * self.k * 2 * (self.step / 64));
        let mut acc = [[_mm512_setzero_ps(); P]; R];
        if self.add {
            for r in 0..R {
                for p in 0..P {
                    // SAFETY: as above.
                    acc[r][p] = unsafe { _mm512_load_ps(c(r, p)) };
                }
            }
        }
        for k in (0..self.k).step_by(8) {
            for _ in 0..R / 4 {
                _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                ahead = ahead.wrapping_add(self.step);
            }
            for u in 0..8 {
                // SAFETY: k + u lies below the widened k.
                unsafe {
                    let x: [__m512; P] = std::array::from_fn(|p| _mm512_load_ps(self.x.add(((k + u) * P + p) * PANEL)));
                    for r in 0..R {
                        let w = _mm512_set1_ps(*w.add(r * K_BLOCK + k + u));
                        for p in 0..P {
                            acc[r][p] = _mm512_fmadd_ps(w, x[p], acc[r][p]);
                        }
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
#[target_feature(enable = "avx512f,avx512bw,fma")]
pub unsafe fn dots(rows: Rows<'_>, xs: TokenRows<'_>, y: *mut f32, ld: usize) {
    let mut i = 0;
    while i < rows.n {
        let n = if i + 4 <= rows.n { 4 } else { 1 };
        let mut t = 0;
        while t < xs.tokens {
            let group = even_group(xs.tokens - t, BLOCK_TOKENS);
            let x = (xs.row(t).cast(), xs.stride / 4);
            // SAFETY: row i and token t of the caller's y.
            let y = unsafe { y.add(t * ld + i) };
            // SAFETY: rows i .. i + n and tokens t .. t + group lie inside.
            unsafe {
                match (n, group) {
                    (4, 1) => dot::<4, 1>(rows, i, x, y, ld),
                    (4, 2) => dot::<4, 2>(rows, i, x, y, ld),
                    (4, 3) => dot::<4, 3>(rows, i, x, y, ld),
                    (4, 4) => dot::<4, 4>(rows, i, x, y, ld),
                    (4, 5) => dot::<4, 5>(rows, i, x, y, ld),
                    (4, _) => dot::<4, 6>(rows, i, x, y, ld),
                    (_, 1) => dot::<1, 1>(rows, i, x, y, ld),
                    (_, 2) => dot::<1, 2>(rows, i, x, y, ld),
                    (_, 3) => dot::<1, 3>(rows, i, x, y, ld),
                    (_, 4) => dot::<1, 4>(rows, i, x, y, ld),
                    (_, 5) => dot::<1, 5>(rows, i, x, y, ld),
                    _ => dot::<1, 6>(rows, i, x, y, ld),
                }
            }
            t += group;
        }
        i += n;
    }
}

/// Rows `[i, i + R)` (R is 4 or 1) times `T` token rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,fma")]
// SAFETY: as `dots`.
unsafe fn dot<const R: usize, const T: usize>(
    rows: Rows<'_>,
    i: usize,
    (x, x_stride): (*const f32, usize),
    y: *mut f32,
    ld: usize,
) {
    let k = rows.k;
    let w: [*const u8; R] = std::array::from_fn(|r| rows.row(i + r));
    let mut acc = [[_mm512_setzero_ps(); T]; R];
    let mut ahead = Ahead::side_by_side(&rows, i, R, 64);
    let step = |at: usize, w: [__m512i; R], acc: &mut [[__m512; T]; R]| {
        let halves: [[__m512; R]; 2] = [std::array::from_fn(|r| even(w[r])), std::array::from_fn(|r| odd(w[r]))];
        for (half, w) in halves.iter().enumerate() {
            for t in 0..T {
                // SAFETY: token rows have whole groups of 32 k.
                let x = unsafe { _mm512_load_ps(x.add(t * x_stride + at + half * 16)) };
                for r in 0..R {
                    acc[r][t] = _mm512_fmadd_ps(w[r], x, acc[r][t]);
                }
            }
        }
    };
    for at in (0..k / 32 * 32).step_by(32) {
        ahead.prefetch::<R>();
        // SAFETY: whole vectors below k.
        let w = std::array::from_fn(|r| unsafe { _mm512_loadu_si512(w[r].add(at * 2).cast()) });
        step(at, w, &mut acc);
    }
    if !k.is_multiple_of(32) {
        let at = k / 32 * 32;
        // SAFETY: below k.
        step(at, std::array::from_fn(|r| unsafe { load32(w[r], at, k) }), &mut acc);
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
