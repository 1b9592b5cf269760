//! What surrounds the products, on AVX2.

use super::{bf16, glu, int8, pack, store};
use crate::isa::{Avx2, Bf16Form};
use crate::kernels::vectors::vectors_by_modules;
use crate::pack::TokenRows;
use crate::tensor::{DType, Rows};

vectors_by_modules!(Avx2 {
    fn bf16_form(self) -> Bf16Form {
        Bf16Form::Fma
    }

    // SAFETY: contract of `Vectors::dots`.
    unsafe fn dots(self, rows: Rows<'_>, xs: TokenRows<'_>, y: *mut f32, ld: usize) {
        debug_assert!(rows.dtype == xs.dtype && rows.k == xs.k);
        match rows.dtype {
            // SAFETY: the token proves the features; the rest is the caller's promise.
            DType::Bf16 => unsafe { bf16::dots(rows, xs, y, ld) },
            // SAFETY: as above.
            DType::Q8_0 => unsafe {
                match self.vnni() {
                    Some(_) => int8::by_vnni(rows, xs, y, ld),
                    None => int8::by_words(rows, xs, y, ld),
                }
            },
            other => unreachable!("no dot product for {other:?}"),
        }
    }
});
