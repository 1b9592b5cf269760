//! A block on AMX.

use super::block::Job;
use super::{Panel, Tile};
use crate::kernels::amx::attention::{TileAttention, WIDTH};
use crate::kernels::attention::{Ahead, Attend, LANES, Weights};

impl<A: Attend> Tile<'_, A> {
    /// One block of a part: products, weights, weighted sums.
    ///
    /// Where V is taken at once, its sums wait until the next block's products are on their way, whichever part's that is: tile loads
    /// of what was stored just before would have to wait.
    // SAFETY: `item`'s contract, with the rows packed.
    pub(super) unsafe fn block_on_amx(&mut self, job: Job) {
        let tiles = self.plan.dv.div_ceil(LANES);
        let first = self.parts[job.part].first;
        let Some(mut amx) = self.amx.take() else { return };
        let [mut ahead_k, mut ahead_v] = self.ahead(&amx, job);
        let early = TileAttention::early(tiles, self.parts[job.part].count);
        // SAFETY: the block's positions are in the views; all scratch is this thread's and sized by the plan.
        unsafe {
            amx.block(job.k);
            for (i, panel) in self.busy(job.part, job.block) {
                amx.scores(i, panel.lanes, self.s.add(panel.s), &mut ahead_k);
            }
            self.weigh_waiting(&mut amx);
            if early {
                amx.take_values(job.v, 0, tiles, &mut ahead_v);
            }
            self.weights_on_amx(&mut amx, job);
            if early {
                for (i, panel) in self.busy(job.part, job.block) {
                    self.waiting[i - first] = Some(self.rows_of_16(job, i, panel));
                }
            } else {
                for tile in (0..tiles).step_by(WIDTH) {
                    let n = WIDTH.min(tiles - tile);
                    amx.take_values(job.v, tile, n, &mut ahead_v);
                    for (i, panel) in self.busy(job.part, job.block) {
                        amx.values(i - first, self.rows_of_16(job, i, panel), tile, n);
                    }
                }
            }
        }
        self.amx = Some(amx);
    }

    /// What a job asks for in time: of K with its products, of V where that is taken.
    fn ahead(&self, amx: &TileAttention, job: Job) -> [Ahead; 2] {
        let busy = self.parts[job.part].count - job.block.idle.count_ones() as usize;
        let [of_k, of_v] = amx.portions(job.block.n, busy, self.plan.dv.div_ceil(LANES));
        job.coming.map_or([Ahead::NOTHING; 2], |[k, v]| {
            [Ahead::new(k, of_k), if self.plan.shared { Ahead::NOTHING } else { Ahead::new(v, of_v) }]
        })
    }

    /// Weights of a job's products.
    // SAFETY: `block_on_amx`'s contract; the products are there.
    unsafe fn weights_on_amx(&mut self, amx: &mut TileAttention, job: Job) {
        let first = self.parts[job.part].first;
        for (i, panel) in self.busy(job.part, job.block) {
            // SAFETY: the caller's contract.
            unsafe {
                let s = self.s.add(panel.s);
                self.parts[job.part].finite &= amx.settle_scores(i, panel.lanes, s);
                self.weights(job.block, i, panel);
                amx.weigh(i - first, panel.lanes, s, job.block.n);
            }
        }
    }

    /// Multiplies the weights that wait with their V.
    // SAFETY: `item`'s contract; the weights and V are those that `amx` took last.
    unsafe fn weigh_waiting(&mut self, amx: &mut TileAttention) {
        for (i, waiting) in self.waiting.iter_mut().enumerate() {
            if let Some(w) = waiting.take() {
                // SAFETY: the caller's contract.
                unsafe { amx.values(i, w, 0, w.tiles) };
            }
        }
    }

    /// Does so behind the last block of an item.
    // SAFETY: `item`'s contract.
    pub(super) unsafe fn weigh_last(&mut self) {
        if let Some(mut amx) = self.amx.take() {
            // SAFETY: the caller's contract.
            unsafe { self.weigh_waiting(&mut amx) };
            self.amx = Some(amx);
        }
    }

    /// As [`Tile::rows_of`] for AMX, whose sums are those of 16 rows: a twin panel has two for each row.
    // SAFETY: the panel has them.
    unsafe fn rows_of_16(&self, job: Job, i: usize, panel: Panel) -> Weights {
        // SAFETY: the caller's contract.
        Weights { rows: LANES, ..unsafe { self.rows_of(job.block, i, panel) } }
    }
}
