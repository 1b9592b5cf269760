//! The product of a block of weight rows with some tokens of one expert, and what becomes of it.

use super::awaited::Awaited;
use super::blocks::MOST_ROWS;
use super::gather::Packed;
use super::routing::Active;
use crate::isa::Reading;
use crate::kernels::glu::Glu;
use crate::kernels::{Engine, Finish, Vectors};
use crate::pack::{MAX_TOKEN_ROWS, PANEL};
use crate::tensor::Rows;

/// Some tokens of an expert.
#[derive(Clone, Copy, Debug)]
pub enum Chunk {
    /// Panels `[first, first + panels)` with `tokens` tokens.
    Lanes {
        /// First panel.
        first: usize,
        /// Panels.
        panels: usize,
        /// Tokens, at most 16 for each panel.
        tokens: usize,
    },
    /// All token rows, which come after `lanes` tokens in panels.
    Rows {
        /// Tokens before.
        lanes: usize,
        /// Tokens.
        tokens: usize,
    },
}

impl Chunk {
    /// The expert's tokens in pieces whose C blocks with `n` weight rows fit in `room` f32.
    pub fn all(active: &Active, n: usize, room: usize) -> impl Iterator<Item = Self> {
        let (lanes, panels, rows) = (active.lanes(), active.panels(), active.rows);
        let most = room / (n * PANEL);
        let pieces = (0..panels).step_by(most).map(move |first| {
            let panels = most.min(panels - first);
            Self::Lanes { first, panels, tokens: (panels * PANEL).min(lanes - first * PANEL) }
        });
        pieces.chain((rows > 0).then_some(Self::Rows { lanes, tokens: rows }))
    }

    /// The tokens' places among the expert's.
    pub fn range(&self) -> std::ops::Range<usize> {
        match *self {
            Self::Lanes { first, tokens, .. } => first * PANEL..first * PANEL + tokens,
            Self::Rows { lanes, tokens } => lanes..lanes + tokens,
        }
    }
}

/// Rows whose sums are made something of between prefetches: a multiple of what the vectors do at a time.
const AT_ONCE: usize = 16;

/// f32 that are room for any C block: 256 KiB, for the L2 cache.
pub const ROOM: usize = 64 << 10;
const _: () = assert!(MAX_TOKEN_ROWS * MOST_ROWS <= ROOM / 2 && MOST_ROWS * PANEL <= ROOM / 2);

/// One thread's engine and its state.
pub struct Multiplier<E: Engine> {
    engine: E,
    session: E::Session,
}

impl<E: Engine> Multiplier<E> {
    /// Starts a run of products on this thread.
    ///
    /// # Safety
    /// `room` is 64-byte aligned, and this value's, [`Engine::ROOM`] bytes, as long as it lives.
    // SAFETY: contract above.
    pub unsafe fn new(engine: E, room: *mut u8) -> Self {
        let mut session = engine.begin();
        // SAFETY: the caller's promise.
        unsafe { engine.lend(&mut session, room) };
        Self { engine, session }
    }

    /// The engine.
    pub fn engine(&self) -> E {
        self.engine
    }

    /// Multiplies the rows with the tokens of a chunk. Then come the tokens of expert `then`, if that is known.
    ///
    /// # Safety
    /// `packed` holds the expert's tokens for rows of this type and k; `c` is 64-byte aligned and writable for what
    /// [`Chunk::all`] was told.
    // SAFETY: contract above.
    pub unsafe fn product(
        &mut self,
        rows: Rows<'_>,
        packed: &Packed,
        active: &Active,
        (chunk, then): (Chunk, Option<&Active>),
        c: *mut f32,
    ) -> CBlock {
        match chunk {
            Chunk::Lanes { first, panels, .. } => {
                // SAFETY: the caller's promise.
                unsafe {
                    let panels = packed.panels(active, first, panels);
                    let panels = then.map_or(panels, |then| packed.then(panels, then));
                    // The weights of further panels are not far: they came with the first.
                    let rows = if first > 0 { rows.by(Reading::Stretch) } else { rows };
                    self.engine.product(&mut self.session, rows, panels, c, false);
                }
            }
            Chunk::Rows { .. } => {
                // SAFETY: the caller's promise.
                unsafe {
                    let v = self.engine.vectors();
                    v.dots(rows, packed.rows(active, v.bf16_form()), c, rows.n.next_multiple_of(PANEL));
                }
            }
        }
        CBlock { chunk, c, n: rows.n }
    }
}

/// A product: for panels `[panel][n][16 lanes]`, for token rows `[token][n rounded up to 16]`.
#[derive(Clone, Copy, Debug)]
pub struct CBlock {
    chunk: Chunk,
    c: *mut f32,
    n: usize,
}

impl CBlock {
    /// The block of `n` weight rows and a chunk's tokens that lies at `c`.
    pub fn new(chunk: Chunk, c: *mut f32, n: usize) -> Self {
        Self { chunk, c, n }
    }

    fn ld(&self) -> usize {
        self.n.next_multiple_of(PANEL)
    }

    /// Transform (c): token `t` of the chunk goes to `row(t)`, `n` values, with weight `weight(t)` (see [`Finish`]).
    ///
    /// # Safety
    /// The block is initialised; the rows are writable and nobody else's; the bias is as `Finish` wants it.
    // SAFETY: contract above.
    pub unsafe fn finish(
        &self,
        v: impl Vectors,
        finish: Finish,
        weight: impl Fn(usize) -> f32,
        row: impl Fn(usize) -> *mut f32,
        awaited: &mut Awaited,
    ) {
        match self.chunk {
            Chunk::Lanes { panels, tokens, .. } => {
                for p in 0..panels {
                    let (mut rows, mut weights) = ([std::ptr::null_mut(); PANEL], [0.0; PANEL]);
                    let count = PANEL.min(tokens - p * PANEL);
                    for t in 0..count {
                        (rows[t], weights[t]) = (row(p * PANEL + t), weight(p * PANEL + t));
                    }
                    for first in (0..self.n).step_by(AT_ONCE) {
                        let n = AT_ONCE.min(self.n - first);
                        let part = rows.map(|row| row.wrapping_add(first));
                        let bias = if finish.bias.is_null() { finish.bias } else { finish.bias.wrapping_add(first) };
                        awaited.lines(n);
                        // SAFETY: rows of panel p of the block; the caller's rows.
                        unsafe {
                            let c = self.c.add((p * self.n + first) * PANEL);
                            v.finish_lanes(Finish { bias, ..finish }, c, n, &part[..count], &weights);
                        }
                    }
                }
            }
            Chunk::Rows { tokens, .. } => {
                for t in 0..tokens {
                    // SAFETY: token t of the block; the caller's row.
                    unsafe { v.finish_row(finish, self.c.add(t * self.ld()), self.n, row(t), weight(t)) };
                }
            }
        }
    }

    /// Makes this block of gate values that of `glu(gate, up)`. Biases are one value for each row of the block, or null.
    ///
    /// # Safety
    /// Both blocks are initialised and of the same rows and tokens; the biases are readable.
    // SAFETY: contract above.
    pub unsafe fn glu(&self, v: impl Vectors, kind: Glu, up: &Self, bias: [*const f32; 2], awaited: &mut Awaited) {
        let n = self.n;
        match self.chunk {
            Chunk::Lanes { panels, .. } => {
                for p in 0..panels {
                    for first in (0..n).step_by(AT_ONCE) {
                        let (at, some) = ((p * n + first) * PANEL, AT_ONCE.min(n - first));
                        let bias = bias.map(|b| if b.is_null() { b } else { b.wrapping_add(first) });
                        awaited.lines(some);
                        // SAFETY: rows of panel p of the blocks.
                        unsafe { v.glu_lanes(kind, self.c.add(at), up.c.add(at), some, bias) };
                    }
                }
            }
            Chunk::Rows { tokens, .. } => {
                for t in 0..tokens {
                    let at = t * self.ld();
                    // SAFETY: token t of the blocks.
                    unsafe { v.glu_row(kind, self.c.add(at), up.c.add(at), n, bias) };
                }
            }
        }
    }

    /// Transform (b): the block becomes columns `[first, first + n)` of the expert's packed tokens in `packed`.
    ///
    /// # Safety
    /// The block is initialised; those columns are nobody else's; `first` is a multiple of 32, and `n` too but at the end.
    // SAFETY: contract above.
    pub unsafe fn repack(&self, v: impl Vectors, packed: &Packed, active: &Active, first: usize) {
        let (n, dtype, k) = (self.n, packed.panel_dtype(active), packed.k());
        match self.chunk {
            Chunk::Lanes { first: panel, panels, .. } => {
                for p in 0..panels {
                    let to = packed.panel(active, panel + p);
                    // SAFETY: panel p of the block; columns of the expert's panel.
                    unsafe { v.lanes_to_panel(dtype, self.c.add(p * n * PANEL), n, to, first) };
                }
            }
            Chunk::Rows { tokens, .. } => {
                for t in 0..tokens {
                    let to = packed.row(active, t);
                    // SAFETY: token t of the block; columns of the expert's token row.
                    unsafe { v.token_row(packed.dtype(), k, self.c.add(t * self.ld()), first, n, to) };
                }
            }
        }
    }
}
