//! Q8_0 weights in place times INT8 tokens: `vpdpbusd` within a block of 32 k, then both scales in f32.
//!
//! `vpdpbusd` wants one operand unsigned: that is `w + 128` (`w ^ 0x80` as bits), and each sum starts at `-128 * (sum of the
//! token's quants)`, which the packed tokens hold, so the integer sums are exact for all weights from -128 to 127.

mod blocked;
mod dots;
mod in_place;
mod stream;

pub use dots::dots;
pub use in_place::in_place;

use crate::pack::{PANEL, Panels};
use crate::tensor::Rows;

/// The panel form (see [`super::super::Engine::product`]) with weights that are made ready first, in L1: once for all panels where there are many.
///
/// # Safety
/// As `Engine::product`, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
pub unsafe fn ready_first(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    if panels.count() > 2 {
        // SAFETY: the caller's promise.
        return unsafe { blocked::blocked(rows, panels, c, add) };
    }
    for p in 0..panels.count() {
        // SAFETY: panel p, whose C rows are the caller's.
        unsafe { stream::streamed::<8>(rows, panels.panel(p), c.add(p * rows.n * PANEL), add) };
    }
}
