//! Transposes and horizontal maxima in registers.

use std::arch::x86_64::*;

/// Transposes an 8 x 8 matrix of 32-bit values: lane `j` of vector `i` goes to lane `i` of vector `j`.
#[inline]
#[target_feature(enable = "avx2")]
pub fn transpose8(m: [__m256i; 8]) -> [__m256i; 8] {
    let mut a = m;
    for i in 0..4 {
        a[2 * i] = _mm256_unpacklo_epi32(m[2 * i], m[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi32(m[2 * i], m[2 * i + 1]);
    }
    // b[4q + j]: in each 128-bit lane l, column 4l + j of rows 4q .. 4q + 4.
    let mut b = a;
    for q in 0..2 {
        b[4 * q] = _mm256_unpacklo_epi64(a[4 * q], a[4 * q + 2]);
        b[4 * q + 1] = _mm256_unpackhi_epi64(a[4 * q], a[4 * q + 2]);
        b[4 * q + 2] = _mm256_unpacklo_epi64(a[4 * q + 1], a[4 * q + 3]);
        b[4 * q + 3] = _mm256_unpackhi_epi64(a[4 * q + 1], a[4 * q + 3]);
    }
    let mut out = b;
    for j in 0..4 {
        out[j] = _mm256_permute2x128_si256::<0x20>(b[j], b[4 + j]);
        out[4 + j] = _mm256_permute2x128_si256::<0x31>(b[j], b[4 + j]);
    }
    out
}

/// Lane `i` is the largest lane of vector `i`; none is NaN.
#[inline]
#[target_feature(enable = "avx2")]
pub fn maxima8(v: [__m256; 8]) -> __m256 {
    let two = |a, b| _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    let four = |a, b| _mm256_max_ps(_mm256_shuffle_ps::<0x44>(a, b), _mm256_shuffle_ps::<0xEE>(a, b));
    let low = four(two(v[0], v[1]), two(v[2], v[3]));
    let high = four(two(v[4], v[5]), two(v[6], v[7]));
    _mm256_max_ps(_mm256_permute2f128_ps::<0x20>(low, high), _mm256_permute2f128_ps::<0x31>(low, high))
}

/// The largest lane in all lanes; none is NaN.
#[inline]
#[target_feature(enable = "avx2")]
pub fn maximum(v: __m256) -> __m256 {
    let v = _mm256_max_ps(v, _mm256_permute2f128_ps::<0x01>(v, v));
    let v = _mm256_max_ps(v, _mm256_shuffle_ps::<0x4E>(v, v));
    _mm256_max_ps(v, _mm256_shuffle_ps::<0xB1>(v, v))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::avx2;

    fn lanes(v: __m256i) -> [i32; 8] {
        // SAFETY: both are 32 bytes of plain data.
        unsafe { std::mem::transmute(v) }
    }

    #[target_feature(enable = "avx2")]
    fn check() {
        let cell = |i: usize, j: usize| (i * 8 + j) as i32;
        // SAFETY: both are 32 bytes of plain data.
        let vector = |lanes: [i32; 8]| unsafe { std::mem::transmute::<[i32; 8], __m256i>(lanes) };
        let row = |i: usize| vector(std::array::from_fn(|j| cell(i, j)));
        for (j, column) in transpose8(std::array::from_fn(row)).into_iter().enumerate() {
            assert_eq!(lanes(column), std::array::from_fn(|i| cell(i, j)));
        }
        // Each row has its largest value in another column.
        let value = |i: usize, j: usize| ((i * 3 + j) % 8 * 8 + i) as i32;
        let v: [__m256; 8] = std::array::from_fn(|i| _mm256_cvtepi32_ps(vector(std::array::from_fn(|j| value(i, j)))));
        let max = |i: usize| (0..8).map(|j| value(i, j)).max().unwrap();
        assert_eq!(lanes(_mm256_cvtps_epi32(maxima8(v))), std::array::from_fn(max));
        for (i, v) in v.into_iter().enumerate() {
            assert_eq!(lanes(_mm256_cvtps_epi32(maximum(v))), [max(i); 8]);
        }
    }

    #[test]
    fn transposes_and_maxima_are_those_of_the_definition() {
        if avx2().is_some() {
            // SAFETY: the features were detected just now.
            unsafe { check() }
        }
    }
}
