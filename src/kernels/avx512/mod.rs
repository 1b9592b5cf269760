//! Kernels of the AVX-512 engine: BF16 products by `vdpbf16ps` or f32 multiply-adds, INT8 products by `vpdpbusd`.
//!
//! Two forms. The *panel form* ([`Engine::product`]) has tokens in the lanes and broadcasts pairs (or fours) of weights: no
//! horizontal sums, full use of the units where 16 tokens or more share an expert. The *dot form*
//! ([`Vectors::dots`](super::Vectors::dots)) has k in the lanes of weights and tokens alike: a load of 64 bytes of weights
//! serves each token once, no lane is empty, and one horizontal sum ends each row: for a few tokens, where reading the
//! weights takes the time.

pub(super) mod attention;
mod bf16_fma;
mod bf16_pairs;
mod glu;
mod int8;
mod pack;
mod store;
mod to_bf16;
pub(super) mod transpose;
mod vectors;

use super::Engine;
use crate::isa::{Avx512, Bf16Form, Int8Form};
use crate::pack::{PANEL, Panels};
use crate::tensor::{DType, Rows};

impl Engine for Avx512 {
    type Session = ();
    type Vectors = Self;

    const GROUP: usize = 24;

    fn vectors(self) -> Self {
        self
    }

    fn begin(self) {}

    fn dot_tokens(self, dtype: DType, tokens: usize) -> usize {
        // Where a panel that is not full still costs less than its tokens one by one (measured on Emerald Rapids, and Q8_0, of which half a
        // panel takes half the products, on Sapphire Rapids).
        let most = match dtype {
            DType::Q8_0 => 4,
            _ => 11,
        };
        let rest = tokens % PANEL;
        if rest <= most { rest } else { 0 }
    }

    // SAFETY: contract of `Engine::product`.
    unsafe fn product(self, (): &mut (), rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
        debug_assert!(rows.dtype == panels.dtype && rows.k == panels.k);
        match rows.dtype {
            // SAFETY: `self` proves the features; the rest is the caller's promise.
            DType::Bf16 => unsafe {
                match Bf16Form::best() {
                    Bf16Form::Fma => bf16_fma::panels(rows, panels, c, add),
                    Bf16Form::Pairs => bf16_pairs::panels(rows, panels, c, add),
                }
            },
            // SAFETY: as above.
            DType::Q8_0 => unsafe {
                match Int8Form::best() {
                    Int8Form::ReadyFirst => int8::ready_first(rows, panels, c, add),
                    Int8Form::InPlace => int8::in_place(rows, panels, c, add),
                }
            },
            other => unreachable!("no panel product for {other:?}"),
        }
    }
}

#[cfg(test)]
mod tests;
