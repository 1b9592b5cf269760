//! Gated linear units on AVX2.

use crate::kernels::glu::Glu;

// SAFETY: contract of `Vectors::glu_lanes`, on a CPU with the features.
pub unsafe fn lanes(_glu: Glu, _gate: *mut f32, _up: *const f32, _n: usize, _bias: [*const f32; 2]) {
    todo!()
}

// SAFETY: contract of `Vectors::glu_row`, on a CPU with the features.
pub unsafe fn row(_glu: Glu, _gate: *mut f32, _up: *const f32, _n: usize, _bias: [*const f32; 2]) {
    todo!()
}
