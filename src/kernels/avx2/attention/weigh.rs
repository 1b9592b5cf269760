//! The weighted sum of V rows, and the merge of partial sums.

use std::arch::x86_64::*;
use std::ops::Range;

use super::values::{InPlace, Values, Widened};
use super::widen::{Bf16, F16, F32, Q8};
use crate::kernels::attention::{Ahead, LANES, Source, Weights};
use crate::tensor::DType;

/// Columns (vectors of 8 elements) of V that all rows use before the next ones: few enough to stay in the first-level
/// cache.
const COLUMNS: usize = 8;

// SAFETY: contract of `Attend::weigh`, on a CPU with the features.
pub unsafe fn weigh(w: Weights, block: *const f32, stride: usize, ahead: &mut Ahead) {
    let w = Weights { n: w.n.next_multiple_of(LANES), ..w };
    // SAFETY: the caller's contract.
    unsafe { all(w, Widened { block, stride }, ahead) }
}

// SAFETY: contract of `Attend::weigh_in_place`, on a CPU with the features.
pub unsafe fn weigh_in_place(w: Weights, source: Source, ahead: &mut Ahead) {
    debug_assert!(source.rows == w.n && source.d == w.tiles * LANES && source.closed == 0);
    let Source { data, stride, .. } = source;
    // SAFETY: the caller's contract.
    unsafe {
        match source.dtype {
            DType::F32 => all(w, InPlace::<F32>::new(data, stride), ahead),
            DType::F16 => all(w, InPlace::<F16>::new(data, stride), ahead),
            DType::Bf16 => all(w, InPlace::<Bf16>::new(data, stride), ahead),
            DType::Q8_0 => all(w, InPlace::<Q8>::new(data, stride), ahead),
        }
    }
}

/// All rows: some positions at a time, and of them some columns at a time.
///
/// A block has 8 sums, one for each FMA that is under way at a time. With more of them its stores, which wait for the
/// last FMAs, would fill the queue in front of the next block (measured on Zen 3).
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: `weigh`'s contract.
unsafe fn all<V: Values>(w: Weights, v: V, ahead: &mut Ahead) {
    // SAFETY: the sums and their factors.
    unsafe { rescale(w) };
    let fours = w.rows / 4 * 4;
    for first in (0..w.n).step_by(V::POSITIONS) {
        for start in (0..2 * w.tiles).step_by(COLUMNS) {
            let columns = start..(start + COLUMNS).min(2 * w.tiles);
            // SAFETY: positions from `first` on and rows of the caller's operands, as far as there are.
            unsafe {
                let n = V::POSITIONS.min(w.n - first);
                let w = Weights { p: w.p.add(first * w.lanes), n, ..w };
                for column in columns.clone().step_by(2) {
                    if column % 4 == 0 {
                        (0..n.div_ceil(LANES)).for_each(|_| ahead.step());
                    }
                    for row in (0..fours).step_by(4) {
                        block::<4, 2, V>(w, row, v, first, column);
                    }
                }
                if w.rows & 2 != 0 {
                    run::<2, 4, V>(w, fours, v, first, columns.clone());
                }
                if w.rows & 1 != 0 {
                    run::<1, 8, V>(w, w.rows - 1, v, first, columns);
                }
            }
        }
    }
}

/// Multiplies earlier sums by what the rows' new maxima ask for.
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: `weigh`'s contract.
unsafe fn rescale(w: Weights) {
    for row in 0..w.rows {
        // SAFETY: the row's factor and sums.
        unsafe {
            let factor = *w.rescale.add(row);
            if factor == 1.0 {
                continue;
            }
            let o = w.o.add(row * w.tiles * LANES);
            for i in (0..w.tiles * LANES).step_by(8) {
                _mm256_store_ps(o.add(i), _mm256_mul_ps(_mm256_load_ps(o.add(i)), _mm256_set1_ps(factor)));
            }
        }
    }
}

/// `R` rows from `row` on, `N` columns at a time. Apart, so as not to take registers from the loop over fours.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: `weigh`'s contract for `R` rows and positions from `first` on; of V and the sums the columns.
unsafe fn run<const R: usize, const N: usize, V: Values>(
    w: Weights,
    row: usize,
    v: V,
    first: usize,
    columns: Range<usize>,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let whole = columns.start + columns.len() / N * N;
        for column in (columns.start..whole).step_by(N) {
            block::<R, N, V>(w, row, v, first, column);
        }
        // Columns come in pairs, the two halves of a tile.
        for column in (whole..columns.end).step_by(2) {
            block::<R, 2, V>(w, row, v, first, column);
        }
    }
}

/// `R` rows from `row` on times `N` columns from `column` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: as `run`, for these columns.
unsafe fn block<const R: usize, const N: usize, V: Values>(w: Weights, row: usize, v: V, first: usize, column: usize) {
    let mut acc = [[_mm256_setzero_ps(); N]; R];
    // SAFETY: all addresses are inside the operands, by the caller's contract.
    unsafe {
        let o = |r: usize, n: usize| w.o.add((row + r) * w.tiles * LANES + (column + n) * 8);
        for (r, acc) in acc.iter_mut().enumerate() {
            for (n, acc) in acc.iter_mut().enumerate() {
                *acc = _mm256_load_ps(o(r, n));
            }
        }
        let p = w.p.add(row);
        let whole = w.n / LANES;
        for group in 0..whole {
            let (base, p) = (v.group(first / LANES + group), p.add(group * LANES * w.lanes));
            for i in 0..LANES {
                add::<R, N, V>(&mut acc, p.add(i * w.lanes), base.add(i * v.stride()), column);
            }
        }
        if !w.n.is_multiple_of(LANES) {
            let (base, p) = (v.group(first / LANES + whole), p.add(whole * LANES * w.lanes));
            for i in 0..w.n % LANES {
                add::<R, N, V>(&mut acc, p.add(i * w.lanes), base.add(i * v.stride()), column);
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                _mm256_store_ps(o(r, n), *acc);
            }
        }
    }
}

/// Adds one position.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: `R` weights at `p`, and `N` columns of the position at `at`.
unsafe fn add<const R: usize, const N: usize, V: Values>(
    acc: &mut [[__m256; N]; R],
    p: *const f32,
    at: *const u8,
    column: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let v: [__m256; N] = V::load(at, column);
        for (r, acc) in acc.iter_mut().enumerate() {
            let p = _mm256_broadcast_ss(&*p.add(r));
            for (acc, v) in acc.iter_mut().zip(v) {
                *acc = _mm256_fmadd_ps(p, v, *acc);
            }
        }
    }
}

// SAFETY: contract of `Attend::merge`, on a CPU with the features.
pub unsafe fn merge(parts: impl Iterator<Item = (*const f32, f32)> + Clone, n: usize, to: *mut f32) {
    /// Columns for which the parts are gone through once: their factors are computed on the way.
    const AT_ONCE: usize = 64;

    #[target_feature(enable = "avx2,fma")]
    // SAFETY: `merge`'s contract.
    unsafe fn run(parts: impl Iterator<Item = (*const f32, f32)> + Clone, n: usize, to: *mut f32) {
        for first in (0..n).step_by(AT_ONCE) {
            let n = AT_ONCE.min(n - first);
            let mut acc = [_mm256_setzero_ps(); AT_ONCE / 8];
            for (part, factor) in parts.clone().filter(|(_, factor)| *factor != 0.0) {
                for (i, acc) in acc.iter_mut().take(n.div_ceil(8)).enumerate() {
                    // SAFETY: inside the part, which is padded to 16.
                    let x = unsafe { _mm256_load_ps(part.add(first + 8 * i)) };
                    *acc = _mm256_fmadd_ps(_mm256_set1_ps(factor), x, *acc);
                }
            }
            let mut sums = [0f32; AT_ONCE];
            for (i, acc) in acc.into_iter().enumerate() {
                // SAFETY: 8 of the sums.
                unsafe { _mm256_storeu_ps(sums.as_mut_ptr().add(8 * i), acc) };
            }
            // SAFETY: as many of them as there are places; bytes, because these may lie at any address.
            unsafe { to.add(first).cast::<u8>().copy_from_nonoverlapping(sums.as_ptr().cast(), 4 * n) };
        }
    }
    // SAFETY: the caller's contract.
    unsafe { run(parts, n, to) }
}
