//! The weighted sum of V's rows on tiles: weights of 16 rows are the left operand, 32 positions of V the right one.
//!
//! | tiles | hold |
//! |---|---|
//! | 0 to 3 | sums of 16 rows x 64 elements |
//! | 4, 5 | weights, hi and lo, 16 rows x 32 positions; of a twin panel tile 4 alone, hi and lo of 8 rows |
//! | 6, 7 | V (hi and lo), 32 positions x 16 elements |
//!
//! Position `j` of a step's 32 is paired with position `j + 16`: then pairs of V's elements are one shift away.

use std::arch::x86_64::*;

use super::form::{self, Form, Product, with_product, with_tiles};
use super::scores::{Keys, elements, row};
use super::split::Split;
use super::{PART, STEP, TWIN};
use crate::kernels::amx::each;
use crate::kernels::amx::tile::Tiles;
use crate::kernels::attention::{Ahead, LANES, Source, Weights};
use crate::kernels::avx512::transpose::transpose16;

/// Tiles of 16 elements that share the weights' loads.
pub const WIDTH: usize = 4;

/// Turns the weights `s[position * 16 + row]` of `n` (rounded up to 16) positions into the left operand:
/// `[32 positions][hi, lo][row]`.
///
/// # Safety
/// `s` has those positions, `to` two KiB for each 32 of them; both are 64-byte aligned. AVX-512 F, BW, DQ and VL are there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn pack_weights(form: Form, s: *const f32, n: usize, to: *mut u8) {
    let scale = _mm512_set1_ps(form.weights());
    for step in 0..n.div_ceil(STEP) {
        let half = |first: usize| {
            // SAFETY: 16 positions of `s`, which has `n` rounded up to 16.
            let position = |i: usize| unsafe { _mm512_load_si512(s.add((first + i) * LANES).cast()) };
            if first < n { transpose16(std::array::from_fn(position)) } else { [_mm512_setzero_si512(); LANES] }
        };
        let (a, b) = (half(step * STEP), half(step * STEP + LANES));
        for row in 0..LANES {
            let a = _mm512_mul_ps(_mm512_castsi512_ps(a[row]), scale);
            let b = _mm512_mul_ps(_mm512_castsi512_ps(b[row]), scale);
            let both = form.parts(a, b);
            // SAFETY: the row's place in both parts of this step.
            unsafe {
                let to = to.add(step * 2 * PART + row * 64);
                _mm512_store_si512(to.cast(), both.hi);
                _mm512_store_si512(to.add(PART).cast(), both.lo);
            }
        }
    }
}

/// The same of a twin panel, `s[position * 8 + row]`: `[32 positions][hi, lo][8 rows]` is one tile.
///
/// # Safety
/// As [`pack_weights`], with one KiB for each 32 positions.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn pack_weights_twin(form: Form, s: *const f32, n: usize, to: *mut u8) {
    let scale = _mm512_set1_ps(form.weights());
    for first in (0..n).step_by(STEP) {
        // SAFETY: a position's 8 rows; `s` has `n` positions rounded up to 16.
        let position = |i: usize| unsafe {
            if first + i < n.next_multiple_of(LANES) {
                _mm256_load_si256(s.add((first + i) * TWIN).cast())
            } else {
                _mm256_setzero_si256()
            }
        };
        // Rows of positions 0 to 15 first, then those of 16 to 31.
        let both = |i: usize| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(position(i)), position(i + LANES));
        let rows = transpose16(std::array::from_fn(both));
        for row in 0..TWIN {
            let a = _mm512_mul_ps(_mm512_castsi512_ps(rows[row]), scale);
            let b = _mm512_mul_ps(_mm512_castsi512_ps(rows[row + TWIN]), scale);
            let both = form.parts(a, b);
            // SAFETY: the row's places in this step's tile.
            unsafe {
                let to = to.add(first / STEP * PART + row * 64);
                _mm512_store_si512(to.cast(), both.hi);
                _mm512_store_si512(to.add(TWIN * 64).cast(), both.lo);
            }
        }
    }
}

/// Packs tiles `[first, first + n)` of V's rows, BF16 or F16: `[32 positions][tile][pair]`. Rows that are closed or not
/// there are zeros.
///
/// # Safety
/// The rows that are not closed are readable; `to` is 64-byte aligned and writable for a KiB for each tile (of 4) and 32
/// positions. AVX-512 F, BW and VL are there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn pack_values(v: Source, first: usize, n: usize, to: *mut u8, ahead: &mut Ahead) {
    let whole = (first + n) * LANES <= v.d;
    for pair in 0..v.rows.div_ceil(STEP) * LANES {
        let (step, j) = (pair / LANES, pair % LANES);
        ahead.step();
        let (a, b) = (row(&v, step * STEP + j), row(&v, step * STEP + LANES + j));
        // SAFETY: open rows are readable; pair `j` of this step and its tiles.
        unsafe {
            let to = to.add(step * WIDTH * PART + j * 64);
            if whole && n == WIDTH && !a.is_null() && !b.is_null() {
                let at = first * LANES * 2;
                for tile in 0..WIDTH {
                    let both = form::interleave(a.add(at + tile * 32), b.add(at + tile * 32));
                    _mm512_store_si512(to.add(tile * PART).cast(), both);
                }
                continue;
            }
            for tile in 0..n {
                let both = form::interleave_some(a, b, v.d, (first + tile) * LANES);
                _mm512_store_si512(to.add(tile * PART).cast(), both);
            }
        }
    }
}

/// Splits tiles `[first, first + n)` of V's rows: `[32 positions][tile][hi, lo][pair]`. Rows that are closed or not there are
/// zeros.
///
/// # Safety
/// As [`pack_values`], with two KiB; AVX-512 DQ is there too.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn split_values<T: Split>(v: Source, first: usize, n: usize, to: *mut u8, ahead: &mut Ahead) {
    for pair in 0..v.rows.div_ceil(STEP) * LANES {
        let (step, j) = (pair / LANES, pair % LANES);
        ahead.step();
        let (a, b) = (row(&v, step * STEP + j), row(&v, step * STEP + LANES + j));
        for tile in 0..n {
            let at = (first + tile) * LANES;
            // SAFETY: open rows are readable; pair `j` of both parts of this step and tile.
            unsafe {
                let both = T::split(elements::<T>(a, v.d, at), elements::<T>(b, v.d, at));
                let to = to.add((step * WIDTH + tile) * 2 * PART + j * 64);
                _mm512_store_si512(to.cast(), both.hi);
                _mm512_store_si512(to.add(PART).cast(), both.lo);
            }
        }
    }
}

/// As [`split_values`], from the split rows of K whose first elements V is: nothing is widened or split again.
///
/// # Safety
/// `keys` are split rows of `v.rows` positions (rounded up to 16) that have these tiles; `to` as in [`pack_values`].
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn pack_values_of_keys(keys: &[Keys], first: usize, n: usize, to: *mut u8) {
    let lower = _mm512_set1_epi32(0xffff);
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
                // SAFETY: pair `j` of this step, tile and part.
                unsafe {
                    _mm512_store_si512(to.add((step * WIDTH + tile) * 2 * PART + part * PART + j * 64).cast(), both)
                };
            }
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

/// Adds a panel's weighted sums to tiles `[first, first + n)` of its sums, of 16 rows: of a twin panel 8 of the weights' hi parts
/// and 8 of their lo parts.
///
/// # Safety
/// All tiles are 16 rows x 64 bytes. `p` and `v` hold `w.n` positions (rounded up to 32) in this form, `v` as [`pack_values`] or
/// [`split_values`] left it for these (1 to 4) tiles; `w.o` has 16 rows.
// SAFETY: contract above.
pub unsafe fn weigh(tiles: &Tiles<'_>, form: Form, w: &Weights, p: *const u8, v: *const u8, first: usize, n: usize) {
    // SAFETY: the caller's contract.
    unsafe {
        with_product!(form, product => with_tiles!(n, w.lanes == TWIN, products(tiles, product, w, p, v, first)));
    }
}

/// `hi hi + lo hi + hi lo`, as for the scores.
// SAFETY: contract of `weigh`.
unsafe fn products<const N: usize, const TWIN: bool, P: Product>(
    tiles: &Tiles<'_>,
    product: P,
    w: &Weights,
    p: *const u8,
    v: *const u8,
    first: usize,
) {
    let stride = w.tiles * 64;
    let bytes = if P::SPLIT { 2 * PART } else { PART };
    // SAFETY: the caller's contract: every address is inside its operand.
    unsafe {
        let o = w.o.add(first * LANES).cast::<u8>();
        each!(N, I => tiles.load::<I>(o.add(I as usize * 64), stride));
        for step in 0..w.n.div_ceil(STEP) {
            let (p, v) = (p.add(step * if TWIN { PART } else { 2 * PART }), v.add(step * WIDTH * bytes));
            tiles.load::<4>(p, 64);
            if !TWIN {
                tiles.load::<5>(p.add(PART), 64);
            }
            each!(N, I => {
                let v = v.add(I as usize * bytes);
                tiles.load::<6>(v, 64);
                product.dp::<I, 4, 6>(tiles);
                if !TWIN {
                    product.dp::<I, 5, 6>(tiles);
                }
                if P::SPLIT {
                    tiles.load::<7>(v.add(PART), 64);
                    product.dp::<I, 4, 7>(tiles);
                }
            });
        }
        each!(N, I => tiles.store::<I>(o.add(I as usize * 64), stride));
    }
}

/// Makes a panel's sums what they stand for, once all are there: adds those of a twin's lo parts, takes back the weights' factor.
///
/// # Safety
/// `o` has 16 rows of `16 * tiles` sums, 64-byte aligned; AVX-512 F is there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f")]
pub unsafe fn settle(form: Form, lanes: usize, o: *mut f32, tiles: usize) {
    let scale = _mm512_set1_ps(1.0 / form.weights());
    let lo = lanes * tiles * LANES;
    for i in (0..lo).step_by(LANES) {
        // SAFETY: `lanes` rows, and as many behind them where a panel is a twin.
        unsafe {
            let x = _mm512_load_ps(o.add(i));
            let x = if lanes == TWIN { _mm512_add_ps(x, _mm512_load_ps(o.add(lo + i))) } else { x };
            _mm512_store_ps(o.add(i), _mm512_mul_ps(x, scale));
        }
    }
}
