//! Q8_0 weights in place times INT8 tokens: `vpdpbusd` within a block of 32 k, then both scales in f32.
//!
//! `vpdpbusd` wants one operand unsigned: that is `w + 128` (`w ^ 0x80` as bits), and each sum starts at `-128 * (sum of the
//! token's quants)`, which the packed tokens hold, so the integer sums are exact for all weights from -128 to 127.

mod dots;
mod fold;
mod panels;
mod ready_first;

use std::arch::x86_64::*;

use crate::pack::{PANEL, Panels};
use crate::tensor::Rows;

pub use dots::dots;

/// Most tokens of half a panel.
const HALF: usize = PANEL / 2;

/// Stores a block's 32 quants as `w + 128`.
#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
// SAFETY: the block is readable, `to` writable for 32 bytes and aligned to as many.
unsafe fn make_ready(block: *const u8, to: *mut u8) {
    // SAFETY: the caller's promise.
    unsafe {
        let quants = _mm256_loadu_si256(block.add(2).cast());
        _mm256_store_si256(to.cast(), _mm256_xor_si256(quants, _mm256_set1_epi8(-128)));
    }
}

/// The panel form (see [`Engine::product`](crate::kernels::Engine::product)) with weights made ready first.
///
/// # Safety
/// As there, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
pub unsafe fn ready_first(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        if panels.tokens <= HALF {
            panels::half_by_blocks(rows, panels, c, add);
        } else {
            ready_first::panels(rows, panels, c, add);
        }
    }
}

/// The same with weights as they lie.
///
/// # Safety
/// As there, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
pub unsafe fn in_place(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        if panels.tokens <= HALF {
            panels::half_in_place(rows, panels, c, add);
        } else {
            panels::in_place(rows, panels, c, add);
        }
    }
}
