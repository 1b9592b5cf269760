//! Which positions are open: the mask is looked at before K and V, block by block.

use super::Tile;
use crate::kernels::attention::Attend;

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

impl<A: Attend> Tile<'_, A> {
    /// The first block at or after `start` that is open for some row.
    // SAFETY: the mask rows have `end` values.
    pub(super) unsafe fn open(&self, mut start: usize, end: usize) -> Option<Block> {
        while start < end {
            let n = (end - start).min(self.plan.block);
            // SAFETY: `[start, start + n)` is in front of `end`.
            let block = unsafe { self.look(start, n) };
            if block.closed != u64::MAX >> (64 - n) {
                return Some(block);
            }
            start += n;
        }
        None
    }

    /// What the mask says about a block.
    // SAFETY: the mask rows have `start + n` values.
    unsafe fn look(&self, start: usize, n: usize) -> Block {
        let all = u64::MAX >> (64 - n);
        let mut block = Block { start, n, closed: all, idle: 0, masked: 0 };
        for (i, panel) in self.panels[..self.count].iter().enumerate() {
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
