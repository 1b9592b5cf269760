//! Transform (a): gather token rows of f32, convert, and write panels or token rows (layouts: [`crate::pack`]).

use crate::tensor::DType;

// SAFETY: contract of `Vectors::panel`, on a CPU with the features.
pub unsafe fn panel(_dtype: DType, _k: usize, _tokens: &[*const f32], _panel: *mut u8) {
    todo!()
}

// SAFETY: contract of `Vectors::token_row`, on a CPU with the features.
pub unsafe fn token_row(_dtype: DType, _k: usize, _x: *const f32, _first: usize, _n: usize, _row: *mut u8) {
    todo!()
}
