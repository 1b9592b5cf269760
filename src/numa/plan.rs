//! From placement to who computes what: blocks of rows with the same cut of their columns, a part of it for each node.
//!
//! The paper's segments (section 5, equations 3 to 5) in general form. Columns are cut in *granules*: 32 elements of BF16
//! (64 bytes) or two Q8_0 blocks (68 bytes), the kernels' steps along K. A granule belongs to the node that holds its first byte. Rows whose granules
//! are cut the same way form a *block*; the ranges of columns that one node holds of it are a *part*. A node's result for
//! a part is a partial sum; a row's value is the sum over its block's parts, ascending by node.
//!
//! Four ways to find blocks, the cheapest by remote bytes and number of products wins:
//!
//! * *Apart*: where the placement repeats after P bytes, rows `T = P / gcd(P, row stride)` apart are cut alike (T_x of
//!   equation 5), so they make a block even though they do not follow each other.
//! * *Nearly*: where T is so large that few rows are left to a block, rows a smaller step apart whose cuts drift a little
//!   from row to row. A block is cut as its middle row is; what the others have beyond their own cuts is remote.
//! * *Alike*: neighbouring rows that happen to be cut alike; for long runs, where T is larger than the matrix.
//! * *Majority*: sixteen rows to the node that holds most of them; always possible, but part of it is remote.

use std::ops::Range;

use super::NodeId;
use super::period::Pattern;
use super::placement::Pages;
use crate::tensor::DType;

/// Rows of a block at most: the rows of an AMX tile.
pub const BLOCK_ROWS: usize = 16;
/// Columns of a granule.
pub const fn granule(dtype: DType) -> usize {
    match dtype {
        DType::Q8_0 => 64,
        _ => 32,
    }
}

/// What one more product costs, in bytes that could have been read meanwhile: some 150 ns of one core's 13 GB/s.
const PRODUCT_COST: usize = 2048;

/// Where a weight matrix lies: one expert of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// Element type, BF16 or Q8_0.
    pub dtype: DType,
    /// Address of row 0.
    pub base: usize,
    /// Rows.
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// Bytes from a row to the next.
    pub row_stride: usize,
}

impl Matrix {
    /// The addresses from the first row's begin to the last row's end.
    pub fn range(&self) -> Range<usize> {
        let last = self.n.saturating_sub(1) * self.row_stride + self.dtype.row_bytes(self.k);
        self.base..self.base + last
    }

    /// Addresses of columns `[k0, k1)` of a row.
    fn columns(&self, row: usize, k: &Range<u32>) -> Range<usize> {
        let at = self.base + row * self.row_stride;
        at + self.dtype.row_bytes(k.start as usize)..at + self.dtype.row_bytes(k.end as usize)
    }

    /// Which node each granule of a row belongs to, as (end column, node); unknown granules go with their neighbours.
    fn cut(&self, row: usize, pages: &dyn Pages) -> Cut {
        let (at, columns) = (self.base + row * self.row_stride, granule(self.dtype));
        let bytes = self.dtype.row_bytes(columns);
        let mut cut = Cut::new();
        pages.stretches(at..at + self.dtype.row_bytes(self.k), &mut |r, node| {
            let end = ((r.end - at).div_ceil(bytes) * columns).min(self.k) as u32;
            match cut.last_mut() {
                Some(last) if last.1 == node || node.is_none() => last.0 = end,
                Some(last) if last.1.is_none() => *last = (end, node),
                // A stretch in which no granule begins.
                Some(last) if last.0 == end => {}
                _ => cut.push((end, node)),
            }
        });
        cut
    }
}

type Cut = Vec<(u32, Option<NodeId>)>;

/// Rows `first, first + step, …` that are cut alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The first row.
    pub first: u32,
    /// Number of rows, at most [`BLOCK_ROWS`]. They are [`Plan::step`] apart.
    pub rows: u32,
    /// Its parts in [`Plan::parts`], ascending by node.
    pub parts: Range<u32>,
}

/// What one node holds of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The block in [`Plan::blocks`].
    pub block: u32,
    /// The node.
    pub node: NodeId,
    /// Where its partial sums lie: rows before it in the plan's buffer of them.
    pub slot: u32,
    /// Bytes of weights.
    pub bytes: u32,
    ranges: Range<u32>,
    held: Range<u32>,
}

/// One node's parts of a plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The node.
    pub node: NodeId,
    /// Its parts in [`Plan::parts`].
    pub parts: Vec<u32>,
    /// Bytes of weights before each part, and at the end all bytes.
    pub before: Vec<u64>,
}

impl Share {
    /// How many parts begin before this many bytes of the share.
    pub fn begins_before(&self, bytes: u64) -> usize {
        self.before[..self.parts.len()].partition_point(|&at| at < bytes)
    }

    /// Bytes of weights.
    pub fn bytes(&self) -> u64 {
        self.before.last().copied().unwrap_or(0)
    }
}

/// Who computes what of one matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    n: usize,
    k: usize,
    step: usize,
    blocks: Vec<Block>,
    /// First block of each class of rows modulo `step`, and the number of blocks.
    classes: Vec<u32>,
    parts: Vec<Part>,
    ranges: Vec<Range<u32>>,
    held: Vec<(NodeId, u32)>,
    shares: Vec<Share>,
    slots: usize,
}

impl Plan {
    /// The cheapest plan for a matrix whose pages are placed as `pages` says, with `rule` as a hint how they repeat.
    ///
    /// Bytes are accounted by `pages`, so they are exact also where a page is not where the rule says.
    pub fn new(m: &Matrix, pages: &dyn Pages, rule: Option<&Pattern>) -> Self {
        let plans = [
            rule.and_then(|rule| Self::apart(m, pages, rule)),
            rule.and_then(|rule| Self::nearly(m, pages, rule)),
            Self::alike(m, pages),
            Some(Self::majority(m, pages)),
        ];
        plans.into_iter().flatten().min_by_key(Self::cost).expect("the last is always there")
    }

    /// Rows T apart, or none if that leaves fewer than two rows to a block.
    pub fn apart(m: &Matrix, pages: &dyn Pages, rule: &Pattern) -> Option<Self> {
        let step = Self::step_alike(m, rule);
        (2 * step <= m.n).then(|| Self::by_step(m, pages, rule, step))
    }

    /// Where that leaves half a block or less: rows so far apart that their cuts drift least, of the steps that leave whole blocks.
    pub fn nearly(m: &Matrix, pages: &dyn Pages, rule: &Pattern) -> Option<Self> {
        let few = Self::step_alike(m, rule) * BLOCK_ROWS / 2 > m.n;
        let drift = |&step: &usize| {
            let ahead = step * m.row_stride % rule.period();
            ahead.min(rule.period() - ahead)
        };
        let step = (1..=m.n / BLOCK_ROWS).min_by_key(drift).filter(|_| few)?;
        Some(Self::by_step(m, pages, rule, step))
    }

    /// T of equation 5: rows so far apart are cut alike.
    fn step_alike(m: &Matrix, rule: &Pattern) -> usize {
        rule.period() / gcd(rule.period(), m.row_stride)
    }

    /// Blocks of rows `step` apart, each cut as its middle row is by the rule.
    fn by_step(m: &Matrix, pages: &dyn Pages, rule: &Pattern, step: usize) -> Self {
        let mut plan = Builder::new(m, pages, step);
        for class in 0..step {
            plan.class();
            let rows = (m.n - class).div_ceil(step);
            let blocks = rows.div_ceil(BLOCK_ROWS);
            for b in 0..blocks {
                let (from, to) = (rows * b / blocks, rows * (b + 1) / blocks);
                let cut = m.cut(class + (from + to) / 2 * step, rule);
                plan.block(class + from * step, to - from, &cut);
            }
        }
        plan.done()
    }

    /// Neighbouring rows that are cut alike, or none if that takes more blocks than half the rows.
    pub fn alike(m: &Matrix, pages: &dyn Pages) -> Option<Self> {
        let mut plan = Builder::new(m, pages, 1);
        plan.class();
        let (mut first, mut cut) = (0, m.cut(0, pages));
        for row in 1..=m.n {
            let next = if row < m.n { m.cut(row, pages) } else { Cut::new() };
            if row - first < BLOCK_ROWS && next == cut {
                continue;
            }
            plan.block(first, row - first, &cut);
            if plan.blocks() > m.n.div_ceil(2).max(2) {
                return None;
            }
            (first, cut) = (row, next);
        }
        Some(plan.done())
    }

    /// Sixteen rows to the node that holds most of them.
    pub fn majority(m: &Matrix, pages: &dyn Pages) -> Self {
        let mut plan = Builder::new(m, pages, 1);
        plan.class();
        for first in (0..m.n).step_by(BLOCK_ROWS) {
            let rows = BLOCK_ROWS.min(m.n - first);
            let block = Matrix { base: m.base + first * m.row_stride, n: rows, ..*m };
            let mut held = Vec::new();
            pages.stretches(block.range(), &mut |r, node| add(&mut held, node, r.len()));
            let most = held.iter().filter(|h| h.0 != UNKNOWN).max_by_key(|h| (h.1, std::cmp::Reverse(h.0)));
            plan.block(first, rows, &vec![(m.k as u32, most.map(|h| h.0))]);
        }
        plan.done()
    }

    /// Rows.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Columns.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Rows from a block's row to its next: T_x of the paper, or 1.
    pub fn step(&self) -> usize {
        self.step
    }

    /// All blocks; each row is in exactly one.
    pub fn blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// All parts; each element is in exactly one.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The nodes' shares, ascending by node.
    pub fn shares(&self) -> &[Share] {
        &self.shares
    }

    /// One node's share.
    pub fn share(&self, node: NodeId) -> Option<&Share> {
        self.shares.binary_search_by_key(&node, |s| s.node).ok().map(|i| &self.shares[i])
    }

    /// Ranges of columns of a part, ascending; each begins at a multiple of [`granule`] and ends at one, or at the last column.
    pub fn ranges(&self, part: &Part) -> &[Range<u32>] {
        &self.ranges[part.ranges.start as usize..part.ranges.end as usize]
    }

    /// Bytes of a part that lie on `node`: what is local when a worker there does it.
    pub fn bytes_on(&self, part: &Part, node: NodeId) -> u32 {
        let held = &self.held[part.held.start as usize..part.held.end as usize];
        held.iter().find(|h| h.0 == node).map_or(0, |h| h.1)
    }

    /// Rows of partial sums: what the buffer of them must have room for, times the panels' tokens.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// The block of a row, and its place in it.
    pub fn block_of(&self, row: usize) -> (&Block, usize) {
        let class = row % self.step;
        let blocks = &self.blocks[self.classes[class] as usize..self.classes[class + 1] as usize];
        let block = &blocks[blocks.partition_point(|b| b.first as usize <= row) - 1];
        (block, (row - block.first as usize) / self.step)
    }

    /// Calls `f` with each of some rows, its block and its place in it; rows of a class follow each other.
    pub fn each_row<'a>(&'a self, rows: Range<usize>, mut f: impl FnMut(usize, &'a Block, usize)) {
        for first in rows.start..rows.end.min(rows.start + self.step) {
            let (mut block, mut j) = self.block_of(first);
            for row in (first..rows.end).step_by(self.step) {
                if j == block.rows as usize {
                    (block, j) = self.block_of(row);
                }
                f(row, block, j);
                j += 1;
            }
        }
    }

    /// Bytes of some rows, and those of them that lie on `node`. Over whole blocks the sums are exact; a row of a block whose
    /// rows are not cut alike counts as much as the others of it.
    pub fn bytes_of_rows(&self, rows: Range<usize>, node: NodeId) -> (u64, u64) {
        let (mut all, mut local) = (0, 0);
        for row in rows {
            let (block, j) = self.block_of(row);
            let (j, n) = (j as u64, u64::from(block.rows));
            let share = |bytes: u32| u64::from(bytes) * (j + 1) / n - u64::from(bytes) * j / n;
            for part in &self.parts[block.parts.start as usize..block.parts.end as usize] {
                all += share(part.bytes);
                local += share(self.bytes_on(part, node));
            }
        }
        (all, local)
    }

    /// All bytes of weights, and those that are not on the node of their part.
    pub fn bytes(&self) -> (u64, u64) {
        let all = self.parts.iter().map(|p| u64::from(p.bytes)).sum();
        let local: u64 = self.parts.iter().map(|p| u64::from(self.bytes_on(p, p.node))).sum();
        (all, all - local)
    }

    fn cost(&self) -> usize {
        self.bytes().1 as usize + PRODUCT_COST * self.ranges.len()
    }
}

/// Stands for a node that is not known in a part's account.
const UNKNOWN: NodeId = NodeId::MAX;

fn add(held: &mut Vec<(NodeId, u32)>, node: Option<NodeId>, bytes: usize) {
    let node = node.unwrap_or(UNKNOWN);
    match held.iter_mut().find(|h| h.0 == node) {
        Some(h) => h.1 += bytes as u32,
        None => held.push((node, bytes as u32)),
    }
}

/// Collects the blocks of a plan.
struct Builder<'a> {
    m: &'a Matrix,
    pages: &'a dyn Pages,
    plan: Plan,
}

impl<'a> Builder<'a> {
    fn new(m: &'a Matrix, pages: &'a dyn Pages, step: usize) -> Self {
        let plan = Plan {
            n: m.n,
            k: m.k,
            step,
            blocks: Vec::new(),
            classes: Vec::new(),
            parts: Vec::new(),
            ranges: Vec::new(),
            held: Vec::new(),
            shares: Vec::new(),
            slots: 0,
        };
        Self { m, pages, plan }
    }

    fn blocks(&self) -> usize {
        self.plan.blocks.len()
    }

    /// Begins the next class of rows.
    fn class(&mut self) {
        self.plan.classes.push(self.plan.blocks.len() as u32);
    }

    /// Adds a block: a part for each node of the cut, ascending. Columns whose node is unknown go to the lowest.
    fn block(&mut self, first: usize, rows: usize, cut: &Cut) {
        let mut nodes: Vec<NodeId> = cut.iter().map(|c| c.1.unwrap_or(0)).collect();
        nodes.sort_unstable();
        nodes.dedup();
        let parts = self.plan.parts.len() as u32;
        for node in nodes {
            self.part(node, first, rows, cut);
        }
        let parts = parts..self.plan.parts.len() as u32;
        self.plan.blocks.push(Block { first: first as u32, rows: rows as u32, parts });
    }

    fn part(&mut self, node: NodeId, first: usize, rows: usize, cut: &Cut) {
        let plan = &mut self.plan;
        let (ranges, held_from) = (plan.ranges.len() as u32, plan.held.len() as u32);
        let mut begin = 0;
        for &(end, owner) in cut {
            if owner.unwrap_or(0) == node {
                plan.ranges.push(begin..end);
            }
            begin = end;
        }
        let mut held = Vec::new();
        for row in (0..rows).map(|i| first + i * plan.step) {
            for columns in &plan.ranges[ranges as usize..] {
                self.pages.stretches(self.m.columns(row, columns), &mut |r, node| add(&mut held, node, r.len()));
            }
        }
        let bytes = held.iter().map(|h| h.1).sum();
        plan.held.extend(held);
        plan.parts.push(Part {
            block: plan.blocks.len() as u32,
            node,
            slot: plan.slots as u32,
            bytes,
            ranges: ranges..plan.ranges.len() as u32,
            held: held_from..plan.held.len() as u32,
        });
        plan.slots += rows;
    }

    fn done(mut self) -> Plan {
        self.class();
        let mut shares: Vec<Share> = Vec::new();
        // In the order of their addresses: blocks' rows are as many streams through memory, and the parts go along them, so that
        // each page is read once, from its begin to its end.
        let at = |i: &usize| {
            let part = &self.plan.parts[*i];
            let first = self.plan.blocks[part.block as usize].first as usize;
            self.m.columns(first, &self.plan.ranges(part)[0]).start
        };
        let mut order: Vec<usize> = (0..self.plan.parts.len()).collect();
        order.sort_by_key(at);
        for i in order {
            let part = &self.plan.parts[i];
            let at = shares.binary_search_by_key(&part.node, |s| s.node).unwrap_or_else(|at| {
                shares.insert(at, Share { node: part.node, parts: Vec::new(), before: vec![0] });
                at
            });
            let all = shares[at].bytes() + u64::from(part.bytes);
            shares[at].parts.push(i as u32);
            shares[at].before.push(all);
        }
        self.plan.shares = shares;
        self.plan
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
