//! What is multiplied at a time, and where its sums go.

use std::arch::asm;
use std::ops::Range;

use super::{PANELS, ROOM, Sums, Tokens, Use, WHOLE_BYTES, WHOLE_ROWS};
use crate::kernels::{Engine, Vectors};
use crate::numa::plan::{BLOCK_ROWS, Part};
use crate::pack::{PANEL, Panels};
use crate::tensor::{Rows, Weights};

/// Some rows of one part, or of several whose rows are whole and follow each other.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// Place of the expert.
    pub i: usize,
    u: Use<'a>,
    part: &'a Part,
    /// The first row and how many.
    first: usize,
    n: usize,
}

impl<'a> Job<'a> {
    /// A part of an expert in use.
    pub fn new(i: usize, u: &Use<'a>, part: &'a Part) -> Self {
        let block = &u.plan.blocks()[part.block as usize];
        Self { i, u: *u, part, first: block.first as usize, n: block.rows as usize }
    }

    /// Both as one, where the other's rows follow this one's.
    pub fn with(&self, other: &Self, row_bytes: usize) -> Option<Self> {
        let same = (self.i, self.part.place) == (other.i, other.part.place);
        let whole = same && self.u.plan.whole_rows(self.part) && self.u.plan.whole_rows(other.part);
        let n = self.n + other.n;
        let few = n <= WHOLE_ROWS && n * row_bytes <= WHOLE_BYTES;
        (whole && few && self.first + self.n == other.first).then_some(Self { n, ..*self })
    }

    /// `n` of the rows, from row `first` of them on.
    fn some(&self, first: usize, n: usize) -> Self {
        Self { first: self.first + first * self.u.plan.step(), n, ..*self }
    }

    /// The rows, in place; narrow them by the ranges of [`Plan::ranges`](crate::numa::plan::Plan::ranges).
    fn rows<'w>(&self, w: &Weights<'w>) -> Rows<'w> {
        w.rows_apart(self.u.expert, self.first, self.u.plan.step(), self.n)
    }

    /// Asks for the lines where the sums will lie. The other core that added those of the operation before has them: they are on their
    /// way while this one multiplies.
    fn own_sums(&self, partial: *const f32) {
        let (u, place) = (&self.u, self.part.place as usize);
        for row in (0..self.n).map(|j| self.first + j * u.plan.step()) {
            (0..u.panels).for_each(|p| prefetch_to_write(partial.wrapping_add(u.lanes_of(place, p, row))));
            (0..u.rows).for_each(|t| prefetch_to_write(partial.wrapping_add(u.row_of(place, t, row))));
        }
    }

    /// Which of its ranges is read first.
    ///
    /// Where neighbouring rows have several, the first begins within a page that ends the row before: that page's begin comes first, so that
    /// the hardware's prefetcher goes on to the rest. Of rows apart, each is a stream that goes on in the next part's.
    fn first_range(&self) -> usize {
        let count = self.u.plan.ranges(self.part).len();
        usize::from(self.u.plan.step() == 1) % count
    }

    /// Address of what is read first of the first row.
    pub fn begin(&self, w: &Weights<'_>) -> *const u8 {
        let range = &self.u.plan.ranges(self.part)[self.first_range()];
        self.rows(w).columns(range.start as usize, 0).data
    }
}

/// Never a fault, wherever that is; nothing on a CPU that does not know it. In assembler because the compiler makes a prefetch to read of it
/// unless it is told that the CPU does.
fn prefetch_to_write(at: *const f32) {
    // SAFETY: a prefetch only hints.
    unsafe { asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags)) };
}

/// One job times an expert's tokens: the node's partial sums. `next` is what this thread reads next.
///
/// # Safety
/// As [`products`](super::products); nobody else uses this node's sums of these rows meanwhile.
// SAFETY: contract above.
pub unsafe fn product<E: Engine>(
    engine: E,
    session: &mut E::Session,
    w: &Weights<'_>,
    job: &Job<'_>,
    tokens: &Tokens<'_>,
    to: Sums,
    next: *const u8,
) {
    let rows = job.rows(w).then(next);
    job.own_sums(to.partial);
    if let Some(panels) = &tokens.panels {
        debug_assert!(panels.count() == job.u.panels && job.n <= WHOLE_ROWS);
        // What whole rows leave over comes with some that were done before, so that all are as many as fill the kernels' blocks.
        let full = job.n / BLOCK_ROWS * BLOCK_ROWS;
        let over = job.u.plan.whole_rows(job.part) && full > 0 && full < job.n;
        let (first, last) =
            if over { (job.some(0, full), Some(job.some(job.n - BLOCK_ROWS, BLOCK_ROWS))) } else { (*job, None) };
        // SAFETY: some of the job's rows.
        unsafe {
            let then = last.map_or(next, |last| last.begin(w));
            lanes(engine, session, &first, first.rows(w).then(then), panels, to);
            if let Some(last) = last {
                lanes(engine, session, &last, last.rows(w).then(next), panels, to);
            }
        }
    }
    if let Some(xs) = &tokens.rows {
        let (v, len) = (engine.vectors(), xs.tokens * job.n);
        debug_assert!(xs.tokens == job.u.rows && 2 * len <= ROOM);
        each_range(job, rows, 1, |i, part, k| {
            let xs = xs.columns(k.start, k.len());
            // SAFETY: room for the sums twice; views of the same columns.
            unsafe {
                if i == 0 {
                    return v.dots(part, xs, to.c, job.n);
                }
                v.dots(part, xs, to.c.add(len), job.n);
                let (c, more) = std::slice::from_raw_parts_mut(to.c, 2 * len).split_at_mut(len);
                c.iter_mut().zip(more).for_each(|(c, more)| *c += *more);
            }
        });
        // SAFETY: written just now; the caller's promise.
        unsafe { keep_rows(job, to) };
    }
}

/// A job's rows times its panels.
///
/// # Safety
/// As [`product`].
// SAFETY: contract above.
unsafe fn lanes<E: Engine>(
    engine: E,
    session: &mut E::Session,
    job: &Job<'_>,
    rows: Rows<'_>,
    panels: &Panels<'_>,
    to: Sums,
) {
    for first in (0..panels.count()).step_by(PANELS) {
        let some = panels.some(first, PANELS.min(panels.count() - first));
        let ranges = each_range(job, rows, E::PANEL_STEP, |i, part, k| {
            // SAFETY: room for the panels; views of the same columns.
            unsafe { engine.product(session, part, some.columns(k.start, k.len()), to.c, i > 0) };
        });
        // SAFETY: room for the panels; written just now; the caller's promise.
        unsafe {
            if ranges == 0 {
                to.c.write_bytes(0, some.count() * job.n * PANEL);
            }
            keep_lanes(job, first..first + some.count(), to);
        }
    }
}

/// Calls `f` with the number of each range of columns, the rows' part of it, and its columns; returns how many there are. They begin and
/// end at multiples of `step`, moved upwards where the plan cuts finer; some may be empty then and are left out.
fn each_range(job: &Job<'_>, rows: Rows<'_>, step: usize, mut f: impl FnMut(usize, Rows<'_>, Range<usize>)) -> usize {
    let ranges = job.u.plan.ranges(job.part);
    let first = job.first_range();
    let range = |i: usize| {
        let up = |k: u32| (k as usize).next_multiple_of(step).min(rows.k);
        let r = &ranges[(i + first) % ranges.len()];
        up(r.start)..up(r.end)
    };
    let mut count = 0;
    for i in 0..ranges.len() {
        let (k, last) = (range(i), i + 1 == ranges.len());
        if k.is_empty() && rows.k > 0 {
            continue;
        }
        let next = if last { rows.next } else { rows.columns(range(i + 1).start, 0).data };
        f(count, rows.columns(k.start, k.len()).then(next), k);
        count += 1;
    }
    count
}

/// Puts panels' C block where the rows' sums lie.
///
/// # Safety
/// As [`product`]; the block is that of the job and these panels.
// SAFETY: contract above.
unsafe fn keep_lanes(job: &Job<'_>, panels: Range<usize>, to: Sums) {
    let (u, place, step) = (&job.u, job.part.place as usize, job.u.plan.step());
    for p in panels.clone() {
        for j in 0..job.n {
            // SAFETY: 16 lanes of the block; 16 lanes of the row's.
            unsafe {
                let from = to.c.add(((p - panels.start) * job.n + j) * PANEL);
                let to = to.partial.add(u.lanes_of(place, p, job.first + j * step));
                to.cast::<[f32; PANEL]>().write(from.cast::<[f32; PANEL]>().read());
            }
        }
    }
}

/// The same for token rows. Rows that the node has nothing of become zeros, so that all can be added alike.
///
/// # Safety
/// As [`keep_lanes`].
// SAFETY: contract above.
unsafe fn keep_rows(job: &Job<'_>, to: Sums) {
    let (u, place, step) = (&job.u, job.part.place as usize, job.u.plan.step());
    for t in 0..u.rows {
        // SAFETY: the token's sums in the block; the node's sums of the token.
        unsafe {
            let (from, at) = (to.c.add(t * job.n), to.partial.add(u.row_of(place, t, 0)));
            (0..job.n).for_each(|j| *at.add(job.first + j * step) = *from.add(j));
            let without: &[Range<u32>] = if job.part.leads { &u.plan.shares()[place].without } else { &[] };
            without.iter().for_each(|rows| at.add(rows.start as usize).write_bytes(0, rows.len()));
        }
    }
}
