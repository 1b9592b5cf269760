//! How integers are multiplied, by what the CPU has.

use std::arch::asm;
use std::arch::x86_64::*;

use crate::isa::AvxVnni;

/// A way to multiply weights and quants of the same block.
///
/// Its functions are unsafe for the one reason that they want a CPU with AVX2.
pub trait Form: Copy {
    /// 32 weights for the panel form: some vectors, from whose 32-bit lanes they are broadcast.
    type Ready: Copy;
    /// 32 weights for the dot form.
    type Weights: Copy;
    /// Vectors of [`Form::Ready`].
    const PARTS: usize;

    /// Makes 32 weights ready for the panel form.
    // SAFETY: contract: AVX2 is there, and `to` is 32-byte aligned and writable.
    unsafe fn prepare(self, w: __m256i, to: *mut Self::Ready);

    /// What the sums of 8 tokens begin with, of which the panel has `starts`.
    // SAFETY: contract: AVX2 is there, and a vector is readable at `starts`, which is 32-byte aligned.
    unsafe fn start(self, starts: *const u8) -> __m256i;

    /// Four k of each of 8 tokens as part `part` of the weights wants them.
    // SAFETY: contract: AVX2 is there.
    unsafe fn quants(self, part: usize, x: __m256i) -> __m256i;

    /// Adds products of weights (a lane of a part, broadcast) and quants of such a part to 8 tokens' sums.
    // SAFETY: contract: AVX2 is there.
    unsafe fn multiply(self, sum: __m256i, w: __m256i, x: __m256i) -> __m256i;

    /// 32 weights as [`Form::dot`] wants them.
    // SAFETY: contract: AVX2 is there.
    unsafe fn weights(self, w: __m256i) -> Self::Weights;

    /// Eight sums, of four products each, of 32 weights and a token's quants.
    // SAFETY: contract: AVX2 is there, and half a block of a token row is readable at `x` (see `Q8_ROW_BLOCK`).
    unsafe fn dot(self, w: Self::Weights, x: *const u8) -> __m256i;
}

/// By 16-bit words, on each CPU with AVX2.
///
/// Panels: `vpmaddwd` on weights and quants as 16-bit values. Of a vector of bytes two shifts give those with even k,
/// one those with odd k, so of four k a 32-bit lane holds (k0, k2) or (k1, k3); both operands take them in that order.
///
/// Dots: `vpmaddubsw` of |w| and of the quants with w's sign. A pair's sum is at most 2 * 128 * 127: 16 bits hold it.
#[derive(Clone, Copy, Debug)]
pub struct Words;

impl Form for Words {
    type Ready = [[i32; 8]; 2];
    /// |w| and w.
    type Weights = [__m256i; 2];
    const PARTS: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: contract of the trait.
    unsafe fn prepare(self, w: __m256i, to: *mut Self::Ready) {
        // SAFETY: the caller's promise.
        unsafe { (0..2).for_each(|part| _mm256_store_si256(to.cast::<__m256i>().add(part), self.quants(part, w))) };
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: contract of the trait.
    unsafe fn start(self, _: *const u8) -> __m256i {
        _mm256_setzero_si256()
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: contract of the trait.
    unsafe fn quants(self, part: usize, x: __m256i) -> __m256i {
        // Of k0 to k3 in each 32-bit lane, k0 and k2, or k1 and k3.
        _mm256_srai_epi16::<8>(if part == 0 { _mm256_slli_epi16::<8>(x) } else { x })
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: contract of the trait.
    unsafe fn multiply(self, sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        _mm256_add_epi32(sum, _mm256_madd_epi16(w, x))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: contract of the trait.
    unsafe fn weights(self, w: __m256i) -> Self::Weights {
        [_mm256_abs_epi8(w), w]
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: contract of the trait.
    unsafe fn dot(self, [magnitudes, w]: Self::Weights, x: *const u8) -> __m256i {
        // SAFETY: the caller's promise.
        let quants = _mm256_sign_epi8(unsafe { _mm256_load_si256(x.cast()) }, w);
        _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, quants), _mm256_set1_epi16(1))
    }
}

/// By `vpdpbusd`, which wants unsigned weights: `w + 128`, so sums start at -128 times the quants' sum.
impl Form for AvxVnni {
    type Ready = [[i32; 8]; 1];
    type Weights = __m256i;
    const PARTS: usize = 1;

    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: contract of the trait.
    unsafe fn prepare(self, w: __m256i, to: *mut Self::Ready) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_store_si256(to.cast(), self.weights(w)) };
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: contract of the trait.
    unsafe fn start(self, starts: *const u8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_load_si256(starts.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: contract of the trait.
    unsafe fn quants(self, _: usize, x: __m256i) -> __m256i {
        x
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: contract of the trait.
    unsafe fn multiply(self, mut sum: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // Not the compiler's own name for it: a function with that feature is not inlined into those that serve both forms.
        // SAFETY: the token proves that the instruction runs; it has registers alone.
        unsafe {
            asm!("{{vex}} vpdpbusd {0}, {1}, {2}", inout(ymm_reg) sum, in(ymm_reg) w, in(ymm_reg) x,
                options(pure, nomem, nostack, preserves_flags));
        }
        sum
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: contract of the trait.
    unsafe fn weights(self, w: __m256i) -> Self::Weights {
        _mm256_xor_si256(w, _mm256_set1_epi8(-128))
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: contract of the trait.
    unsafe fn dot(self, w: Self::Weights, x: *const u8) -> __m256i {
        // SAFETY: the caller's promise: the starts are 64 bytes behind the quants.
        unsafe {
            let (quants, start) = (_mm256_load_si256(x.cast()), _mm256_load_si256(x.add(64).cast()));
            self.multiply(start, w, quants)
        }
    }
}
