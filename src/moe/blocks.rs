//! Blocks of weight rows: how the threads share them.

use super::routing::{Active, Routing};
use crate::isa::Reading;
use crate::kernels::Engine;
use crate::team::Worker;
use crate::tensor::{Rows, Weights};

/// Most rows of a block: a multiple of the register blocks of all engines.
const MAX_ROWS: usize = 96;
/// The same where it is read in streams, which are the longer the more rows there are. Measured on a Xeon 6 (rows of 2048 and 768): BF16 2 to
/// 5 % faster, Q8_0 4 to 9 %, and 384 rows no more.
const STREAMED_ROWS: usize = 192;
/// The most of all, [`Engine::MANY_TOKENS_ROWS`] included.
pub const MOST_ROWS: usize = STREAMED_ROWS;
/// Up to so many tokens an expert on average, a block goes by once, and need not stay in L2.
const FEW_TOKENS: usize = 64;
/// From so many tokens an expert on, on average, blocks may have [`Engine::MANY_TOKENS_ROWS`] rows.
const MANY_TOKENS: usize = 256;
/// Bytes of weights of a block, at most about: a stretch that streams well and stays in the L2 cache with many tokens.
const BLOCK_BYTES: usize = 768 << 10;
/// Blocks for each thread, at least, where there are enough rows, so that the threads end together.
const BLOCKS_PER_THREAD: usize = 8;

/// Most rows of a block that few tokens meet.
pub fn most_rows() -> usize {
    if Reading::best() == Reading::Streams { STREAMED_ROWS } else { MAX_ROWS }
}

/// Rows of a block of `w`, of which `total` rows are to be multiplied by `nth` threads: a multiple of `step`, at most `most`.
pub fn block_rows(w: &Weights<'_>, total: usize, nth: usize, (step, most): (usize, usize)) -> usize {
    let by_bytes = BLOCK_BYTES / w.dtype.row_bytes(w.k).max(1);
    let by_threads = total.div_ceil(BLOCKS_PER_THREAD * nth);
    by_bytes.min(by_threads).clamp(step, most) / step * step
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
        const { assert!(E::MANY_TOKENS_ROWS <= MOST_ROWS && E::ROWS <= MAX_ROWS) };
        let most = match routing.pairs.len().div_ceil(routing.active.len().max(1)) {
            MANY_TOKENS.. => MAX_ROWS.max(E::MANY_TOKENS_ROWS),
            tokens if tokens > FEW_TOKENS => MAX_ROWS,
            _ => most_rows(),
        };
        let rows = block_rows(&w, w.n * routing.active.len(), nth, (E::ROWS, most));
        Self { w, active: routing.active, rows, per_expert: w.n.div_ceil(rows) }
    }

    /// Number of blocks.
    pub fn count(&self) -> usize {
        self.per_expert * self.active.len()
    }

    /// Block `i`: the expert, its rows, the number of the first row.
    pub fn get(&self, i: usize) -> (&'a Active, Rows<'a>, usize) {
        let active = &self.active[i / self.per_expert];
        let first = i % self.per_expert * self.rows;
        (active, self.w.rows(active.expert, first, self.rows.min(self.w.n - first)), first)
    }

    /// Address of block `i`.
    pub fn start(&self, i: usize) -> *const u8 {
        self.get(i).1.data
    }
}
