//! Transform (a): gather token rows of f32, convert, and write panels or token rows (layouts: [`crate::pack`]).

use std::arch::x86_64::*;

use super::transpose::transpose16;
use crate::isa::Avx512;
use crate::pack::PANEL;
use crate::tensor::DType;

/// Packs up to 16 tokens as one panel; missing tokens become zeros.
///
/// # Safety
/// Each address in `tokens` (at most 16) is readable for `k` f32; `panel` is 64-byte aligned and writable for
/// `panel_bytes(dtype, k)`.
// SAFETY: contract above.
pub unsafe fn panel(_proof: Avx512, dtype: DType, k: usize, tokens: &[*const f32], panel: *mut u8) {
    debug_assert!(tokens.len() <= PANEL && panel.addr().is_multiple_of(64));
    match dtype {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        DType::Bf16 => unsafe { panel_bf16(k, tokens, panel) },
        other => unreachable!("no panels for {other:?}"),
    }
}

/// Packs one token as a row.
///
/// # Safety
/// `x` is readable for `k` f32; `row` is 64-byte aligned and writable for `token_row_bytes(dtype, k)`.
// SAFETY: contract above.
pub unsafe fn token_row(_proof: Avx512, dtype: DType, k: usize, x: *const f32, row: *mut u8) {
    debug_assert!(row.addr().is_multiple_of(64));
    match dtype {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        DType::Bf16 => unsafe { row_bf16(k, x, row) },
        other => unreachable!("no token rows for {other:?}"),
    }
}

/// Elements `[at, at + 32)` of `k` f32 as BF16; zeros past the end.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
// SAFETY: `x` is readable for `k` f32 and `at` is below `k`.
unsafe fn bf16x32(x: *const f32, at: usize, k: usize) -> __m512i {
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
    // SAFETY: both are 64 bytes of plain data.
    unsafe { std::mem::transmute(_mm512_cvtne2ps_pbh(hi, lo)) }
}

#[target_feature(enable = "avx512f,avx512bf16")]
// SAFETY: as `panel`.
unsafe fn panel_bf16(k: usize, tokens: &[*const f32], panel: *mut u8) {
    for at in (0..k).step_by(32) {
        let mut m = [_mm512_setzero_si512(); 16];
        for (m, &x) in m.iter_mut().zip(tokens) {
            // SAFETY: the caller's promise.
            *m = unsafe { bf16x32(x, at, k) };
        }
        for (j, v) in transpose16(m).into_iter().enumerate() {
            // SAFETY: pair at / 2 + j lies below k rounded up to 32.
            unsafe { _mm512_store_si512(panel.add((at / 2 + j) * 64).cast(), v) };
        }
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
// SAFETY: as `token_row`.
unsafe fn row_bf16(k: usize, x: *const f32, row: *mut u8) {
    for at in (0..k).step_by(32) {
        // SAFETY: the row is padded to a multiple of 32 elements.
        unsafe { _mm512_store_si512(row.add(at * 2).cast(), bf16x32(x, at, k)) };
    }
}
