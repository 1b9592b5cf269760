//! `e^x` and `tanh` of 8 values.

use std::arch::x86_64::*;

use crate::kernels::attention::exp::{LN_2, SMALLEST, TAYLOR};

/// Added to a small number it leaves the nearest whole one, plus the bias of an exponent, in the lowest bits.
const ROUND: f32 = (3 << 22) as f32 + 127.0;

/// `e^x` to 2 units in the last place for `x <= 88`; 0 below -87.3 (also for -Inf), NaN for NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn exp(x: __m256) -> __m256 {
    let counts = _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(SMALLEST));
    let biased = _mm256_fmadd_ps(x, _mm256_set1_ps(std::f32::consts::LOG2_E), _mm256_set1_ps(ROUND));
    let n = _mm256_sub_ps(biased, _mm256_set1_ps(ROUND));
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN_2[0]), x);
    let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN_2[1]), r);
    let mut p = _mm256_set1_ps(TAYLOR[0]);
    for c in &TAYLOR[1..] {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(*c));
    }
    let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(biased)));
    _mm256_and_ps(counts, _mm256_mul_ps(p, power))
}

/// `tanh x` with an absolute error below 2e-7; NaN for NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub fn tanh(x: __m256) -> __m256 {
    let sign = _mm256_set1_ps(-0.0);
    let e = exp(_mm256_mul_ps(_mm256_set1_ps(-2.0), _mm256_andnot_ps(sign, x)));
    let one = _mm256_set1_ps(1.0);
    let t = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
    _mm256_or_ps(t, _mm256_and_ps(sign, x))
}
