//! Attention on AVX2.

mod dots;
mod mask;
mod scores;
mod softmax;
mod values;
mod weigh;
mod widen;

use crate::isa::Avx2;
use crate::kernels::attention::{Ahead, Source, attend_by_modules};
use crate::tensor::DType;

attend_by_modules!(Avx2 {
    fn v_in_place(v: DType) -> usize {
        if v == DType::Q8_0 { 4 } else { 16 }
    }

    fn k_in_place(k: DType) -> usize {
        if k == DType::Q8_0 { 0 } else { 8 }
    }

    // SAFETY: contract of `Attend::scores_in_place`.
    unsafe fn scores_in_place(
        self,
        panel: *const f32,
        [lanes, rows]: [usize; 2],
        k: Source,
        s: *mut f32,
        ahead: &mut Ahead,
    ) {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        unsafe { dots::scores(panel, lanes, rows, k, s, ahead) }
    }
});
