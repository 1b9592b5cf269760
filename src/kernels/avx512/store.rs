//! Transform (c): C blocks, which have tokens in the lanes, become rows.

use std::arch::x86_64::*;

use super::transpose::transpose16;
use crate::isa::Avx512;
use crate::pack::PANEL;

/// Writes the lanes of `n` vectors as rows: lane `t` of vector `i` goes to `rows[t] + i`.
///
/// # Safety
/// `c` is 64-byte aligned and readable for `n * 16` f32; each of `rows` (at most 16) is writable for `n` f32.
// SAFETY: contract above.
pub unsafe fn lanes_to_rows(_proof: Avx512, c: *const f32, n: usize, rows: &[*mut f32]) {
    debug_assert!(rows.len() <= PANEL);
    // SAFETY: the token proves the features; the rest is the caller's promise.
    unsafe { transposed(c, n, rows) }
}

#[target_feature(enable = "avx512f")]
// SAFETY: as `lanes_to_rows`.
unsafe fn transposed(c: *const f32, n: usize, rows: &[*mut f32]) {
    for i in (0..n).step_by(PANEL) {
        let left = (n - i).min(PANEL);
        // SAFETY: vectors i .. i + left of c.
        let vector = |j: usize| unsafe { _mm512_load_si512(c.add((i + j) * PANEL).cast()) };
        let m = std::array::from_fn(|j| if j < left { vector(j) } else { _mm512_setzero_si512() });
        let mask = ((1u32 << left) - 1) as __mmask16;
        for (&row, v) in rows.iter().zip(transpose16(m)) {
            // SAFETY: elements i .. i + left of the row.
            unsafe { _mm512_mask_storeu_epi32(row.add(i).cast(), mask, v) };
        }
    }
}
