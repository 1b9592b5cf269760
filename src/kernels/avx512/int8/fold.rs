//! Up to 8 tokens leave half of a panel's lanes empty. *Folded*, two neighbouring lanes are one token and hold two fours of k: half as many
//! products. `F` is how many, 1 or 2.

use std::arch::x86_64::*;

/// Fours `i` of k of a panel's block: of two, `2 * i` and the one behind it.
#[inline]
#[target_feature(enable = "avx512f")]
// SAFETY: a whole block, 64-byte aligned, and `i` below `8 / F`.
pub unsafe fn fours<const F: usize>(block: *const u8, i: usize) -> __m512i {
    // SAFETY: the caller's promise.
    let at = |g: usize| unsafe { _mm512_load_si512(block.add(g * 64).cast()) };
    if F == 1 {
        return at(i);
    }
    let by_turns = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    _mm512_permutex2var_epi32(at(2 * i), by_turns, at(2 * i + 1))
}

/// Fours `i` of k of a row, to meet these.
#[inline]
#[target_feature(enable = "avx512f")]
// SAFETY: a block's 32 quants, and `i` below `8 / F`.
pub unsafe fn broadcast<const F: usize>(quants: *const u8, i: usize) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        match F {
            1 => _mm512_set1_epi32(quants.cast::<i32>().add(i).read_unaligned()),
            _ => _mm512_set1_epi64(quants.cast::<i64>().add(i).read_unaligned()),
        }
    }
}

const EACH_TWICE: [i32; 16] = [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7];

/// What sums of the tokens begin with: in one of a token's lanes, the other is 0.
#[inline]
#[target_feature(enable = "avx512f")]
// SAFETY: 16 values, 64-byte aligned.
pub unsafe fn once<const F: usize>(values: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let values = _mm512_load_si512(values.cast());
        if F == 1 {
            values
        } else {
            _mm512_maskz_permutexvar_epi32(0x5555, _mm512_loadu_si512(EACH_TWICE.as_ptr().cast()), values)
        }
    }
}

/// The tokens' scales: in all of their lanes.
#[inline]
#[target_feature(enable = "avx512f")]
// SAFETY: 16 values, 64-byte aligned.
pub unsafe fn all<const F: usize>(values: *const u8) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe {
        let values = _mm512_load_ps(values.cast());
        if F == 1 { values } else { _mm512_permutexvar_ps(_mm512_loadu_si512(EACH_TWICE.as_ptr().cast()), values) }
    }
}

/// Sums as a panel has them.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn unfolded<const F: usize>(sums: __m512) -> __m512 {
    if F == 1 {
        return sums;
    }
    _mm512_maskz_compress_ps(0x5555, _mm512_add_ps(sums, _mm512_permute_ps::<0b10_11_00_01>(sums)))
}
