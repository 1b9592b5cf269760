//! What surrounds the products, on AVX-512.

use super::{bf16_fma, bf16_pairs, glu, int8, pack, store};
use crate::isa::{Avx512, Bf16Form};
use crate::kernels::vectors::vectors_by_modules;
use crate::pack::TokenRows;
use crate::tensor::{DType, Rows};

vectors_by_modules!(Avx512 {
    fn bf16_form(self) -> Bf16Form {
        Bf16Form::best()
    }

    // SAFETY: contract of `Vectors::dots`.
    unsafe fn dots(self, rows: Rows<'_>, xs: TokenRows<'_>, y: *mut f32, ld: usize) {
        debug_assert!(rows.dtype == xs.dtype && rows.k == xs.k);
        match rows.dtype {
            // SAFETY: the token proves the features; the rest is the caller's promise.
            DType::Bf16 => unsafe {
                match Bf16Form::best() {
                    Bf16Form::Fma => bf16_fma::dots(rows, xs, y, ld),
                    Bf16Form::Pairs => bf16_pairs::dots(bf16_pairs::in_order(rows, xs.tokens), xs, y, ld),
                }
            },
            // SAFETY: as above.
            DType::Q8_0 => unsafe { int8::dots(rows, xs, y, ld) },
            other => unreachable!("no dot product for {other:?}"),
        }
    }
});
