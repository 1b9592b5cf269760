//! Products over a plan's parts, and the sum of the nodes' partial results.
//!
//! An operation uses some experts, each with some tokens ([`Use`]). The parts of all of them are one list for each node,
//! from which each worker takes its [`Duty`]. A part's product leaves partial sums in a buffer that all workers share;
//! behind a barrier [`sum_lanes`] and [`sum_rows`] add them, always ascending by node, to the same C blocks that a plain
//! product leaves. So the result does not depend on the number of workers, nor on where they run.

mod job;

use std::ops::Range;

use job::{Job, product};

use super::NodeId;
use super::plan::{Part, Plan};
use super::threads::{Duty, MAX_NODES};
use crate::kernels::Engine;
use crate::pack::{MAX_TOKEN_ROWS, PANEL, Panels, TokenRows};
use crate::tensor::Weights;

/// Most rows of whole rows that are multiplied at a time, and most bytes of them, beyond one part's: as plain blocks have (measured there).
const WHOLE_ROWS: usize = 1024;
const WHOLE_BYTES: usize = 1 << 20;

/// Panels that rows are multiplied with at a time: however many rows there are, so that sums do not depend on who does them.
const PANELS: usize = 4;

/// f32 of room that [`Sums`] must have: for the panels, and for token rows twice.
pub const ROOM: usize = PANELS * PANEL * WHOLE_ROWS;
const _: () = assert!(2 * MAX_TOKEN_ROWS * WHOLE_ROWS <= ROOM);

/// One expert that an operation uses.
#[derive(Clone, Copy, Debug)]
pub struct Use<'a> {
    /// Who computes what of it.
    pub plan: &'a Plan,
    /// Expert.
    pub expert: usize,
    /// Panels of tokens.
    pub panels: usize,
    /// Tokens that are packed as rows, at most [`MAX_TOKEN_ROWS`].
    pub rows: usize,
    /// Where the panels' partial sums begin in the buffer, in f32: a multiple of 16, with room for [`Use::lanes_len`].
    pub lanes_at: usize,
    /// Where the token rows' begin, with room for [`Use::rows_len`].
    pub rows_at: usize,
}

impl Use<'_> {
    /// f32 of the panels' partial sums: `[set of the plan][panel][row][16 lanes]`.
    pub fn lanes_len(&self) -> usize {
        self.plan.sets() * self.panels * self.plan.n() * PANEL
    }

    /// f32 of the token rows' partial sums: `[node of the plan][token][row]`, so that no two nodes write to one line.
    pub fn rows_len(&self) -> usize {
        self.plan.shares().len() * self.rows * self.plan.n()
    }

    /// Where a node's sums of panel `p` with a row are in the buffer: 16 f32.
    fn lanes_of(&self, place: usize, p: usize, row: usize) -> usize {
        self.lanes_at + ((place % self.plan.sets() * self.panels + p) * self.plan.n() + row) * PANEL
    }

    /// The same for token `t`: one f32, the next row's behind it.
    fn row_of(&self, place: usize, t: usize, row: usize) -> usize {
        self.rows_at + (place * self.rows + t) * self.plan.n() + row
    }
}

/// The experts that an operation uses: `of(0)` to `of(count - 1)`.
#[derive(Clone, Copy, Debug)]
pub struct Uses<F> {
    /// Number of experts in use.
    pub count: usize,
    /// The one at a place.
    pub of: F,
}

impl<'a, F: Fn(usize) -> Use<'a>> Uses<F> {
    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = Use<'a>> {
        (0..self.count).map(&self.of)
    }

    /// Bytes of weights by place of `ids`, the topology's nodes: what [`Duty::new`] splits. Nodes that are not there
    /// count for the first.
    pub fn bytes(&self, ids: &[NodeId]) -> [u64; MAX_NODES] {
        let mut bytes = [0; MAX_NODES];
        for u in self.iter() {
            u.plan.shares().iter().for_each(|s| bytes[place(ids, s.node)] += s.bytes());
        }
        bytes
    }

    /// Calls `work` with each part that is this duty's: the place of the expert, its use, the part. Each
    /// part falls to exactly one of a team's duties.
    pub fn each(&self, ids: &[NodeId], duty: &Duty, mut work: impl FnMut(usize, &Use<'a>, &'a Part)) {
        for span in duty.spans() {
            let mut before = 0;
            for (i, u) in self.iter().enumerate() {
                let here = u.plan.shares().iter().filter(|s| place(ids, s.node) == span.place);
                for share in here {
                    let inside = |end: u64| share.begins_before(end.saturating_sub(before));
                    for &p in &share.parts[inside(span.bytes.start)..inside(span.bytes.end)] {
                        work(i, &u, &u.plan.parts()[p as usize]);
                    }
                    before += share.bytes();
                }
                if before >= span.bytes.end {
                    break;
                }
            }
        }
    }
}

fn place(ids: &[NodeId], node: NodeId) -> usize {
    ids.binary_search(&node).unwrap_or(0)
}

/// An expert's packed tokens, as many as its [`Use`] says.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Its panels, if it has some.
    pub panels: Option<Panels<'a>>,
    /// Its token rows, if it has some.
    pub rows: Option<TokenRows<'a>>,
}

/// Where products leave their sums.
#[derive(Clone, Copy, Debug)]
pub struct Sums {
    /// The buffer that all workers share.
    pub partial: *mut f32,
    /// [`ROOM`] f32 of this worker's own, 64-byte aligned.
    pub c: *mut f32,
}

/// All parts of one worker: the partial sums of what falls to it. Behind a barrier they can be added.
///
/// `ids` are the topology's nodes, `tokens` gets the place of an expert in `uses`. Returns the bytes of weights read, and
/// those of them that lie on `node`, the worker's.
///
/// # Safety
/// `w` are the weights that the plans were made for; the tokens agree with them in type and k. `to.partial` is 64-byte aligned
/// and writable where the uses say, by nobody but the team, whose workers' duties come from the same seats; `to.c` is this worker's.
// SAFETY: contract above.
pub unsafe fn products<'a, 't, E: Engine, F: Fn(usize) -> Use<'a>>(
    engine: E,
    w: &Weights<'_>,
    uses: &Uses<F>,
    (ids, node, duty): (&[NodeId], NodeId, &Duty),
    tokens: impl Fn(usize) -> Tokens<'t>,
    to: Sums,
) -> (u64, u64) {
    let mut session = engine.begin();
    let mut multiply = |job: Job<'a>, next: *const u8| {
        // SAFETY: the caller's promise; each part falls to one worker.
        unsafe { product(engine, &mut session, w, &job, &tokens(job.i), to, next) };
    };
    let (mut bytes, mut local) = (0, 0);
    let mut in_hand: Option<Job<'a>> = None;
    uses.each(ids, duty, |i, u, part| {
        bytes += u64::from(part.bytes);
        local += u64::from(u.plan.bytes_on(part, node));
        let job = Job::new(i, u, part);
        let Some(before) = in_hand else { return in_hand = Some(job) };
        in_hand = before.with(&job, w.row_stride).or_else(|| {
            multiply(before, job.begin(w));
            Some(job)
        });
    });
    if let Some(last) = in_hand {
        multiply(last, last.begin(w));
    }
    (bytes, local)
}

/// `c[(p * n + i) * 16 + lane]` = row `first + i`'s sum over the nodes, for panel `p` of `panels`.
///
/// # Safety
/// `partial` are the sums of this use, all parts' products done; `c` is writable for `panels.len() * n * 16` f32.
// SAFETY: contract above.
pub unsafe fn sum_lanes(
    u: &Use<'_>,
    partial: *const f32,
    panels: Range<usize>,
    (first, n): (usize, usize),
    c: *mut f32,
) {
    let holders = &u.plan.holders()[first..first + n];
    for p in panels.clone() {
        // SAFETY: a node's sums of the n rows with panel p.
        let of = |place: u32| unsafe { partial.add(u.lanes_of(place as usize, p, first)).cast::<[f32; PANEL]>() };
        for (i, &holders) in holders.iter().enumerate() {
            let mut left = holders & (holders - 1);
            // SAFETY: of nodes that have a part of the row; the caller's C block.
            unsafe {
                let mut sum = *of(holders.trailing_zeros()).add(i);
                while left != 0 {
                    sum.iter_mut().zip(&*of(left.trailing_zeros()).add(i)).for_each(|(s, x)| *s += x);
                    left &= left - 1;
                }
                c.add(((p - panels.start) * n + i) * PANEL).cast::<[f32; PANEL]>().write(sum);
            }
        }
    }
}

/// `c[token * ld + i]` = row `first + i`'s sum over the nodes, for the use's token rows.
///
/// # Safety
/// As [`sum_lanes`]; `c` is writable for `rows` tokens of `n` f32, `ld` f32 apart.
// SAFETY: contract above.
pub unsafe fn sum_rows(u: &Use<'_>, partial: *const f32, (first, n): (usize, usize), c: *mut f32, ld: usize) {
    for t in 0..u.rows {
        // SAFETY: n rows' sums of token t; the caller's C block, which is not among them.
        unsafe {
            let of = |place: usize| std::slice::from_raw_parts(partial.add(u.row_of(place, t, first)), n);
            c.add(t * ld).copy_from_nonoverlapping(of(0).as_ptr(), n);
            let c = std::slice::from_raw_parts_mut(c.add(t * ld), n);
            for more in 1..u.plan.shares().len() {
                c.iter_mut().zip(of(more)).for_each(|(c, more)| *c += more);
            }
        }
    }
}

#[cfg(test)]
mod tests;
