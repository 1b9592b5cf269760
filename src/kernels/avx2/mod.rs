//! Kernels of the AVX2 engine, for CPUs without AVX-512 VNNI: BF16 products by f32 fused multiply-adds, INT8 products
//! by `vpdpbusd` where there is AVX-VNNI, else by `vpmaddwd`. The layouts are those of [`crate::pack`]: 16 lanes are two vectors. As in [`super::avx512`] there is
//! a panel form with tokens in the lanes, and a dot form for a few tokens with k in the lanes.

mod attention;
mod bf16;
mod exp;
mod glu;
mod int8;
mod pack;
mod part;
mod pieces;
mod quantize;
mod store;
mod sums;
mod transpose;
mod vectors;

use super::Engine;
use crate::isa::Avx2;
use crate::pack::{PANEL, Panels};
use crate::tensor::{DType, Rows};

impl Engine for Avx2 {
    type Session = ();
    type Vectors = Self;

    const GROUP: usize = 24;

    fn vectors(self) -> Self {
        self
    }

    fn begin(self) {}

    fn dot_tokens(self, dtype: DType, tokens: usize) -> usize {
        // Where a panel that is not full, or half of one, still costs less than its tokens one by one (BF16 measured on Zen 3, Q8_0 on
        // a Sapphire Rapids; in BF16 they cost the same, so there is no half).
        let most = match dtype {
            DType::Q8_0 if self.vnni().is_some() => 3,
            DType::Q8_0 => 4,
            _ => 12,
        };
        let rest = tokens % PANEL;
        if rest <= most { rest } else { 0 }
    }

    // SAFETY: contract of `Engine::product`.
    unsafe fn product(self, (): &mut (), rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
        debug_assert!(rows.dtype == panels.dtype && rows.k == panels.k);
        match rows.dtype {
            // SAFETY: `self` proves the features; the rest is the caller's promise.
            DType::Bf16 => unsafe { bf16::panels(rows, panels, c, add) },
            // SAFETY: as above.
            DType::Q8_0 => unsafe {
                match self.vnni() {
                    Some(vnni) => int8::panels(vnni, rows, panels, c, add),
                    None => int8::panels(int8::Words, rows, panels, c, add),
                }
            },
            other => unreachable!("no panel product for {other:?}"),
        }
    }
}

#[cfg(test)]
mod tests;
