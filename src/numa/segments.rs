//! Products over a plan's parts, and the sum of the nodes' partial results.
//!
//! An operation uses some experts, each with some tokens ([`Use`]). The parts of all of them are one list for each node,
//! from which each worker takes its [`Duty`]. A part's product leaves partial sums in a buffer that all workers share;
//! behind a barrier [`sum_lanes`] and [`sum_rows`] add them, always ascending by node, to the same C blocks that a plain
//! product leaves. So the result does not depend on the number of workers, nor on where they run.

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::ops::Range;

use super::NodeId;
use super::plan::{BLOCK_ROWS, Part, Plan};
use super::threads::{Duty, MAX_NODES};
use crate::kernels::{Engine, Vectors};
use crate::pack::{MAX_TOKEN_ROWS, PANEL, Panels, TokenRows};
use crate::tensor::{Rows, Weights};

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
    /// f32 of the panels' partial sums.
    pub fn lanes_len(&self) -> usize {
        self.plan.slots() * self.panels * PANEL
    }

    /// f32 of the token rows' partial sums.
    pub fn rows_len(&self) -> usize {
        self.plan.slots() * self.rows
    }

    /// Calls `f` with each of `n` rows from `first` on: its place among them, and where it is in its block.
    fn each_row(&self, (first, n): (usize, usize), mut f: impl FnMut(usize, InBlock<'_>)) {
        self.plan.each_row(first..first + n, |row, block, j| {
            let parts = &self.plan.parts()[block.parts.start as usize..block.parts.end as usize];
            f(row - first, InBlock { parts, rows: block.rows as usize, j });
        });
    }

    /// Where a part's sums of a row and of panel `p` are in the buffer: 16 f32.
    fn lanes_of(&self, part: &Part, p: usize, at: &InBlock<'_>) -> usize {
        self.lanes_at + (part.slot as usize * self.panels + p * at.rows + at.j) * PANEL
    }
}

/// A row of a block.
struct InBlock<'a> {
    /// The block's parts, at least one.
    parts: &'a [Part],
    /// Rows of the block.
    rows: usize,
    /// Which of them it is.
    j: usize,
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

/// The rows of a part, in place; narrow them by the ranges of [`Plan::ranges`].
pub fn rows<'a>(w: &Weights<'a>, expert: usize, plan: &Plan, part: &Part) -> Rows<'a> {
    let block = &plan.blocks()[part.block as usize];
    w.rows_apart(expert, block.first as usize, plan.step(), block.rows as usize)
}

/// An expert's packed tokens, as many as its [`Use`] says.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// Its panels, if it has some.
    pub panels: Option<Panels<'a>>,
    /// Its token rows, if it has some.
    pub rows: Option<TokenRows<'a>>,
}

/// All parts of one worker: the partial sums of what falls to it. Behind a barrier they can be added.
///
/// `ids` are the topology's nodes, `tokens` gets the place of an expert in `uses`. Returns the bytes of weights read, and
/// those of them that lie on `node`, the worker's.
///
/// # Safety
/// `w` are the weights that the plans were made for; the tokens agree with them in type and k. `partial` is 64-byte aligned
/// and writable where the uses say, by nobody but the team, whose workers' duties come from the same seats.
// SAFETY: contract above.
pub unsafe fn products<'a, 't, E: Engine, F: Fn(usize) -> Use<'a>>(
    engine: E,
    w: &Weights<'_>,
    uses: &Uses<F>,
    (ids, node, duty): (&[NodeId], NodeId, &Duty),
    tokens: impl Fn(usize) -> Tokens<'t>,
    partial: *mut f32,
) -> (u64, u64) {
    let mut session = engine.begin();
    let mut multiply = |(i, u, part): (usize, Use<'a>, &Part), next: *const u8| {
        // SAFETY: the caller's promise; each part falls to one worker.
        unsafe { product(engine, &mut session, w, (&u, part), &tokens(i), partial, next) };
    };
    let (mut bytes, mut local) = (0, 0);
    let mut in_hand = None;
    uses.each(ids, duty, |i, u, part| {
        bytes += u64::from(part.bytes);
        local += u64::from(u.plan.bytes_on(part, node));
        let first = begin(w, u, part);
        if let Some(before) = in_hand.replace((i, *u, part)) {
            multiply(before, first);
        }
    });
    if let Some(last @ (_, u, part)) = in_hand {
        multiply(last, begin(w, &u, part));
    }
    (bytes, local)
}

/// Address of a part's first column in its first row.
fn begin(w: &Weights<'_>, u: &Use<'_>, part: &Part) -> *const u8 {
    rows(w, u.expert, u.plan, part).columns(u.plan.ranges(part)[0].start as usize, 0).data
}

/// One part times an expert's tokens: the node's partial sums. `next` is what this thread reads next.
///
/// # Safety
/// As [`products`]; nobody else uses this part's sums meanwhile.
// SAFETY: contract above.
unsafe fn product<E: Engine>(
    engine: E,
    session: &mut E::Session,
    w: &Weights<'_>,
    (u, part): (&Use<'_>, &Part),
    tokens: &Tokens<'_>,
    partial: *mut f32,
    next: *const u8,
) {
    let all = rows(w, u.expert, u.plan, part);
    let slot = part.slot as usize;
    let ranges = u.plan.ranges(part);
    // Where a row has several, its first begins within a page that ends the row before: that page's begin comes first, so that the
    // hardware's prefetcher goes on to the rest.
    for i in 0..ranges.len() {
        let range = |i: usize| &ranges[(i + 1) % ranges.len()];
        let (k0, k) = (range(i).start as usize, (range(i).end - range(i).start) as usize);
        let next = if i + 1 < ranges.len() { all.columns(range(i + 1).start as usize, 0).data } else { next };
        let here = all.columns(k0, k).then(next);
        if let Some(panels) = &tokens.panels {
            debug_assert_eq!(panels.count(), u.panels);
            // SAFETY: the part's C block in the buffer; views of the same columns.
            unsafe {
                let c = partial.add(u.lanes_at + slot * u.panels * PANEL);
                engine.product(session, here, panels.columns(k0, k), c, i > 0);
            }
        }
        if let Some(xs) = &tokens.rows {
            debug_assert_eq!(xs.tokens, u.rows);
            // SAFETY: the part's sums of the token rows in the buffer; views of the same columns.
            unsafe {
                let y = partial.add(u.rows_at + slot * u.rows);
                if i == 0 {
                    engine.vectors().dots(here, xs.columns(k0, k), y, here.n);
                } else {
                    add_dots(engine.vectors(), here, xs.columns(k0, k), y);
                }
            }
        }
    }
}

/// `y[token * rows.n + row] += …`: the dot form for a further range of columns.
///
/// # Safety
/// As [`Vectors::dots`], with `ld` = `rows.n`, which is at most [`BLOCK_ROWS`].
// SAFETY: contract above.
unsafe fn add_dots(v: impl Vectors, rows: Rows<'_>, xs: TokenRows<'_>, y: *mut f32) {
    let mut more = [0f32; MAX_TOKEN_ROWS * BLOCK_ROWS];
    let len = xs.tokens * rows.n;
    // SAFETY: `more` has room for all tokens and rows, `y` too by contract.
    let y = unsafe {
        v.dots(rows, xs, more.as_mut_ptr(), rows.n);
        std::slice::from_raw_parts_mut(y, len)
    };
    y.iter_mut().zip(&more).for_each(|(y, m)| *y += m);
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
    // Other cores have written much of it: all lines are asked for before the first is waited for.
    u.each_row((first, n), |_, at| {
        for p in panels.clone() {
            for part in at.parts {
                // SAFETY: SSE is part of x86-64, and a prefetch only hints.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(partial.wrapping_add(u.lanes_of(part, p, &at)).cast()) };
            }
        }
    });
    u.each_row((first, n), |i, at| {
        for p in panels.clone() {
            // SAFETY: the row's 16 lanes of panel p in the part's C block.
            let of = |part: &Part| unsafe { &*partial.add(u.lanes_of(part, p, &at)).cast::<[f32; PANEL]>() };
            let mut sum = *of(&at.parts[0]);
            for part in &at.parts[1..] {
                sum.iter_mut().zip(of(part)).for_each(|(s, x)| *s += x);
            }
            // SAFETY: the caller's C block.
            unsafe { c.add(((p - panels.start) * n + i) * PANEL).cast::<[f32; PANEL]>().write(sum) };
        }
    });
}

/// `c[token * ld + i]` = row `first + i`'s sum over the nodes, for the use's token rows.
///
/// # Safety
/// As [`sum_lanes`]; `c` is writable for `rows` tokens of `n` f32, `ld` f32 apart.
// SAFETY: contract above.
pub unsafe fn sum_rows(u: &Use<'_>, partial: *const f32, (first, n): (usize, usize), c: *mut f32, ld: usize) {
    u.each_row((first, n), |i, InBlock { parts, rows, j }| {
        for t in 0..u.rows {
            // SAFETY: token t, row j of the part's sums; the caller's C block.
            unsafe {
                let of = |part: &Part| *partial.add(u.rows_at + part.slot as usize * u.rows + t * rows + j);
                *c.add(t * ld + i) = parts[1..].iter().fold(of(&parts[0]), |sum, part| sum + of(part));
            }
        }
    });
}

#[cfg(test)]
mod tests;
