//! How a plan is made: the ways to find blocks, and the order of each node's parts.

use super::{BLOCK_ROWS, Block, Matrix, Part, Plan, Share, granule};
use crate::numa::NodeId;
use crate::numa::period::Pattern;
use crate::numa::placement::Pages;
use crate::numa::threads::MAX_NODES;

/// What one more product costs, in bytes that could have been read meanwhile: some 150 ns of one core's 13 GB/s.
const PRODUCT_COST: usize = 2048;

/// What it costs that neighbouring rows on one node end: the streams through them are a fraction as long, and those through rows apart go
/// on. Measured on a Xeon 6 with runs of 64 KiB.
const STRETCH_COST: usize = 6 << 10;

/// Stands for a node that is not known in a part's account.
const UNKNOWN: NodeId = NodeId::MAX;

type Cut = Vec<(u32, Option<NodeId>)>;

impl Matrix {
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

    /// The node that holds most of some neighbouring rows.
    fn most(&self, first: usize, n: usize, pages: &dyn Pages) -> Option<NodeId> {
        let rows = Self { base: self.base + first * self.row_stride, n, ..*self };
        let mut held = Vec::new();
        pages.stretches(rows.range(), &mut |r, node| add(&mut held, node, r.len()));
        let most = held.iter().filter(|h| h.0 != UNKNOWN).max_by_key(|h| (h.1, std::cmp::Reverse(h.0)));
        most.map(|h| h.0)
    }
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
            Some(Self::whole(m, pages)),
            Some(Self::majority(m, pages)),
        ];
        plans.into_iter().flatten().min_by_key(Self::cost).expect("the last is always there")
    }

    /// Rows T apart, or a multiple of it that leaves a block's worth; none if T leaves fewer than two rows to a block. A block's rows are
    /// streams through memory, and the farther apart they begin the longer each is (measured on a Xeon 6: 5 % faster than T itself).
    pub fn apart(m: &Matrix, pages: &dyn Pages, rule: &Pattern) -> Option<Self> {
        let step = Self::step_alike(m, rule);
        let step = step * m.n.div_ceil(step * BLOCK_ROWS);
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

    /// Each row to the node that holds most of it; neighbours of one node together.
    pub fn whole(m: &Matrix, pages: &dyn Pages) -> Self {
        let mut plan = Builder::new(m, pages, 1);
        plan.class();
        let mut first = 0;
        let mut node = m.most(0, 1, pages);
        for row in 1..=m.n {
            let next = if row < m.n { m.most(row, 1, pages) } else { None };
            if row < m.n && row - first < BLOCK_ROWS && next == node {
                continue;
            }
            plan.block(first, row - first, &vec![(m.k as u32, node)]);
            (first, node) = (row, next);
        }
        plan.done()
    }

    /// Sixteen rows to the node that holds most of them.
    pub fn majority(m: &Matrix, pages: &dyn Pages) -> Self {
        let mut plan = Builder::new(m, pages, 1);
        plan.class();
        for first in (0..m.n).step_by(BLOCK_ROWS) {
            let rows = BLOCK_ROWS.min(m.n - first);
            plan.block(first, rows, &vec![(m.k as u32, m.most(first, rows, pages))]);
        }
        plan.done()
    }

    /// In bytes that could be read meanwhile.
    fn cost(&self) -> usize {
        let products = self.bytes().1 as usize + PRODUCT_COST * self.ranges.len();
        if self.step > 1 {
            return products;
        }
        let part = |p: u32| &self.parts[p as usize];
        let block = |p: u32| &self.blocks[part(p).block as usize];
        let whole = |p: u32| self.whole_rows(part(p));
        let goes_on = |p: u32, q: u32| whole(p) && whole(q) && block(p).first + block(p).rows == block(q).first;
        let stretches = self.shares.iter().flat_map(|share| share.parts.chunk_by(|&p, &q| goes_on(p, q)));
        products + STRETCH_COST * stretches.count()
    }
}

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
            holders: vec![0; m.n],
            sets: 0,
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
            place: 0,
            leads: false,
            bytes,
            ranges: ranges..plan.ranges.len() as u32,
            held: held_from..plan.held.len() as u32,
        });
    }

    /// Brings a node's parts in the order in which they are best read. The rows of a block are as many streams through memory; the
    /// blocks that stand at the same place in their classes go along them together. What ends a run (of pages) where a stream begins
    /// comes last, behind the run's begin, where the stream before it ends: so the hardware's prefetcher meets each page at its
    /// begin and goes on from there.
    fn sort(&self, parts: &mut [u32]) {
        let place = |p: u32| {
            let id = self.plan.parts[p as usize].block;
            let first = self.plan.blocks[id as usize].first as usize;
            (id - self.plan.classes[first % self.plan.step], first)
        };
        let bytes = |p: u32| {
            let columns = &self.plan.ranges[self.plan.parts[p as usize].ranges.start as usize];
            self.m.columns(place(p).1, columns)
        };
        parts.sort_by_key(|&p| (place(p).0, bytes(p).start));
        for together in parts.chunk_by_mut(|&a, &b| place(a).0 == place(b).0) {
            let gap = together.windows(2).position(|pair| bytes(pair[0]).end != bytes(pair[1]).start);
            together.rotate_left(gap.map_or(0, |i| i + 1));
        }
    }

    /// Notes who has a part of which rows.
    fn hold(&mut self, place: usize, share: &mut Share) {
        debug_assert!(place < MAX_NODES);
        let plan = &mut self.plan;
        for (i, &part) in share.parts.iter().enumerate() {
            let part = &mut plan.parts[part as usize];
            (part.place, part.leads) = (place as u32, i == 0);
            let block = &plan.blocks[part.block as usize];
            (0..block.rows as usize).for_each(|i| plan.holders[block.first as usize + i * plan.step] |= 1 << place);
        }
        for (row, _) in plan.holders.iter().enumerate().filter(|(_, holders)| *holders >> place & 1 == 0) {
            let row = row as u32;
            match share.without.last_mut() {
                Some(last) if last.end == row => last.end += 1,
                _ => share.without.push(row..row + 1),
            }
        }
    }

    /// Whether no row has two nodes whose places are alike modulo `sets`.
    fn are_apart(&self, sets: usize) -> bool {
        self.plan.holders.iter().all(|&holders| {
            let mut taken = 0u32;
            (0..MAX_NODES).filter(|place| holders >> place & 1 == 1).all(|place| {
                let set = 1 << (place % sets);
                let free = taken & set == 0;
                taken |= set;
                free
            })
        })
    }

    fn done(mut self) -> Plan {
        self.class();
        let mut shares: Vec<Share> = Vec::new();
        for (i, part) in self.plan.parts.iter().enumerate() {
            let at = shares.binary_search_by_key(&part.node, |s| s.node).unwrap_or_else(|at| {
                shares.insert(at, Share { node: part.node, parts: Vec::new(), before: vec![0], without: Vec::new() });
                at
            });
            shares[at].parts.push(i as u32);
        }
        for (place, share) in shares.iter_mut().enumerate() {
            self.sort(&mut share.parts);
            for &part in &share.parts {
                let all = share.bytes() + u64::from(self.plan.parts[part as usize].bytes);
                share.before.push(all);
            }
            self.hold(place, share);
        }
        let nodes = shares.len();
        self.plan.sets = (1..nodes).find(|&sets| self.are_apart(sets)).unwrap_or(nodes);
        self.plan.shares = shares;
        self.plan
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
