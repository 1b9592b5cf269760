//! What comes near while memory would idle.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use crate::isa::Reading;
use crate::tensor::Rows;

/// Streams in which rows are read that meet panels.
const STREAMS: usize = 16;
/// Bytes of each that the kernel has asked for by itself, and that come at most.
const KERNELS: usize = 512;
const MOST: usize = 4096;

/// The rows that are read next, of which some lines are asked for while sums are made something of (GLU, weighting): one with 16 sums is half of
/// what memory brings in that time, and shows the hardware's prefetcher where the streams are. Measured on a Xeon 6: 1 % of the FFN's time at 8
/// and 16 tokens.
#[derive(Clone, Copy, Debug)]
pub struct Awaited {
    at: *const u8,
    /// From a stream to the next.
    apart: usize,
    stream: usize,
    /// Bytes of each that came, and that may.
    done: usize,
    most: usize,
}

impl Awaited {
    /// What comes after `rows`, if they are read in streams and it is known.
    pub fn behind(rows: &Rows<'_>) -> Self {
        let apart = rows.n / STREAMS * rows.stride;
        let known = rows.reading == Reading::Streams && rows.n.is_multiple_of(STREAMS) && !rows.next.is_null();
        Self { at: rows.next, apart, stream: 0, done: KERNELS, most: if known { apart.min(MOST) } else { 0 } }
    }

    /// Asks for some lines, if there are any left.
    pub fn lines(&mut self, n: usize) {
        for _ in 0..n {
            if self.done >= self.most {
                return;
            }
            let at = self.at.wrapping_add(self.stream * self.apart + self.done);
            // SAFETY: SSE is part of x86-64, and a prefetch only hints.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) };
            self.stream += 1;
            if self.stream == STREAMS {
                (self.stream, self.done) = (0, self.done + 64);
            }
        }
    }
}
