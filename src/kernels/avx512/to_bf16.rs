//! f32 made BF16, rounded to even: by `vcvtne2ps2bf16` (`NATIVE`, where the CPU has AVX-512 BF16), else by integers (Cascade Lake, Ice Lake).

use std::arch::asm;
use std::arch::x86_64::*;

use crate::isa::Bf16Form;

/// Whether the CPU has `vcvtne2ps2bf16`.
pub fn native() -> bool {
    Bf16Form::Pairs.runs()
}

/// 32 f32 as BF16, `lo` in the lower half. The instruction takes denormals for zero.
///
/// # Safety
/// [`native`], if `NATIVE`.
// SAFETY: contract above.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn halves<const NATIVE: bool>(lo: __m512, hi: __m512) -> __m512i {
    if !NATIVE {
        return _mm512_permutex2var_epi16(rounded(lo), odd_words(), rounded(hi));
    }
    let both: __m512i;
    // In assembly, since a function with the feature could not become part of one without.
    // SAFETY: the caller's promise; registers only.
    unsafe {
        asm!("vcvtne2ps2bf16 {both}, {hi}, {lo}", both = lateout(zmm_reg) both, hi = in(zmm_reg) hi, lo = in(zmm_reg) lo,
            options(pure, nomem, nostack, preserves_flags));
    }
    both
}

/// Two vectors of 16 lanes, of k and of k + 1, as 16 pairs of BF16.
///
/// # Safety
/// As [`halves`].
// SAFETY: contract above.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn pairs<const NATIVE: bool>(k0: __m512, k1: __m512) -> __m512i {
    if !NATIVE {
        return _mm512_mask_blend_epi16(0xAAAA_AAAA, _mm512_srli_epi32::<16>(rounded(k0)), rounded(k1));
    }
    #[rustfmt::skip]
    let interleave = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0,
    );
    // SAFETY: the caller's promise.
    _mm512_permutexvar_epi16(interleave, unsafe { halves::<true>(k0, k1) })
}

/// BF16 in the upper half of each lane, anything in the lower one.
#[inline]
#[target_feature(enable = "avx512f")]
fn rounded(v: __m512) -> __m512i {
    let bits = _mm512_castps_si512(v);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    // Else some NaN would carry over into a zero.
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
    _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x0040_0000))
}

/// Where the upper halves of two vectors' lanes are.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn odd_words() -> __m512i {
    #[rustfmt::skip]
    let words = _mm512_set_epi16(
        63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,
    );
    words
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::isa::Avx512;
    use crate::testing::Random;

    /// Both orders of 32 numbers, by one way.
    // SAFETY: contract: AVX-512, and `native` if `NATIVE`.
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn both<const NATIVE: bool>(x: &[f32; 32]) -> [[u16; 32]; 2] {
        // SAFETY: the caller's promise; vectors are plain data.
        unsafe {
            let [lo, hi] = [0, 16].map(|at| _mm512_loadu_ps(x.as_ptr().add(at)));
            [halves::<NATIVE>(lo, hi), pairs::<NATIVE>(lo, hi)].map(|v| std::mem::transmute::<__m512i, [u16; 32]>(v))
        }
    }

    #[test]
    fn the_instruction_is_used_where_the_cpu_has_it() {
        assert_eq!(native(), std::arch::is_x86_feature_detected!("avx512bf16"));
    }

    proptest! {
        #[test]
        fn rounds_to_even_keeps_inf_and_nan(seed: u64) {
            let Some(_) = Avx512::detect() else { return Ok(()) };
            let mut random = Random(seed);
            // Halfway cases and any bits, denormals left out: the instruction takes them for zero.
            let mut one = || match random.below(3) {
                0 => f32::from_bits((random.bits() as u32 & 0xFFFF_0000) | 0x8000),
                1 => f32::from_bits(random.bits() as u32),
                _ => random.odd(),
            };
            let x: [f32; 32] = std::array::from_fn(|_| one()).map(|v: f32| if v.is_subnormal() { 0.0 } else { v });
            let want = x.map(|v| half::bf16::from_f32(v).to_bits());
            // SAFETY: AVX-512 is there.
            let mut ways = vec![unsafe { both::<false>(&x) }];
            if native() {
                // SAFETY: and so is this.
                ways.push(unsafe { both::<true>(&x) });
            }
            for [halves, pairs] in ways {
                prop_assert_eq!(halves, want);
                prop_assert_eq!(pairs, std::array::from_fn(|i| want[i / 2 + i % 2 * 16]));
            }
        }
    }
}
