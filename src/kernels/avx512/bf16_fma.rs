//! BF16 weights in place times BF16 tokens by f32 fused multiply-adds, for CPUs where `vdpbf16ps` is slow.
//!
//! A BF16 value is the upper half of an f32, so of a vector of 32 values a shift gives those with even k and a mask those with
//! odd k: two instructions for 32 weights. Both operands take their k in that order, so no shuffle is needed.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, panel and token")]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::transpose::store_sums;
use crate::kernels::passes::{DotPass, Group, Sweep, dots_by_passes, even_group, groups};
use crate::pack::{PANEL, Panels, TokenRows};
use crate::tensor::Rows;

/// Panels of a register block.
const BLOCK_PANELS: usize = 2;

/// 32 columns of some rows, widened: of each row the 16 with even k, then the 16 with odd k.
#[repr(C, align(64))]
struct Wide32<const R: usize>([[f32; 32]; R]);

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

/// The first `n` columns at `at`, 1 to 16 of them; zeros past them, where nothing is read.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
// SAFETY: `at` is readable for `n` elements.
unsafe fn load16(at: *const u8, n: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_maskz_loadu_epi16((1u32 << n).wrapping_sub(1) as __mmask16, at.cast()) }
}

/// The panel form (see [`super::super::Engine::product`]).
///
/// # Safety
/// As `Engine::product`, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,fma")]
pub unsafe fn panels(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    let mut p = 0;
    while p < panels.count() {
        let group = even_group(panels.count() - p, BLOCK_PANELS);
        // SAFETY: panels p .. p + group, whose C rows are the caller's.
        unsafe {
            let (part, c) = (panels.some(p, group), c.add(p * rows.n * PANEL));
            match group {
                1 => streamed::<16, 1>(rows, part, c, add),
                _ => streamed::<12, 2>(rows, part, c, add),
            }
        }
        p += group;
    }
}

/// All rows times `P` panels. Rows go by in the order of memory, each group over all k with its sums in registers. While 32
/// columns of `R` rows are multiplied, the next 32 are loaded and widened, so that memory does not wait for the arithmetic.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,fma")]
// SAFETY: as `panels`.
unsafe fn streamed<const R: usize, const P: usize>(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    let x: [*const u8; P] = std::array::from_fn(|p| panels.panel(p));
    for group in groups(&rows, [R, 4, 1]) {
        // SAFETY: the group's rows are below n.
        unsafe {
            match group.n {
                4 => stream::<4, P>(rows, group, x, c, add),
                1 => stream::<1, P>(rows, group, x, c, add),
                _ => stream::<R, P>(rows, group, x, c, add),
            }
        }
    }
}

/// A group of `R` rows of `streamed`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,fma")]
// SAFETY: as `panels`.
unsafe fn stream<const R: usize, const P: usize>(
    rows: Rows<'_>,
    group: Group,
    x: [*const u8; P],
    c: *mut f32,
    add: bool,
) {
    let (n, k) = (rows.n, rows.k);
    let w: [*const u8; R] = group.addresses(&rows);
    let mut wide = [const { MaybeUninit::<Wide32<R>>::uninit() }; 2];
    let wide: [*mut f32; 2] = wide.each_mut().map(|w| w.as_mut_ptr().cast());
    // SAFETY: room for R rows; columns at .. at + 32 of row r, as far as they are below k.
    let widen = |to: *mut f32, r: usize, at: usize| unsafe {
        let v = load32(w[r], at, k);
        _mm512_store_ps(to.add(r * 32), even(v));
        _mm512_store_ps(to.add(r * 32 + 16), odd(v));
    };
    // SAFETY: C rows of the group and P panels.
    let c = |r: usize, p: usize| unsafe { c.add((p * n + group.row(r)) * PANEL) };
    let mut acc = [[_mm512_setzero_ps(); P]; R];
    if add {
        for r in 0..R {
            for p in 0..P {
                // SAFETY: as above.
                acc[r][p] = unsafe { _mm512_load_ps(c(r, p)) };
            }
        }
    }
    let mut ahead = Sweep::new(&rows, group, 64);
    (0..R).filter(|_| k > 0).for_each(|r| widen(wide[0], r, 0));
    for at in (0..k).step_by(32) {
        let (now, next) = (wide[at / 32 % 2], wide[(at / 32 + 1) % 2]);
        for pair in 0..16 {
            ahead.line(pair);
            if pair < R && at + 32 < k {
                widen(next, pair, at + 32);
            }
            // SAFETY: panels have whole groups of 32 k; `now` has 32 values of each row.
            unsafe {
                let x: [__m512i; P] = std::array::from_fn(|p| _mm512_load_si512(x[p].add((at / 2 + pair) * 64).cast()));
                let halves = [x.map(|x| even(x)), x.map(|x| odd(x))];
                for (half, x) in halves.iter().enumerate() {
                    for r in 0..R {
                        let w = _mm512_set1_ps(*now.add(r * 32 + half * 16 + pair));
                        for p in 0..P {
                            acc[r][p] = _mm512_fmadd_ps(w, x[p], acc[r][p]);
                        }
                    }
                }
            }
        }
        ahead.advance();
    }
    for r in 0..R {
        for p in 0..P {
            // SAFETY: as above.
            unsafe { _mm512_store_ps(c(r, p), acc[r][p]) };
        }
    }
}

dots_by_passes!("avx512f,avx512bw,avx512vl,fma", 5, [1 2 3 4 5], 2, [1 2]);

/// A group of `R` rows (8, 6, 4 or 1) times `T` token rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,fma")]
// SAFETY: as `dots`.
unsafe fn dot<const R: usize, const T: usize>(pass: DotPass<'_>) {
    let DotPass { ref rows, group, x, x_stride, skip, ref lines, .. } = pass;
    let (mut x, x_stride) = (x.cast::<f32>(), x_stride / 4);
    let mut k = rows.k;
    let mut w: [*const u8; R] = pass.rows();
    let mut acc = [[_mm512_setzero_ps(); T]; R];
    let mut ahead = Sweep::new(rows, group, 64);
    // Of the columns with even and with odd k, those that are `there`.
    let step = |x: *const f32, w: [__m512i; R], there: __mmask16, acc: &mut [[__m512; T]; R]| {
        let halves: [[__m512; R]; 2] = [std::array::from_fn(|r| even(w[r])), std::array::from_fn(|r| odd(w[r]))];
        for (half, w) in halves.iter().enumerate() {
            for t in 0..T {
                // SAFETY: token rows have whole groups of 32 k.
                let x = unsafe { _mm512_load_ps(x.add(t * x_stride + half * 16)) };
                for r in 0..R {
                    acc[r][t] = _mm512_mask3_fmadd_ps(w[r], x, acc[r][t], there);
                }
            }
        }
    };
    if skip > 0 {
        // Nothing before the row is touched, nor is the page that it may lie on.
        // SAFETY: the first columns, up to 16, are the upper half of the group's.
        let half = w.map(|w| unsafe { _mm512_inserti64x4::<1>(_mm512_setzero_si512(), load16(w, k.min(16))) });
        step(x, half, 0xFF00, &mut acc);
        (x, k) = (x.wrapping_add(32), k.saturating_sub(16));
        w = w.map(|w| w.wrapping_add(32));
    }
    for at in (0..k / 32 * 32).step_by(32) {
        lines.clone().for_each(|line| ahead.line(line));
        ahead.advance();
        // SAFETY: whole vectors below k.
        let w = std::array::from_fn(|r| unsafe { _mm512_loadu_si512(w[r].add(at * 2).cast()) });
        step(x.wrapping_add(at), w, 0xFFFF, &mut acc);
    }
    if !k.is_multiple_of(32) {
        let at = k / 32 * 32;
        // Nor what is behind the row.
        // SAFETY: below k.
        let last = w.map(|w| unsafe {
            if k - at > 16 { load32(w, at, k) } else { _mm512_zextsi256_si512(load16(w.add(at * 2), k - at)) }
        });
        step(x.wrapping_add(at), last, (1u32 << (k - at).div_ceil(2)).wrapping_sub(1) as __mmask16, &mut acc);
    }
    // SAFETY: the pass is the caller's.
    unsafe { store_sums(&acc, &pass) };
}
