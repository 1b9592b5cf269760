//! Q8_0 weights in place times INT8 tokens, exact within a block of 32 k, then both scales in f32: the same bits by words as by VNNI.

mod dots;
mod form;
mod panels;

pub use dots::{by_vnni, by_words};
pub use form::Words;
pub use panels::panels;

use form::Form;
