//! Transposes and horizontal sums in registers.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row and token")]

use std::arch::x86_64::*;

use crate::kernels::passes::DotPass;

/// Transposes a 16 x 16 matrix of 32-bit values: lane `j` of vector `i` goes to lane `i` of vector `j`.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn transpose16(m: [__m512i; 16]) -> [__m512i; 16] {
    let mut a = m;
    for i in 0..8 {
        a[2 * i] = _mm512_unpacklo_epi32(m[2 * i], m[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(m[2 * i], m[2 * i + 1]);
    }
    // b[4q + j]: in each 128-bit lane l, column 4l + j of rows 4q .. 4q + 4.
    let mut b = a;
    for q in 0..4 {
        b[4 * q] = _mm512_unpacklo_epi64(a[4 * q], a[4 * q + 2]);
        b[4 * q + 1] = _mm512_unpackhi_epi64(a[4 * q], a[4 * q + 2]);
        b[4 * q + 2] = _mm512_unpacklo_epi64(a[4 * q + 1], a[4 * q + 3]);
        b[4 * q + 3] = _mm512_unpackhi_epi64(a[4 * q + 1], a[4 * q + 3]);
    }
    let mut out = b;
    for j in 0..4 {
        let lo01 = _mm512_shuffle_i32x4::<0x44>(b[j], b[4 + j]);
        let hi01 = _mm512_shuffle_i32x4::<0xEE>(b[j], b[4 + j]);
        let lo23 = _mm512_shuffle_i32x4::<0x44>(b[8 + j], b[12 + j]);
        let hi23 = _mm512_shuffle_i32x4::<0xEE>(b[8 + j], b[12 + j]);
        out[j] = _mm512_shuffle_i32x4::<0x88>(lo01, lo23);
        out[4 + j] = _mm512_shuffle_i32x4::<0xDD>(lo01, lo23);
        out[8 + j] = _mm512_shuffle_i32x4::<0x88>(hi01, hi23);
        out[12 + j] = _mm512_shuffle_i32x4::<0xDD>(hi01, hi23);
    }
    out
}

/// The sums of four vectors' lanes. Each sum's order of additions does not depend on the other vectors.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn sums4(v: [__m512; 4]) -> __m128 {
    let ab = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    let cd = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    let lo = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
    let hi = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
    let abcd = _mm512_add_ps(lo, hi);
    let upper = _mm512_castpd_ps(_mm512_castpd256_pd512(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(abcd))));
    let half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_castps512_ps256(upper));
    _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps::<1>(half))
}

/// Writes the sums of a pass of `T` tokens and `R` rows (8, 6, 4 or 1).
#[inline]
#[target_feature(enable = "avx512f")]
// SAFETY: contract: of `DotPass::store`.
pub unsafe fn store_sums<const R: usize, const T: usize>(acc: &[[__m512; T]; R], pass: &DotPass<'_>) {
    for t in 0..T {
        for first in (0..R).step_by(4) {
            let row = |r: usize| if first + r < R { acc[first + r][t] } else { _mm512_setzero_ps() };
            // SAFETY: a token of the pass, rows of its group.
            unsafe { pass.store(t, first, sums4(std::array::from_fn(row))) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Avx512;

    #[target_feature(enable = "avx512f")]
    fn check() {
        let cell = |i: usize, j: usize| (i * 16 + j) as i32;
        let rows: [__m512i; 16] = std::array::from_fn(|i| {
            let row: [i32; 16] = std::array::from_fn(|j| cell(i, j));
            // SAFETY: 64 readable bytes.
            unsafe { _mm512_loadu_si512(row.as_ptr().cast()) }
        });
        for (j, column) in transpose16(rows).into_iter().enumerate() {
            let mut got = [0i32; 16];
            // SAFETY: 64 writable bytes.
            unsafe { _mm512_storeu_si512(got.as_mut_ptr().cast(), column) };
            assert_eq!(got, std::array::from_fn(|i| cell(i, j)));
        }
        let v = std::array::from_fn(|i| _mm512_cvtepi32_ps(rows[i]));
        let mut got = [0f32; 4];
        // SAFETY: 16 writable bytes.
        unsafe { _mm_storeu_ps(got.as_mut_ptr(), sums4(v)) };
        assert_eq!(got, std::array::from_fn(|i| (0..16).map(|j| cell(i, j) as f32).sum::<f32>()));
    }

    #[test]
    fn transposes_and_sums_are_those_of_the_definition() {
        if Avx512::detect().is_none() {
            println!("skipped: this CPU has no AVX-512");
            return;
        }
        // SAFETY: the features were detected just now.
        unsafe { check() }
    }
}
