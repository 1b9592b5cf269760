//! The passes of the dot form: some rows side by side, times some tokens.

use std::arch::x86_64::*;

use super::Group;
use crate::tensor::Rows;

/// Rows of a short block.
const SHORT: usize = 64;

/// A pass of the dot form: a group of rows times some tokens.
pub struct DotPass<'a> {
    pub rows: Rows<'a>,
    pub group: Group,
    pub x: *const u8,
    pub x_stride: usize,
    /// As [`TokenRows::skip`](crate::pack::TokenRows::skip).
    pub skip: usize,
    /// Where the first token's results begin, for row 0.
    pub y: *mut f32,
    pub ld: usize,
    /// Of each step's cache lines that are to be prefetched, this pass's: all passes together see to all of them, so that
    /// memory works as steadily as the arithmetic.
    pub lines: std::ops::Range<usize>,
}

impl DotPass<'_> {
    /// Addresses of the group's rows.
    pub fn rows<const R: usize>(&self) -> [*const u8; R] {
        self.group.addresses(&self.rows)
    }

    /// Writes the sums of the pass's token `t` with up to four of the group's rows, from `first` on.
    ///
    /// # Safety
    /// The token is the pass's, whose `y` is the caller's of `dots`.
    // SAFETY: contract above.
    #[inline(always)]
    pub unsafe fn store(&self, t: usize, first: usize, sums: __m128) {
        let (group, y) = (self.group, self.y.wrapping_add(t * self.ld));
        let n = 4.min(group.n - first);
        // SAFETY: a result for each row of the group; SSE is part of x86-64.
        unsafe {
            if n == 4 && group.apart == 1 {
                return _mm_storeu_ps(y.add(group.row(first)), sums);
            }
            let mut lanes = [0f32; 4];
            _mm_storeu_ps(lanes.as_mut_ptr(), sums);
            for (r, sum) in lanes.into_iter().enumerate().take(n) {
                y.add(group.row(first + r)).write(sum);
            }
        }
    }
}

/// Rows that the dot form has side by side. More than four for a `few` tokens where streams are short: of rows with gaps, and of a short
/// block where that leaves no row over.
pub fn side_by_side(rows: &Rows<'_>, few: bool) -> usize {
    let leaves = |left: usize| [8, 6].into_iter().find(|size| rows.n % size == left);
    match rows.contiguous() {
        _ if !few => 4,
        true if rows.n.is_multiple_of(4) || rows.n > SHORT => 4,
        true => leaves(0).unwrap_or(4),
        false => leaves(0).or(leaves(4)).unwrap_or(8),
    }
}

/// Makes `dots` of a kernel `dot::<rows, tokens>` for 4 rows or 1 and each of some numbers of tokens, up to `$most`; and for 8 and 6 rows
/// (see [`side_by_side`]) with no more than `$few` tokens.
macro_rules! dots_by_passes {
    ($features:literal, $most:literal, [$($tokens:literal)*], $few:literal, [$($few_tokens:literal)*]) => {
        /// The dot form (see [`Vectors::dots`](crate::kernels::Vectors::dots)).
        ///
        /// # Safety
        /// As there, on a CPU with the features.
        // SAFETY: contract above.
        #[target_feature(enable = $features)]
        pub unsafe fn dots(rows: Rows<'_>, xs: TokenRows<'_>, y: *mut f32, ld: usize) {
            let passes = xs.tokens.div_ceil($most);
            let side_by_side = $crate::kernels::passes::side_by_side(&rows, xs.tokens <= $few);
            for group in $crate::kernels::passes::dot_groups(&rows, side_by_side) {
                let mut t = 0;
                for pass in 0..passes {
                    let tokens = $crate::kernels::passes::even_group(xs.tokens - t, $most);
                    // One line more than rows: 4 rows of Q8_0 advance by 272 bytes.
                    let lines = (group.n + 1) * pass / passes..(group.n + 1) * (pass + 1) / passes;
                    // SAFETY: token t of the caller's y.
                    let y = unsafe { y.add(t * ld) };
                    let (x, x_stride, skip) = (xs.row(t), xs.stride, xs.skip);
                    let part = $crate::kernels::passes::DotPass { rows, group, x, x_stride, skip, y, ld, lines };
                    // SAFETY: the group's rows and tokens t .. t + tokens lie inside.
                    unsafe {
                        match (group.n, tokens) {
                            $((8, $few_tokens) => dot::<8, $few_tokens>(part), (6, $few_tokens) => dot::<6, $few_tokens>(part),)*
                            $((4, $tokens) => dot::<4, $tokens>(part), (_, $tokens) => dot::<1, $tokens>(part),)*
                            _ => unreachable!("groups have at most {} tokens", $most),
                        }
                    }
                    t += tokens;
                }
            }
        }
    };
}
pub(in crate::kernels) use dots_by_passes;
