//! Prefetching in small portions, so that memory works all the time that the arithmetic does.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use super::Source;

/// Bytes of a cache line.
const LINE: usize = 64;

/// The rows of the cache that will be widened next, asked for line by line.
#[derive(Clone, Copy, Debug)]
pub struct Ahead {
    at: *const u8,
    /// Lines of a row, and how many are left of this one.
    lines: usize,
    left: usize,
    /// Bytes from the end of a row's lines to the next row.
    skip: usize,
    /// Lines left in all.
    total: usize,
    /// Lines of a portion.
    portion: usize,
}

impl Ahead {
    /// Nothing to ask for.
    pub const NOTHING: Self = Self { at: std::ptr::null(), lines: 0, left: 0, skip: 0, total: 0, portion: 0 };

    /// Asks for `rows` in `portions` portions.
    pub fn new(rows: Source, portions: usize) -> Self {
        let bytes = rows.dtype.row_bytes(rows.d);
        let (bytes, stride, n) =
            if bytes == rows.stride { (bytes * rows.rows, 0, 1) } else { (bytes, rows.stride, rows.rows) };
        let lines = (rows.data.addr() % LINE + bytes).div_ceil(LINE);
        let total = lines * n;
        let skip = stride.wrapping_sub(lines * LINE);
        Self { at: rows.data, lines, left: lines, skip, total, portion: total.div_ceil(portions.max(1)) }
    }

    /// Asks for the next portion, into the second-level cache: the rows of a head lie a power of two apart, and would throw
    /// each other out of the few sets of the first level that they share.
    #[inline(always)]
    pub fn step(&mut self) {
        for _ in 0..self.portion.min(self.total) {
            // SAFETY: a prefetch touches nothing; any address is allowed.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.at.cast()) };
            self.at = self.at.wrapping_add(LINE);
            self.left -= 1;
            self.total -= 1;
            if self.left == 0 {
                self.at = self.at.wrapping_add(self.skip);
                self.left = self.lines;
            }
        }
    }
}
