//! Q8_0 weights in place times INT8 tokens by `vpmaddwd`, then both scales in f32.

use crate::pack::{Panels, TokenRows};
use crate::tensor::Rows;

/// The panel form (see [`super::super::Engine::product`]).
///
/// # Safety
/// As `Engine::product`, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn panels(_rows: Rows<'_>, _panels: Panels<'_>, _c: *mut f32, _add: bool) {
    todo!()
}

/// The dot form (see [`Vectors::dots`](crate::kernels::Vectors::dots)).
// SAFETY: contract of `Vectors::dots`, on a CPU with the features.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn dots(_rows: Rows<'_>, _xs: TokenRows<'_>, _y: *mut f32, _ld: usize) {
    todo!()
}
