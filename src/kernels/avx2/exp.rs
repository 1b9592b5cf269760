//! `e^x` and `tanh` of 8 values.

use std::arch::x86_64::*;

use crate::kernels::series;

/// Below this `e^x` counts as zero in [`exp_or_zero`]: it is 1e-38 of the largest weight.
const SMALLEST: f32 = -87.3;

/// `e^r - 1` and `n` of `e^x = e^r 2^n` with |r| <= ln(2) / 2, for `-87.4 < x < 88.9`; `n + 127` is in the low bits of
/// each lane. NaN gives NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn parts(x: __m256) -> (__m256, __m256i) {
    let set = |v: f32| _mm256_set1_ps(v);
    // Where f32 are a unit apart: adding it rounds to an integer, which then is in the low bits.
    let round = set((3 << 22) as f32 + 127.0);
    let t = _mm256_fmadd_ps(x, set(std::f32::consts::LOG2_E), round);
    let n = _mm256_sub_ps(t, round);
    let r = series::LN_2.into_iter().fold(x, |r, part| _mm256_fnmadd_ps(n, set(part), r));
    // Side by side rather than one power after the other: most of the time is waiting.
    let [c7, c6, c5, c4, c3, c2, _, _] = series::EXP;
    let square = _mm256_mul_ps(r, r);
    let two = |high, low| _mm256_fmadd_ps(set(high), r, set(low));
    let p = _mm256_fmadd_ps(_mm256_fmadd_ps(two(c7, c6), square, two(c5, c4)), square, two(c3, c2));
    (_mm256_fmadd_ps(p, square, r), _mm256_castps_si256(t))
}

/// `(p + 1) 2^n` for `-126 <= n <= 127`, from `n + 127` in the low bits.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn scale(p: __m256, n: __m256i) -> __m256 {
    let power = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(n));
    _mm256_fmadd_ps(p, power, power)
}

/// `e^x` to 2 units in the last place. NaN stays NaN; too large is Inf; what is below -86.9 counts as -86.9.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn exp(x: __m256) -> __m256 {
    // min and max give their second operand where one is NaN.
    let x = _mm256_max_ps(_mm256_set1_ps(-86.9), _mm256_min_ps(_mm256_set1_ps(88.8), x));
    let (p, n) = parts(x);
    // n may be 128: half of that power is still finite.
    let half = scale(p, _mm256_sub_epi32(n, _mm256_set1_epi32(1)));
    _mm256_add_ps(half, half)
}

/// `e^x` to 2 units in the last place for `x <= 88`; 0 below -87.3 (also for -Inf), NaN for NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn exp_or_zero(x: __m256) -> __m256 {
    let counts = _mm256_cmp_ps::<_CMP_NLT_UQ>(x, _mm256_set1_ps(SMALLEST));
    let (p, n) = parts(x);
    _mm256_and_ps(counts, scale(p, n))
}

/// `tanh x` with an absolute error below 2e-7; NaN for NaN.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn tanh(x: __m256) -> __m256 {
    let sign = _mm256_set1_ps(-0.0);
    let e = exp_or_zero(_mm256_mul_ps(_mm256_set1_ps(-2.0), _mm256_andnot_ps(sign, x)));
    let one = _mm256_set1_ps(1.0);
    let t = _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
    _mm256_or_ps(t, _mm256_and_ps(sign, x))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::avx2;

    /// `exp`, `exp_or_zero` and `tanh` of each.
    #[target_feature(enable = "avx2,fma")]
    fn each(x: [f32; 8]) -> [[f32; 8]; 3] {
        // SAFETY: an array of 8 f32; the load is an unaligned one.
        let x = unsafe { _mm256_loadu_ps(x.as_ptr()) };
        [exp(x), exp_or_zero(x), tanh(x)].map(|v| {
            let mut to = [0.0; 8];
            // SAFETY: an array of 8 f32; the store is an unaligned one.
            unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) };
            to
        })
    }

    /// Units in the last place between a normal `got` and `want`.
    fn units(got: f32, want: f64) -> f64 {
        let unit = f64::from(f32::from_bits(got.to_bits() + 1)) - f64::from(got);
        (f64::from(got) - want).abs() / unit
    }

    #[test]
    fn close_to_the_standard_library() {
        if avx2().is_none() {
            return;
        }
        for i in 0..80_000 {
            let x: [f32; 8] = std::array::from_fn(|j| -86.9 + (i * 8 + j) as f32 * (88.0 + 86.9) / 640_000.0);
            // SAFETY: the features were detected.
            let [e, z, t] = unsafe { each(x) };
            for j in 0..8 {
                let want = f64::from(x[j]).exp();
                assert!(units(e[j], want) <= 2.0, "exp {}: {} {want}", x[j], e[j]);
                assert!(units(z[j], want) <= 2.0, "exp {}: {} {want}", x[j], z[j]);
                assert!((f64::from(t[j]) - f64::from(x[j]).tanh()).abs() < 2e-7, "tanh {}", x[j]);
            }
        }
    }

    #[test]
    fn edges() {
        if avx2().is_none() {
            return;
        }
        // SAFETY: the features were detected.
        let [e, z, t] = unsafe { each([f32::NEG_INFINITY, f32::NAN, -1e30, 0.0, -88.0, -0.0, -87.29, 1e-40]) };
        assert!(e[1].is_nan() && z[1].is_nan() && t[1].is_nan());
        assert_eq!((e[3], e[5], e[7]), (1.0, 1.0, 1.0));
        assert!([e[0], e[2], e[4], e[6]].iter().all(|&e| (0.0..2e-38).contains(&e)));
        assert_eq!((z[0], z[2], z[3], z[4], z[5], z[7]), (0.0, 0.0, 1.0, 0.0, 1.0, 1.0));
        assert!(units(z[6], f64::from(-87.29f32).exp()) <= 2.0);
        assert_eq!((t[0], t[2], t[3]), (-1.0, -1.0, 0.0));
        // SAFETY: as above.
        let [e, _, t] = unsafe { each([f32::INFINITY, 88.72, 88.73, 90.0, 1e30, 88.5, 88.38, -89.0]) };
        assert_eq!((e[0], e[2], e[3], e[4]), (f32::INFINITY, f32::INFINITY, f32::INFINITY, f32::INFINITY));
        assert!([(1, 88.72f32), (5, 88.5), (6, 88.38)].iter().all(|&(i, x)| units(e[i], f64::from(x).exp()) <= 2.0));
        assert_eq!((t[0], t[4], t[7]), (1.0, 1.0, -1.0));
    }
}
