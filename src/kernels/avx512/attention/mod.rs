//! Attention on AVX-512.

mod exp;
mod mask;
mod scores;
mod softmax;
mod weigh;
pub(in crate::kernels) mod widen;

use crate::isa::Avx512;
use crate::kernels::attention::attend_by_modules;

attend_by_modules!(Avx512 {});
