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

#[cfg(test)]
mod tests {
    use crate::isa::Avx512;
    use crate::kernels::attention::Attend;
    use half::f16;

    #[test]
    fn bits_of_odd_lengths() {
        let Some(isa) = Avx512::detect() else { return println!("skipped: no AVX-512") };
        let value = |i: usize| [0.0, f32::NEG_INFINITY, -1.5, -0.0][i * 7 / 3 % 4];
        for n in 1..=64 {
            let row: Vec<u16> = (0..n).map(|i| f16::from_f32(value(i)).to_bits()).collect();
            // SAFETY: `n` values.
            let got = unsafe { isa.mask_bits(row.as_ptr(), n) };
            let bits = |f: fn(f32) -> bool| (0..n).fold(0, |b, i| b | u64::from(f(value(i))) << i);
            assert_eq!(got.closed, bits(|x| x == f32::NEG_INFINITY));
            assert_eq!(got.valued, bits(|x| x == -1.5));
        }
    }

    #[test]
    fn bias_is_added_in_score_order() {
        let Some(isa) = Avx512::detect() else { return println!("skipped: no AVX-512") };
        #[repr(align(64))]
        struct Scores([f32; 48 * 8]);
        let (lanes, n) = (8, 37);
        let mask: Vec<Vec<u16>> = (0..5)
            .map(|r| {
                (0..n)
                    .map(|p| f16::from_f32(if (r + p) % 5 == 0 { f32::NEG_INFINITY } else { (r * p) as f32 }).to_bits())
                    .collect()
            })
            .collect();
        let mut s = Scores([1.0; 48 * 8]);
        s.0[5 * lanes] = f32::NAN; // row 0, position 5: closed
        let rows = mask.iter().enumerate().map(|(r, m)| (m.as_ptr(), 1.0 + r as f32));
        // SAFETY: five rows of `n` values, `s` has 48 positions of 8 lanes.
        unsafe { isa.bias(rows, lanes, n, s.0.as_mut_ptr()) };
        for p in 0..48 {
            for r in 0..lanes {
                let want = match (r, p) {
                    (5.., _) => 1.0,
                    _ if p >= n || (r + p) % 5 == 0 => f32::NEG_INFINITY,
                    _ => 1.0 + (r * p) as f32 * (1.0 + r as f32),
                };
                assert_eq!(s.0[p * lanes + r], want, "row {r} position {p}");
            }
        }
    }
}
