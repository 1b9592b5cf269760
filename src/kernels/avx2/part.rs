//! Loads and stores of vectors, where the last one may have less than 8 lanes.

use std::arch::x86_64::*;

/// Lanes of a vector of f32.
pub const LANES: usize = 8;

/// Calls `f(i, left)` for each 8 of `n` elements, at element `i`, then for what is left.
#[inline(always)]
pub fn each(n: usize, mut f: impl FnMut(usize, usize)) {
    let whole = n / LANES * LANES;
    // The loop needs no masks.
    (0..whole).step_by(LANES).for_each(|i| f(i, LANES));
    if whole < n {
        f(whole, n - whole);
    }
}

/// The lowest `n` of 8 lanes: those with their highest bit set.
#[inline]
#[target_feature(enable = "avx2")]
fn below(n: usize) -> __m256i {
    _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))
}

/// Up to 8 of `left` f32, which may be none; zeros after them.
#[inline]
#[target_feature(enable = "avx2")]
// SAFETY: contract: `left` f32 at `x` are readable.
pub unsafe fn load(x: *const f32, left: usize) -> __m256 {
    // SAFETY: the caller's promise; the mask hides the rest.
    unsafe { if left >= LANES { _mm256_loadu_ps(x) } else { _mm256_maskload_ps(x, below(left)) } }
}

/// Writes up to 8 of `left` f32.
#[inline]
#[target_feature(enable = "avx2")]
// SAFETY: contract: `left` f32 at `to` are writable.
pub unsafe fn store(to: *mut f32, left: usize, v: __m256) {
    // SAFETY: the caller's promise; the mask hides the rest.
    unsafe { if left >= LANES { _mm256_storeu_ps(to, v) } else { _mm256_maskstore_ps(to, below(left), v) } }
}

/// Up to 16 of `left` f32, of which there is at least one; zeros after them.
#[inline]
#[target_feature(enable = "avx2")]
// SAFETY: contract: `left` f32 at `x` are readable.
pub unsafe fn load16(x: *const f32, left: usize) -> [__m256; 2] {
    // SAFETY: the caller's promise.
    unsafe { [load(x, left), load(x.wrapping_add(LANES), left.saturating_sub(LANES))] }
}

/// Writes up to 16 of `left` f32, of which there is at least one.
#[inline]
#[target_feature(enable = "avx2")]
// SAFETY: contract: `left` f32 at `to` are writable.
pub unsafe fn store16(to: *mut f32, left: usize, v: [__m256; 2]) {
    // SAFETY: the caller's promise.
    unsafe {
        store(to, left, v[0]);
        store(to.wrapping_add(LANES), left.saturating_sub(LANES), v[1]);
    }
}
