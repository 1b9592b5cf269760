//! Attention on AVX2.

mod dots;
mod mask;
mod scores;
mod softmax;
mod values;
mod weigh;
mod widen;

use crate::isa::Avx2;
use crate::kernels::attention::{Ahead, Attend, MaskBits, Source, State, Weights};
use crate::tensor::DType;

impl Attend for Avx2 {
    // SAFETY: contract of `Attend::widen`.
    unsafe fn widen(self, from: Source, block: *mut f32) {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        unsafe { widen::widen(from, block) }
    }

    // SAFETY: contract of `Attend::scores`.
    unsafe fn scores(
        self,
        lanes: usize,
        panel: *const f32,
        block: *const f32,
        tiles: usize,
        s: *mut f32,
        ahead: &mut Ahead,
    ) {
        // SAFETY: as above.
        unsafe { scores::scores(lanes, panel, block, tiles, s, ahead) }
    }

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
        // SAFETY: as above.
        unsafe { dots::scores(panel, lanes, rows, k, s, ahead) }
    }

    // SAFETY: contract of `Attend::cap`.
    unsafe fn cap(self, cap: f32, s: *mut f32, len: usize) {
        // SAFETY: as above.
        unsafe { softmax::cap(cap, s, len) }
    }

    // SAFETY: contract of `Attend::softmax`.
    unsafe fn softmax(self, lanes: usize, s: *mut f32, len: usize, state: &mut State) {
        // SAFETY: as above.
        unsafe { softmax::softmax(lanes, s, len, state) }
    }

    // SAFETY: contract of `Attend::mask_bits`.
    unsafe fn mask_bits(self, mask: *const u16, n: usize) -> MaskBits {
        // SAFETY: as above.
        unsafe { mask::mask_bits(mask, n) }
    }

    // SAFETY: contract of `Attend::bias`.
    unsafe fn bias(
        self,
        rows: impl ExactSizeIterator<Item = (*const u16, f32)> + Clone,
        lanes: usize,
        n: usize,
        s: *mut f32,
    ) {
        // SAFETY: as above.
        unsafe { mask::bias(rows, lanes, n, s) }
    }

    // SAFETY: contract of `Attend::weigh`.
    unsafe fn weigh(self, w: Weights, block: *const f32, stride: usize, ahead: &mut Ahead) {
        // SAFETY: as above.
        unsafe { weigh::weigh(w, block, stride, ahead) }
    }

    // SAFETY: contract of `Attend::weigh_in_place`.
    unsafe fn weigh_in_place(self, w: Weights, source: Source, ahead: &mut Ahead) {
        // SAFETY: as above.
        unsafe { weigh::weigh_in_place(w, source, ahead) }
    }

    // SAFETY: contract of `Attend::merge`.
    unsafe fn merge(self, parts: impl Iterator<Item = (*const f32, f32)> + Clone, n: usize, to: *mut f32) {
        // SAFETY: as above.
        unsafe { weigh::merge(parts, n, to) }
    }
}
