//! The dot form: a block of a row and of a token, 32 k in eight lanes.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row and token")]

use std::arch::x86_64::*;

use super::form::{Form, Words};
use crate::isa::AvxVnni;
use crate::kernels::avx2::sums::{settle, store_sums};
use crate::kernels::passes::{DotPass, Sweep, dots_by_passes};
use crate::pack::{Q8_ROW_BLOCK, TokenRows};
use crate::tensor::{Q8_0_BYTES, QK8_0, Rows};

pub use vnni::dots as by_vnni;
pub use words::dots as by_words;

mod words {
    use super::*;

    // Three tokens and four rows: 12 sums.
    dots_by_passes!("avx2,fma,f16c", 3, [1 2 3], 1, [1]);

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    // SAFETY: as `product`.
    unsafe fn dot<const R: usize, const T: usize>(pass: DotPass<'_>) {
        // SAFETY: the caller's promise.
        unsafe { product::<_, R, T>(Words, pass) };
    }
}

mod vnni {
    use super::*;

    dots_by_passes!("avx2,fma,f16c,avxvnni", 3, [1 2 3], 1, [1]);

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    // SAFETY: as `product`.
    unsafe fn dot<const R: usize, const T: usize>(pass: DotPass<'_>) {
        // SAFETY: the caller's promise, and the feature is one of this function's.
        unsafe { product::<_, R, T>(AvxVnni::assume(), pass) };
    }
}

/// A group of `R` rows (8, 6, 4 or 1) times `T` token rows.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: as `dots`.
unsafe fn product<F: Form, const R: usize, const T: usize>(form: F, pass: DotPass<'_>) {
    let DotPass { ref rows, group, x, x_stride, ref lines, .. } = pass;
    let mut w: [*const u8; R] = pass.rows();
    let mut acc = [[_mm256_setzero_ps(); T]; R];
    let mut ahead = Sweep::new(rows, group, 2 * Q8_0_BYTES).only(lines.clone());
    for b in 0..rows.k / QK8_0 {
        if b % 2 == 0 {
            ahead.step();
        }
        // SAFETY: block b of the token rows, whose scales are 128 bytes after the quants, and of rows below R.
        unsafe {
            let x = x.add(b / 2 * Q8_ROW_BLOCK + b % 2 * QK8_0);
            for r in 0..R {
                let scale = _mm256_cvtph_ps(_mm_set1_epi16(w[r].cast::<i16>().read_unaligned()));
                let w = form.weights(_mm256_loadu_si256(w[r].add(2).cast()));
                for t in 0..T {
                    let x = x.add(t * x_stride);
                    let sum = _mm256_cvtepi32_ps(form.dot(w, x));
                    let both = _mm256_mul_ps(scale, _mm256_load_ps(x.add(128).cast()));
                    acc[r][t] = _mm256_fmadd_ps(sum, both, acc[r][t]);
                }
                settle!(acc[r]);
            }
        }
        w = w.map(|w| w.wrapping_add(Q8_0_BYTES));
    }
    // SAFETY: the pass is the caller's.
    unsafe { store_sums(&acc, &pass) };
}
