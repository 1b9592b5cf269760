//! K and V rows of any cache type into a block of f32.

use crate::kernels::attention::Source;

// SAFETY: contract of `Attend::widen`, on a CPU with the features.
pub unsafe fn widen(_from: Source, _block: *mut f32) {
    todo!()
}
