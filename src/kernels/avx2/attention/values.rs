//! V by position, in a block or where the cache has it.

use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use super::widen::Load;
use crate::kernels::attention::{LANES, TILE};
use crate::tensor::Q8_0_BYTES;

/// V by position.
pub trait Values: Copy {
    /// Positions that all columns and rows use before the next ones: few enough to stay in the first-level cache meanwhile,
    /// also where they lie a power of two apart and share a few of its sets.
    const POSITIONS: usize;
    /// Columns (vectors of 8 elements) that all rows use before the next ones: the same.
    const COLUMNS: usize;

    /// Bytes from a position to the next one of the same 16.
    fn stride(self) -> usize;
    /// The positions from `16 * group` on.
    // SAFETY: for all of these: the values are readable, and the caller has the features.
    unsafe fn group(self, group: usize) -> *const u8;
    /// Columns `[column, column + N)` of the position at `at`.
    // SAFETY: as above.
    unsafe fn load<const N: usize>(at: *const u8, column: usize) -> [__m256; N];

    /// The weights `p` of some positions for the columns from `column` on, in `scaled` where they are not as they were.
    #[inline]
    // SAFETY: as above; `p` has the positions' weights, `lanes` each.
    unsafe fn weights(
        self,
        p: *const f32,
        _lanes: usize,
        _positions: Range<usize>,
        _column: usize,
        _scaled: &mut Scaled,
    ) -> *const f32 {
        p
    }
}

/// Weights of 16 positions.
#[repr(align(32))]
pub struct Scaled(pub [f32; LANES * LANES]);

/// V in a block.
#[derive(Clone, Copy)]
pub struct Widened {
    pub block: *const f32,
    pub stride: usize,
}

impl Values for Widened {
    const POSITIONS: usize = 64;
    const COLUMNS: usize = 8;

    fn stride(self) -> usize {
        LANES * 4
    }

    #[inline]
    // SAFETY: the trait's contract.
    unsafe fn group(self, group: usize) -> *const u8 {
        // SAFETY: the trait's contract.
        unsafe { self.block.add(group * self.stride * TILE).cast() }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    // SAFETY: the trait's contract.
    unsafe fn load<const N: usize>(at: *const u8, column: usize) -> [__m256; N] {
        let mut v = [_mm256_setzero_ps(); N];
        for (n, v) in v.iter_mut().enumerate() {
            let c = column + n;
            // SAFETY: the trait's contract.
            *v = unsafe { _mm256_load_ps(at.cast::<f32>().add(c / 2 * TILE + c % 2 * 8)) };
        }
        v
    }
}

/// V in the cache: the first row and the stride.
pub struct InPlace<T>(pub *const u8, pub usize, pub PhantomData<T>);

impl<T> Clone for InPlace<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for InPlace<T> {}

impl<T: Load> Values for InPlace<T> {
    const POSITIONS: usize = LANES;
    const COLUMNS: usize = 8;

    fn stride(self) -> usize {
        self.1
    }

    #[inline]
    // SAFETY: the trait's contract.
    unsafe fn group(self, group: usize) -> *const u8 {
        // SAFETY: the trait's contract.
        unsafe { self.0.add(group * LANES * self.1) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    // SAFETY: the trait's contract.
    unsafe fn load<const N: usize>(at: *const u8, column: usize) -> [__m256; N] {
        // SAFETY: the trait's contract.
        unsafe { T::load(at, column) }
    }
}

/// V in the cache as Q8_0: the first row and the stride. Its scales are multiplied into the weights, once for all the columns
/// of a block, so that reading a value is a conversion alone.
#[derive(Clone, Copy)]
pub struct Quants(pub *const u8, pub usize);

impl Values for Quants {
    const POSITIONS: usize = LANES;
    /// A block of 32 elements.
    const COLUMNS: usize = 4;

    fn stride(self) -> usize {
        self.1
    }

    #[inline]
    // SAFETY: the trait's contract.
    unsafe fn group(self, group: usize) -> *const u8 {
        // SAFETY: the trait's contract.
        unsafe { self.0.add(group * LANES * self.1) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    // SAFETY: the trait's contract.
    unsafe fn load<const N: usize>(at: *const u8, column: usize) -> [__m256; N] {
        let mut v = [_mm256_setzero_ps(); N];
        for (n, v) in v.iter_mut().enumerate() {
            let c = column + n;
            // SAFETY: the trait's contract.
            let quants = unsafe { _mm_loadl_epi64(at.add(c / 4 * Q8_0_BYTES + 2 + c % 4 * 8).cast()) };
            *v = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(quants));
        }
        v
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    // SAFETY: the trait's contract.
    unsafe fn weights(
        self,
        p: *const f32,
        lanes: usize,
        positions: Range<usize>,
        column: usize,
        scaled: &mut Scaled,
    ) -> *const f32 {
        for (i, position) in positions.enumerate() {
            // SAFETY: the trait's contract; `scaled` has 16 lanes of 16 positions.
            unsafe {
                let block = self.0.add(position * self.1 + column / 4 * Q8_0_BYTES);
                let scale = _mm256_cvtph_ps(_mm_set1_epi16(block.cast::<i16>().read_unaligned()));
                let (from, to) = (p.add(i * lanes), scaled.0.as_mut_ptr().add(i * lanes));
                match lanes {
                    8.. => {
                        for lane in (0..lanes).step_by(8) {
                            _mm256_storeu_ps(to.add(lane), _mm256_mul_ps(_mm256_loadu_ps(from.add(lane)), scale));
                        }
                    }
                    4 => _mm_storeu_ps(to, _mm_mul_ps(_mm_loadu_ps(from), _mm256_castps256_ps128(scale))),
                    _ => (0..lanes).for_each(|lane| *to.add(lane) = *from.add(lane) * _mm256_cvtss_f32(scale)),
                }
            }
        }
        scaled.0.as_ptr()
    }
}
