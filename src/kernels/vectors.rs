//! What surrounds the products, for each vector instruction set: tokens into panels and rows, the dot form, and what becomes of
//! C blocks.

use super::glu::Glu;
use crate::isa::Bf16Form;
use crate::pack::{PANEL, TokenRows};
use crate::tensor::{DType, Rows};

/// How rows of a C block end in the result: `to[i] (+)= weight * (c[i] + bias[i])`.
#[derive(Clone, Copy, Debug)]
pub struct Finish {
    /// One value for each weight row of the block, or null.
    pub bias: *const f32,
    /// Whether to add to what is there.
    pub add: bool,
}

/// A vector instruction set: a token of [`crate::isa`], which proves that it may run.
pub trait Vectors: Copy + Send + Sync {
    /// In which form BF16 token rows are packed for [`Vectors::dots`].
    fn bf16_form(self) -> Bf16Form;

    /// Transform (a): packs up to 16 tokens as one panel (see [`Panels`](crate::pack::Panels)); missing tokens become zeros.
    ///
    /// # Safety
    /// Each address in `tokens` (at most 16) is readable for `k` f32; `panel` is 64-byte aligned and writable for
    /// `panel_bytes(dtype, k)`.
    // SAFETY: contract above.
    unsafe fn panel(self, dtype: DType, k: usize, tokens: &[*const f32], panel: *mut u8);

    /// Packs elements `[first, first + n)` of a token as that part of its row (see [`TokenRows`]): all of it, or what a block
    /// of weight rows made. `first` is a multiple of 32, and `n` too but at the end of `k`, where zeros fill the row's last
    /// unit.
    ///
    /// # Safety
    /// `x`, the element `first`, is readable for `n` f32; `row` is 64-byte aligned and writable for
    /// `token_row_bytes(dtype, k)`.
    // SAFETY: contract above.
    unsafe fn token_row(self, dtype: DType, k: usize, x: *const f32, first: usize, n: usize, row: *mut u8);

    /// The dot form: `y[token * ld + row] = sum over k of w[row][k] * x[token][k]`, in f32.
    ///
    /// Nothing outside the rows' own bytes is read. A row's result does not depend on the other rows of the block.
    ///
    /// # Safety
    /// `rows` and `xs` are as their types promise and agree in `dtype` and `k`; `y` is writable for `xs.tokens` rows of
    /// `rows.n` f32 that are `ld` f32 apart.
    // SAFETY: contract above.
    unsafe fn dots(self, rows: Rows<'_>, xs: TokenRows<'_>, y: *mut f32, ld: usize);

    /// Transform (b): `n` vectors of 16 lanes become columns `[first, first + n)` of a panel; `first` is a multiple of 32. Where
    /// `n` is not one (at the end of k), zeros follow up to it.
    ///
    /// # Safety
    /// `h` is 64-byte aligned and readable for `n * 16` f32; `panel` is 64-byte aligned and writable for `first + n` columns
    /// rounded up to 32.
    // SAFETY: contract above.
    unsafe fn lanes_to_panel(self, dtype: DType, h: *const f32, n: usize, panel: *mut u8, first: usize);

    /// Transform (c): writes the lanes of `n` vectors as rows: lane `t` of vector `i` goes to `rows[t] + i`, with weight
    /// `weights[t]`.
    ///
    /// # Safety
    /// `c` is 64-byte aligned and readable for `n * 16` f32; each of `rows` (at most 16) is writable for `n` f32; the bias is
    /// readable for `n` f32 or null.
    // SAFETY: contract above.
    unsafe fn finish_lanes(self, finish: Finish, c: *const f32, n: usize, rows: &[*mut f32], weights: &[f32; PANEL]);

    /// The same for one token's row of `n` values.
    ///
    /// # Safety
    /// `c` is readable and `row` writable for `n` f32; the bias is readable for `n` f32 or null.
    // SAFETY: contract above.
    unsafe fn finish_row(self, finish: Finish, c: *const f32, n: usize, row: *mut f32, weight: f32);

    /// `gate[i] = glu(gate[i] + gate_bias, up[i] + up_bias)` for a C block of panels: `n` vectors, a weight row each. A bias is
    /// one value for each row, or null.
    ///
    /// # Safety
    /// `gate` is writable and `up` readable for `n * 16` f32, both 64-byte aligned; biases are readable for `n` f32 or null.
    // SAFETY: contract above.
    unsafe fn glu_lanes(self, glu: Glu, gate: *mut f32, up: *const f32, n: usize, bias: [*const f32; 2]);

    /// The same for one token's row of a C block: `n` values; a bias is one value for each of them.
    ///
    /// # Safety
    /// `gate` is writable and `up` readable for `n` f32; biases are readable for `n` f32 or null.
    // SAFETY: contract above.
    unsafe fn glu_row(self, glu: Glu, gate: *mut f32, up: *const f32, n: usize, bias: [*const f32; 2]);
}

/// Makes `impl Vectors` of a token whose module has `pack::{panel, token_row}`, `store::{lanes_to_panel, finish_lanes,
/// finish_row}` and `glu::{lanes, row}`; `$own` is the rest.
macro_rules! vectors_by_modules {
    ($isa:ty { $($own:item)* }) => {
        impl $crate::kernels::Vectors for $isa {
            $($own)*

            // SAFETY: contract of `Vectors::panel`.
            unsafe fn panel(self, dtype: $crate::tensor::DType, k: usize, tokens: &[*const f32], panel: *mut u8) {
                // SAFETY: the token proves the features; the rest is the caller's promise.
                unsafe { pack::panel(dtype, k, tokens, panel) }
            }

            // SAFETY: contract of `Vectors::token_row`.
            unsafe fn token_row(self, dtype: $crate::tensor::DType, k: usize, x: *const f32, first: usize, n: usize, row: *mut u8) {
                // SAFETY: as above.
                unsafe { pack::token_row(dtype, k, x, first, n, row) }
            }

            // SAFETY: contract of `Vectors::lanes_to_panel`.
            unsafe fn lanes_to_panel(self, dtype: $crate::tensor::DType, h: *const f32, n: usize, panel: *mut u8, first: usize) {
                // SAFETY: as above.
                unsafe { store::lanes_to_panel(dtype, h, n, panel, first) }
            }

            // SAFETY: contract of `Vectors::finish_lanes`.
            unsafe fn finish_lanes(self, finish: $crate::kernels::Finish, c: *const f32, n: usize, rows: &[*mut f32], weights: &[f32; $crate::pack::PANEL]) {
                // SAFETY: as above.
                unsafe { store::finish_lanes(finish, c, n, rows, weights) }
            }

            // SAFETY: contract of `Vectors::finish_row`.
            unsafe fn finish_row(self, finish: $crate::kernels::Finish, c: *const f32, n: usize, row: *mut f32, weight: f32) {
                // SAFETY: as above.
                unsafe { store::finish_row(finish, c, n, row, weight) }
            }

            // SAFETY: contract of `Vectors::glu_lanes`.
            unsafe fn glu_lanes(self, kind: $crate::kernels::glu::Glu, gate: *mut f32, up: *const f32, n: usize, bias: [*const f32; 2]) {
                // SAFETY: as above.
                unsafe { glu::lanes(kind, gate, up, n, bias) }
            }

            // SAFETY: contract of `Vectors::glu_row`.
            unsafe fn glu_row(self, kind: $crate::kernels::glu::Glu, gate: *mut f32, up: *const f32, n: usize, bias: [*const f32; 2]) {
                // SAFETY: as above.
                unsafe { glu::row(kind, gate, up, n, bias) }
            }
        }
    };
}
pub(super) use vectors_by_modules;
