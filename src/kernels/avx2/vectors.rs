//! What surrounds the products, on AVX2.

use super::{bf16, glu, int8, pack, store};
use crate::isa::{Avx2, Bf16Form};
use crate::kernels::glu::Glu;
use crate::kernels::vectors::{Finish, Vectors};
use crate::pack::{PANEL, TokenRows};
use crate::tensor::{DType, Rows};

impl Vectors for Avx2 {
    fn bf16_form(self) -> Bf16Form {
        Bf16Form::Fma
    }

    // SAFETY: contract of `Vectors::panel`.
    unsafe fn panel(self, dtype: DType, k: usize, tokens: &[*const f32], panel: *mut u8) {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        unsafe { pack::panel(dtype, k, tokens, panel) }
    }

    // SAFETY: contract of `Vectors::token_row`.
    unsafe fn token_row(self, dtype: DType, k: usize, x: *const f32, first: usize, n: usize, row: *mut u8) {
        // SAFETY: as above.
        unsafe { pack::token_row(dtype, k, x, first, n, row) }
    }

    // SAFETY: contract of `Vectors::dots`.
    unsafe fn dots(self, rows: Rows<'_>, xs: TokenRows<'_>, y: *mut f32, ld: usize) {
        debug_assert!(rows.dtype == xs.dtype && rows.k == xs.k);
        match rows.dtype {
            // SAFETY: as above.
            DType::Bf16 => unsafe { bf16::dots(rows, xs, y, ld) },
            // SAFETY: as above.
            DType::Q8_0 => unsafe { int8::dots(rows, xs, y, ld) },
            other => unreachable!("no dot product for {other:?}"),
        }
    }

    // SAFETY: contract of `Vectors::lanes_to_panel`.
    unsafe fn lanes_to_panel(self, dtype: DType, h: *const f32, n: usize, panel: *mut u8, first: usize) {
        // SAFETY: as above.
        unsafe { store::lanes_to_panel(dtype, h, n, panel, first) }
    }

    // SAFETY: contract of `Vectors::finish_lanes`.
    unsafe fn finish_lanes(self, finish: Finish, c: *const f32, n: usize, rows: &[*mut f32], weights: &[f32; PANEL]) {
        // SAFETY: as above.
        unsafe { store::finish_lanes(finish, c, n, rows, weights) }
    }

    // SAFETY: contract of `Vectors::finish_row`.
    unsafe fn finish_row(self, finish: Finish, c: *const f32, n: usize, row: *mut f32, weight: f32) {
        // SAFETY: as above.
        unsafe { store::finish_row(finish, c, n, row, weight) }
    }

    // SAFETY: contract of `Vectors::glu_lanes`.
    unsafe fn glu_lanes(self, kind: Glu, gate: *mut f32, up: *const f32, n: usize, bias: [*const f32; 2]) {
        // SAFETY: as above.
        unsafe { glu::lanes(kind, gate, up, n, bias) }
    }

    // SAFETY: contract of `Vectors::glu_row`.
    unsafe fn glu_row(self, kind: Glu, gate: *mut f32, up: *const f32, n: usize, bias: [*const f32; 2]) {
        // SAFETY: as above.
        unsafe { glu::row(kind, gate, up, n, bias) }
    }
}
