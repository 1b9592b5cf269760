//! K and V rows of any cache type into a block of f32.

use std::arch::x86_64::*;

use crate::kernels::attention::{LANES, Source, TILE};
use crate::tensor::{DType, Q8_0_BYTES};

// SAFETY: contract of `Attend::widen`, on a CPU with the features.
pub unsafe fn widen(from: Source, block: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe {
        match from.dtype {
            DType::F32 => rows::<F32>(from, block),
            DType::F16 => rows::<F16>(from, block),
            DType::Bf16 => rows::<Bf16>(from, block),
            DType::Q8_0 => rows::<Q8>(from, block),
        }
    }
}

/// How a cache type is read.
pub(super) trait Load {
    /// Bytes of an element where elements stand alone.
    const BYTES: usize;

    /// `8 * N` elements from `8 * j` of a row; `j` is a multiple of 4 or of 2 where N is.
    // SAFETY: the elements are readable, and the caller has the features.
    unsafe fn load<const N: usize>(row: *const u8, j: usize) -> [__m256; N];

    /// 16 elements from `16 * j` of a row, in the order of the panels of [`Attend::scores_in_place`].
    ///
    /// [`Attend::scores_in_place`]: crate::kernels::attention::Attend::scores_in_place
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    // SAFETY: as above.
    unsafe fn tile(row: *const u8, j: usize) -> [__m256; 2] {
        // SAFETY: the caller's contract.
        unsafe { Self::load(row, 2 * j) }
    }
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Bf16;
pub(super) struct Q8;

impl Load for F32 {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    // SAFETY: the trait's contract.
    unsafe fn load<const N: usize>(row: *const u8, j: usize) -> [__m256; N] {
        let mut v = [_mm256_setzero_ps(); N];
        for (n, v) in v.iter_mut().enumerate() {
            // SAFETY: the trait's contract.
            *v = unsafe { _mm256_loadu_ps(row.add((j + n) * 32).cast()) };
        }
        v
    }
}

impl Load for F16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    // SAFETY: the trait's contract.
    unsafe fn load<const N: usize>(row: *const u8, j: usize) -> [__m256; N] {
        let mut v = [_mm256_setzero_ps(); N];
        for (n, v) in v.iter_mut().enumerate() {
            // SAFETY: the trait's contract.
            *v = unsafe { _mm256_cvtph_ps(_mm_loadu_si128(row.add((j + n) * 16).cast())) };
        }
        v
    }
}

impl Load for Bf16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    // SAFETY: the trait's contract.
    unsafe fn load<const N: usize>(row: *const u8, j: usize) -> [__m256; N] {
        let mut v = [_mm256_setzero_ps(); N];
        for (n, v) in v.iter_mut().enumerate() {
            // SAFETY: the trait's contract.
            let x = unsafe { _mm_loadu_si128(row.add((j + n) * 16).cast()) };
            *v = _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x)));
        }
        v
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    // SAFETY: the trait's contract.
    unsafe fn tile(row: *const u8, j: usize) -> [__m256; 2] {
        // SAFETY: the trait's contract.
        let x = unsafe { _mm256_loadu_si256(row.add(j * 32).cast()) };
        let odd = _mm256_and_si256(x, _mm256_set1_epi32(0xffff_0000_u32 as i32));
        [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)), _mm256_castsi256_ps(odd)]
    }
}

impl Load for Q8 {
    /// A row is whole blocks of 32, so that none stands alone.
    const BYTES: usize = 0;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    // SAFETY: the trait's contract.
    unsafe fn load<const N: usize>(row: *const u8, j: usize) -> [__m256; N] {
        let mut v = [_mm256_setzero_ps(); N];
        let mut scale = _mm256_setzero_ps();
        let shared = 1 << N.trailing_zeros().min(2);
        for (n, v) in v.iter_mut().enumerate() {
            // SAFETY: the trait's contract: block `(j + n) / 4` is in the row.
            unsafe {
                let block = row.add((j + n) / 4 * Q8_0_BYTES);
                // Vectors of the same block share its scale.
                if n % shared == 0 {
                    scale = _mm256_cvtph_ps(_mm_set1_epi16(block.cast::<i16>().read_unaligned()));
                }
                let quants = _mm_loadl_epi64(block.add(2 + (j + n) % 4 * 8).cast());
                *v = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(quants)));
            }
        }
        v
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: `widen`'s contract.
unsafe fn rows<T: Load>(from: Source, block: *mut f32) {
    let tiles = from.d.div_ceil(LANES);
    for p in 0..from.rows.next_multiple_of(LANES) {
        // SAFETY: position `p` of the block; its tiles are 1 KiB apart.
        let to = unsafe { block.add(p / LANES * tiles * TILE + p % LANES * LANES) };
        // SAFETY: inside the block; row `p` is readable unless it is closed, by the caller's contract.
        unsafe {
            if p >= from.rows || from.closed >> p & 1 == 1 {
                for j in 0..2 * tiles {
                    store(to, j, [_mm256_setzero_ps()]);
                }
            } else {
                row::<T>(from.data.add(p * from.stride), from.d, to);
            }
        }
    }
}

/// One row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: the row has `d` readable elements, and its place in the block `d` rounded up to 16.
unsafe fn row<T: Load>(row: *const u8, d: usize, to: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe {
        let fours = d / 32 * 4;
        for j in (0..fours).step_by(4) {
            store(to, j, T::load::<4>(row, j));
        }
        let whole = d / 8;
        for j in fours..whole {
            store(to, j, T::load::<1>(row, j));
        }
        for j in whole..d.div_ceil(LANES) * 2 {
            // The last few elements, if these are they, with zeros behind them.
            let mut rest = [0u8; 32];
            let n = d.saturating_sub(j * 8) * T::BYTES;
            rest.as_mut_ptr().copy_from_nonoverlapping(row.add(d * T::BYTES - n), n);
            store(to, j, T::load::<1>(rest.as_ptr(), 0));
        }
    }
}

/// Puts `8 * N` elements of a position at its `8 * j`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: `to` is a position in a block that has them.
unsafe fn store<const N: usize>(to: *mut f32, j: usize, v: [__m256; N]) {
    for (n, v) in v.into_iter().enumerate() {
        // SAFETY: the caller's contract.
        unsafe { _mm256_store_ps(to.add((j + n) / 2 * TILE + (j + n) % 2 * 8), v) };
    }
}
