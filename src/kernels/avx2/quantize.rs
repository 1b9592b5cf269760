//! f32 activations to the quants and scales of ggml's `quantize_row_q8_0`.

use std::arch::x86_64::*;

use crate::pack::PANEL;
use crate::tensor::QK8_0;

/// `max(|v|, max)`, where NaN does not count.
#[inline]
#[target_feature(enable = "avx2")]
fn larger(max: __m256, v: __m256) -> __m256 {
    // max gives its second operand where one is NaN.
    _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0), v), max)
}

/// The largest `|x|` of 32 in 8 lanes.
#[inline]
#[target_feature(enable = "avx2")]
// SAFETY: contract: `x` is readable for 32 f32.
pub unsafe fn block_maxima(x: *const f32) -> __m256 {
    // SAFETY: the caller's promise.
    (0..4).fold(_mm256_setzero_ps(), |max, i| larger(max, unsafe { _mm256_loadu_ps(x.add(i * 8)) }))
}

/// `127 / max`, by which values become quants, and the scale `max / 127` rounded to f16, for blocks with these maxima.
/// Where the inverse is Inf, the scale is 0 and quants overflow.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub fn scales(max: __m256) -> (__m256, __m256) {
    let most = _mm256_set1_ps(127.0);
    let scale = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_div_ps(max, most));
    (_mm256_div_ps(most, max), _mm256_cvtph_ps(scale))
}

/// The quants of a block of 32, by fours of k in the order 0, 2, 4, 6, 1, 3, 5, 7; NaN and overflow give 0.
#[inline]
#[target_feature(enable = "avx2")]
// SAFETY: contract: `x` is readable for 32 f32.
pub unsafe fn quants(x: *const f32, inverse: __m256) -> __m256i {
    // SAFETY: the caller's promise.
    let eight = |i: usize| unsafe { _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x.add(i * 8)), inverse)) };
    let (low, high) = (_mm256_packs_epi32(eight(0), eight(1)), _mm256_packs_epi32(eight(2), eight(3)));
    let bytes = _mm256_packs_epi16(low, high);
    // Only i32::MIN becomes -128, which is what NaN and overflow convert to.
    _mm256_andnot_si256(_mm256_cmpeq_epi8(bytes, _mm256_set1_epi8(-128)), bytes)
}

/// In each lane, -128 times the sum of all `fours`' quants.
#[inline]
#[target_feature(enable = "avx2")]
pub fn starts<const N: usize>(fours: [__m256i; N]) -> __m256i {
    let ones = _mm256_set1_epi8(1);
    let sums = fours.iter().fold(_mm256_setzero_si256(), |sums, &four| {
        // Pairs of quants, 254 at most: 8 of them stay far inside i16.
        _mm256_add_epi16(sums, _mm256_maddubs_epi16(ones, four))
    });
    _mm256_madd_epi16(sums, _mm256_set1_epi16(-128))
}

/// Writes 8 lanes of a block of an INT8 panel: quants by fours of k, scales, starts of the sums.
#[inline]
#[target_feature(enable = "avx2")]
// SAFETY: contract: `block` is one half of a panel's block (at 0 or 32 of each vector's 64 bytes), 32-byte aligned.
pub unsafe fn store_block(block: *mut u8, fours: [__m256i; 8], scales: __m256) {
    // SAFETY: the caller's promise.
    unsafe {
        for (g, &four) in fours.iter().enumerate() {
            _mm256_store_si256(block.add(g * 64).cast(), four);
        }
        _mm256_store_ps(block.add(8 * 64).cast(), scales);
        _mm256_store_si256(block.add(9 * 64).cast(), starts(fours));
    }
}

/// 8 of the 16 lanes of 32 vectors, one of each k, as half a block of an INT8 panel: each lane with its own scale.
#[inline]
#[target_feature(enable = "avx2,f16c")]
// SAFETY: contract: `h` has 32 vectors, 16 f32 apart and 32-byte aligned; `block` as in [`store_block`].
pub unsafe fn quantize_lanes(h: *const f32, block: *mut u8) {
    // SAFETY: vector i of 32.
    let vector = |i: usize| unsafe { _mm256_load_ps(h.add(i * PANEL)) };
    let max = (0..QK8_0).fold(_mm256_setzero_ps(), |max, i| larger(max, vector(i)));
    let (inverse, scales) = scales(max);
    let quant = |i: usize| _mm256_cvtps_epi32(_mm256_mul_ps(vector(i), inverse));
    let words = |i: usize| _mm256_blend_epi16::<0xAA>(quant(i), _mm256_slli_epi32::<16>(quant(i + 2)));
    // NaN and overflow convert to i32::MIN, whose low byte is 0.
    let four = |g: usize| {
        let even = _mm256_and_si256(words(g * 4), _mm256_set1_epi16(0xFF));
        _mm256_or_si256(even, _mm256_slli_epi16::<8>(words(g * 4 + 1)))
    };
    // SAFETY: the caller's promise.
    unsafe { store_block(block, std::array::from_fn(four), scales) };
}
