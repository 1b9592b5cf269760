//! f32 values as sums of two BF16 values, in pairs as the tiles want them.

use std::arch::x86_64::*;

use crate::kernels::avx512::attention::widen::{F16, Load, Q8};

/// The upper half of each f32: its BF16.
const UPPER: i32 = 0xffff_0000_u32 as i32;
/// Half of a BF16's last place, in the bits of an f32.
const HALF: i32 = 0x8000;
/// NaNs and infinities, as `vfpclassps` names them.
pub const SPECIAL: i32 = 0x99;

/// Pairs `(a[j], b[j])` in lane `j`, `a` in the lower half: `hi + lo` is the value.
#[derive(Clone, Copy)]
pub struct Pairs {
    pub hi: __m512i,
    pub lo: __m512i,
}

/// A cache type whose values are two BF16 values.
pub trait Split: Load {
    /// Splits two vectors of values.
    ///
    /// # Safety
    /// AVX-512 F and DQ are there.
    // SAFETY: contract above.
    unsafe fn split(a: __m512, b: __m512) -> Pairs;
}

impl Split for F16 {
    /// Of 11 bits `hi` takes the first 8: exact.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    // SAFETY: contract of `Split::split`.
    unsafe fn split(a: __m512, b: __m512) -> Pairs {
        let (a, b) = (cut(a), cut(b));
        Pairs { hi: join(a.0, b.0), lo: join(a.1, b.1) }
    }
}

impl Split for Q8 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq")]
    // SAFETY: contract of `Split::split`.
    unsafe fn split(a: __m512, b: __m512) -> Pairs {
        pairs(a, b)
    }
}

/// Splits two vectors of f32.
///
/// `hi` is the value rounded to BF16 and `lo` the rest, rounded likewise: their sum is within 2^-17 of the value. An
/// infinity or NaN has itself as `hi` and 0 as `lo`. (A finite value beyond BF16's largest rounds to an infinity with
/// an infinite rest: products with it are not finite.)
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub fn pairs(a: __m512, b: __m512) -> Pairs {
    let (a, b) = (rounded(a), rounded(b));
    Pairs { hi: join(a.0, b.0), lo: join(a.1, b.1) }
}

/// hi and lo of values whose first bits are hi.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn cut(x: __m512) -> (__m512i, __m512i) {
    let special = _mm512_fpclass_ps_mask::<SPECIAL>(x);
    let hi = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(UPPER));
    (hi, _mm512_castps_si512(_mm512_maskz_sub_ps(!special, x, _mm512_castsi512_ps(hi))))
}

/// hi and lo, both rounded.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn rounded(x: __m512) -> (__m512i, __m512i) {
    let (upper, half) = (_mm512_set1_epi32(UPPER), _mm512_set1_epi32(HALF));
    let special = _mm512_fpclass_ps_mask::<SPECIAL>(x);
    let bits = _mm512_castps_si512(x);
    // Rounding must not carry a NaN's payload into its sign.
    let hi = _mm512_and_si512(_mm512_mask_add_epi32(bits, !special, bits, half), upper);
    let lo = _mm512_castps_si512(_mm512_maskz_sub_ps(!special, x, _mm512_castsi512_ps(hi)));
    (hi, _mm512_and_si512(_mm512_add_epi32(lo, half), upper))
}

/// The upper halves of two vectors: `a`'s below `b`'s.
#[inline]
#[target_feature(enable = "avx512f")]
fn join(a: __m512i, b: __m512i) -> __m512i {
    _mm512_or_si512(_mm512_srli_epi32::<16>(a), b)
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::isa::Avx512;
    use crate::testing::Random;

    /// `[hi, lo]` of each of 32 values.
    #[target_feature(enable = "avx512f,avx512dq")]
    fn split<T: Split>(x: &[f32; 32]) -> [[f32; 2]; 32] {
        // SAFETY: 32 f32; the loads are unaligned ones. The features are there.
        let both = unsafe { T::split(_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x[16..].as_ptr())) };
        let mut bits = [[0u32; 16]; 2];
        // SAFETY: arrays of 16 lanes; the stores are unaligned ones.
        unsafe {
            _mm512_storeu_si512(bits[0].as_mut_ptr().cast(), both.hi);
            _mm512_storeu_si512(bits[1].as_mut_ptr().cast(), both.lo);
        }
        let value = |part: usize, i: usize| {
            let pair = bits[part][i % 16];
            f32::from_bits(if i < 16 { pair << 16 } else { pair & 0xffff_0000 })
        };
        std::array::from_fn(|i| [value(0, i), value(1, i)])
    }

    /// As [`split`], on a CPU that has it.
    fn parts<T: Split>(x: &[f32; 32]) -> Option<[[f32; 2]; 32]> {
        if Avx512::detect().is_none() {
            println!("skipped: no AVX-512");
            return None;
        }
        // SAFETY: the features were detected.
        Some(unsafe { split::<T>(x) })
    }

    /// Each value is the exact sum of its parts; infinities and NaNs are in `hi` alone.
    fn exact<T: Split>(value: impl Fn(u16) -> f32) {
        for first in (0..=u16::MAX).step_by(32) {
            let x: [f32; 32] = std::array::from_fn(|i| value(first + i as u16));
            let Some(parts) = parts::<T>(&x) else { return };
            for (x, [hi, lo]) in x.into_iter().zip(parts) {
                if x.is_finite() {
                    assert!(hi + lo == x, "{x}: {hi} {lo}");
                } else {
                    assert!(hi == x || hi.is_nan() && x.is_nan(), "{x}: {hi}");
                    assert_eq!(lo, 0.0);
                }
            }
        }
    }

    #[test]
    fn every_f16_is_the_sum_of_its_parts() {
        exact::<F16>(|bits| f16::from_bits(bits).to_f32());
        exact::<Q8>(|bits| f16::from_bits(bits).to_f32());
    }

    #[test]
    fn other_values_keep_17_bits() {
        let mut random = Random(5);
        for _ in 0..2000 {
            let x: [f32; 32] = std::array::from_fn(|_| random.f32() * 2f32.powi(random.below(200) as i32 - 100));
            let Some(parts) = parts::<Q8>(&x) else { return };
            for (x, [hi, lo]) in x.into_iter().zip(parts) {
                let error = (f64::from(hi) + f64::from(lo) - f64::from(x)).abs();
                assert!(error <= f64::from(x).abs() / f64::from(1 << 17), "{x}: {hi} {lo}");
            }
        }
    }
}
