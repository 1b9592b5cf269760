//! The online softmax: scores of one block become weights, and the running maximum and sum of each row move on.

use crate::kernels::attention::State;

// SAFETY: contract of `Attend::cap`, on a CPU with the features.
pub unsafe fn cap(_cap: f32, _s: *mut f32, _len: usize) {
    todo!()
}

// SAFETY: contract of `Attend::softmax`, on a CPU with the features.
pub unsafe fn softmax(_lanes: usize, _s: *mut f32, _len: usize, _state: &mut State) {
    todo!()
}
