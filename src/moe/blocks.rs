//! Blocks of weight rows: how the threads share them.

use super::routing::{Active, Routing};
use crate::kernels::Engine;
use crate::team::Worker;
use crate::tensor::{Rows, Weights};

/// Most rows of a block: a multiple of the register blocks of all engines.
pub const MAX_ROWS: usize = 96;
/// The most that any engine's [`Engine::MANY_TOKENS_ROWS`] may be.
pub const MOST_ROWS: usize = 128;
/// From so many tokens an expert on, on average, blocks may have [`Engine::MANY_TOKENS_ROWS`] rows.
const MANY_TOKENS: usize = 256;
/// Bytes of weights of a block, at most about: a stretch that streams well and stays in the L2 cache with many tokens.
const BLOCK_BYTES: usize = 768 << 10;
/// Blocks for each thread, at least, where there are enough rows, so that the threads end together.
const BLOCKS_PER_THREAD: usize = 8;

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
        let many = routing.pairs.len() >= MANY_TOKENS * routing.active.len();
        let most = if many { MAX_ROWS.max(E::MANY_TOKENS_ROWS) } else { MAX_ROWS };
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
