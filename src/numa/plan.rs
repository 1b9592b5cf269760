//! From placement to who computes what: blocks of rows with the same cut of their columns, a part of it for each node.
//!
//! The paper's segments (section 5, equations 3 to 5) in general form. Columns are cut in *granules*: 16 elements of BF16
//! (32 bytes, to which GGUF aligns tensors) or two Q8_0 blocks (68 bytes). A granule belongs to the node that holds its first byte. Rows whose granules
//! are cut the same way form a *block*; the ranges of columns that one node holds of it are a *part*. A node's result for
//! a part is a partial sum; a row's value is the sum over its block's parts, ascending by node.
//!
//! Five ways to find blocks, the cheapest by remote bytes and number of products wins:
//!
//! * *Apart*: where the placement repeats after P bytes, rows `T = P / gcd(P, row stride)` apart are cut alike (T_x of
//!   equation 5), so they make a block even though they do not follow each other.
//! * *Nearly*: where T is so large that few rows are left to a block, rows a smaller step apart whose cuts drift a little
//!   from row to row. A block is cut as its middle row is; what the others have beyond their own cuts is remote.
//! * *Alike*: neighbouring rows that happen to be cut alike; for long runs, where T is larger than the matrix.
//! * *Whole*: each row to the node that holds most of it, neighbours of one node together: for long runs too, where the rows that are cut
//!   are too short to be worth two products.
//! * *Majority*: sixteen rows to the node that holds most of them; always possible, but part of it is remote.

mod build;

use std::ops::Range;

use super::NodeId;
use crate::tensor::DType;

/// Rows of a block at most: the rows of an AMX tile.
pub const BLOCK_ROWS: usize = 16;
/// Columns of a granule.
pub const fn granule(dtype: DType) -> usize {
    match dtype {
        DType::Q8_0 => 64,
        _ => 16,
    }
}

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
}

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
    /// Place of its node in [`Plan::shares`].
    pub place: u32,
    /// Whether it is the first of its node's parts.
    pub leads: bool,
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
    /// Its parts in [`Plan::parts`], in the order in which they are best read.
    pub parts: Vec<u32>,
    /// Bytes of weights before each part, and at the end all bytes.
    pub before: Vec<u64>,
    /// The rows that it has no part of.
    pub without: Vec<Range<u32>>,
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
    /// The nodes that have a part of each row: bit `i` is that of share `i`.
    holders: Vec<u32>,
    sets: usize,
}

impl Plan {
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

    /// How many sets of partial sums hold those of all nodes, where the node at place `i` writes to set `i % sets`: no row has two nodes
    /// in one set.
    pub fn sets(&self) -> usize {
        self.sets
    }

    /// The nodes that have a part of each row: bit `i` is that of share `i`.
    pub fn holders(&self) -> &[u32] {
        &self.holders
    }

    /// Whether a part is whole rows, all columns of them, that follow each other in memory.
    pub fn whole_rows(&self, part: &Part) -> bool {
        self.step == 1 && self.ranges(part)[0] == (0..self.k as u32)
    }

    /// The block of a row, and its place in it.
    pub fn block_of(&self, row: usize) -> (&Block, usize) {
        let class = row % self.step;
        let blocks = &self.blocks[self.classes[class] as usize..self.classes[class + 1] as usize];
        let block = &blocks[blocks.partition_point(|b| b.first as usize <= row) - 1];
        (block, (row - block.first as usize) / self.step)
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
}
