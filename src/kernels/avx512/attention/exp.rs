//! `e^x` and `tanh` of 16 values.

use std::arch::x86_64::*;

use crate::kernels::attention::exp::{LN_2, SMALLEST, TAYLOR};

/// `e^x` to 2 units in the last place for `x <= 88`; 0 below -87.3 (also for -Inf), NaN for NaN.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn exp(x: __m512) -> __m512 {
    let counts = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(SMALLEST));
    let n = _mm512_roundscale_ps::<0x08>(_mm512_mul_ps(x, _mm512_set1_ps(std::f32::consts::LOG2_E)));
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN_2[0]), x);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN_2[1]), r);
    let mut p = _mm512_set1_ps(TAYLOR[0]);
    for c in &TAYLOR[1..] {
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
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
