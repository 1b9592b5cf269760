//! The products, one folder per engine; no threads, no policy, no ggml.
//!
//! An [`Engine`] multiplies a block of weight rows, in place as GGUF stores them, with panels of tokens. The result is a
//! *C block*: for each panel, for each row, 16 lanes of f32 (one a token), which is also how an AMX tile is stored.

pub mod amx;
pub mod attention;
pub mod avx2;
pub mod avx512;
pub mod glu;
mod passes;
pub mod reference;
mod series;
pub mod vectors;

use crate::pack::Panels;
use crate::tensor::{DType, Rows};
pub use vectors::{Finish, Vectors};

/// Something that multiplies weight rows with panels.
pub trait Engine: Copy + Send + Sync {
    /// Holds the thread's state (AMX: its tile configuration, saved and put back) between products of one operation.
    type Session;

    /// The vector instructions that go with it.
    type Vectors: Vectors;

    /// How many rows it multiplies at a time: blocks that it is given have a multiple of this, where the matrix does. A
    /// multiple of 32, so that a Q8_0 block of the next product's k lies in one of them.
    const ROWS: usize = 32;

    /// The most rows of a block where each is multiplied with many tokens: the more, the less often panels come from the cache
    /// that the cores share. Fewer than blocks have anyway change nothing.
    const MANY_TOKENS_ROWS: usize = Self::ROWS;

    /// The same as [`Engine::ROWS`] where rows need not come in blocks of 32.
    const GROUP: usize = Self::ROWS;

    /// Bytes of memory for [`Engine::lend`], for each thread.
    const ROOM: usize = 0;

    /// Views of a panel of BF16 may begin and end at multiples of so many columns.
    const PANEL_STEP: usize = 32;

    /// The token of the vector instructions.
    fn vectors(self) -> Self::Vectors;

    /// In what type an expert's `tokens` tokens that are lanes of panels are packed, for weights of `dtype`.
    fn panel_dtype(self, dtype: DType, _tokens: usize) -> DType {
        dtype
    }

    /// Starts a run of products on this thread.
    fn begin(self) -> Self::Session;

    /// Lends a session [`Engine::ROOM`] bytes; without them, products with many tokens may take longer.
    ///
    /// # Safety
    /// `room` is 64-byte aligned, and the session's alone as long as that lives.
    // SAFETY: contract above.
    unsafe fn lend(self, _session: &mut Self::Session, _room: *mut u8) {}

    /// How many of an expert's `tokens` tokens (the last ones) are better multiplied as rows, by [`Vectors::dots`], than as
    /// lanes of panels; at most [`MAX_TOKEN_ROWS`](crate::pack::MAX_TOKEN_ROWS).
    fn dot_tokens(self, _dtype: DType, _tokens: usize) -> usize {
        0
    }

    /// The same where the rows of a block may be apart (a NUMA node's parts).
    fn dot_tokens_apart(self, dtype: DType, tokens: usize) -> usize {
        self.dot_tokens(dtype, tokens)
    }

    /// `c[(panel * rows.n + row) * 16 + lane] (+)= sum over k of w[row][k] * x[k][panel][lane]`, in f32.
    ///
    /// With `add` the block is added to, else overwritten. Lanes past the last token get unspecified values (NaN where
    /// a weight is Inf). BF16 weights take BF16 panels, Q8_0 weights INT8 panels or those of [`Engine::panel_dtype`]. Nothing outside the rows'
    /// own bytes is read, not even the next row's: `0 * Inf` would be NaN there.
    ///
    /// # Safety
    /// `rows` and `panels` are as their types promise and agree in `k`; `c` is 64-byte aligned and writable
    /// for `panels.count() * rows.n * 16` f32.
    // SAFETY: contract above.
    unsafe fn product(self, session: &mut Self::Session, rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool);
}
