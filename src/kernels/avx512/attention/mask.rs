//! The mask: which positions it closes, and its values in the order of the scores.

use std::arch::x86_64::*;

use crate::kernels::attention::{LANES, MaskBits};
use crate::kernels::avx512::transpose::transpose16;

/// Minus infinity as F16: a position with this mask value takes no part.
const CLOSED: i16 = 0xfc00_u16 as i16;

// SAFETY: contract of `Attend::mask_bits`, on a CPU with the features.
pub unsafe fn mask_bits(mask: *const u16, n: usize) -> MaskBits {
    // SAFETY: the caller's contract.
    unsafe { bits(mask, n) }
}

#[target_feature(enable = "avx512f,avx512bw")]
// SAFETY: `mask_bits`' contract.
unsafe fn bits(mask: *const u16, n: usize) -> MaskBits {
    let mut out = MaskBits { closed: 0, valued: 0 };
    for at in (0..n).step_by(32) {
        let some = u32::MAX >> (32 - (n - at).min(32));
        // SAFETY: masked lanes are not read.
        let x = unsafe { _mm512_maskz_loadu_epi16(some, mask.add(at).cast()) };
        let closed = _mm512_mask_cmpeq_epi16_mask(some, x, _mm512_set1_epi16(CLOSED));
        let nonzero = _mm512_mask_test_epi16_mask(some, x, _mm512_set1_epi16(0x7fff));
        out.closed |= u64::from(closed) << at;
        out.valued |= u64::from(nonzero & !closed) << at;
    }
    out
}

// SAFETY: contract of `Attend::bias`, on a CPU with the features.
pub unsafe fn bias(
    rows: impl ExactSizeIterator<Item = (*const u16, f32)> + Clone,
    lanes: usize,
    n: usize,
    s: *mut f32,
) {
    // SAFETY: the caller's contract.
    unsafe { add(rows, lanes, n, s) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
// SAFETY: `bias`' contract.
unsafe fn add(rows: impl ExactSizeIterator<Item = (*const u16, f32)> + Clone, lanes: usize, n: usize, s: *mut f32) {
    let least = _mm512_set1_ps(f32::NEG_INFINITY);
    let live = (0xffff_u32 >> (LANES - rows.len())) as u16;
    for at in (0..n).step_by(LANES) {
        let some = (0xffff_u32 >> (LANES - (n - at).min(LANES))) as u16;
        let mut v = [_mm512_setzero_si512(); LANES];
        for (v, (mask, slope)) in v.iter_mut().zip(rows.clone()) {
            // SAFETY: masked lanes are not read.
            let x = _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(some, mask.add(at).cast()) });
            *v = _mm512_castps_si512(_mm512_mask_mul_ps(least, some, x, _mm512_set1_ps(slope)));
        }
        for (p, v) in transpose16(v).into_iter().enumerate() {
            let v = _mm512_castsi512_ps(v);
            // SAFETY: `live` has at most `lanes` bits, so only this position's own scores are touched.
            unsafe {
                let s = s.add((at + p) * lanes);
                let closed = _mm512_cmpeq_ps_mask(v, least);
                let sum = _mm512_add_ps(_mm512_maskz_loadu_ps(live, s), v);
                _mm512_mask_storeu_ps(s, live, _mm512_mask_mov_ps(sum, closed, least));
            }
        }
    }
}
