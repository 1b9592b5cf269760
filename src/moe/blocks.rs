//! Blocks of weight rows: how the threads share them, and the C block a product of one leaves.

use super::gather::Packed;
use super::routing::{Active, Pair, Routing};
use crate::isa::Avx512;
use crate::kernels::Engine;
use crate::kernels::avx512::{dots, store};
use crate::pack::PANEL;
use crate::team::Worker;
use crate::tensor::{Rows, Weights};

/// Most rows of a block.
pub const MAX_ROWS: usize = 128;
/// Rows of a block are a multiple of this, but in the last block: a Q8_0 block of the next product's k.
pub const ROW_STEP: usize = 32;
/// Bytes of weights of a block, about: a stretch that streams well and stays in the L2 cache with many tokens.
const BLOCK_BYTES: usize = 256 << 10;

/// Row blocks of all active experts, handed out in the order of memory.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    /// Rows of a block, but the last of an expert.
    pub rows: usize,
    per_expert: usize,
    total: usize,
}

impl Blocks {
    /// Blocks of `w` for a team of `nth` threads.
    pub fn new(w: &Weights<'_>, active: usize, nth: usize) -> Self {
        let by_bytes = BLOCK_BYTES / w.dtype.row_bytes(w.k).max(1);
        // At least a few blocks for each thread, so that they end together.
        let by_threads = (w.n * active).div_ceil(8 * nth);
        let rows = by_bytes.min(by_threads).clamp(ROW_STEP, MAX_ROWS) / ROW_STEP * ROW_STEP;
        let per_expert = w.n.div_ceil(rows);
        Self { rows, per_expert, total: per_expert * active }
    }

    /// Calls `work` with each block that falls to this worker: the expert, its rows, the number of the first row.
    ///
    /// The team's counter must be fresh (behind a barrier). A worker claims one block ahead, so the kernel in hand can
    /// prefetch across the seam.
    pub fn each(
        &self,
        worker: &Worker<'_>,
        w: &Weights<'_>,
        routing: &Routing<'_>,
        mut work: impl FnMut(&Active, Rows<'_>, usize),
    ) {
        let block = |i: usize| {
            let active = &routing.active[i / self.per_expert];
            let first = i % self.per_expert * self.rows;
            (active, w.rows(active.expert, first, self.rows.min(w.n - first)), first)
        };
        let mut mine = worker.next();
        while mine < self.total {
            let next = worker.next();
            let (active, rows, first) = block(mine);
            let rows = if next < self.total { rows.then(block(next).1.data) } else { rows };
            work(active, rows, first);
            mine = next;
        }
    }
}

/// One thread's means to multiply: the engine, its state, and room for a C block.
pub struct Multiplier<E: Engine> {
    engine: E,
    session: E::Session,
    proof: Avx512,
    c: *mut f32,
}

impl<E: Engine> Multiplier<E> {
    /// Starts a run of products on this thread.
    ///
    /// # Safety
    /// `c` is 64-byte aligned and writable for [`CBlock::MAX`] f32 as long as the multiplier lives, by nobody else.
    // SAFETY: contract above.
    pub unsafe fn new(engine: E, proof: Avx512, c: *mut f32) -> Self {
        Self { engine, session: engine.begin(), proof, c }
    }

    /// Multiplies the rows with all tokens of an expert, a C block at a time; `then` gets each block in turn, with the
    /// number of its first token among the expert's.
    ///
    /// # Safety
    /// `rows.n` is at most [`MAX_ROWS`]; `packed` holds the expert's tokens for rows of this type and k.
    // SAFETY: contract above.
    pub unsafe fn products(
        &mut self,
        rows: Rows<'_>,
        packed: &Packed,
        active: &Active,
        mut then: impl FnMut(CBlock, usize),
    ) {
        let (c, n) = (self.c, rows.n);
        let chunk = CBlock::MAX / (n * PANEL);
        for p in (0..active.panels()).step_by(chunk) {
            let count = chunk.min(active.panels() - p);
            // SAFETY: the caller's promise; a chunk fits in the C block.
            let panels = unsafe { packed.panels(active, p, count) };
            // SAFETY: as above.
            unsafe { self.engine.product(&mut self.session, rows, panels, c, false) };
            then(CBlock::Lanes { c, n, tokens: panels.tokens }, p * PANEL);
        }
        if active.rows > 0 {
            let ld = n.next_multiple_of(PANEL);
            // SAFETY: the caller's promise; MAX_TOKEN_ROWS rows of MAX_ROWS fit in the C block.
            unsafe { dots(self.proof, rows, packed.rows(active), c, ld) };
            then(CBlock::Rows { c, n, tokens: active.rows, ld }, active.lanes());
        }
    }
}

/// The product of a block of weight rows with some tokens of one expert.
#[derive(Clone, Copy, Debug)]
pub enum CBlock {
    /// Of panels: `[panel][n][16 lanes]`.
    Lanes {
        /// Address, 64-byte aligned.
        c: *mut f32,
        /// Weight rows.
        n: usize,
        /// Tokens.
        tokens: usize,
    },
    /// Of token rows: `[token][ld]`, `n` of each `ld` are meant.
    Rows {
        /// Address, 64-byte aligned.
        c: *mut f32,
        /// Weight rows.
        n: usize,
        /// Tokens.
        tokens: usize,
        /// f32 from a token to the next, a multiple of 16.
        ld: usize,
    },
}

impl CBlock {
    /// f32 that any C block fits in: 256 KiB, for the L2 cache.
    pub const MAX: usize = 64 << 10;

    /// Transform (c): writes the block row-major, token by token: element `i` of token `t` goes to `row(pairs[t]) + first + i`.
    ///
    /// # Safety
    /// The block is initialised; each of those places is writable and nobody else's.
    // SAFETY: contract above.
    pub unsafe fn scatter(&self, proof: Avx512, pairs: &[Pair], first: usize, row: &impl Fn(Pair) -> *mut f32) {
        let to = |pair: Pair| row(pair).wrapping_add(first);
        match *self {
            Self::Lanes { c, n, tokens } => {
                for (p, pairs) in pairs[..tokens].chunks(PANEL).enumerate() {
                    let mut rows = [std::ptr::null_mut(); PANEL];
                    rows.iter_mut().zip(pairs).for_each(|(r, &pair)| *r = to(pair));
                    // SAFETY: panel p of the block; the caller's places.
                    unsafe { store::lanes_to_rows(proof, c.add(p * n * PANEL), n, &rows[..pairs.len()]) };
                }
            }
            Self::Rows { c, n, tokens, ld } => {
                for (t, &pair) in pairs[..tokens].iter().enumerate() {
                    // SAFETY: token t of the block; the caller's place. They do not overlap.
                    unsafe { to(pair).copy_from_nonoverlapping(c.add(t * ld), n) };
                }
            }
        }
    }
}

const _: () = assert!(crate::pack::MAX_TOKEN_ROWS * MAX_ROWS <= CBlock::MAX && MAX_ROWS * PANEL <= CBlock::MAX);
