//! The online softmax: scores of one block become weights, and the running maximum and sum of each row move on.

use std::arch::x86_64::*;

use crate::kernels::attention::{LANES, State, with_lanes};
use crate::kernels::avx2::exp::{exp_or_zero, tanh};

// SAFETY: contract of `Attend::cap`, on a CPU with the features.
pub unsafe fn cap(cap: f32, s: *mut f32, len: usize) {
    #[target_feature(enable = "avx2,fma")]
    // SAFETY: `cap`'s contract.
    unsafe fn run(cap: f32, s: *mut f32, len: usize) {
        for i in (0..len).step_by(8) {
            // SAFETY: inside `s`.
            unsafe { _mm256_store_ps(s.add(i), _mm256_mul_ps(_mm256_set1_ps(cap), tanh(_mm256_load_ps(s.add(i))))) };
        }
    }
    // SAFETY: the caller's contract.
    unsafe { run(cap, s, len) }
}

// SAFETY: contract of `Attend::softmax`, on a CPU with the features.
pub unsafe fn softmax(lanes: usize, s: *mut f32, len: usize, state: &mut State) {
    // SAFETY: the caller's contract.
    unsafe { with_lanes!(lanes, run(s, len, state)) }
}

#[target_feature(enable = "avx2,fma")]
// SAFETY: `softmax`'s contract.
unsafe fn run<const L: usize>(s: *mut f32, len: usize, state: &mut State) {
    // SAFETY: whole vectors inside `s`; `State` is aligned and its arrays are two vectors each.
    unsafe {
        let mut top = load(s);
        for i in (LANES..len).step_by(LANES) {
            let next = load(s.add(i));
            top = [_mm256_max_ps(top[0], next[0]), _mm256_max_ps(top[1], next[1])];
        }
        let top = fold_max::<L>(top);
        let old = load(state.max.as_ptr());
        let (mut base, mut sum) = (old, load(state.sum.as_ptr()));
        for h in 0..2 {
            let max = _mm256_max_ps(old[h], top[h]);
            // A row without any score yet has max -Inf: measure from 0 then, so that its weights are e^-Inf = 0.
            let some = _mm256_cmp_ps::<_CMP_NEQ_UQ>(max, _mm256_set1_ps(f32::NEG_INFINITY));
            base[h] = _mm256_and_ps(max, some);
            let rescale = exp_or_zero(_mm256_sub_ps(old[h], base[h]));
            sum[h] = _mm256_mul_ps(sum[h], rescale);
            _mm256_store_ps(state.max.as_mut_ptr().add(8 * h), max);
            _mm256_store_ps(state.rescale.as_mut_ptr().add(8 * h), rescale);
        }
        for i in (0..len).step_by(LANES) {
            for (h, x) in load(s.add(i)).into_iter().enumerate() {
                let p = exp_or_zero(_mm256_sub_ps(x, base[h]));
                sum[h] = _mm256_add_ps(sum[h], p);
                _mm256_store_ps(s.add(i + 8 * h), p);
            }
        }
        _mm256_store_ps(state.sum.as_mut_ptr(), sum[0]);
        _mm256_store_ps(state.sum.as_mut_ptr().add(8), sum[1]);
    }
}

/// Sixteen lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
// SAFETY: they are readable and 32-byte aligned.
unsafe fn load(from: *const f32) -> [__m256; 2] {
    // SAFETY: the caller's contract.
    unsafe { [_mm256_load_ps(from), _mm256_load_ps(from.add(8))] }
}

/// The maximum over the `16 / L` lanes of each row, in all of them.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn fold_max<const L: usize>(v: [__m256; 2]) -> [__m256; 2] {
    if L == LANES {
        return v;
    }
    let mut v = _mm256_max_ps(v[0], v[1]);
    if L <= 4 {
        v = _mm256_max_ps(v, _mm256_permute2f128_ps::<0x01>(v, v));
    }
    if L <= 2 {
        v = _mm256_max_ps(v, _mm256_shuffle_ps::<0b01_00_11_10>(v, v));
    }
    if L <= 1 {
        v = _mm256_max_ps(v, _mm256_shuffle_ps::<0b10_11_00_01>(v, v));
    }
    [v, v]
}
