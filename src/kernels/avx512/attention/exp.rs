//! `e^x` and `tanh` of 16 values.

use std::arch::x86_64::*;

use crate::kernels::series;

/// Below this `e^x` counts as zero: it is 1e-38 of the largest weight.
const SMALLEST: f32 = -87.3;

/// `e^x` to 2 units in the last place for `x <= 88`; 0 below -87.3 (also for -Inf), NaN for NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn exp(x: __m512) -> __m512 {
    let counts = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(SMALLEST));
    // x = n ln 2 + r with |r| <= ln 2 / 2.
    let n = _mm512_roundscale_ps::<0x08>(_mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E)));
    let r = series::LN_2.into_iter().fold(x, |r, part| _mm512_fnmadd_ps(n, _mm512_set1_ps(part), r));
    let [first, rest @ ..] = series::EXP;
    let mut p = _mm512_set1_ps(first);
    for c in rest {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    }
    _mm512_maskz_scalef_ps(counts, p, n)
}

/// `tanh x` with an absolute error below 2e-7; NaN for NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub fn tanh(x: __m512) -> __m512 {
    let sign = _mm512_set1_ps(-0.0);
    let e = exp(_mm512_mul_ps(_mm512_set1_ps(-2.0), _mm512_andnot_ps(sign, x)));
    let one = _mm512_set1_ps(1.0);
    let t = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    _mm512_or_ps(t, _mm512_and_ps(sign, x))
}
