//! f32 values as sums of two BF16 values, in pairs as the tiles want them.

use std::arch::x86_64::*;

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
    /// Not 0 where a value is an infinity or NaN.
    pub special: __mmask16,
}

/// Splits two vectors.
///
/// `hi` is the value rounded to BF16 and `lo` the rest, rounded likewise: exact for 16 significant bits, so for each F16
/// and BF16 value; else the sum is within 2^-17 of the value. An infinity or NaN has itself as `hi` and 0 as `lo`. (A finite
/// value beyond BF16's largest rounds to an infinity with an infinite rest: products with it are not finite.)
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub fn pairs(a: __m512, b: __m512) -> Pairs {
    let ([a, a_lo], a_special) = parts(a);
    let ([b, b_lo], b_special) = parts(b);
    Pairs { hi: join(a, b), lo: join(a_lo, b_lo), special: a_special | b_special }
}

/// The same for values that are BF16 already: `lo` is 0.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub fn exact_pairs(a: __m512, b: __m512) -> Pairs {
    let special = _mm512_fpclass_ps_mask::<SPECIAL>(a) | _mm512_fpclass_ps_mask::<SPECIAL>(b);
    Pairs { hi: join(_mm512_castps_si512(a), _mm512_castps_si512(b)), lo: _mm512_setzero_si512(), special }
}

/// `[hi, lo]` in the upper half of each lane, zeros in the lower; and which lanes are special.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn parts(x: __m512) -> ([__m512i; 2], __mmask16) {
    let (upper, half) = (_mm512_set1_epi32(UPPER), _mm512_set1_epi32(HALF));
    let special = _mm512_fpclass_ps_mask::<SPECIAL>(x);
    let bits = _mm512_castps_si512(x);
    // Rounding must not carry a NaN's payload into its sign.
    let hi = _mm512_and_si512(_mm512_mask_add_epi32(bits, !special, bits, half), upper);
    let lo = _mm512_castps_si512(_mm512_maskz_sub_ps(!special, x, _mm512_castsi512_ps(hi)));
    ([hi, _mm512_and_si512(_mm512_add_epi32(lo, half), upper)], special)
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

    /// `[hi, lo]` of each value of `a` and then of `b`, and whether any is special.
    #[target_feature(enable = "avx512f,avx512dq")]
    fn split(a: &[f32; 16], b: &[f32; 16]) -> ([[f32; 2]; 32], bool) {
        // SAFETY: arrays of 16 f32; the loads are unaligned ones.
        let both = unsafe { pairs(_mm512_loadu_ps(a.as_ptr()), _mm512_loadu_ps(b.as_ptr())) };
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
        (std::array::from_fn(|i| [value(0, i), value(1, i)]), both.special != 0)
    }

    #[test]
    fn every_f16_is_the_sum_of_its_parts() {
        if Avx512::detect().is_none() {
            return println!("skipped: no AVX-512");
        }
        for first in (0..=u16::MAX).step_by(32) {
            let x: [f32; 32] = std::array::from_fn(|i| f16::from_bits(first + i as u16).to_f32());
            // SAFETY: the features were detected.
            let (parts, special) = unsafe { split(x[..16].try_into().unwrap(), x[16..].try_into().unwrap()) };
            for (x, [hi, lo]) in x.into_iter().zip(parts) {
                if x.is_finite() {
                    assert!(hi + lo == x && hi.to_bits() & 0xffff == 0, "{x}: {hi} {lo}");
                } else {
                    assert!(hi == x || hi.is_nan() && x.is_nan(), "{x}: {hi}");
                    assert_eq!(lo, 0.0);
                }
            }
            assert_eq!(special, x.iter().any(|x| !x.is_finite()));
        }
    }

    #[test]
    fn other_values_keep_17_bits() {
        if Avx512::detect().is_none() {
            return println!("skipped: no AVX-512");
        }
        let mut random = Random(5);
        for _ in 0..2000 {
            let mut value = || random.f32() * 2f32.powi(random.below(200) as i32 - 100);
            let (a, b): ([f32; 16], [f32; 16]) = (std::array::from_fn(|_| value()), std::array::from_fn(|_| value()));
            // SAFETY: the features were detected.
            let (parts, special) = unsafe { split(&a, &b) };
            assert!(!special);
            for (x, [hi, lo]) in a.into_iter().chain(b).zip(parts) {
                let error = (f64::from(hi) + f64::from(lo) - f64::from(x)).abs();
                assert!(error <= f64::from(x).abs() / f64::from(1 << 17), "{x}: {hi} {lo}");
            }
        }
    }
}
