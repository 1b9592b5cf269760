//! Kernels of the AVX-512 engine: BF16 products by `vdpbf16ps`, INT8 products by `vpdpbusd`.
//!
//! Two forms. The *panel form* ([`Engine::product`]) has tokens in the lanes and broadcasts pairs (or fours) of weights: no
//! horizontal sums, full use of the units where 16 tokens or more share an expert. The *dot form* ([`dots`]) has k in the
//! lanes of weights and tokens alike: a load of 64 bytes of weights serves each token once, no lane is empty, and one
//! horizontal sum ends each row: for a few tokens, where reading the weights takes the time.

pub mod attention;
mod bf16_fma;
mod bf16_pairs;
pub mod glu;
mod int8;
pub mod pack;
pub mod store;
pub(crate) mod transpose;

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use super::Engine;
use crate::isa::{Avx512, Bf16Form};
use crate::pack::{PANEL, Panels, TokenRows};
use crate::tensor::{DType, Rows};

/// What lies ahead of the row in hand in the order in which this thread reads: where to prefetch.
#[derive(Clone, Copy)]
struct Ahead {
    end: *const u8,
    next: *const u8,
}

/// How far ahead of the rows in hand to prefetch: enough for the latency of memory at one core's share of its bandwidth.
const AHEAD: usize = 16 << 10;

impl Ahead {
    fn of(rows: &Rows<'_>) -> Self {
        Self { end: rows.data.wrapping_add(rows.n * rows.stride), next: rows.next }
    }

    /// Where to prefetch while the rows at `at` are in hand.
    fn from(self, at: *const u8) -> *const u8 {
        let ahead = at.wrapping_add(AHEAD);
        if ahead < self.end { ahead } else { self.next.wrapping_add(ahead.addr() - self.end.addr()) }
    }

    /// Where to prefetch while the rows `[i, i + r)` are in hand, which are read side by side, `step` bytes of each at a time.
    ///
    /// Contiguous rows are one stretch, and so is what lies ahead. Rows with gaps (some columns, or rows apart) are followed by
    /// their like: what is in the gaps is not wanted, and may lie on another NUMA node.
    fn side_by_side(rows: &Rows<'_>, i: usize, r: usize, step: usize) -> Sweep {
        if rows.contiguous() {
            return Sweep {
                at: Self::of(rows).from(rows.row(i)),
                apart: 64,
                step: r * step,
                lines: (r * step).div_ceil(64),
            };
        }
        let at = if i + r < rows.n { rows.row(i + r) } else { rows.next };
        Sweep { at, apart: rows.stride, step, lines: r }
    }

    /// What is read after the `bytes` bytes at `at`: where to prefetch while they are in hand more than once.
    fn block_after(self, at: *const u8, bytes: usize) -> *const u8 {
        let after = at.wrapping_add(bytes);
        if after < self.end { after } else { self.next }
    }
}

/// Prefetches for rows that are read side by side: some lines a step.
struct Sweep {
    at: *const u8,
    /// From a line to the next.
    apart: usize,
    step: usize,
    lines: usize,
}

impl Sweep {
    /// Prefetches line `i` of the step in hand, into the L2 cache, if the step has so many.
    #[inline(always)]
    fn line(&self, i: usize) {
        if i < self.lines {
            // SAFETY: SSE is part of x86-64, and a prefetch only hints.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.at.wrapping_add(i * self.apart).cast()) };
        }
    }

    /// Goes on to the next step.
    #[inline(always)]
    fn advance(&mut self) {
        self.at = self.at.wrapping_add(self.step);
    }
}

/// A pass of the dot form: some rows from `i` on times some tokens.
struct DotPass<'a> {
    rows: Rows<'a>,
    i: usize,
    x: *const u8,
    x_stride: usize,
    y: *mut f32,
    ld: usize,
    /// Of each step's cache lines that are to be prefetched, this pass's: all passes together see to all of them, so that
    /// memory works as steadily as the arithmetic.
    lines: std::ops::Range<usize>,
}

/// Makes `dots` of a kernel `dot::<rows, tokens>` for 4 rows or 1 and each of some numbers of tokens, up to `$most`.
macro_rules! dots_by_passes {
    ($features:literal, $most:literal, [$($tokens:literal)*]) => {
        /// The dot form (see [`dots`](crate::kernels::avx512::dots)).
        ///
        /// # Safety
        /// As there, on a CPU with the features.
        // SAFETY: contract above.
        #[target_feature(enable = $features)]
        pub unsafe fn dots(rows: Rows<'_>, xs: TokenRows<'_>, y: *mut f32, ld: usize) {
            let passes = xs.tokens.div_ceil($most);
            let mut i = 0;
            while i < rows.n {
                let n = if i + 4 <= rows.n { 4 } else { 1 };
                let mut t = 0;
                for pass in 0..passes {
                    let group = $crate::kernels::avx512::even_group(xs.tokens - t, $most);
                    // One line more than rows: 4 rows of Q8_0 advance by 272 bytes.
                    let lines = (n + 1) * pass / passes..(n + 1) * (pass + 1) / passes;
                    // SAFETY: row i and token t of the caller's y.
                    let y = unsafe { y.add(t * ld + i) };
                    let part = $crate::kernels::avx512::DotPass { rows, i, x: xs.row(t), x_stride: xs.stride, y, ld, lines };
                    // SAFETY: rows i .. i + n and tokens t .. t + group lie inside.
                    unsafe {
                        match (n, group) {
                            $((4, $tokens) => dot::<4, $tokens>(part), (_, $tokens) => dot::<1, $tokens>(part),)*
                            _ => unreachable!("groups have at most {} tokens", $most),
                        }
                    }
                    t += group;
                }
                i += n;
            }
        }
    };
}
use dots_by_passes;

impl Engine for Avx512 {
    type Session = ();

    const GROUP: usize = 24;

    fn begin(self) {}

    fn dot_tokens(self, dtype: DType, tokens: usize) -> usize {
        // Where a panel that is not full still costs less than its tokens one by one (measured on Emerald Rapids).
        let most = match dtype {
            DType::Q8_0 => 5,
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
            DType::Q8_0 => unsafe { int8::panels(rows, panels, c, add) },
            other => unreachable!("no panel product for {other:?}"),
        }
    }
}

/// The dot form: `y[token * ld + row] = sum over k of w[row][k] * x[token][k]`, in f32.
///
/// Nothing outside the rows' own bytes is read. A row's result does not depend on the other rows of the block.
///
/// # Safety
/// `rows` and `xs` are as their types promise and agree in `dtype` and `k`; `y` is writable for `xs.tokens` rows of
/// `rows.n` f32 that are `ld` f32 apart.
// SAFETY: contract above.
pub unsafe fn dots(_proof: Avx512, rows: Rows<'_>, xs: TokenRows<'_>, y: *mut f32, ld: usize) {
    debug_assert!(rows.dtype == xs.dtype && rows.k == xs.k);
    match rows.dtype {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        DType::Bf16 => unsafe {
            match Bf16Form::best() {
                Bf16Form::Fma => bf16_fma::dots(rows, xs, y, ld),
                Bf16Form::Pairs => bf16_pairs::dots(rows, xs, y, ld),
            }
        },
        // SAFETY: as above.
        DType::Q8_0 => unsafe { int8::dots(rows, xs, y, ld) },
        other => unreachable!("no dot product for {other:?}"),
    }
}

/// Sizes of the next group when `left` items are done in groups of at most `most`, as even as can be.
fn even_group(left: usize, most: usize) -> usize {
    left.div_ceil(left.div_ceil(most))
}

#[cfg(test)]
mod tests;
