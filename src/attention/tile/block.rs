//! One block of positions: scores, weights, weighted sums.

use super::open::Block;
use super::{Panel, Tile};
use crate::kernels::amx::attention::{STEP, WIDTH};
use crate::kernels::attention::{Ahead, Attend, LANES, Source, TILE, Weights};

impl<A: Attend> Tile<'_, A> {
    /// One block: scores, weights, weighted sums. Asks for the rows of K and V that come next meanwhile.
    // SAFETY: `chunk`'s contract, with the rows packed.
    pub(super) unsafe fn block(&mut self, block: Block, coming: Option<[Source; 2]>, k: Source, v: Source) {
        let here = |s: Source| Source { closed: block.closed, ..s.part(block.start, block.n) };
        if self.on_amx {
            // SAFETY: the caller's contract.
            return unsafe { self.block_on_amx(block, coming, here(k), here(v)) };
        }
        let busy = self.count - block.idle.count_ones() as usize;
        let portions = busy * block.n.div_ceil(LANES);
        // SAFETY: the block's positions are in the views; all scratch is this thread's and sized by the plan.
        unsafe {
            self.scores(block, here(k), coming.map(|[next, _]| next), portions);
            for (i, panel) in self.busy(block) {
                self.weights(block, i, panel);
            }
            self.values(block, here(v), coming.map(|[_, next]| next), portions);
        }
    }

    /// The scores of the block's K rows.
    // SAFETY: `chunk`'s contract, with the rows packed.
    unsafe fn scores(&mut self, block: Block, k: Source, next: Option<Source>, portions: usize) {
        let plan = self.plan;
        let tiles = plan.d.div_ceil(LANES);
        let mut ahead = next.map_or(Ahead::NOTHING, |next| Ahead::new(next, portions * tiles));
        // SAFETY: the block's positions are in the view, one of them open; all scratch is this thread's and sized by the
        // plan.
        unsafe {
            if self.in_place[0] {
                for (_, panel) in self.busy(block) {
                    let (q, s) = (self.q.add(panel.q), self.s.add(panel.s));
                    self.isa.scores_in_place(q, [panel.lanes, panel.rows], k, s, &mut ahead);
                }
                return;
            }
            for first in (0..block.n).step_by(LANES) {
                // Where V has no use for it, the same 16 positions of scratch serve all of the block.
                let to = if plan.shared { self.k.add(first / LANES * tiles * TILE) } else { self.k };
                self.isa.widen(k.part(first, LANES.min(block.n - first)), to);
                for (_, panel) in self.busy(block) {
                    let s = self.s.add(panel.s + first * panel.lanes);
                    self.isa.scores(panel.lanes, self.q.add(panel.q), to, tiles, s, &mut ahead);
                }
            }
        }
    }

    /// The same on AMX.
    // SAFETY: `block`'s contract, with the block's own rows.
    unsafe fn block_on_amx(&mut self, block: Block, coming: Option<[Source; 2]>, k: Source, v: Source) {
        let plan = self.plan;
        let Some(mut amx) = self.amx.take() else { return };
        let busy = self.count - block.idle.count_ones() as usize;
        let tiles = plan.dv.div_ceil(LANES);
        let [mut ahead_k, mut ahead_v] = coming.map_or([Ahead::NOTHING; 2], |[k, v]| {
            let v = if plan.shared { Ahead::NOTHING } else { Ahead::new(v, busy * tiles.div_ceil(WIDTH)) };
            [Ahead::new(k, busy * plan.d.div_ceil(STEP)), v]
        });
        // SAFETY: the block's positions are in the views; all scratch is this thread's and sized by the plan.
        unsafe {
            amx.block(k);
            for (i, panel) in self.busy(block) {
                let s = self.s.add(panel.s);
                let lost = amx.scores(i, s, &mut ahead_k);
                self.scores_again(lost, k, panel);
                self.weights(block, i, panel);
                amx.weigh(i, s, block.n);
            }
            let panels = self.busy(block).map(|(i, panel)| (i, self.rows_of(block, i, panel)));
            amx.values(v, panels, &mut ahead_v);
        }
        self.amx = Some(amx);
    }

    /// Scores on vectors, of each group of 16 positions whose bit is set in `groups`.
    // SAFETY: `block_on_amx`'s contract.
    unsafe fn scores_again(&self, groups: u32, k: Source, panel: Panel) {
        for first in (0..k.rows).step_by(LANES).filter(|first| groups >> (first / LANES) & 1 == 1) {
            // SAFETY: the caller's contract; the f32 panel is there, and scratch for 16 positions.
            unsafe {
                self.isa.widen(k.part(first, LANES.min(k.rows - first)), self.k);
                let s = self.s.add(panel.s + first * panel.lanes);
                let tiles = self.plan.d.div_ceil(LANES);
                self.isa.scores(panel.lanes, self.q.add(panel.q), self.k, tiles, s, &mut { Ahead::NOTHING });
            }
        }
    }

    /// A panel's weights and sums.
    // SAFETY: the panel has them.
    unsafe fn rows_of(&self, block: Block, i: usize, panel: Panel) -> Weights {
        // SAFETY: inside this thread's scratch.
        unsafe {
            Weights {
                p: self.s.add(panel.s),
                lanes: panel.lanes,
                rows: panel.rows,
                n: block.n,
                rescale: (*self.states.add(i)).rescale.as_ptr(),
                o: self.o.add(panel.row * self.plan.dv_padded()),
                tiles: self.plan.dv.div_ceil(LANES),
            }
        }
    }

    /// Adds the block's V rows to the sums.
    // SAFETY: `chunk`'s contract; the weights are there.
    unsafe fn values(&mut self, block: Block, v: Source, next: Option<Source>, portions: usize) {
        let plan = self.plan;
        let tiles = plan.dv.div_ceil(LANES);
        let stride = if plan.shared { plan.d.div_ceil(LANES) } else { tiles };
        let in_place = self.in_place[1] && block.closed == 0;
        let next = next.filter(|_| !plan.shared);
        let mut ahead = next.map_or(Ahead::NOTHING, |next| Ahead::new(next, portions * tiles.div_ceil(2)));
        // SAFETY: the block's positions are in the view; all scratch is this thread's and sized by the plan.
        unsafe {
            if !plan.shared && !in_place {
                self.isa.widen(v, self.v);
            }
            for (i, panel) in self.busy(block) {
                let w = self.rows_of(block, i, panel);
                if in_place {
                    self.isa.weigh_in_place(w, v, &mut ahead);
                } else {
                    self.isa.weigh(w, self.v, stride, &mut ahead);
                }
            }
        }
    }

    /// The panels for which the block is open.
    fn busy(&self, block: Block) -> impl Iterator<Item = (usize, Panel)> + Clone + use<A> {
        let (panels, count) = (self.panels, self.count);
        (0..count).filter(move |i| block.idle >> i & 1 == 0).map(move |i| (i, panels[i]))
    }

    /// Scores of a panel into weights.
    // SAFETY: `chunk`'s contract; the panel's scores are there.
    unsafe fn weights(&self, block: Block, i: usize, panel: Panel) {
        // SAFETY: the panel's scores and state are this thread's; the mask rows have the block's positions.
        unsafe {
            let s = self.s.add(panel.s);
            let len = block.n.next_multiple_of(LANES) * panel.lanes;
            if self.params.logit_softcap != 0.0 {
                self.isa.cap(self.params.logit_softcap, s, len);
            }
            if block.masked >> i & 1 == 1 {
                let rows = &self.rows[panel.row..panel.row + panel.rows];
                let rows = rows.iter().map(|r| (r.mask.add(block.start), r.slope));
                self.isa.bias(rows, panel.lanes, block.n, s);
            } else {
                let tail = block.n * panel.lanes..len;
                std::slice::from_raw_parts_mut(s.add(tail.start), tail.len()).fill(f32::NEG_INFINITY);
            }
            self.isa.softmax(panel.lanes, s, len, &mut *self.states.add(i));
        }
    }
}
