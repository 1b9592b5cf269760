//! Blocks of weight rows: how the threads share them.

use super::routing::{Active, Routing};
use crate::isa::Reading;
use crate::kernels::Engine;
use crate::pack::PANEL;
use crate::team::Worker;
use crate::tensor::Weights;

/// Most rows of a block: a multiple of the register blocks of all engines.
const MAX_ROWS: usize = 96;
/// The same where it is read in streams, which are the longer the more rows there are.
const STREAMED_ROWS: usize = 1024;
/// Most of them that only token rows meet, on the vectors: 4 to 8 % faster than up to 1 MiB with Q8_0, no difference with BF16 (Xeon 6).
const DOT_ROWS: usize = 192;
/// The most of all, [`Engine::MANY_TOKENS_ROWS`] included.
pub const MOST_ROWS: usize = STREAMED_ROWS;
/// Up to so many tokens an expert on average, a block goes by once, and need not stay in L2.
const FEW_TOKENS: usize = 64;
/// Rows of a block of few tokens, times tokens, at most: a C block of 128 KiB.
const STREAMED_SUMS: usize = 32 << 10;
/// From so many tokens an expert on, on average, blocks may have [`Engine::MANY_TOKENS_ROWS`] rows.
const MANY_TOKENS: usize = 256;
/// Bytes of weights of a block, at most about: a stretch that streams well and stays in the L2 cache with many tokens.
const BLOCK_BYTES: usize = 768 << 10;
/// The same in streams. Measured on a Xeon 6, products alone: rows of Q8_0, 768 wide, in blocks of 128, 192, 512 and 1024 take 1.20, 1.16,
/// 1.09 and 1.07 times as long as plain reads; 2048 wide in blocks of 192 and 384 1.12 and 1.05.
const STREAMED_BYTES: usize = 1 << 20;
/// Blocks for each thread, at least, where there are enough rows, so that the threads end together.
const BLOCKS_PER_THREAD: usize = 8;

/// The largest block of a matrix: rows, and bytes of weights.
#[derive(Clone, Copy, Debug)]
struct Most {
    rows: usize,
    bytes: usize,
}

impl Most {
    /// For what a routing's experts have on average.
    fn of<E: Engine>(routing: &Routing<'_>) -> Self {
        const { assert!(E::MANY_TOKENS_ROWS <= MOST_ROWS && E::ROWS <= MAX_ROWS) };
        match routing.pairs.len().div_ceil(routing.active.len().max(1)) {
            MANY_TOKENS.. => Self { rows: MAX_ROWS.max(E::MANY_TOKENS_ROWS), bytes: BLOCK_BYTES },
            tokens if tokens <= FEW_TOKENS && Reading::best() == Reading::Streams => {
                let lanes = routing.active.iter().any(|a| a.lanes() > 0);
                let most = if lanes { STREAMED_ROWS } else { DOT_ROWS };
                let rows = (STREAMED_SUMS / tokens.next_multiple_of(PANEL).max(1)).min(most);
                Self { rows, bytes: STREAMED_BYTES }
            }
            _ => Self { rows: MAX_ROWS, bytes: BLOCK_BYTES },
        }
    }

    /// Rows of a block of `w`: a multiple of `step`, about `rows` or less.
    fn rows(self, w: &Weights<'_>, rows: usize, step: usize) -> usize {
        let by_bytes = self.bytes / w.dtype.row_bytes(w.k).max(1);
        by_bytes.min(rows).clamp(step, self.rows) / step * step
    }
}

/// Calls `work` with each of `total` items that falls to this worker, and with the item that it will have next, if any: so
/// that the kernel in hand can prefetch across the seam. The team's counter must be fresh (behind a barrier).
pub fn each(worker: &Worker<'_>, total: usize, mut work: impl FnMut(usize, Option<usize>)) {
    let mut mine = worker.next();
    while mine < total {
        let next = worker.next();
        work(mine, (next < total).then_some(next));
        mine = next;
    }
}

/// Row blocks of all active experts, in the order of memory.
#[derive(Clone, Copy, Debug)]
pub struct Blocks<'a> {
    w: Weights<'a>,
    active: &'a [Active],
    rows: usize,
    per_expert: usize,
}

impl<'a> Blocks<'a> {
    /// Blocks of `w` for a team of `nth` threads, of a multiple of the engine's rows but for an expert's last.
    pub fn new<E: Engine>(_: E, w: Weights<'a>, routing: &Routing<'a>, nth: usize) -> Self {
        let by_threads = (w.n * routing.active.len()).div_ceil(BLOCKS_PER_THREAD * nth);
        let most = Most::of::<E>(routing).rows(&w, by_threads, E::ROWS);
        // Even ones: of 768 rows, two blocks of 384 and not one of 480 and one of 288.
        let rows = w.n.div_ceil(w.n.div_ceil(most).max(1)).next_multiple_of(E::ROWS);
        Self { w, active: routing.active, rows, per_expert: w.n.div_ceil(rows.max(1)) }
    }

    /// Number of blocks.
    pub fn count(&self) -> usize {
        self.per_expert * self.active.len()
    }

    /// Block `i`: the expert, its first row, the number of its rows.
    pub fn get(&self, i: usize) -> (&'a Active, usize, usize) {
        let first = i % self.per_expert * self.rows;
        (&self.active[i / self.per_expert], first, self.rows.min(self.w.n - first))
    }

    /// Address of block `i`.
    pub fn start(&self, i: usize) -> *const u8 {
        let (active, first, _) = self.get(i);
        self.start_of(active, first)
    }

    /// Address of an expert's row.
    pub fn start_of(&self, active: &Active, row: usize) -> *const u8 {
        self.w.rows(active.expert, row, 0).data
    }
}

/// All rows of a matrix, cut into blocks that get smaller: so the first ones are long streams, and the threads still end together.
#[derive(Clone, Copy, Debug)]
pub struct Cuts {
    n: usize,
    /// Parts into which what is left is cut, of which the next block is one.
    parts: usize,
    most: usize,
    least: usize,
    step: usize,
}

impl Cuts {
    /// Blocks of `w`'s rows for a team of `nth` threads: multiples of `step` but for the last, at most `most`.
    pub fn new<E: Engine>(
        _: E,
        w: &Weights<'_>,
        routing: &Routing<'_>,
        nth: usize,
        (step, most): (usize, usize),
    ) -> Self {
        let most = Most::of::<E>(routing).rows(w, most, step);
        let least = w.n.div_ceil(2 * BLOCKS_PER_THREAD * nth).next_multiple_of(step).min(most);
        Self { n: w.n, parts: 2 * nth, most, least, step }
    }

    /// First row and number of rows of each block.
    pub fn iter(self) -> impl Iterator<Item = (usize, usize)> {
        let mut first = 0;
        std::iter::from_fn(move || {
            let left = self.n - first;
            let size = (left / self.parts).clamp(self.least, self.most) / self.step * self.step;
            let block = (first, size.min(left));
            first += block.1;
            (left > 0).then_some(block)
        })
    }

    /// Block `i`.
    pub fn get(self, i: usize) -> (usize, usize) {
        self.iter().nth(i).unwrap_or((self.n, 0))
    }

    /// The largest block's rows.
    pub fn largest(self) -> usize {
        self.get(0).1
    }
}

/// The rows of a block that an expert's tokens meet at a time, as first row and number: all, as long as their sums are not too many; where
/// more panels than go by with the weights come back to them, so many that they stay in L2.
pub fn pieces<E: Engine>(_: E, active: &Active, n: usize) -> impl Iterator<Item = (usize, usize)> {
    let most = match active.lanes() {
        0 => n,
        lanes if lanes > FEW_TOKENS => MAX_ROWS.max(E::MANY_TOKENS_ROWS),
        lanes => STREAMED_SUMS / lanes.next_multiple_of(PANEL),
    };
    let size = n.div_ceil(n.div_ceil(most.max(1)).max(1)).next_multiple_of(E::ROWS);
    (0..n).step_by(size.max(1)).map(move |first| (first, size.min(n - first)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_have_each_row_once_and_get_smaller() {
        for (n, nth, step, most) in
            [(2048, 2, 32, 512), (2048, 64, 32, 512), (7168, 3, 32, 96), (50, 2, 8, 64), (1, 1, 8, 64)]
        {
            let least = usize::div_ceil(n, 16 * nth).next_multiple_of(step).min(most);
            let cuts = Cuts { n, parts: 2 * nth, most, least, step };
            let all: Vec<_> = cuts.iter().collect();
            let mut done = 0;
            for (i, &(first, rows)) in all.iter().enumerate() {
                assert!(first == done && rows > 0 && rows <= cuts.largest(), "{cuts:?}: {all:?}");
                assert!(rows.is_multiple_of(step) || i + 1 == all.len(), "{cuts:?}: {all:?}");
                assert_eq!(cuts.get(i), (first, rows));
                done += rows;
            }
            assert_eq!(done, n);
            assert!(all.is_sorted_by(|a, b| a.1 >= b.1), "{all:?}");
        }
    }
}
