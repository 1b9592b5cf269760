//! The dot form: blocks of a row and of some tokens, in the lanes of both.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, panel and token")]

use std::arch::x86_64::*;

use crate::kernels::avx512::transpose::store_sums;
use crate::kernels::passes::{DotPass, Sweep, dots_by_passes};
use crate::pack::{Q8_ROW_BLOCK, TokenRows};
use crate::tensor::{Q8_0_BYTES, QK8_0, Rows};

dots_by_passes!("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c", 5, [1 2 3 4 5], 2, [1 2]);

/// Two neighbouring blocks of a row: their quants as `w + 128`, and their scales, eight lanes each. With `both` unset the
/// second is not there: scale 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
// SAFETY: one or two blocks are readable at `block`.
unsafe fn two_blocks(block: *const u8, both: bool) -> (__m512i, __m512) {
    // SAFETY: the caller's promise.
    unsafe {
        let quants = |b: usize| _mm256_loadu_si256(block.add(b * Q8_0_BYTES + 2).cast());
        let half = |b: usize| u32::from(block.add(b * Q8_0_BYTES).cast::<u16>().read_unaligned());
        let (w, halves) = if both {
            (_mm512_inserti64x4::<1>(_mm512_castsi256_si512(quants(0)), quants(1)), half(0) | half(1) << 16)
        } else {
            (_mm512_zextsi256_si512(quants(0)), half(0))
        };
        let scales = _mm512_castps128_ps512(_mm_cvtph_ps(_mm_cvtsi32_si128(halves as i32)));
        let each = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        (_mm512_xor_si512(w, _mm512_set1_epi8(-128)), _mm512_permutexvar_ps(each, scales))
    }
}

/// A group of `R` rows (8, 6, 4 or 1) times `T` token rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c")]
// SAFETY: as `dots`.
unsafe fn dot<const R: usize, const T: usize>(pass: DotPass<'_>) {
    let DotPass { ref rows, group, x, x_stride, ref lines, .. } = pass;
    let w: [*const u8; R] = pass.rows();
    let mut acc = [[_mm512_setzero_ps(); T]; R];
    let mut ahead = Sweep::new(rows, group, 2 * Q8_0_BYTES);
    let blocks = rows.k / QK8_0;
    for b in 0..blocks.div_ceil(2) {
        lines.clone().for_each(|line| ahead.line(line));
        ahead.advance();
        let both = 2 * b + 1 < blocks;
        // SAFETY: blocks below the row's end; token rows have whole pairs of blocks.
        unsafe {
            let w: [(__m512i, __m512); R] = std::array::from_fn(|r| two_blocks(w[r].add(b * 2 * Q8_0_BYTES), both));
            for t in 0..T {
                let x = x.add(t * x_stride + b * Q8_ROW_BLOCK);
                let quants = _mm512_load_si512(x.cast());
                let start = _mm512_load_si512(x.add(64).cast());
                let scale = _mm512_load_ps(x.add(128).cast());
                for r in 0..R {
                    let sum = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, w[r].0, quants));
                    acc[r][t] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, w[r].1), acc[r][t]);
                }
            }
        }
    }
    // SAFETY: the pass is the caller's.
    unsafe { store_sums(&acc, &pass) };
}
