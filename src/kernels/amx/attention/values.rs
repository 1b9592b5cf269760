//! The weighted sum of V's rows on tiles: weights of 16 rows are the left operand, 32 positions of V the right one.
//!
//! | tiles | hold |
//! |---|---|
//! | 0 to 3 | sums of 16 rows x 64 elements |
//! | 4, 5 | weights, hi and lo, 16 rows x 32 positions |
//! | 6, 7 | V, hi and lo, 32 positions x 16 elements |
//!
//! Position `j` of a step's 32 is paired with position `j + 16`: then pairs of V's elements are one shift away.

use std::arch::x86_64::*;

use super::scores::{Keys, elements};
use super::split::{Pairs, Split, pairs};
use super::{PART, STEP};
use crate::kernels::amx::each;
use crate::kernels::amx::tile::Tiles;
use crate::kernels::attention::{LANES, Source, Weights};
use crate::kernels::avx512::attention::widen::Load;
use crate::kernels::avx512::transpose::transpose16;

/// Tiles of 16 elements that share the weights' loads.
pub const WIDTH: usize = 4;

/// Turns the weights `s[position * 16 + row]` of `n` (rounded up to 16) positions into the left operand:
/// `[32 positions][hi, lo][row]`.
///
/// # Safety
/// `s` has those positions, `to` two KiB for each 32 of them; both are 64-byte aligned. AVX-512 F and DQ are there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512dq")]
pub unsafe fn pack_weights(s: *const f32, n: usize, to: *mut u8) {
    for step in 0..n.div_ceil(STEP) {
        let half = |first: usize| {
            // SAFETY: 16 positions of `s`, which has `n` rounded up to 16.
            let position = |i: usize| unsafe { _mm512_load_si512(s.add((first + i) * LANES).cast()) };
            if first < n { transpose16(std::array::from_fn(position)) } else { [_mm512_setzero_si512(); LANES] }
        };
        let (a, b) = (half(step * STEP), half(step * STEP + LANES));
        for row in 0..LANES {
            let both = pairs(_mm512_castsi512_ps(a[row]), _mm512_castsi512_ps(b[row]));
            // SAFETY: the row's place in both parts of this step.
            unsafe {
                let to = to.add(step * 2 * PART + row * 64);
                _mm512_store_si512(to.cast(), both.hi);
                _mm512_store_si512(to.add(PART).cast(), both.lo);
            }
        }
    }
}

/// Packs tiles `[first, first + n)` of V's rows: `[32 positions][tile][hi, lo][pair]` (of BF16 only `hi`). Gives back
/// whether any value is an infinity or NaN. Rows that are closed or not there are zeros.
///
/// # Safety
/// The rows that are not closed are readable; `to` is 64-byte aligned and writable for two KiB for each tile and 32
/// positions. AVX-512 F, BW, DQ and VL are there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn pack_values<T: Split>(v: Source, first: usize, n: usize, to: *mut u8) -> bool {
    let row = |p: usize| {
        let open = p < v.rows && v.closed >> p & 1 == 0;
        if open { v.data.wrapping_add(p * v.stride) } else { std::ptr::null() }
    };
    let mut special = 0;
    for step in 0..v.rows.div_ceil(STEP) {
        for j in 0..LANES {
            let (a, b) = (row(step * STEP + j), row(step * STEP + LANES + j));
            for tile in 0..n {
                let at = (first + tile) * LANES;
                // SAFETY: open rows are readable; pair `j` of this step and tile.
                unsafe {
                    let (a, b) = (elements::<T>(a, v.d, at), elements::<T>(b, v.d, at));
                    let both = T::split(a, b);
                    special |= both.special;
                    put(T::TWO, both, to.add(((step * WIDTH + tile) * 2 * PART) + j * 64));
                }
            }
        }
    }
    special != 0
}

/// As [`pack_values`], from the split rows of K whose first elements V is: nothing is widened or split again.
///
/// # Safety
/// `keys` are split rows of `v.rows` positions (rounded up to 16) that have these tiles; `to` as in [`pack_values`].
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn pack_values_of_keys(keys: &[Keys], first: usize, n: usize, to: *mut u8) -> bool {
    let (lower, exponent) = (_mm512_set1_epi32(0xffff), _mm512_set1_epi16(0x7f80));
    let mut special = 0;
    for step in 0..keys.len().div_ceil(2) {
        let groups = [keys.get(2 * step), keys.get(2 * step + 1)];
        for tile in 0..n {
            // Lane `j` of a key's vector has elements `j` and `j + 16` of 32: those of an even tile and the next one.
            let (from, upper) = ((first + tile) / 2, (first + tile) % 2 == 1);
            for (part, j) in (0..2).flat_map(|part| (0..LANES).map(move |j| (part, j))) {
                let [a, b] = groups.map(|group| match group {
                    // SAFETY: row `j` of a part of this step of the keys.
                    Some(k) => unsafe { _mm512_load_si512(k.data.add(from * k.step + part * PART + j * 64).cast()) },
                    None => _mm512_setzero_si512(),
                });
                let both = if upper {
                    _mm512_or_si512(_mm512_srli_epi32::<16>(a), _mm512_andnot_si512(lower, b))
                } else {
                    _mm512_or_si512(_mm512_and_si512(a, lower), _mm512_slli_epi32::<16>(b))
                };
                special |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(both, exponent), exponent);
                // SAFETY: pair `j` of this step, tile and part.
                unsafe {
                    _mm512_store_si512(to.add((step * WIDTH + tile) * 2 * PART + part * PART + j * 64).cast(), both)
                };
            }
        }
    }
    special != 0
}

/// Stores a pair's parts.
// SAFETY: 64 bytes at `to`, 64-byte aligned, and the same a part further.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn put(two: bool, both: Pairs, to: *mut u8) {
    // SAFETY: the caller's contract.
    unsafe {
        _mm512_store_si512(to.cast(), both.hi);
        if two {
            _mm512_store_si512(to.add(PART).cast(), both.lo);
        }
    }
}

/// Multiplies tiles `[first, first + n)` of the rows' sums by `w.rescale`, where that is not 1.
///
/// # Safety
/// `w` as in `Attend::weigh`; AVX-512 F is there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f")]
pub unsafe fn rescale(w: &Weights, first: usize, n: usize) {
    for row in 0..w.rows {
        // SAFETY: one factor a row; the row's sums.
        unsafe {
            let factor = *w.rescale.add(row);
            if factor != 1.0 {
                for tile in first..first + n {
                    let at = w.o.add((row * w.tiles + tile) * LANES);
                    _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(factor)));
                }
            }
        }
    }
}

/// Adds 16 rows' weighted sums to tiles `[first, first + n)` of their sums.
///
/// # Safety
/// All tiles are 16 rows x 64 bytes. `p` and `v` hold `w.n` positions (rounded up to 32), `v` as [`pack_values`] left
/// it for these (1 to 4) tiles; `w.o` has 16 rows.
// SAFETY: contract above.
pub unsafe fn weigh(tiles: &Tiles<'_>, split: bool, w: &Weights, p: *const u8, v: *const u8, first: usize, n: usize) {
    // SAFETY: the caller's contract.
    unsafe {
        match (n, split) {
            (1, false) => products::<1, false>(tiles, w, p, v, first),
            (2, false) => products::<2, false>(tiles, w, p, v, first),
            (3, false) => products::<3, false>(tiles, w, p, v, first),
            (_, false) => products::<4, false>(tiles, w, p, v, first),
            (1, true) => products::<1, true>(tiles, w, p, v, first),
            (2, true) => products::<2, true>(tiles, w, p, v, first),
            (3, true) => products::<3, true>(tiles, w, p, v, first),
            (_, true) => products::<4, true>(tiles, w, p, v, first),
        }
    }
}

/// `hi hi + lo hi + hi lo`, as for the scores.
// SAFETY: contract of `weigh`.
unsafe fn products<const N: usize, const SPLIT: bool>(
    tiles: &Tiles<'_>,
    w: &Weights,
    p: *const u8,
    v: *const u8,
    first: usize,
) {
    let stride = w.tiles * 64;
    // SAFETY: the caller's contract: every address is inside its operand.
    unsafe {
        let o = w.o.add(first * LANES).cast::<u8>();
        each!(N, I => tiles.load::<I>(o.add(I as usize * 64), stride));
        for step in 0..w.n.div_ceil(STEP) {
            let (p, v) = (p.add(step * 2 * PART), v.add(step * WIDTH * 2 * PART));
            tiles.load::<4>(p, 64);
            tiles.load::<5>(p.add(PART), 64);
            each!(N, I => {
                let v = v.add(I as usize * 2 * PART);
                tiles.load::<6>(v, 64);
                tiles.dp_bf16::<I, 4, 6>();
                tiles.dp_bf16::<I, 5, 6>();
                if SPLIT {
                    tiles.load::<7>(v.add(PART), 64);
                    tiles.dp_bf16::<I, 4, 7>();
                }
            });
        }
        each!(N, I => tiles.store::<I>(o.add(I as usize * 64), stride));
    }
}

/// The same in f32, from V where it lies: for tiles that hold an infinity or NaN, which parts would get wrong.
///
/// # Safety
/// V's rows that are not closed are readable; `w` as in `Attend::weigh`. AVX-512 F, BW and VL are there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn weigh_in_f32<T: Load>(w: &Weights, v: Source, first: usize, n: usize) {
    for row in 0..w.rows {
        for tile in first..first + n {
            // SAFETY: the row's sums, its weights, and V's rows that are open.
            unsafe {
                let at = w.o.add((row * w.tiles + tile) * LANES);
                let mut sum = _mm512_load_ps(at);
                for i in (0..v.rows).filter(|i| v.closed >> i & 1 == 0) {
                    let p = _mm512_set1_ps(*w.p.add(i * w.lanes + row));
                    sum = _mm512_fmadd_ps(p, elements::<T>(v.data.add(i * v.stride), v.d, tile * LANES), sum);
                }
                _mm512_store_ps(at, sum);
            }
        }
    }
}
