//! The mask: which positions it closes, and its values in the order of the scores.

use std::arch::x86_64::*;

use crate::kernels::attention::{LANES, MaskBits};

/// Minus infinity as F16: a position with this mask value takes no part.
const CLOSED: i16 = 0xfc00_u16 as i16;

// SAFETY: contract of `Attend::mask_bits`, on a CPU with the features.
pub unsafe fn mask_bits(mask: *const u16, n: usize) -> MaskBits {
    // SAFETY: the caller's contract.
    unsafe { bits(mask, n) }
}

#[target_feature(enable = "avx2")]
// SAFETY: `mask_bits`' contract.
unsafe fn bits(mask: *const u16, n: usize) -> MaskBits {
    let mut out = MaskBits { closed: 0, valued: 0 };
    for at in (0..n).step_by(16) {
        // SAFETY: `n - at` values are there.
        let x = unsafe { some::<16>(mask.add(at), n - at) };
        // SAFETY: 16 values.
        let x = unsafe { _mm256_loadu_si256(x.as_ptr().cast()) };
        let closed = _mm256_cmpeq_epi16(x, _mm256_set1_epi16(CLOSED));
        let zero = _mm256_cmpeq_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7fff)), _mm256_setzero_si256());
        // A byte each: the closed ones, then those that are closed or zero.
        let both = _mm256_packs_epi16(closed, _mm256_or_si256(closed, zero));
        let both = _mm256_movemask_epi8(_mm256_permute4x64_epi64::<0b11_01_10_00>(both)) as u32;
        out.closed |= u64::from(both & 0xffff) << at;
        out.valued |= u64::from(!both >> 16) << at;
    }
    out
}

/// The first `N` of `n` values; zeros where there are fewer.
#[inline]
// SAFETY: `n` values are readable.
unsafe fn some<const N: usize>(from: *const u16, n: usize) -> [u16; N] {
    if n >= N {
        // SAFETY: the caller's contract.
        return unsafe { from.cast::<[u16; N]>().read_unaligned() };
    }
    let mut values = [0; N];
    // SAFETY: `n` values fit, and are readable; bytes, because they may lie at an odd address.
    unsafe { values.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(from.cast(), 2 * n) };
    values
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

/// The values to add to 8 positions' scores, in their order.
#[repr(align(32))]
struct Values([f32; 8 * LANES]);

#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: `bias`' contract.
unsafe fn add(rows: impl ExactSizeIterator<Item = (*const u16, f32)> + Clone, lanes: usize, n: usize, s: *mut f32) {
    let least = _mm256_set1_ps(f32::NEG_INFINITY);
    let mut values = Values([0.0; 8 * LANES]);
    for at in (0..n.next_multiple_of(LANES)).step_by(8) {
        for row in (0..rows.len()).step_by(8) {
            // SAFETY: the rows' values; `values` has 8 positions of `lanes`.
            unsafe {
                let v = by_position(rows.clone().skip(row), at, n);
                place(v, lanes, values.0.as_mut_ptr().add(row));
            }
        }
        for i in (0..8 * lanes).step_by(8) {
            // SAFETY: vector `i / 8` of these positions' scores.
            unsafe {
                let s = s.add(at * lanes + i);
                let v = _mm256_load_ps(values.0.as_ptr().add(i));
                let sum = _mm256_add_ps(_mm256_load_ps(s), v);
                _mm256_store_ps(s, _mm256_blendv_ps(sum, least, _mm256_cmp_ps::<_CMP_EQ_OQ>(v, least)));
            }
        }
    }
}

/// What up to 8 rows add at positions `[at, at + 8)`: a vector for each position. -Inf past the last position, and -0,
/// which changes nothing, past the last row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: `bias`' contract for the rows' values.
unsafe fn by_position(rows: impl Iterator<Item = (*const u16, f32)>, at: usize, n: usize) -> [__m256; 8] {
    let mut v = [_mm256_set1_ps(-0.0); 8];
    let index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    let left = n.saturating_sub(at);
    let there = _mm256_cmpgt_epi32(_mm256_set1_epi32(left as i32), index);
    for (v, (mask, slope)) in v.iter_mut().zip(rows) {
        // SAFETY: `left` values are there, from `at` on where it is not 0.
        let x = unsafe { some::<8>(mask.wrapping_add(at), left) };
        // SAFETY: 8 values.
        let x = _mm256_cvtph_ps(unsafe { _mm_loadu_si128(x.as_ptr().cast()) });
        let x = _mm256_mul_ps(x, _mm256_set1_ps(slope));
        *v = _mm256_blendv_ps(_mm256_set1_ps(f32::NEG_INFINITY), x, _mm256_castsi256_ps(there));
    }
    transpose8(v)
}

/// Puts each position's values for 8 rows where they belong: all of them, or as many as there are lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: `to` has 8 positions `lanes` apart, with 8 rows each or with `lanes`.
unsafe fn place(v: [__m256; 8], lanes: usize, to: *mut f32) {
    for (p, v) in v.into_iter().enumerate() {
        // SAFETY: the caller's contract.
        unsafe {
            let (to, low) = (to.add(p * lanes), _mm256_castps256_ps128(v));
            match lanes {
                1 => _mm_store_ss(to, low),
                2 => _mm_storel_pd(to.cast(), _mm_castps_pd(low)),
                4 => _mm_storeu_ps(to, low),
                _ => _mm256_storeu_ps(to, v),
            }
        }
    }
}

/// Lane `j` of vector `i` goes to lane `i` of vector `j`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn transpose8(m: [__m256; 8]) -> [__m256; 8] {
    let pairs =
        |a: __m256, b: __m256| [_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)].map(|x| _mm256_castps_pd(x));
    let mut out = m;
    // Columns 0 to 3 of four rows in one half, 4 to 7 in the other.
    let four = |r: usize| {
        let (ab, cd) = (pairs(m[r], m[r + 1]), pairs(m[r + 2], m[r + 3]));
        [
            _mm256_unpacklo_pd(ab[0], cd[0]),
            _mm256_unpackhi_pd(ab[0], cd[0]),
            _mm256_unpacklo_pd(ab[1], cd[1]),
            _mm256_unpackhi_pd(ab[1], cd[1]),
        ]
        .map(|x| _mm256_castpd_ps(x))
    };
    let (top, bottom) = (four(0), four(4));
    for j in 0..4 {
        out[j] = _mm256_permute2f128_ps::<0x20>(top[j], bottom[j]);
        out[4 + j] = _mm256_permute2f128_ps::<0x31>(top[j], bottom[j]);
    }
    out
}
