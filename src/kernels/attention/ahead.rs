//! Prefetching in small portions, so that memory works all the time that the arithmetic does.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use super::Source;

/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes of a stream, at least, and how many there are side by side, at most: the hardware runs ahead of each by itself within a page, by
/// so few lines that one stream alone is not ahead by the time that memory takes (docs/MEMORY.md).
const STREAM: usize = 4096;
const STREAMS: usize = 8;

/// The rows of the cache that will be widened next, asked for line by line.
#[derive(Clone, Copy, Debug)]
pub struct Ahead {
    at: *const u8,
    /// Lines that are asked for side by side, or are a row's, how far apart they are, and how many are left of these.
    lines: usize,
    apart: usize,
    left: usize,
    /// Bytes from behind the last of them to the next ones.
    skip: usize,
    /// Lines left in all.
    total: usize,
    /// Lines of a portion.
    portion: usize,
}

impl Ahead {
    /// Nothing to ask for.
    pub const NOTHING: Self = Self { at: std::ptr::null(), lines: 0, apart: 0, left: 0, skip: 0, total: 0, portion: 0 };

    /// Asks for `rows` in `portions` portions.
    pub fn new(rows: Source, portions: usize) -> Self {
        let bytes = rows.dtype.row_bytes(rows.d);
        let lines = |bytes: usize| (rows.data.addr() % LINE + bytes).div_ceil(LINE);
        let (side, apart, next, total) = if bytes == rows.stride {
            let all = bytes * rows.rows;
            let streams = (all / STREAM).clamp(1, STREAMS);
            let each = lines(all).div_ceil(streams);
            (streams, each * LINE, LINE, each * streams)
        } else {
            (lines(bytes), LINE, rows.stride, lines(bytes) * rows.rows)
        };
        let skip = next.wrapping_sub(side * apart);
        Self { at: rows.data, lines: side, apart, left: side, skip, total, portion: total.div_ceil(portions.max(1)) }
    }

    /// Asks for the next portion, into the second-level cache: the rows of a head lie a power of two apart, and would throw
    /// each other out of the few sets of the first level that they share.
    #[inline(always)]
    pub fn step(&mut self) {
        for _ in 0..self.portion.min(self.total) {
            // SAFETY: a prefetch touches nothing; any address is allowed.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(self.at.cast()) };
            self.at = self.at.wrapping_add(self.apart);
            self.left -= 1;
            self.total -= 1;
            if self.left == 0 {
                self.at = self.at.wrapping_add(self.skip);
                self.left = self.lines;
            }
        }
    }
}
