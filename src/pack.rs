//! Transform (a): tokens become panels (paper section 4).
//!
//! A *panel* holds [`PANEL`] tokens in VNNI order, the layout that AMX wants of its right operand and that AVX-512 reads as
//! whole vectors:
//!
//! * BF16: for each pair of k, 16 tokens x 2 values = 64 bytes. K is padded with zeros to a multiple of 32.
//! * INT8: for each block of 32 k, eight groups of 4 k (16 tokens x 4 signed bytes = 64 bytes each), then the 16 tokens'
//!   scales of this block as f32 (64 bytes), then for each token `-128 * (sum of its 32 quants)` as i32 (64 bytes; where VNNI
//!   takes `w + 128` for its unsigned operand, a sum starts there): 640 bytes a block. The quants are those of ggml's
//!   `quantize_row_q8_0` on x86: the scale is `max|x| / 127` rounded to f16, the quant is `x * (127 / max|x|)` rounded to even.
//!
//! Lanes past the last token hold zeros. The panels of an expert follow each other without a gap. An engine may want the last
//! few tokens of an expert not as panel lanes but as plain rows ([`TokenRows`]): they follow the panels.

use std::marker::PhantomData;

use crate::isa::Bf16Form;
use crate::tensor::{DType, QK8_0};

/// Tokens of a panel: the columns of an AMX tile of f32 and the lanes of an AVX-512 vector of f32.
pub const PANEL: usize = 16;
/// Bytes of an INT8 panel for 32 k: the quants, the scales, the starts of the sums.
pub const Q8_PANEL_BLOCK: usize = QK8_0 * PANEL + 2 * PANEL * 4;
/// Bytes of an INT8 token row for 64 k: 64 quants; 16 starts of sums (i32, `-128 * (sum of 4 quants)`); 16 scales (f32,
/// eight times that of the first 32 k, then of the second).
pub const Q8_ROW_BLOCK: usize = 3 * 64;

/// Bytes of one panel for weights of `dtype` with `k` columns.
pub const fn panel_bytes(dtype: DType, k: usize) -> usize {
    match dtype {
        DType::Q8_0 => k / QK8_0 * Q8_PANEL_BLOCK,
        _ => k.next_multiple_of(32) * PANEL * 2,
    }
}

/// Bytes of one token row for weights of `dtype` with `k` columns, a multiple of 64: enough for either form of BF16.
pub const fn token_row_bytes(dtype: DType, k: usize) -> usize {
    match dtype {
        DType::Q8_0 => k.div_ceil(64) * Q8_ROW_BLOCK,
        _ => k.next_multiple_of(32) * 4,
    }
}

/// The most tokens of an expert that may be packed as rows.
pub const MAX_TOKEN_ROWS: usize = 31;

/// The right operand of a product: `tokens` tokens in `tokens.div_ceil(16)` panels, 64-byte aligned.
#[derive(Clone, Copy, Debug)]
pub struct Panels<'a> {
    /// What the tokens are packed as: BF16, or as for Q8_0 weights; decides the panel's layout.
    pub dtype: DType,
    /// Address of the first panel.
    pub data: *const u8,
    /// Columns of the weights.
    pub k: usize,
    /// Tokens, at least one.
    pub tokens: usize,
    /// Bytes from a panel to the next: at least [`panel_bytes`] of the whole K, also in a view of some columns.
    pub stride: usize,
    /// Panels that are read after these: where they begin, and their bytes (0 if that is not known). Only prefetched.
    pub next: (*const u8, usize),
    life: PhantomData<&'a [u8]>,
}

impl Panels<'_> {
    /// A view of packed tokens.
    ///
    /// # Safety
    /// `tokens.div_ceil(PANEL) * panel_bytes(dtype, k)` bytes at `data` (64-byte aligned) are readable for the view's
    /// lifetime.
    // SAFETY: contract above.
    pub unsafe fn from_raw(dtype: DType, data: *const u8, k: usize, tokens: usize) -> Self {
        debug_assert!(data.addr().is_multiple_of(64) && tokens > 0);
        let next = (std::ptr::null(), 0);
        Self { dtype, data, k, tokens, stride: panel_bytes(dtype, k), next, life: PhantomData }
    }

    /// Columns `[k0, k0 + k)` of the same tokens: the right operand for [`Rows::columns`](crate::tensor::Rows::columns).
    ///
    /// `k0` is a multiple of 32 (BF16: of what the engine says), and `k` too unless the range ends at the last column: past other
    /// ranges' ends lie the next columns' values, not zeros.
    pub fn columns(&self, k0: usize, k: usize) -> Self {
        let unit = if self.dtype == DType::Q8_0 { 32 } else { 16 };
        debug_assert!(k0.is_multiple_of(unit) && k0 + k <= self.k && (k.is_multiple_of(unit) || k0 + k == self.k));
        let before = if self.dtype == DType::Q8_0 { panel_bytes(self.dtype, k0) } else { k0 * PANEL * 2 };
        // SAFETY: inside the first panel.
        let data = unsafe { self.data.add(before) };
        Self { data, k, ..*self }
    }

    /// The same, `stride` bytes from one panel to the next: as many as a panel has, or more.
    pub fn apart(self, stride: usize) -> Self {
        debug_assert!(stride >= panel_bytes(self.dtype, self.k) || self.tokens <= PANEL);
        Self { stride, ..self }
    }

    /// The same, behind which the `bytes` bytes at `next` are read.
    pub fn then(self, next: *const u8, bytes: usize) -> Self {
        Self { next: (next, bytes), ..self }
    }

    /// Panels `[p, p + n)`.
    pub fn some(&self, p: usize, n: usize) -> Self {
        debug_assert!(n > 0 && p + n <= self.count());
        Self { data: self.panel(p), tokens: (n * PANEL).min(self.tokens - p * PANEL), ..*self }
    }

    /// Number of panels.
    pub fn count(&self) -> usize {
        self.tokens.div_ceil(PANEL)
    }

    /// Tokens of panel `p`.
    pub fn lanes(&self, p: usize) -> usize {
        debug_assert!(p < self.count());
        PANEL.min(self.tokens - p * PANEL)
    }

    /// Address of panel `p`.
    pub fn panel(&self, p: usize) -> *const u8 {
        debug_assert!(p < self.count());
        // SAFETY: inside the view, by its contract.
        unsafe { self.data.add(p * self.stride) }
    }
}

/// The right operand of the dot form: tokens as rows in k, 64-byte aligned.
///
/// INT8: [`Q8_ROW_BLOCK`] bytes for each 64 k, zeros past the end. BF16: the k values rounded to BF16, zeros up to a multiple
/// of 32, in the form that the engine multiplies fastest ([`Bf16Form`]): as BF16, or as f32, of each 32 k first those with even k,
/// then those with odd k.
#[derive(Clone, Copy, Debug)]
pub struct TokenRows<'a> {
    /// What the weights are: BF16 or Q8_0.
    pub dtype: DType,
    /// How BF16 rows are packed.
    pub form: Bf16Form,
    /// Address of the first row.
    pub data: *const u8,
    /// Columns of the weights.
    pub k: usize,
    /// Tokens, at least one.
    pub tokens: usize,
    /// Bytes from a row to the next: [`token_row_bytes`] of the whole K, also in a view of some columns.
    pub stride: usize,
    /// Columns of the row's first 32 that are not in the view: 0, or 16 of a BF16 row.
    pub skip: usize,
    life: PhantomData<&'a [u8]>,
}

impl TokenRows<'_> {
    /// A view of packed tokens.
    ///
    /// # Safety
    /// `tokens * token_row_bytes(dtype, k)` bytes at `data` (64-byte aligned) are readable for the view's lifetime.
    // SAFETY: contract above.
    pub unsafe fn from_raw((dtype, form): (DType, Bf16Form), data: *const u8, k: usize, tokens: usize) -> Self {
        debug_assert!(data.addr().is_multiple_of(64) && tokens > 0);
        Self { dtype, form, data, k, tokens, stride: token_row_bytes(dtype, k), skip: 0, life: PhantomData }
    }

    /// Columns `[k0, k0 + k)` of the same tokens; `k0` is a multiple of 64 for Q8_0, of 16 else, and `k` too unless the range
    /// ends at the last column.
    pub fn columns(&self, k0: usize, k: usize) -> Self {
        let unit = if self.dtype == DType::Q8_0 { 64 } else { 16 };
        debug_assert!(
            self.skip == 0
                && k0.is_multiple_of(unit)
                && k0 + k <= self.k
                && (k.is_multiple_of(unit) || k0 + k == self.k)
        );
        let (before, skip) = match self.dtype {
            DType::Q8_0 => (token_row_bytes(self.dtype, k0), 0),
            _ => ((k0 - k0 % 32) * self.form.element_bytes(), k0 % 32),
        };
        // SAFETY: inside the first row.
        let data = unsafe { self.data.add(before) };
        Self { data, k, skip, ..*self }
    }

    /// Address of token row `t`.
    pub fn row(&self, t: usize) -> *const u8 {
        debug_assert!(t < self.tokens);
        // SAFETY: inside the view, by its contract.
        unsafe { self.data.add(t * self.stride) }
    }
}
