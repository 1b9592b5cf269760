//! What becomes of C blocks: transform (b), the next product's tokens, and transform (c), rows of the result.

use std::arch::x86_64::*;

use super::pack::quantize_lanes;
use super::to_bf16::{native, pairs};
use super::transpose::transpose16;
use crate::kernels::vectors::Finish;
use crate::pack::{PANEL, Q8_PANEL_BLOCK};
use crate::tensor::{DType, QK8_0};

#[target_feature(enable = "avx512f,fma")]
// SAFETY: contract of `Vectors::finish_lanes`, on a CPU with the features.
pub unsafe fn finish_lanes(finish: Finish, c: *const f32, n: usize, rows: &[*mut f32], weights: &[f32; PANEL]) {
    for i in (0..n).step_by(PANEL) {
        let left = (n - i).min(PANEL);
        // SAFETY: vectors i .. i + left of c.
        let load = |j: usize| unsafe { _mm512_load_si512(c.add((i + j) * PANEL).cast()) };
        let m = std::array::from_fn(|j| if j < left { load(j) } else { _mm512_setzero_si512() });
        for ((&row, &weight), v) in rows.iter().zip(weights).zip(transpose16(m)) {
            // SAFETY: elements i .. i + left of the row.
            unsafe { vector(finish, row, i, left, _mm512_castsi512_ps(v), weight) };
        }
    }
}

#[target_feature(enable = "avx512f,fma")]
// SAFETY: contract of `Vectors::finish_row`, on a CPU with the features.
pub unsafe fn finish_row(finish: Finish, c: *const f32, n: usize, row: *mut f32, weight: f32) {
    for i in (0..n).step_by(PANEL) {
        let left = (n - i).min(PANEL);
        // SAFETY: elements i .. i + left.
        unsafe { vector(finish, row, i, left, _mm512_maskz_loadu_ps(below(left), c.add(i)), weight) };
    }
}

#[inline]
#[target_feature(enable = "avx512f,fma")]
// SAFETY: elements i .. i + left of the row and of the bias are there.
unsafe fn vector(finish: Finish, row: *mut f32, i: usize, left: usize, v: __m512, weight: f32) {
    let (mask, weight) = (below(left), _mm512_set1_ps(weight));
    // SAFETY: the caller's promise.
    unsafe {
        let to = row.add(i);
        let v =
            if finish.bias.is_null() { v } else { _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, finish.bias.add(i))) };
        let v = match finish.add {
            true => _mm512_fmadd_ps(v, weight, _mm512_maskz_loadu_ps(mask, to)),
            false => _mm512_mul_ps(v, weight),
        };
        _mm512_mask_storeu_ps(to, mask, v);
    }
}

/// The lowest `n` of 16 lanes.
#[inline]
fn below(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

// SAFETY: contract of `Vectors::lanes_to_panel`, on a CPU with the features.
pub unsafe fn lanes_to_panel(dtype: DType, h: *const f32, n: usize, panel: *mut u8, first: usize) {
    debug_assert!(first.is_multiple_of(32));
    match dtype {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        DType::Bf16 => unsafe {
            let panel = panel.add(first * 2 * PANEL);
            if native() { lanes_to_bf16::<true>(h, n, panel) } else { lanes_to_bf16::<false>(h, n, panel) }
        },
        // SAFETY: as above.
        DType::Q8_0 => unsafe { lanes_to_int8(h, n, panel.add(first / QK8_0 * Q8_PANEL_BLOCK)) },
        other => unreachable!("no panels for {other:?}"),
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
// SAFETY: as `lanes_to_panel`; `panel` is that of the first column; `native` if `NATIVE`.
unsafe fn lanes_to_bf16<const NATIVE: bool>(h: *const f32, n: usize, panel: *mut u8) {
    // SAFETY: vectors below n.
    let vector = |i: usize| unsafe { if i < n { _mm512_load_ps(h.add(i * PANEL)) } else { _mm512_setzero_ps() } };
    for pair in 0..n.next_multiple_of(32) / 2 {
        // SAFETY: the caller's promise; below n rounded up to 32.
        unsafe {
            let v = pairs::<NATIVE>(vector(2 * pair), vector(2 * pair + 1));
            _mm512_store_si512(panel.add(pair * 64).cast(), v);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
// SAFETY: as `lanes_to_panel`; `panel` is that of the first column, `n` a multiple of 32.
unsafe fn lanes_to_int8(h: *const f32, n: usize, panel: *mut u8) {
    for b in 0..n / QK8_0 {
        // SAFETY: block b of h and of the panel.
        unsafe { quantize_lanes(h.add(b * QK8_0 * PANEL), panel.add(b * Q8_PANEL_BLOCK)) };
    }
}
