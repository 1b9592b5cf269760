//! Transform (a): gather token rows of f32, convert, and write panels or token rows (layouts: [`crate::pack`]).

use std::arch::x86_64::*;

use super::part::LANES;
use super::quantize::{block_maxima, quants, scales, starts, store_block};
use super::transpose::{maxima8, maximum, transpose8};
use crate::pack::{PANEL, Q8_PANEL_BLOCK, Q8_ROW_BLOCK, panel_bytes};
use crate::tensor::{DType, QK8_0};

// SAFETY: contract of `Vectors::panel`, on a CPU with the features.
pub unsafe fn panel(dtype: DType, k: usize, tokens: &[*const f32], panel: *mut u8) {
    debug_assert!(tokens.len() <= PANEL && panel.addr().is_multiple_of(64));
    let whole = k / 32 * 32;
    // SAFETY: whole blocks of 32; then a copy of the last elements, with zeros up to 32.
    unsafe {
        columns(dtype, whole, tokens, panel);
        if whole < k {
            let rest: [_; PANEL] =
                std::array::from_fn(|t| tokens.get(t).map_or([0.0; 32], |x| below32(x.add(whole), k - whole)));
            let rest = rest.each_ref().map(|x| x.as_ptr());
            columns(dtype, 32, &rest[..tokens.len()], panel.add(panel_bytes(dtype, whole)));
        }
    }
}

// SAFETY: as `panel`; `k` is a multiple of 32.
unsafe fn columns(dtype: DType, k: usize, tokens: &[*const f32], panel: *mut u8) {
    let (low, high) = tokens.split_at(tokens.len().min(LANES));
    for (half, tokens) in [low, high].into_iter().enumerate() {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        unsafe {
            let panel = panel.add(half * 32);
            match dtype {
                DType::Bf16 => half_panel_bf16(k, tokens, panel),
                DType::Q8_0 => half_panel_int8(k, tokens, panel),
                other => unreachable!("no panels for {other:?}"),
            }
        }
    }
}

// SAFETY: contract of `Vectors::token_row`, on a CPU with the features.
pub unsafe fn token_row(dtype: DType, k: usize, x: *const f32, first: usize, n: usize, row: *mut u8) {
    debug_assert!(row.addr().is_multiple_of(64) && first.is_multiple_of(32) && first + n <= k);
    match dtype {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        DType::Bf16 => unsafe { row_bf16(x, n, row.cast::<f32>().add(first)) },
        // SAFETY: as above.
        DType::Q8_0 => unsafe { row_int8(k, x, first, n, row) },
        other => unreachable!("no token rows for {other:?}"),
    }
}

/// A copy of `n` f32 with zeros up to 32.
// SAFETY: contract: they are readable; `n` is at most 32.
unsafe fn below32(x: *const f32, n: usize) -> [f32; 32] {
    let mut copy = [0f32; 32];
    // SAFETY: the caller's promise. As bytes, which need no alignment.
    unsafe { x.cast::<u8>().copy_to_nonoverlapping(copy.as_mut_ptr().cast(), n * 4) };
    copy
}

/// Rounds to nearest even: BF16 in the upper half of each lane, with no meaning in the lower half. NaN stays NaN.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn round_to_bf16(v: __m256) -> __m256i {
    let bits = _mm256_castps_si256(v);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
    let quiet = _mm256_or_ps(v, _mm256_castsi256_ps(_mm256_set1_epi32(0x0040_0000)));
    let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v);
    _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(up), quiet, nan))
}

/// Eight f32 each of k and of k + 1 as pairs of BF16.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn to_bf16_pairs(k0: __m256, k1: __m256) -> __m256i {
    _mm256_blend_epi16::<0xAA>(_mm256_srli_epi32::<16>(round_to_bf16(k0)), round_to_bf16(k1))
}

/// The pairs that [`bf16_pairs`] has in its lanes.
const PAIRS: [usize; 8] = [0, 1, 4, 5, 2, 3, 6, 7];

/// 16 f32 as 8 pairs of BF16, in the order of [`PAIRS`].
#[inline]
#[target_feature(enable = "avx2")]
// SAFETY: `x` is readable for 16 f32.
unsafe fn bf16_pairs(x: *const f32) -> __m256i {
    // SAFETY: the caller's promise.
    let upper = |x| _mm256_srli_epi32::<16>(round_to_bf16(unsafe { _mm256_loadu_ps(x) }));
    _mm256_packus_epi32(upper(x), upper(x.wrapping_add(8)))
}

#[target_feature(enable = "avx2")]
// SAFETY: as `panel`, for `k` columns (a multiple of 32) of up to 8 tokens and half of each of the panel's vectors.
unsafe fn half_panel_bf16(k: usize, tokens: &[*const f32], panel: *mut u8) {
    for at in (0..k).step_by(16) {
        let m = std::array::from_fn(|i| match tokens.get(i) {
            // SAFETY: the caller's promise.
            Some(x) => unsafe { bf16_pairs(x.add(at)) },
            None => _mm256_setzero_si256(),
        });
        for (pair, v) in PAIRS.into_iter().zip(transpose8(m)) {
            // SAFETY: pairs below k / 2.
            unsafe { _mm256_store_si256(panel.add((at / 2 + pair) * 64).cast(), v) };
        }
    }
}

#[target_feature(enable = "avx2")]
// SAFETY: `x` is readable for `n` f32; `row` is writable for `n` f32 rounded up to 32.
unsafe fn row_bf16(x: *const f32, n: usize, row: *mut f32) {
    let whole = n / 32 * 32;
    // SAFETY: whole blocks of 32; then a copy of the last elements, with zeros up to 32.
    unsafe {
        (0..whole).step_by(32).for_each(|at| bf16x32(x.add(at), row.add(at)));
        if whole < n {
            bf16x32(below32(x.add(whole), n - whole).as_ptr(), row.add(whole));
        }
    }
}

/// 32 f32, rounded to BF16: those with even k, then those with odd k.
#[inline]
#[target_feature(enable = "avx2")]
// SAFETY: `x` is readable and `row` writable for 32 f32; `row` is 32-byte aligned.
unsafe fn bf16x32(x: *const f32, row: *mut f32) {
    let upper = _mm256_set1_epi32(0xFFFF_0000_u32 as i32);
    for half in 0..2 {
        // SAFETY: the caller's promise.
        unsafe {
            let value = |x| _mm256_castsi256_ps(_mm256_and_si256(round_to_bf16(_mm256_loadu_ps(x)), upper));
            let (low, high) = (value(x.add(half * 16)), value(x.add(half * 16 + 8)));
            let put = |to: *mut f32, v| {
                // In order but for the middle two quarters.
                _mm256_store_pd(to.cast(), _mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(v)));
            };
            put(row.add(half * 8), _mm256_shuffle_ps::<0x88>(low, high));
            put(row.add(half * 8 + 16), _mm256_shuffle_ps::<0xDD>(low, high));
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
// SAFETY: as `panel`, for `k` columns (a multiple of 32) of up to 8 tokens and half of each of the panel's vectors.
unsafe fn half_panel_int8(k: usize, tokens: &[*const f32], panel: *mut u8) {
    for at in (0..k).step_by(QK8_0) {
        let maxima = std::array::from_fn(|i| match tokens.get(i) {
            // SAFETY: the caller's promise.
            Some(x) => unsafe { block_maxima(x.add(at)) },
            None => _mm256_setzero_ps(),
        });
        let (inverses, scales) = scales(maxima8(maxima));
        let mut inverse = [0f32; LANES];
        // SAFETY: an array of 8 f32.
        unsafe { _mm256_storeu_ps(inverse.as_mut_ptr(), inverses) };
        let m = std::array::from_fn(|i| match tokens.get(i) {
            // SAFETY: the caller's promise.
            Some(x) => unsafe { quants(x.add(at), _mm256_set1_ps(inverse[i])) },
            None => _mm256_setzero_si256(),
        });
        let [g0, g2, g4, g6, g1, g3, g5, g7] = transpose8(m);
        // SAFETY: block at / 32 of the panel.
        unsafe { store_block(panel.add(at / QK8_0 * Q8_PANEL_BLOCK), [g0, g1, g2, g3, g4, g5, g6, g7], scales) };
    }
}

#[target_feature(enable = "avx2,f16c")]
// SAFETY: as `token_row`; `n` is a multiple of 32.
unsafe fn row_int8(k: usize, x: *const f32, first: usize, n: usize, row: *mut u8) {
    let zero = _mm256_setzero_si256();
    for at in (0..n).step_by(QK8_0) {
        // SAFETY: elements below n; their block of the row.
        unsafe {
            let (inverse, scale) = scales(maximum(block_maxima(x.add(at))));
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let quants = _mm256_permutevar8x32_epi32(quants(x.add(at), inverse), order);
            store_int8x32(row, first + at, quants, scale);
            if first + at + QK8_0 == k && !k.is_multiple_of(64) {
                store_int8x32(row, k, zero, _mm256_setzero_ps());
            }
        }
    }
}

/// Puts a block of 32 quants at element `at` and its scale into an INT8 token row: half of each of the three vectors.
#[inline]
#[target_feature(enable = "avx2")]
// SAFETY: `row` has room for element `at`'s pair of blocks.
unsafe fn store_int8x32(row: *mut u8, at: usize, quants: __m256i, scale: __m256) {
    // SAFETY: the caller's promise.
    unsafe {
        let half = row.add(at / 64 * Q8_ROW_BLOCK + at % 64);
        _mm256_store_si256(half.cast(), quants);
        _mm256_store_si256(half.add(64).cast(), starts([quants]));
        _mm256_store_ps(half.add(128).cast(), scale);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::kernels::Vectors;
    use crate::kernels::reference::Reference;
    use crate::pack::{panel_bytes, token_row_bytes};
    use crate::tensor::DType;
    use crate::testing::{Guarded, Random, avx2, guarded};

    /// Asserts the same bytes of both, in memory that ends at an unreadable page.
    fn same_bytes(bytes: usize, pack: impl Fn(*mut u8), oracle: impl Fn(*mut u8)) -> Result<(), TestCaseError> {
        let [got, want] = [(); 2].map(|()| Guarded::new(&vec![0xA5; bytes]));
        pack(got.ptr());
        oracle(want.ptr());
        for (at, (got, want)) in got.iter().zip(&*want).enumerate() {
            prop_assert_eq!(got, want, "byte {} of {}", at, bytes);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn panels_are_the_oracles(
            q8_0: bool, k in 1usize..300, tokens in 1usize..=16, shift in 0usize..4, seed: u64,
        ) {
            let Some(isa) = avx2() else { return Ok(()) };
            let (dtype, k) = if q8_0 { (DType::Q8_0, k.next_multiple_of(32)) } else { (DType::Bf16, k) };
            let mut random = Random(seed);
            let xs: Vec<_> = (0..tokens).map(|_| guarded(&random.wild(k), shift)).collect();
            let xs: Vec<_> = xs.iter().map(|x| (x.ptr().cast_const().cast::<f32>(), x)).collect();
            let addresses: Vec<_> = xs.iter().map(|x| x.0).collect();
            same_bytes(
                panel_bytes(dtype, k),
                // SAFETY: k values each; the panel has the size its layout asks for.
                |p| unsafe { isa.panel(dtype, k, &addresses, p) },
                // SAFETY: as above.
                |p| unsafe { Reference.panel(dtype, k, &addresses, p) },
            )?;
        }

        /// In one piece, in two, or only the second of them.
        #[test]
        fn token_rows_are_the_oracles(
            q8_0: bool, k in 1usize..300, cut in 0usize..300, both: bool, shift in 0usize..4, seed: u64,
        ) {
            let Some(v) = avx2() else { return Ok(()) };
            let (dtype, k) = if q8_0 { (DType::Q8_0, k.next_multiple_of(32)) } else { (DType::Bf16, k) };
            let cut = cut % k / 32 * 32;
            let x = Random(seed).wild(k);
            let parts = [(0, guarded(&x[..cut], shift)), (cut, guarded(&x[cut..], shift))];
            let parts = parts.iter().map(|(first, x)| (*first, x.len() / 4, x.ptr().cast_const().cast()));
            let parts: Vec<_> = parts.filter(|&(first, n, _)| n > 0 && (both || first == cut)).collect();
            same_bytes(
                token_row_bytes(dtype, k),
                // SAFETY: the values of each part; the row has the size its layout asks for.
                |row| parts.iter().for_each(|&(i, n, x)| unsafe { v.token_row(dtype, k, x, i, n, row) }),
                // SAFETY: as above.
                |row| parts.iter().for_each(|&(i, n, x)| unsafe { Reference.token_row(dtype, k, x, i, n, row) }),
            )?;
        }

        #[test]
        fn lanes_become_the_oracles_panels(q8_0: bool, n in 1usize..150, blocks in 0usize..4, seed: u64) {
            let Some(isa) = avx2() else { return Ok(()) };
            let (dtype, n) = if q8_0 { (DType::Q8_0, n.next_multiple_of(32)) } else { (DType::Bf16, n) };
            let (first, h) = (blocks * 32, guarded(&Random(seed).wild(n * 16), 0));
            same_bytes(
                panel_bytes(dtype, first + n),
                // SAFETY: n vectors that end with a page; the panel has these columns.
                |panel| unsafe { isa.lanes_to_panel(dtype, h.ptr().cast(), n, panel, first) },
                // SAFETY: as above.
                |panel| unsafe { Reference.lanes_to_panel(dtype, h.ptr().cast(), n, panel, first) },
            )?;
        }
    }
}
