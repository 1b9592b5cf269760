//! Scores on tiles: 16 positions of K are the left operand, 16 query rows the right one.
//!
//! | tiles | hold |
//! |---|---|
//! | 0 to 3 | scores of up to four groups of 16 positions x 16 rows |
//! | 4, 5 | K, hi and lo, 16 positions x 32 elements |
//! | 6, 7 | Q, hi and lo, 32 elements x 16 rows |

use std::arch::x86_64::*;

use super::split::{SPECIAL, Split, pairs};
use super::{KeyOrder, PART, STEP};
use crate::kernels::amx::each;
use crate::kernels::amx::tile::Tiles;
use crate::kernels::attention::{Ahead, LANES, Source, TILE};
use crate::kernels::avx512::attention::widen::Load;

/// Most groups of 16 positions of a block.
pub const GROUPS: usize = 4;

/// Where 16 positions of K are: tiles of 16 rows, `step` bytes from 32 elements to the next.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    pub data: *const u8,
    pub stride: usize,
    pub step: usize,
}

/// Packs a panel of 16 query rows (`[element][row]`, `d` elements rounded up to 16) as the right operand:
/// `[32 elements][hi, lo][pair][row]`.
///
/// # Safety
/// `to` is 64-byte aligned and writable for two KiB for each 32 elements; AVX-512 F and DQ are there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512dq")]
pub unsafe fn pack_queries(panel: *const f32, d: usize, order: KeyOrder, to: *mut u8) {
    let padded = d.next_multiple_of(LANES);
    let element = |e: usize| {
        // SAFETY: element `e` is in front of the panel's end.
        if e < padded { unsafe { _mm512_loadu_ps(panel.add(e * LANES)) } } else { _mm512_setzero_ps() }
    };
    for step in 0..d.div_ceil(STEP) {
        for j in 0..LANES {
            let [a, b] = match order {
                KeyOrder::Memory => [2 * j, 2 * j + 1],
                KeyOrder::Halves => [j, j + LANES],
            };
            let both = pairs(element(step * STEP + a), element(step * STEP + b));
            // SAFETY: pair `j` of both parts of this step.
            unsafe {
                let to = to.add(step * 2 * PART + j * 64);
                _mm512_store_si512(to.cast(), both.hi);
                _mm512_store_si512(to.add(PART).cast(), both.lo);
            }
        }
    }
}

/// Splits up to 16 rows of K: `[32 elements][hi, lo][position]`, pairs in the order of [`KeyOrder::Halves`]. Rows
/// that are closed or not there are zeros.
///
/// # Safety
/// The rows that are not closed are readable; `to` is 64-byte aligned and writable for two KiB for each 32 elements;
/// AVX-512 F, BW, DQ and VL are there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn split_rows<T: Split>(from: Source, to: *mut u8) {
    for p in 0..LANES {
        let open = p < from.rows && from.closed >> p & 1 == 0;
        for step in 0..from.d.div_ceil(STEP) {
            // SAFETY: an open row is readable; row `p` of both parts of this step.
            unsafe {
                let row = if open { from.data.add(p * from.stride) } else { std::ptr::null() };
                let both =
                    T::split(elements::<T>(row, from.d, step * STEP), elements::<T>(row, from.d, step * STEP + LANES));
                let to = to.add(step * 2 * PART + p * 64);
                _mm512_store_si512(to.cast(), both.hi);
                _mm512_store_si512(to.add(PART).cast(), both.lo);
            }
        }
    }
}

/// Copies up to 16 BF16 rows of K: `[32 elements][position]`, as they are. Rows that are closed or not there are
/// zeros, and so is what is missing of the last 32 elements.
///
/// # Safety
/// As [`split_rows`], with one KiB for each 32 elements.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn copy_rows(from: Source, to: *mut u8) {
    for p in 0..LANES {
        let open = p < from.rows && from.closed >> p & 1 == 0;
        for step in 0..from.d.div_ceil(STEP) {
            let some = if open { u32::MAX >> (STEP - (from.d - step * STEP).min(STEP)) } else { 0 };
            let row = from.data.wrapping_add(p * from.stride + step * STEP * 2);
            // SAFETY: masked lanes are not read; row `p` of this step.
            unsafe {
                _mm512_store_si512(to.add(step * PART + p * 64).cast(), _mm512_maskz_loadu_epi16(some, row.cast()))
            };
        }
    }
}

/// 16 elements from `at` (a multiple of 16) of a row of `d`, zeros behind its end; all zeros of a null row.
///
/// # Safety
/// A row that is not null is readable; the features of [`Load`] are there.
// SAFETY: contract above.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn elements<T: Load>(row: *const u8, d: usize, at: usize) -> __m512 {
    if row.is_null() || at >= d {
        return _mm512_setzero_ps();
    }
    // SAFETY: the elements are inside the row; masked ones are not read.
    unsafe {
        match d - at {
            LANES.. => T::full(row, at / LANES),
            left => T::part(row, at / LANES, (1 << left) - 1),
        }
    }
}

/// Scores of one panel with a block's groups: `s[position * 16 + row]`. Bit `g` of the result is set where a score of
/// group `g` is not finite.
///
/// # Safety
/// All tiles are 16 rows x 64 bytes. `keys` and `q` hold `steps` steps, of K's `lo` too if `split`; `s` has 16 x 16
/// f32 for each of the (1 to 4) groups, 64-byte aligned; AVX-512 F and DQ are there.
// SAFETY: contract above.
pub unsafe fn scores(
    tiles: &Tiles<'_>,
    split: bool,
    keys: &[Keys],
    q: *const u8,
    steps: usize,
    s: *mut f32,
    ahead: &mut Ahead,
) -> u32 {
    // SAFETY: the caller's contract.
    unsafe {
        match (keys.len(), split) {
            (1, false) => products::<1, false>(tiles, keys, q, steps, s, ahead),
            (2, false) => products::<2, false>(tiles, keys, q, steps, s, ahead),
            (3, false) => products::<3, false>(tiles, keys, q, steps, s, ahead),
            (_, false) => products::<4, false>(tiles, keys, q, steps, s, ahead),
            (1, true) => products::<1, true>(tiles, keys, q, steps, s, ahead),
            (2, true) => products::<2, true>(tiles, keys, q, steps, s, ahead),
            (3, true) => products::<3, true>(tiles, keys, q, steps, s, ahead),
            (_, true) => products::<4, true>(tiles, keys, q, steps, s, ahead),
        }
        (0..keys.len()).fold(0, |lost, g| lost | u32::from(any_special(s.add(g * TILE))) << g)
    }
}

/// `hi hi + hi lo + lo hi`; what is left out, `lo lo`, is below 2^-18 of a product.
// SAFETY: contract of `scores`.
unsafe fn products<const G: usize, const SPLIT: bool>(
    tiles: &Tiles<'_>,
    keys: &[Keys],
    mut q: *const u8,
    steps: usize,
    s: *mut f32,
    ahead: &mut Ahead,
) {
    let mut k: [*const u8; GROUPS] = std::array::from_fn(|g| keys[g % G].data);
    // SAFETY: the caller's contract: every address is inside its operand.
    unsafe {
        each!(G, I => tiles.zero::<I>());
        for _ in 0..steps {
            ahead.step();
            tiles.load::<6>(q, 64);
            tiles.load::<7>(q.add(PART), 64);
            each!(G, I => {
                let (keys, at) = (&keys[I as usize], k[I as usize]);
                tiles.load::<4>(at, keys.stride);
                tiles.dp_bf16::<I, 4, 6>();
                tiles.dp_bf16::<I, 4, 7>();
                if SPLIT {
                    tiles.load::<5>(at.add(PART), keys.stride);
                    tiles.dp_bf16::<I, 5, 6>();
                }
                k[I as usize] = at.wrapping_add(keys.step);
            });
            q = q.wrapping_add(2 * PART);
        }
        each!(G, I => tiles.store::<I>(s.add(I as usize * TILE).cast(), 64));
    }
}

/// Whether any of 16 x 16 scores is an infinity or NaN.
// SAFETY: contract of `scores`.
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn any_special(s: *const f32) -> bool {
    // SAFETY: 16 vectors, 64-byte aligned.
    let special = |i: usize| _mm512_fpclass_ps_mask::<SPECIAL>(unsafe { _mm512_load_ps(s.add(i * LANES)) });
    (0..LANES).fold(0, |any, i| any | special(i)) != 0
}
