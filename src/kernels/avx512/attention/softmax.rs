//! The online softmax: scores of one block become weights, and the running maximum and sum of each row move on.

use std::arch::x86_64::*;

use super::exp::{exp, tanh};
use super::{LANES, with_lanes};
use crate::isa::Avx512;

/// Maximum, sum and last rescaling of the rows of a panel. Lane `i` belongs to row `i % lanes`.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct State {
    /// Largest score so far; -Inf when there was none. The same in every lane of a row.
    pub max: [f32; LANES],
    /// Sum of the weights so far, relative to `max`: a row's sum is that of its lanes.
    pub sum: [f32; LANES],
    /// What the last block's new maximum scaled earlier weights by. The same in every lane of a row.
    pub rescale: [f32; LANES],
}

impl State {
    /// Before the first block.
    pub const EMPTY: Self = Self { max: [f32::NEG_INFINITY; LANES], sum: [0.0; LANES], rescale: [1.0; LANES] };

    /// The sum of `row`'s weights.
    pub fn row_sum(&self, lanes: usize, row: usize) -> f32 {
        self.sum.iter().skip(row).step_by(lanes).sum()
    }
}

/// `s = cap * tanh(s)` for `len` scores: the soft limit of Gemma 2 (the scores come divided by `cap`).
///
/// # Safety
/// `len` is a multiple of 16; `s` is 64-byte aligned and has `len` f32.
// SAFETY: contract above; the token proves the features.
pub unsafe fn cap(_: Avx512, cap: f32, s: *mut f32, len: usize) {
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

/// Turns `len` scores `s[position * lanes + row]` into weights `e^(s - max)` in place and moves `state` on.
///
/// A score of -Inf weighs 0, also where a row has no other; NaN gives NaN.
///
/// # Safety
/// `len` is a multiple of `16 * lanes`, more than 0; `s` is 64-byte aligned and has `len` f32.
// SAFETY: contract above; the token proves the features.
pub unsafe fn softmax(_: Avx512, lanes: usize, s: *mut f32, len: usize, state: &mut State) {
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
