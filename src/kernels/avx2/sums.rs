//! Sums in registers: kept there, and added up.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row and token")]

use std::arch::x86_64::*;

use crate::kernels::passes::DotPass;

/// No instruction, but a place where all these sums (arrays of vectors) are in registers, and before which no later
/// load is moved. With 12 sums the compiler has four registers left: without such places it mixes the steps of a loop
/// until sums go to memory.
macro_rules! settle {
    ($sums:expr) => {
        // In an unsafe block of the caller's; it is safe, as there is no instruction.
        for sum in &mut $sums {
            std::arch::asm!("/* {0} */", inout(ymm_reg) * sum, options(nostack, preserves_flags));
        }
    };
}
pub(super) use settle;

/// The sums of four vectors' lanes. Each sum's order of additions does not depend on the other vectors.
#[inline]
#[target_feature(enable = "avx2")]
pub fn sums4(v: [__m256; 4]) -> __m128 {
    let abcd = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps::<1>(abcd))
}

/// Writes the sums of a pass of `T` tokens and `R` rows (8, 6, 4 or 1).
#[inline]
#[target_feature(enable = "avx2")]
// SAFETY: contract: of `DotPass::store`.
pub unsafe fn store_sums<const R: usize, const T: usize>(acc: &[[__m256; T]; R], pass: &DotPass<'_>) {
    for t in 0..T {
        for first in (0..R).step_by(4) {
            let row = |r: usize| if first + r < R { acc[first + r][t] } else { _mm256_setzero_ps() };
            // SAFETY: a token of the pass, rows of its group.
            unsafe { pass.store(t, first, sums4(std::array::from_fn(row))) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Avx2;

    #[target_feature(enable = "avx2")]
    fn check() {
        let cell = |i: usize, j: usize| (i * 8 + j) as f32;
        let v = std::array::from_fn(|i| {
            let row: [f32; 8] = std::array::from_fn(|j| cell(i, j));
            // SAFETY: 32 readable bytes.
            unsafe { _mm256_loadu_ps(row.as_ptr()) }
        });
        let mut got = [0f32; 4];
        // SAFETY: 16 writable bytes.
        unsafe { _mm_storeu_ps(got.as_mut_ptr(), sums4(v)) };
        assert_eq!(got, std::array::from_fn(|i| (0..8).map(|j| cell(i, j)).sum::<f32>()));
    }

    #[test]
    fn sums_are_those_of_the_definition() {
        if Avx2::detect().is_none() {
            println!("skipped: this CPU has no AVX2");
            return;
        }
        // SAFETY: the features were detected just now.
        unsafe { check() }
    }
}
