//! The products of an operation where its weights lie on several NUMA nodes (see [`crate::numa`]).

use super::Carver;
use super::cblock::{CBlock, Chunk, ROOM};
use super::gather::Packed;
use super::routing::{Active, Routing};
use crate::kernels::{Engine, Vectors};
use crate::numa::segments::{self, Sums, Tokens, Use, Uses, products, sum_lanes, sum_rows};
use crate::numa::tally::Tally;
use crate::numa::tensors::{MAX_TOKENS, Numa, TensorPlan};
use crate::numa::threads::{Duty, Pinned, Seats};
use crate::pack::{MAX_TOKEN_ROWS, PANEL};
use crate::team::Worker;
use crate::tensor::Weights;

/// What an operation needs to follow its weights' pages.
#[derive(Clone, Copy, Debug)]
pub struct OnNodes<'a> {
    /// The machine.
    pub numa: &'a Numa,
    /// Where the workers are; at least one seat for each worker of the team. Operations of one team share it, one after another.
    pub seats: &'a Seats,
    /// Counts the weights' bytes.
    pub tally: &'a Tally,
    /// Whether to count those of plain products too, which costs a look at each row's pages.
    pub count_plain: bool,
}

impl<'a> OnNodes<'a> {
    /// What is known of a tensor, for an operation of so many pairs of token and expert. None where there is nothing to do about it.
    pub fn of(self, w: &Weights<'_>, pairs: usize) -> Option<Placed<'a>> {
        // Even if all experts are in use. How many are is known when the operation runs: see `Segments::pay`.
        let few = |most: usize| pairs <= most * w.experts;
        // No plan allows more than this: long prompts need none.
        if !few(MAX_TOKENS) && !self.count_plain {
            return None;
        }
        let (plan, spread) = self.numa.known(w)?;
        let segments = few(plan.most_tokens()) && spread;
        (segments || self.count_plain).then_some(Placed { nodes: self, plan, segments })
    }
}

/// A tensor whose pages' nodes are known.
#[derive(Clone, Copy, Debug)]
pub struct Placed<'a> {
    nodes: OnNodes<'a>,
    plan: &'a TensorPlan,
    /// Whether to multiply by segments if they pay. The normal path is right on one node, and where computing the tokens takes the
    /// time and not reading the weights.
    segments: bool,
}

impl Placed<'_> {
    /// Counts rows `[first, first + n)` of an expert that this worker multiplies plainly, where that is wanted.
    pub fn count(&self, worker: &Worker<'_>, expert: usize, (first, n): (usize, usize)) {
        let OnNodes { numa, tally, count_plain, .. } = self.nodes;
        if !count_plain {
            return;
        }
        let node = numa.ids()[numa.place(worker.ith(), worker.nth())];
        let (all, local) = self.plan.expert(expert).bytes_of_rows(first..first + n, node);
        tally.plain(local, all - local);
    }
}

/// One tensor's products by segments, in place of a plain product of each block.
#[derive(Clone, Copy, Debug)]
pub struct Segments<'a> {
    nodes: OnNodes<'a>,
    plan: &'a TensorPlan,
    /// All experts' sums of panels, then all experts' sums of token rows.
    partial: *mut f32,
    rows_at: usize,
}

const _: () = assert!(ROOM >= segments::ROOM);

impl<'a> Segments<'a> {
    /// Takes room for the partial sums of any routing of `pairs` pairs over `experts` experts. None where products are plain.
    pub fn carve(placed: Option<Placed<'a>>, carver: &mut Carver, [pairs, experts]: [usize; 2]) -> Option<Self> {
        let Placed { nodes, plan, .. } = placed.filter(|p| p.segments)?;
        let active = pairs.min(experts);
        let n = plan.expert(0).n();
        let rows_at = plan.sets() * n * (pairs / PANEL + active) * PANEL;
        let rows = plan.nodes() * n * pairs.min(active * MAX_TOKEN_ROWS);
        Some(Self { nodes, plan, partial: carver.take(rows_at + rows), rows_at })
    }

    /// These, if the experts in use have few tokens each.
    pub fn pay(self, routing: &Routing<'_>) -> Option<Self> {
        (routing.pairs.len() <= self.plan.most_tokens() * routing.active.len()).then_some(self)
    }

    /// Says where this worker is, after pinning it if the user wants that: until the returned value is dropped. Behind the
    /// next barrier, [`Segments::products`] may run.
    #[must_use]
    pub fn take_seat(&self, w: &Worker<'_>) -> Option<Pinned> {
        let OnNodes { numa, seats, .. } = self.nodes;
        let pinned = numa.pin(w.ith(), w.nth());
        seats.take(w.ith(), numa.place(w.ith(), w.nth()));
        pinned
    }

    fn of(&self, a: &Active) -> Use<'a> {
        let plan = self.plan.expert(a.expert);
        Use {
            plan,
            expert: a.expert,
            panels: a.panels(),
            rows: a.rows,
            lanes_at: self.plan.sets() * plan.n() * a.panels_before * PANEL,
            rows_at: self.rows_at + self.plan.nodes() * plan.n() * a.rows_before,
        }
    }

    /// This worker's part of all products. Behind the next barrier, [`Segments::block`] may be called.
    ///
    /// # Safety
    /// The plan is of `w`; `packed` holds the routing's tokens for it; the seats were taken before a barrier that all
    /// workers have passed; `c` is this worker's, 64-byte aligned and writable for [`ROOM`] f32.
    // SAFETY: contract above.
    pub unsafe fn products<E: Engine>(
        &self,
        engine: E,
        worker: &Worker<'_>,
        w: &Weights<'_>,
        routing: &Routing<'_>,
        packed: &Packed,
        c: *mut f32,
    ) {
        let OnNodes { numa, seats, tally, .. } = self.nodes;
        let uses = Uses { count: routing.active.len(), of: |i: usize| self.of(&routing.active[i]) };
        let duty = Duty::new(&uses.bytes(numa.ids()), seats, numa.near(), (worker.ith(), worker.nth()));
        let node = numa.ids()[seats.place(worker.ith())];
        // SAFETY: the caller's promise.
        let tokens = |i: usize| unsafe {
            let a = &routing.active[i];
            Tokens {
                panels: (a.panels() > 0).then(|| packed.panels(a, 0, a.panels())),
                rows: (a.rows > 0).then(|| packed.rows(a, engine.vectors().bf16_form())),
            }
        };
        // SAFETY: carved for any routing; the caller's promise for the rest.
        let (all, local) = unsafe {
            let to = Sums { partial: self.partial, c };
            products(engine, w, &uses, (numa.ids(), node, &duty), tokens, to)
        };
        tally.segments(local, all - local);
    }

    /// The C block of rows `[first, first + n)` of an expert: the nodes' sums, added.
    ///
    /// # Safety
    /// All workers' products are done; `c` is as for [`Multiplier::product`](super::cblock::Multiplier::product).
    // SAFETY: contract above.
    pub unsafe fn block(&self, active: &Active, (first, n): (usize, usize), chunk: Chunk, c: *mut f32) -> CBlock {
        let u = self.of(active);
        match chunk {
            Chunk::Lanes { first: panel, panels, .. } => {
                // SAFETY: the caller's promise.
                unsafe { sum_lanes(&u, self.partial, panel..panel + panels, (first, n), c) };
            }
            Chunk::Rows { .. } => {
                // SAFETY: the caller's promise.
                unsafe { sum_rows(&u, self.partial, (first, n), c, n.next_multiple_of(PANEL)) };
            }
        }
        CBlock::new(chunk, c, n)
    }
}
