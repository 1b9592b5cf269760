//! What becomes of C blocks: transform (b), the next product's tokens, and transform (c), rows of the result.

use crate::kernels::vectors::Finish;
use crate::pack::PANEL;
use crate::tensor::DType;

// SAFETY: contract of `Vectors::finish_lanes`, on a CPU with the features.
pub unsafe fn finish_lanes(_f: Finish, _c: *const f32, _n: usize, _rows: &[*mut f32], _weights: &[f32; PANEL]) {
    todo!()
}

// SAFETY: contract of `Vectors::finish_row`, on a CPU with the features.
pub unsafe fn finish_row(_f: Finish, _c: *const f32, _n: usize, _row: *mut f32, _weight: f32) {
    todo!()
}

// SAFETY: contract of `Vectors::lanes_to_panel`, on a CPU with the features.
pub unsafe fn lanes_to_panel(_dtype: DType, _h: *const f32, _n: usize, _panel: *mut u8, _first: usize) {
    todo!()
}
