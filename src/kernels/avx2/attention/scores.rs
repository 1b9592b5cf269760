//! Scores: a panel of query rows times a block of K.

use crate::kernels::attention::Ahead;

// SAFETY: contract of `Attend::scores`, on a CPU with the features.
pub unsafe fn scores(
    _lanes: usize,
    _panel: *const f32,
    _block: *const f32,
    _tiles: usize,
    _s: *mut f32,
    _ahead: &mut Ahead,
) {
    todo!()
}
