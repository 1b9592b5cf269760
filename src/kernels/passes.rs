//! How the kernels that multiply rows in place go by them: what to prefetch meanwhile, and the passes of the dot form.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use crate::tensor::Rows;

/// What lies ahead of the row in hand in the order in which this thread reads: where to prefetch.
#[derive(Clone, Copy)]
pub struct Ahead {
    end: *const u8,
    next: *const u8,
}

/// How far ahead of the rows in hand to prefetch: enough for the latency of memory at one core's share of its bandwidth.
const AHEAD: usize = 16 << 10;

impl Ahead {
    pub fn of(rows: &Rows<'_>) -> Self {
        Self { end: rows.data.wrapping_add(rows.n * rows.stride), next: rows.next }
    }

    /// Where to prefetch while the rows at `at` are in hand.
    pub fn from(self, at: *const u8) -> *const u8 {
        let ahead = at.wrapping_add(AHEAD);
        if ahead < self.end { ahead } else { self.next.wrapping_add(ahead.addr() - self.end.addr()) }
    }

    /// Where to prefetch while the rows `[i, i + r)` are in hand, which are read side by side, `step` bytes of each at a time.
    ///
    /// Contiguous rows are one stretch, and so is what lies ahead. Rows with gaps (some columns, or rows apart) are followed by
    /// their like: what is in the gaps is not wanted, and may lie on another NUMA node.
    pub fn side_by_side(rows: &Rows<'_>, i: usize, r: usize, step: usize) -> Sweep {
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
    pub fn block_after(self, at: *const u8, bytes: usize) -> *const u8 {
        let after = at.wrapping_add(bytes);
        if after < self.end { after } else { self.next }
    }
}

/// Prefetches for rows that are read side by side: some lines a step.
pub struct Sweep {
    at: *const u8,
    /// From a line to the next.
    apart: usize,
    step: usize,
    lines: usize,
}

impl Sweep {
    /// Prefetches line `i` of the step in hand, into the L2 cache, if the step has so many.
    #[inline(always)]
    pub fn line(&self, i: usize) {
        if i < self.lines {
            // SAFETY: SSE is part of x86-64, and a prefetch only hints.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.at.wrapping_add(i * self.apart).cast()) };
        }
    }

    /// Only some of each step's lines.
    pub fn only(self, lines: std::ops::Range<usize>) -> Self {
        let end = lines.end.min(self.lines);
        let at = self.at.wrapping_add(lines.start * self.apart);
        Self { at, lines: end.saturating_sub(lines.start), ..self }
    }

    /// Prefetches all lines of the step in hand and goes on to the next one.
    #[inline(always)]
    pub fn step(&mut self) {
        let mut at = self.at;
        for _ in 0..self.lines {
            // SAFETY: as in `line`.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
            at = at.wrapping_add(self.apart);
        }
        self.advance();
    }

    /// Goes on to the next step.
    #[inline(always)]
    pub fn advance(&mut self) {
        self.at = self.at.wrapping_add(self.step);
    }
}

/// A pass of the dot form: some rows from `i` on times some tokens.
pub struct DotPass<'a> {
    pub rows: Rows<'a>,
    pub i: usize,
    pub x: *const u8,
    pub x_stride: usize,
    pub y: *mut f32,
    pub ld: usize,
    /// Of each step's cache lines that are to be prefetched, this pass's: all passes together see to all of them, so that
    /// memory works as steadily as the arithmetic.
    pub lines: std::ops::Range<usize>,
}

/// Makes `dots` of a kernel `dot::<rows, tokens>` for 4 rows or 1 and each of some numbers of tokens, up to `$most`.
macro_rules! dots_by_passes {
    ($features:literal, $most:literal, [$($tokens:literal)*]) => {
        /// The dot form (see [`Vectors::dots`](crate::kernels::Vectors::dots)).
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
                    let group = $crate::kernels::passes::even_group(xs.tokens - t, $most);
                    // One line more than rows: 4 rows of Q8_0 advance by 272 bytes.
                    let lines = (n + 1) * pass / passes..(n + 1) * (pass + 1) / passes;
                    // SAFETY: row i and token t of the caller's y.
                    let y = unsafe { y.add(t * ld + i) };
                    let part = $crate::kernels::passes::DotPass { rows, i, x: xs.row(t), x_stride: xs.stride, y, ld, lines };
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
pub(super) use dots_by_passes;

/// Sizes of the next group when `left` items are done in groups of at most `most`, as even as can be.
pub fn even_group(left: usize, most: usize) -> usize {
    left.div_ceil(left.div_ceil(most))
}
