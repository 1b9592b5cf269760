//! The mask: which positions it closes, and its values in the order of the scores.

use crate::kernels::attention::MaskBits;

// SAFETY: contract of `Attend::mask_bits`, on a CPU with the features.
pub unsafe fn mask_bits(_mask: *const u16, _n: usize) -> MaskBits {
    todo!()
}

// SAFETY: contract of `Attend::bias`, on a CPU with the features.
pub unsafe fn bias(
    _rows: impl ExactSizeIterator<Item = (*const u16, f32)> + Clone,
    _lanes: usize,
    _n: usize,
    _s: *mut f32,
) {
    todo!()
}
