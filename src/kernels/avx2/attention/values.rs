//! V by position and column (a vector of 8 elements), in a block or where the cache has it.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::widen::Load;
use crate::kernels::attention::{LANES, TILE};

/// V by position.
pub trait Values: Copy {
    /// Positions that all columns and rows use before the next ones: few enough to stay in the first-level cache
    /// meanwhile, also where they lie a power of two apart and share a few of its sets.
    const POSITIONS: usize;

    /// Bytes from a position to the next one of the same 16.
    fn stride(self) -> usize;
    /// The positions from `16 * group` on.
    // SAFETY: for both: the values are readable, and the caller has the features.
    unsafe fn group(self, group: usize) -> *const u8;
    /// Columns `[column, column + N)` of the position at `at`; `column` is a multiple of 4 or of 2 where N is.
    // SAFETY: as above.
    unsafe fn load<const N: usize>(at: *const u8, column: usize) -> [__m256; N];
}

/// V in a block.
#[derive(Clone, Copy)]
pub struct Widened {
    pub block: *const f32,
    pub stride: usize,
}

impl Values for Widened {
    const POSITIONS: usize = 64;

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

/// V in the cache.
pub struct InPlace<T> {
    data: *const u8,
    stride: usize,
    dtype: PhantomData<T>,
}

impl<T> InPlace<T> {
    pub fn new(data: *const u8, stride: usize) -> Self {
        Self { data, stride, dtype: PhantomData }
    }
}

impl<T> Clone for InPlace<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for InPlace<T> {}

impl<T: Load> Values for InPlace<T> {
    const POSITIONS: usize = LANES;

    fn stride(self) -> usize {
        self.stride
    }

    #[inline]
    // SAFETY: the trait's contract.
    unsafe fn group(self, group: usize) -> *const u8 {
        // SAFETY: the trait's contract.
        unsafe { self.data.add(group * LANES * self.stride) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    // SAFETY: the trait's contract.
    unsafe fn load<const N: usize>(at: *const u8, column: usize) -> [__m256; N] {
        // SAFETY: the trait's contract.
        unsafe { T::load(at, column) }
    }
}
