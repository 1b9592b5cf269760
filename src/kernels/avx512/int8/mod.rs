//! Q8_0 weights in place times INT8 tokens: `vpdpbusd` within a block of 32 k, then both scales in f32.
//!
//! `vpdpbusd` wants one operand unsigned: that is `w + 128` (`w ^ 0x80` as bits), and each sum starts at `-128 * (sum of the
//! token's quants)`, which the packed tokens hold, so the integer sums are exact for all weights from -128 to 127.

mod dots;
mod panels;
mod ready_first;

pub use dots::dots;
pub use panels::in_place;
pub use ready_first::ready_first;
