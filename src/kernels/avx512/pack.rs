//! Transform (a): gather token rows of f32, convert, and write panels or token rows (layouts: [`crate::pack`]).

use std::arch::x86_64::*;

use super::to_bf16::{halves, native};
use super::transpose::transpose16;
use crate::isa::Bf16Form;
use crate::pack::{PANEL, Q8_PANEL_BLOCK, Q8_ROW_BLOCK};
use crate::tensor::{DType, QK8_0};

// SAFETY: contract of `Vectors::panel`, on a CPU with the features.
pub unsafe fn panel(dtype: DType, k: usize, tokens: &[*const f32], panel: *mut u8) {
    debug_assert!(tokens.len() <= PANEL && panel.addr().is_multiple_of(64));
    match dtype {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        DType::Bf16 => unsafe {
            if native() { panel_bf16::<true>(k, tokens, panel) } else { panel_bf16::<false>(k, tokens, panel) }
        },
        // SAFETY: as above.
        DType::Q8_0 => unsafe { panel_int8(k, tokens, panel) },
        other => unreachable!("no panels for {other:?}"),
    }
}

// SAFETY: contract of `Vectors::token_row`, on a CPU with the features.
pub unsafe fn token_row(dtype: DType, k: usize, x: *const f32, first: usize, n: usize, row: *mut u8) {
    debug_assert!(row.addr().is_multiple_of(64) && first.is_multiple_of(32) && first + n <= k);
    match dtype {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        DType::Bf16 => unsafe { row_bf16(Bf16Form::best(), x, first, n, row) },
        // SAFETY: as above.
        DType::Q8_0 => unsafe { row_int8(k, x, first, n, row) },
        other => unreachable!("no token rows for {other:?}"),
    }
}

/// Elements `[at, at + 32)` of `k` f32 as BF16; zeros past the end.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
// SAFETY: `x` is readable for `k` f32 and `at` is below `k`; `native` if `NATIVE`.
unsafe fn bf16x32<const NATIVE: bool>(x: *const f32, at: usize, k: usize) -> __m512i {
    let left = k - at;
    // SAFETY: whole loads where 32 elements are left, else masked ones.
    let (lo, hi) = unsafe {
        let x = x.add(at);
        if left >= 32 {
            (_mm512_loadu_ps(x), _mm512_loadu_ps(x.add(16)))
        } else {
            let mask = (1u32 << left) - 1;
            (_mm512_maskz_loadu_ps(mask as u16, x), _mm512_maskz_loadu_ps((mask >> 16) as u16, x.wrapping_add(16)))
        }
    };
    // SAFETY: the caller's promise.
    unsafe { halves::<NATIVE>(lo, hi) }
}

#[target_feature(enable = "avx512f,avx512bw")]
// SAFETY: as `panel`; `native` if `NATIVE`.
unsafe fn panel_bf16<const NATIVE: bool>(k: usize, tokens: &[*const f32], panel: *mut u8) {
    for at in (0..k).step_by(32) {
        let mut m = [_mm512_setzero_si512(); 16];
        for (m, &x) in m.iter_mut().zip(tokens) {
            // SAFETY: the caller's promise.
            *m = unsafe { bf16x32::<NATIVE>(x, at, k) };
        }
        for (j, v) in transpose16(m).into_iter().enumerate() {
            // SAFETY: pair at / 2 + j lies below k rounded up to 32.
            unsafe { _mm512_store_si512(panel.add((at / 2 + j) * 64).cast(), v) };
        }
    }
}

// SAFETY: as `token_row`.
pub(super) unsafe fn row_bf16(form: Bf16Form, x: *const f32, first: usize, n: usize, row: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe { if native() { row_by::<true>(form, x, first, n, row) } else { row_by::<false>(form, x, first, n, row) } }
}

#[target_feature(enable = "avx512f,avx512bw")]
// SAFETY: as `token_row`; `native` if `NATIVE`.
unsafe fn row_by<const NATIVE: bool>(form: Bf16Form, x: *const f32, first: usize, n: usize, row: *mut u8) {
    for at in (0..n).step_by(32) {
        // SAFETY: the row has room for k rounded up to 32.
        unsafe { store_bf16x32(form, row, first + at, bf16x32::<NATIVE>(x, at, n)) };
    }
}

/// Puts elements `[at, at + 32)` into a BF16 token row.
#[inline]
#[target_feature(enable = "avx512f")]
// SAFETY: `row` has room for them.
unsafe fn store_bf16x32(form: Bf16Form, row: *mut u8, at: usize, v: __m512i) {
    // SAFETY: the caller's promise.
    unsafe {
        match form {
            Bf16Form::Pairs => _mm512_store_si512(row.add(at * 2).cast(), v),
            Bf16Form::Fma => {
                let odd = _mm512_and_si512(v, _mm512_set1_epi32(0xFFFF_0000_u32 as i32));
                _mm512_store_si512(row.add(at * 4).cast(), _mm512_slli_epi32::<16>(v));
                _mm512_store_si512(row.add(at * 4 + 64).cast(), odd);
            }
        }
    }
}

/// The quants of 32 f32 (32 bytes) and their scale, rounded to f16, as ggml's `quantize_row_q8_0` has them on x86.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
fn quantize(lo: __m512, hi: __m512) -> (__m256i, f32) {
    let max = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(lo), _mm512_abs_ps(hi)));
    let inverse = _mm512_set1_ps(if max == 0.0 { 0.0 } else { 127.0 / max });
    let quants = |v| _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(v, inverse)));
    (_mm256_set_m128i(quants(hi), quants(lo)), to_f16_and_back(max / 127.0))
}

#[inline]
#[target_feature(enable = "avx512f,f16c")]
fn to_f16_and_back(v: f32) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(v))))
}

/// Minus 128 times the sum of each four quants, added to `start`.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn minus_128_sums(start: __m512i, quants: __m512i) -> __m512i {
    let sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(-128), quants);
    _mm512_sub_epi32(start, sums)
}

/// The quants and scales of one or two blocks of a token, at element `at` of `k`; zeros past its end.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
// SAFETY: `x` is readable for `k` f32, a multiple of 32 above `at`.
unsafe fn two_blocks(x: *const f32, at: usize, k: usize) -> (__m512i, [f32; 2]) {
    // SAFETY: below k.
    let block = |at: usize| unsafe { quantize(_mm512_loadu_ps(x.add(at)), _mm512_loadu_ps(x.add(at + 16))) };
    let (first, s0) = block(at);
    if at + QK8_0 >= k {
        return (_mm512_zextsi256_si512(first), [s0, 0.0]);
    }
    let (second, s1) = block(at + QK8_0);
    (_mm512_inserti64x4::<1>(_mm512_castsi256_si512(first), second), [s0, s1])
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
// SAFETY: as `panel`.
unsafe fn panel_int8(k: usize, tokens: &[*const f32], panel: *mut u8) {
    for at in (0..k).step_by(2 * QK8_0) {
        let mut quants = [_mm512_setzero_si512(); 16];
        let mut scales = [[0f32; PANEL]; 2];
        for (t, &x) in tokens.iter().enumerate() {
            // SAFETY: the caller's promise.
            let (q, s) = unsafe { two_blocks(x, at, k) };
            (quants[t], scales[0][t], scales[1][t]) = (q, s[0], s[1]);
        }
        let fours = transpose16(quants);
        for (b, scales) in scales.iter().enumerate().take((k - at) / QK8_0) {
            // SAFETY: block at / 32 + b of the panel.
            unsafe {
                let block = panel.add((at / QK8_0 + b) * Q8_PANEL_BLOCK);
                let mut start = _mm512_setzero_si512();
                for g in 0..8 {
                    start = minus_128_sums(start, fours[b * 8 + g]);
                    _mm512_store_si512(block.add(g * 64).cast(), fours[b * 8 + g]);
                }
                _mm512_store_ps(block.add(8 * 64).cast(), _mm512_loadu_ps(scales.as_ptr()));
                _mm512_store_si512(block.add(9 * 64).cast(), start);
            }
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
// SAFETY: as `token_row`; `n` is a multiple of 32.
unsafe fn row_int8(k: usize, x: *const f32, first: usize, n: usize, row: *mut u8) {
    for at in (0..n).step_by(QK8_0) {
        // SAFETY: elements below n; their block of the row.
        unsafe {
            let (quants, scale) = quantize(_mm512_loadu_ps(x.add(at)), _mm512_loadu_ps(x.add(at + 16)));
            store_int8x32(row, first + at, quants, scale);
            if first + at + QK8_0 == k && !k.is_multiple_of(64) {
                store_int8x32(row, k, _mm256_setzero_si256(), 0.0);
            }
        }
    }
}

/// Puts a block of 32 quants at element `at` and its scale into an INT8 token row: half of each of the three vectors.
#[inline]
#[target_feature(enable = "avx512f,avx512vl,avx512vnni")]
// SAFETY: `row` has room for element `at`'s pair of blocks.
unsafe fn store_int8x32(row: *mut u8, at: usize, quants: __m256i, scale: f32) {
    let sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(-128), quants);
    // SAFETY: the caller's promise.
    unsafe {
        let half = row.add(at / 64 * Q8_ROW_BLOCK + at % 64);
        _mm256_store_si256(half.cast(), quants);
        _mm256_store_si256(half.add(64).cast(), _mm256_sub_epi32(_mm256_setzero_si256(), sums));
        _mm256_store_ps(half.add(128).cast(), _mm256_set1_ps(scale));
    }
}

/// 32 vectors of 16 lanes, one of each k, as a block of an INT8 panel: each lane with its own scale.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
// SAFETY: `h` is readable for 32 vectors, `block` writable for Q8_PANEL_BLOCK; both are 64-byte aligned.
pub(super) unsafe fn quantize_lanes(h: *const f32, block: *mut u8) {
    // SAFETY: vector i of 32.
    let vector = |i: usize| unsafe { _mm512_load_ps(h.add(i * PANEL)) };
    let max = (0..QK8_0).fold(_mm512_setzero_ps(), |max, i| _mm512_max_ps(max, _mm512_abs_ps(vector(i))));
    let some = _mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(max, _mm512_setzero_ps());
    let inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(127.0), max);
    let scale = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm512_div_ps(max, _mm512_set1_ps(127.0)));
    let mut start = _mm512_setzero_si512();
    for g in 0..8 {
        let byte = |j: i32| {
            let quants = _mm512_cvtps_epi32(_mm512_mul_ps(vector(g * 4 + j as usize), inverse));
            _mm512_and_si512(quants, _mm512_set1_epi32(0xFF))
        };
        let low = _mm512_or_si512(byte(0), _mm512_slli_epi32::<8>(byte(1)));
        let high = _mm512_or_si512(byte(2), _mm512_slli_epi32::<8>(byte(3)));
        let four = _mm512_or_si512(low, _mm512_slli_epi32::<16>(high));
        start = minus_128_sums(start, four);
        // SAFETY: group g of the block.
        unsafe { _mm512_store_si512(block.add(g * 64).cast(), four) };
    }
    // SAFETY: the last two vectors of the block.
    unsafe {
        _mm512_store_ps(block.add(8 * 64).cast(), _mm512_cvtph_ps(scale));
        _mm512_store_si512(block.add(9 * 64).cast(), start);
    }
}
