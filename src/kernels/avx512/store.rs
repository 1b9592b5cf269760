//! What becomes of C blocks: transform (b), the next product's tokens, and transform (c), rows of the result.

use std::arch::x86_64::*;

use super::pack::{quantize_lanes, to_bf16_pairs};
use super::transpose::transpose16;
use crate::isa::Avx512;
use crate::pack::{PANEL, Q8_PANEL_BLOCK};
use crate::tensor::{DType, QK8_0};

/// How rows of a C block end in the result: `to[i] (+)= weight * (c[i] + bias[i])`.
#[derive(Clone, Copy, Debug)]
pub struct Finish {
    /// One value for each weight row of the block, or null.
    pub bias: *const f32,
    /// Whether to add to what is there.
    pub add: bool,
}

impl Finish {
    /// Writes the lanes of `n` vectors as rows: lane `t` of vector `i` goes to `rows[t] + i`, with weight `weights[t]`.
    ///
    /// # Safety
    /// `c` is 64-byte aligned and readable for `n * 16` f32; each of `rows` (at most 16) is writable for `n` f32; the bias is
    /// readable for `n` f32 or null.
    // SAFETY: contract above.
    pub unsafe fn lanes(self, _proof: Avx512, c: *const f32, n: usize, rows: &[*mut f32], weights: &[f32; PANEL]) {
        debug_assert!(rows.len() <= PANEL);
        // SAFETY: the token proves the features; the rest is the caller's promise.
        unsafe { self.lanes_on(c, n, rows, weights) }
    }

    #[target_feature(enable = "avx512f,fma")]
    // SAFETY: as `lanes`.
    unsafe fn lanes_on(self, c: *const f32, n: usize, rows: &[*mut f32], weights: &[f32; PANEL]) {
        for i in (0..n).step_by(PANEL) {
            let left = (n - i).min(PANEL);
            // SAFETY: vectors i .. i + left of c.
            let vector = |j: usize| unsafe { _mm512_load_si512(c.add((i + j) * PANEL).cast()) };
            let m = std::array::from_fn(|j| if j < left { vector(j) } else { _mm512_setzero_si512() });
            for ((&row, &weight), v) in rows.iter().zip(weights).zip(transpose16(m)) {
                // SAFETY: elements i .. i + left of the row.
                unsafe { self.vector(row, i, left, _mm512_castsi512_ps(v), weight) };
            }
        }
    }

    /// The same for one token's row of `n` values.
    ///
    /// # Safety
    /// `c` is readable and `row` writable for `n` f32; the bias is readable for `n` f32 or null.
    // SAFETY: contract above.
    pub unsafe fn row(self, _proof: Avx512, c: *const f32, n: usize, row: *mut f32, weight: f32) {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        unsafe { self.row_on(c, n, row, weight) }
    }

    #[target_feature(enable = "avx512f,fma")]
    // SAFETY: as `row`.
    unsafe fn row_on(self, c: *const f32, n: usize, row: *mut f32, weight: f32) {
        for i in (0..n).step_by(PANEL) {
            let left = (n - i).min(PANEL);
            // SAFETY: elements i .. i + left.
            unsafe { self.vector(row, i, left, _mm512_maskz_loadu_ps(below(left), c.add(i)), weight) };
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,fma")]
    // SAFETY: elements i .. i + left of the row and of the bias are there.
    unsafe fn vector(self, row: *mut f32, i: usize, left: usize, v: __m512, weight: f32) {
        let (mask, weight) = (below(left), _mm512_set1_ps(weight));
        // SAFETY: the caller's promise.
        unsafe {
            let to = row.add(i);
            let v =
                if self.bias.is_null() { v } else { _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, self.bias.add(i))) };
            let v = match self.add {
                true => _mm512_fmadd_ps(v, weight, _mm512_maskz_loadu_ps(mask, to)),
                false => _mm512_mul_ps(v, weight),
            };
            _mm512_mask_storeu_ps(to, mask, v);
        }
    }
}

/// The lowest `n` of 16 lanes.
#[inline]
fn below(n: usize) -> __mmask16 {
    ((1u32 << n) - 1) as __mmask16
}

/// Transform (b): `n` vectors of 16 lanes become columns `[first, first + n)` of a panel; `first` is a multiple of 32. Where
/// `n` is not one (at the end of k), zeros follow up to it.
///
/// # Safety
/// `h` is 64-byte aligned and readable for `n * 16` f32; `panel` is 64-byte aligned and writable for `first + n` columns
/// rounded up to 32.
// SAFETY: contract above.
pub unsafe fn lanes_to_panel(_proof: Avx512, dtype: DType, h: *const f32, n: usize, panel: *mut u8, first: usize) {
    debug_assert!(first.is_multiple_of(32));
    match dtype {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        DType::Bf16 => unsafe { lanes_to_bf16(h, n, panel.add(first * 2 * PANEL)) },
        // SAFETY: as above.
        DType::Q8_0 => unsafe { lanes_to_int8(h, n, panel.add(first / QK8_0 * Q8_PANEL_BLOCK)) },
        other => unreachable!("no panels for {other:?}"),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
// SAFETY: as `lanes_to_panel`; `panel` is that of the first column.
unsafe fn lanes_to_bf16(h: *const f32, n: usize, panel: *mut u8) {
    // SAFETY: vectors below n.
    let vector = |i: usize| unsafe { if i < n { _mm512_load_ps(h.add(i * PANEL)) } else { _mm512_setzero_ps() } };
    for pair in 0..n.next_multiple_of(32) / 2 {
        let v = to_bf16_pairs(vector(2 * pair), vector(2 * pair + 1));
        // SAFETY: below n rounded up to 32.
        unsafe { _mm512_store_si512(panel.add(pair * 64).cast(), v) };
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
