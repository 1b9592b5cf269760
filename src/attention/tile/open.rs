//! Which positions are open, and what comes next: the mask is looked at before K and V, block by block.

use super::block::Job;
use super::{MAX_BUNDLE, Tile};
use crate::kernels::attention::{Attend, Source};

/// A block of positions that is open for some row.
#[derive(Clone, Copy)]
pub struct Block {
    pub start: usize,
    pub n: usize,
    /// Positions that are closed for all rows.
    pub closed: u64,
    /// Bit `i`: the block is closed for panel `i`.
    pub idle: u32,
    /// Bit `i`: panel `i` needs its mask added.
    pub masked: u32,
}

/// A block of all tiles.
pub struct Work<'a> {
    /// As each tile sees it, from the first one on.
    pub blocks: &'a [Block],
    pub tile: usize,
    pub coming: Option<Coming>,
}

/// The block that comes next: so many rows of so many tiles.
pub struct Coming {
    pub tile: usize,
    pub tiles: usize,
    pub start: usize,
    pub rows: usize,
}

impl<A: Attend> Tile<'_, A> {
    /// What part `i` has to do with a block, if it is open for it.
    pub(super) fn job(&self, work: &Work<'_>, i: usize) -> Option<Job> {
        let block = work.blocks[i];
        let [k, v] = [&self.params.k, &self.params.v]
            .map(|view| Source { closed: block.closed, ..self.cache(view, work.tile + i).part(block.start, block.n) });
        let coming = work.coming.as_ref().map(|coming| self.slice(coming, [i, work.blocks.len()]));
        (block.closed != u64::MAX >> (64 - block.n)).then_some(Job { part: i, block, coming, k, v })
    }

    /// Slice `i` of `n` of a block of K and V of all its tiles: what to ask for in time. In the order of the addresses, whoever needs
    /// it: so the hardware's own prefetchers see it coming.
    fn slice(&self, of: &Coming, [i, n]: [usize; 2]) -> [Source; 2] {
        let (first, last) = (of.rows * i / n, of.rows * (i + 1) / n);
        [&self.params.k, &self.params.v].map(|view| {
            let s = self.cache(view, of.tile);
            Source { d: s.d * of.tiles, ..s.part(of.start + first, last - first) }
        })
    }

    /// The first block at or after `start` that is open for some row of the first `tiles` packed tiles, as each of these sees it.
    // SAFETY: the mask rows have `end` values.
    pub(super) unsafe fn open(
        &self,
        tiles: usize,
        mut start: usize,
        end: usize,
    ) -> Option<(usize, [Block; MAX_BUNDLE])> {
        while start < end {
            let n = (end - start).min(self.plan.block);
            let mut blocks = [Block { start, n, closed: 0, idle: 0, masked: 0 }; MAX_BUNDLE];
            let mut closed = u64::MAX >> (64 - n);
            for (i, block) in blocks[..tiles].iter_mut().enumerate() {
                // SAFETY: `[start, start + n)` is in front of `end`.
                *block = unsafe { self.look(i, start, n) };
                closed &= block.closed;
            }
            if closed != u64::MAX >> (64 - n) {
                return Some((start, blocks));
            }
            start += n;
        }
        None
    }

    /// What the mask says about a block of part `i`.
    // SAFETY: the mask rows have `start + n` values.
    unsafe fn look(&self, i: usize, start: usize, n: usize) -> Block {
        let part = self.parts[i];
        let all = u64::MAX >> (64 - n);
        let mut block = Block { start, n, closed: all, idle: 0, masked: 0 };
        for i in part.first..part.first + part.count {
            let panel = self.panels[i];
            let (mut closed, mut special) = (all, 0);
            let mut last = std::ptr::null();
            for row in &self.rows[panel.row..panel.row + panel.rows] {
                if row.mask.is_null() {
                    closed = 0;
                    break;
                }
                if row.mask != last {
                    last = row.mask;
                    // SAFETY: the caller's contract.
                    let bits = unsafe { self.isa.mask_bits(row.mask.add(start), n) };
                    closed &= bits.closed;
                    special |= bits.closed | bits.valued;
                }
            }
            block.closed &= closed;
            block.idle |= u32::from(closed == all) << i;
            block.masked |= u32::from(special != 0) << i;
        }
        block
    }
}
