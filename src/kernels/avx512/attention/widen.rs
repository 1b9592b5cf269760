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

/// How a cache type is read: 16 elements from `16 * j` of a row, or the `tail` (1 to 15) elements there.
pub(in crate::kernels) trait Load {
    // SAFETY: for all of them: the elements are readable, and the caller has the features.
    unsafe fn full(row: *const u8, j: usize) -> __m512;
    // SAFETY: as above.
    unsafe fn part(row: *const u8, j: usize, mask: __mmask16) -> __m512;
}

pub(in crate::kernels) struct F32;
pub(in crate::kernels) struct F16;
pub(in crate::kernels) struct Bf16;
pub(in crate::kernels) struct Q8;

impl Load for F32 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    // SAFETY: the trait's contract.
    unsafe fn full(row: *const u8, j: usize) -> __m512 {
        // SAFETY: the trait's contract.
        unsafe { _mm512_loadu_ps(row.cast::<f32>().add(j * LANES)) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    // SAFETY: the trait's contract.
    unsafe fn part(row: *const u8, j: usize, mask: __mmask16) -> __m512 {
        // SAFETY: masked lanes are not read.
        unsafe { _mm512_maskz_loadu_ps(mask, row.cast::<f32>().add(j * LANES)) }
    }
}

impl Load for F16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    // SAFETY: the trait's contract.
    unsafe fn full(row: *const u8, j: usize) -> __m512 {
        // SAFETY: the trait's contract.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(row.add(j * 32).cast())) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    // SAFETY: the trait's contract.
    unsafe fn part(row: *const u8, j: usize, mask: __mmask16) -> __m512 {
        // SAFETY: masked lanes are not read.
        unsafe { _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, row.add(j * 32).cast())) }
    }
}

impl Load for Bf16 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    // SAFETY: the trait's contract.
    unsafe fn full(row: *const u8, j: usize) -> __m512 {
        // SAFETY: the trait's contract.
        let x = unsafe { _mm256_loadu_si256(row.add(j * 32).cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    // SAFETY: the trait's contract.
    unsafe fn part(row: *const u8, j: usize, mask: __mmask16) -> __m512 {
        // SAFETY: masked lanes are not read.
        let x = unsafe { _mm256_maskz_loadu_epi16(mask, row.add(j * 32).cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
    }
}

impl Load for Q8 {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    // SAFETY: the trait's contract.
    unsafe fn full(row: *const u8, j: usize) -> __m512 {
        // SAFETY: the trait's contract: block `j / 2` is in the row.
        unsafe {
            let block = row.add(j / 2 * Q8_0_BYTES);
            let scale = _mm_cvtph_ps(_mm_cvtsi32_si128(block.cast::<u16>().read_unaligned().into()));
            let quants = _mm_loadu_si128(block.add(2 + j % 2 * LANES).cast());
            _mm512_mul_ps(_mm512_broadcastss_ps(scale), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(quants)))
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    // SAFETY: the trait's contract.
    unsafe fn part(row: *const u8, j: usize, _: __mmask16) -> __m512 {
        // SAFETY: a Q8_0 row is whole blocks of 32, so there is no tail; reading a full one is right too.
        unsafe { Self::full(row, j) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
// SAFETY: `widen`'s contract.
unsafe fn rows<T: Load>(from: Source, block: *mut f32) {
    let (full, tail) = (from.d / LANES, from.d % LANES);
    let tiles = from.d.div_ceil(LANES);
    let mask = (1u16 << tail).wrapping_sub(1);
    for p in 0..from.rows.next_multiple_of(LANES) {
        // SAFETY: position `p` of the block; its vectors are one tile (1 KiB) apart.
        let to = unsafe { block.add(p / LANES * tiles * TILE + p % LANES * LANES) };
        if p >= from.rows || from.closed >> p & 1 == 1 {
            for j in 0..tiles {
                // SAFETY: inside the block.
                unsafe { _mm512_store_ps(to.add(j * TILE), _mm512_setzero_ps()) };
            }
            continue;
        }
        // SAFETY: row `p` is readable, by the caller's contract.
        unsafe {
            let row = from.data.add(p * from.stride);
            for j in 0..full {
                _mm512_store_ps(to.add(j * TILE), T::full(row, j));
            }
            if tail > 0 {
                _mm512_store_ps(to.add(full * TILE), T::part(row, full, mask));
            }
        }
    }
}
