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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Avx512;

    #[target_feature(enable = "avx512f,avx512dq")]
    fn each(x: [f32; 16]) -> ([f32; 16], [f32; 16]) {
        let (mut e, mut t) = ([0.0; 16], [0.0; 16]);
        // SAFETY: arrays of 16 f32; the loads and stores are unaligned ones.
        unsafe {
            let v = _mm512_loadu_ps(x.as_ptr());
            _mm512_storeu_ps(e.as_mut_ptr(), exp(v));
            _mm512_storeu_ps(t.as_mut_ptr(), tanh(v));
        }
        (e, t)
    }

    #[test]
    fn close_to_the_standard_library() {
        if Avx512::detect().is_none() {
            return println!("skipped: no AVX-512");
        }
        for i in 0..20_000 {
            let x: [f32; 16] = std::array::from_fn(|j| -87.0 + (i * 16 + j) as f32 * (88.0 + 87.0) / 320_000.0);
            // SAFETY: the features were detected.
            let (e, t) = unsafe { each(x) };
            for j in 0..16 {
                let want = f64::from(x[j]).exp();
                assert!((f64::from(e[j]) - want).abs() <= want * 2.5e-7, "exp {}: {} {want}", x[j], e[j]);
                assert!((f64::from(t[j]) - f64::from(x[j]).tanh()).abs() < 2e-7, "tanh {}", x[j]);
            }
        }
    }

    #[test]
    fn edges() {
        if Avx512::detect().is_none() {
            return println!("skipped: no AVX-512");
        }
        let mut x = [f32::NEG_INFINITY; 16];
        (x[1], x[2], x[3], x[4], x[5]) = (f32::NAN, -1e30, 0.0, -88.0, -0.0);
        // SAFETY: the features were detected.
        let (e, t) = unsafe { each(x) };
        assert!(e[1].is_nan() && t[1].is_nan());
        assert_eq!((e[0], e[2], e[3], e[4], e[5]), (0.0, 0.0, 1.0, 0.0, 1.0));
        assert_eq!((t[0], t[2], t[3]), (-1.0, -1.0, 0.0));
    }
}
