//! The online softmax: scores of one block become weights, and the running maximum and sum of each row move on.

use std::arch::x86_64::*;

use super::exp::{exp, tanh};
use crate::kernels::attention::{LANES, State, with_lanes};

// SAFETY: contract of `Attend::cap`, on a CPU with the features.
pub unsafe fn cap(cap: f32, s: *mut f32, len: usize) {
    #[target_feature(enable = "avx512f,avx512dq")]
    // SAFETY: `cap`'s contract.
    unsafe fn run(cap: f32, s: *mut f32, len: usize) {
        for i in (0..len).step_by(LANES) {
            // SAFETY: inside `s`.
            unsafe { _mm512_store_ps(s.add(i), _mm512_mul_ps(_mm512_set1_ps(cap), tanh(_mm512_load_ps(s.add(i))))) };
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

#[target_feature(enable = "avx512f,avx512dq")]
// SAFETY: `softmax`'s contract.
unsafe fn run<const L: usize>(s: *mut f32, len: usize, state: &mut State) {
    // SAFETY: whole vectors inside `s`; `State` is aligned and its arrays are vectors.
    unsafe {
        let mut top = _mm512_load_ps(s);
        for i in (LANES..len).step_by(LANES) {
            top = _mm512_max_ps(top, _mm512_load_ps(s.add(i)));
        }
        let old = _mm512_load_ps(state.max.as_ptr());
        let max = _mm512_max_ps(old, fold_max::<L>(top));
        // A row without any score yet has max -Inf: measure from 0 then, so that its weights are e^-Inf = 0.
        let none = _mm512_cmpeq_ps_mask(max, _mm512_set1_ps(f32::NEG_INFINITY));
        let base = _mm512_mask_mov_ps(max, none, _mm512_setzero_ps());
        let rescale = exp(_mm512_sub_ps(old, base));
        let mut sum = _mm512_mul_ps(_mm512_load_ps(state.sum.as_ptr()), rescale);
        for i in (0..len).step_by(LANES) {
            let p = exp(_mm512_sub_ps(_mm512_load_ps(s.add(i)), base));
            sum = _mm512_add_ps(sum, p);
            _mm512_store_ps(s.add(i), p);
        }
        _mm512_store_ps(state.max.as_mut_ptr(), max);
        _mm512_store_ps(state.sum.as_mut_ptr(), sum);
        _mm512_store_ps(state.rescale.as_mut_ptr(), rescale);
    }
}

/// The maximum over the `16 / L` lanes of each row, in all of them.
#[inline]
#[target_feature(enable = "avx512f")]
fn fold_max<const L: usize>(mut v: __m512) -> __m512 {
    if L <= 8 {
        v = _mm512_max_ps(v, _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v));
    }
    if L <= 4 {
        v = _mm512_max_ps(v, _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v));
    }
    if L <= 2 {
        v = _mm512_max_ps(v, _mm512_shuffle_ps::<0b01_00_11_10>(v, v));
    }
    if L <= 1 {
        v = _mm512_max_ps(v, _mm512_shuffle_ps::<0b10_11_00_01>(v, v));
    }
    v
}
