//! One block of positions: scores, weights, weighted sums.

use super::open::Block;
use super::{Panel, Part, Tile};
use crate::kernels::attention::{Ahead, Attend, LANES, Source, TILE, Weights};

/// One block of one part.
#[derive(Clone, Copy)]
pub struct Job {
    pub part: usize,
    pub block: Block,
    /// What to ask for meanwhile, of K and V.
    pub coming: Option<[Source; 2]>,
    /// The block's rows.
    pub k: Source,
    pub v: Source,
}

impl<A: Attend> Tile<'_, A> {
    /// A block of a part on vectors: scores, weights, weighted sums. Asks for the rows of K and V that come next meanwhile.
    // SAFETY: `item`'s contract, with the rows packed.
    pub(super) unsafe fn block(&mut self, Job { part, block, coming, k, v }: Job) {
        let busy = self.parts[part].count - block.idle.count_ones() as usize;
        let portions = busy * block.n.div_ceil(LANES);
        // SAFETY: the block's positions are in the views; all scratch is this thread's and sized by the plan.
        unsafe {
            self.scores(part, block, k, coming.map(|[next, _]| next), portions);
            for (i, panel) in self.busy(part, block) {
                self.weights(block, i, panel);
            }
            self.values(part, block, v, coming.map(|[_, next]| next), portions);
        }
    }

    /// The scores of the block's K rows.
    // SAFETY: `item`'s contract, with the rows packed.
    unsafe fn scores(&mut self, part: usize, block: Block, k: Source, next: Option<Source>, portions: usize) {
        let plan = self.plan;
        let tiles = plan.d.div_ceil(LANES);
        let mut ahead = next.map_or(Ahead::NOTHING, |next| Ahead::new(next, portions * tiles));
        // SAFETY: the block's positions are in the view, one of them open; all scratch is this thread's and sized by the
        // plan.
        unsafe {
            if self.in_place[0] {
                for (_, panel) in self.busy(part, block) {
                    let (q, s) = (self.q.add(panel.q), self.s.add(panel.s));
                    self.isa.scores_in_place(q, [panel.lanes, panel.rows], k, s, &mut ahead);
                }
                return;
            }
            for first in (0..block.n).step_by(LANES) {
                // Where V has no use for it, the same 16 positions of scratch serve all of the block.
                let to = if plan.shared { self.k.add(first / LANES * tiles * TILE) } else { self.k };
                self.isa.widen(k.part(first, LANES.min(block.n - first)), to);
                for (_, panel) in self.busy(part, block) {
                    let s = self.s.add(panel.s + first * panel.lanes);
                    self.isa.scores(panel.lanes, self.q.add(panel.q), to, tiles, s, &mut ahead);
                }
            }
        }
    }

    /// A panel's weights and sums.
    // SAFETY: the panel has them.
    pub(super) unsafe fn rows_of(&self, block: Block, i: usize, panel: Panel) -> Weights {
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
    // SAFETY: `item`'s contract; the weights are there.
    unsafe fn values(&mut self, part: usize, block: Block, v: Source, next: Option<Source>, portions: usize) {
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
            for (i, panel) in self.busy(part, block) {
                let w = self.rows_of(block, i, panel);
                if in_place {
                    self.isa.weigh_in_place(w, v, &mut ahead);
                } else {
                    self.isa.weigh(w, self.v, stride, &mut ahead);
                }
            }
        }
    }

    /// The panels of part `part` for which the block is open.
    pub(super) fn busy(&self, part: usize, block: Block) -> impl Iterator<Item = (usize, Panel)> + Clone + use<A> {
        let (panels, Part { first, count, .. }) = (self.panels, self.parts[part]);
        (first..first + count).filter(move |i| block.idle >> i & 1 == 0).map(move |i| (i, panels[i]))
    }

    /// Scores of a panel into weights.
    // SAFETY: `item`'s contract; the panel's scores are there.
    pub(super) unsafe fn weights(&self, block: Block, i: usize, panel: Panel) {
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
