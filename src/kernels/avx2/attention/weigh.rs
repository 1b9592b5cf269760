//! The weighted sum of V rows, and the merge of partial sums.

use crate::kernels::attention::{Ahead, Source, Weights};

// SAFETY: contract of `Attend::weigh`, on a CPU with the features.
pub unsafe fn weigh(_w: Weights, _block: *const f32, _stride: usize, _ahead: &mut Ahead) {
    todo!()
}

// SAFETY: contract of `Attend::weigh_in_place`, on a CPU with the features.
pub unsafe fn weigh_in_place(_w: Weights, _source: Source, _ahead: &mut Ahead) {
    todo!()
}

// SAFETY: contract of `Attend::merge`, on a CPU with the features.
pub unsafe fn merge(_parts: impl Iterator<Item = (*const f32, f32)> + Clone, _n: usize, _to: *mut f32) {
    todo!()
}
