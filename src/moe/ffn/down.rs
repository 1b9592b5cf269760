//! Phase 3 of the FFN: the down product, and what becomes of it.

use super::{Bias, FfnParts, Run, sum_rows};
use crate::kernels::{Engine, Finish};
use crate::moe::awaited::Awaited;
use crate::moe::blocks::{Blocks, Cuts, each, pieces};
use crate::moe::cblock::{Chunk, ROOM};
use crate::moe::routing::{Active, Pair};
use crate::team::Worker;
use crate::tensor::ViewMut;

impl<E: Engine> Run<'_, E> {
    /// Before phase 3, where the weights of down lie on several nodes: this worker's part of their products.
    // SAFETY: the tokens are packed in `areas.h`, all workers are here.
    pub(super) unsafe fn down_products(&mut self, w: &Worker<'_>) {
        if let Some(segments) = self.areas.down {
            // SAFETY: the caller's promise; seated before the first barrier.
            unsafe { self.products(&segments, w, &self.parts.down, &self.areas.h) };
            w.barrier();
        }
    }

    /// Router weight of the expert's pair `t`.
    fn weight(&self, active: &Active, t: usize) -> f32 {
        match self.parts.router {
            // SAFETY: written for each pair.
            Some(_) => unsafe { self.areas.weights.add(active.first + t).read() },
            None => 1.0,
        }
    }

    /// Phase 3, each slot for itself.
    // SAFETY: the tokens are packed in `areas.h`, all workers are here.
    pub(super) unsafe fn down(&mut self, w: &Worker<'_>, dst: ViewMut<'_>) {
        let FfnParts { down, .. } = *self.parts;
        let blocks = Blocks::new(self.multiplier.engine(), down, &self.routing, w.nth());
        each(w, blocks.count(), |block, next| {
            let (active, first, n) = blocks.get(block);
            if self.areas.down.is_none() {
                self.count(w, 2..3, active.expert, (first, n));
            }
            let then = next.map(|next| (blocks.start(next), blocks.get(next).0));
            let then = then.map(|(next, other)| (next, Some(other).filter(|other| other.expert != active.expert)));
            // SAFETY: packed before the barrier and only read since; this worker's columns of dst.
            unsafe {
                let to = |p: Pair| dst.row(p.slot as usize, p.token as usize, 0).wrapping_add(first);
                self.down_block((active, first, n), then, false, to);
            }
        });
    }

    /// The down product of an expert's rows `[first, first + n)`, weighted and written, or added, to `to` of each pair. Then come the weights
    /// at `then`, and if it says so another expert's tokens.
    // SAFETY: the tokens are packed in `areas.h`; `to` is writable for n f32 and this worker's.
    unsafe fn down_block(
        &mut self,
        (active, first, n): (&Active, usize, usize),
        then: Option<(*const u8, Option<&Active>)>,
        add: bool,
        to: impl Fn(Pair) -> *mut f32,
    ) {
        let FfnParts { down, down_bias, .. } = *self.parts;
        let mut pieces = pieces(self.multiplier.engine(), active, n).peekable();
        while let Some((at, n)) = pieces.next() {
            let rows = down.rows(active.expert, first + at, n);
            let (rows, other) = match (pieces.peek(), then) {
                (Some(&(at, _)), _) => (rows.then(down.rows(active.expert, first + at, 0).data), None),
                (None, Some((next, other))) => (rows.then(next), other),
                (None, None) => (rows, None),
            };
            let finish = Finish { bias: Bias::at(down_bias, active.expert, first + at), add };
            for chunk in Chunk::all(active, n, ROOM) {
                let tokens = chunk.range();
                let pairs = &self.routing.of(active)[tokens.clone()];
                // SAFETY: the caller's promise; this worker's C block.
                unsafe {
                    let (segments, h, c) = (self.areas.down, self.areas.h, self.areas.c);
                    let c = self.block(segments, rows, &h, (active, first + at), (chunk, other), c);
                    let weight = |t| self.weight(active, tokens.start + t);
                    let awaited = &mut Awaited::behind(&rows);
                    c.finish(
                        self.multiplier.engine().vectors(),
                        finish,
                        weight,
                        |t| to(pairs[t]).wrapping_add(at),
                        awaited,
                    );
                }
            }
        }
    }

    /// Phase 3 with the sum over the slots: a block of output rows at a time, all experts in turn, so that each sum has one
    /// writer and one order.
    // SAFETY: the tokens are packed in `areas.h`, all workers are here.
    pub(super) unsafe fn down_sum(&mut self, w: &Worker<'_>, dst: ViewMut<'_>) {
        let FfnParts { down, ids, .. } = *self.parts;
        let (active, tokens) = (self.routing.active, ids.n_tokens());
        let step = if active.iter().any(|a| a.lanes() > 0) { E::GROUP } else { 8 };
        let cuts = Cuts::new(self.multiplier.engine(), &down, &self.routing, w.nth(), (step, sum_rows(tokens)));
        each(w, cuts.iter().count(), |block, next| {
            let ((first, n), size, sums) = (cuts.get(block), cuts.largest(), self.areas.sums);
            // SAFETY: this worker's sums.
            unsafe { sums.write_bytes(0, tokens * size) };
            for (i, a) in active.iter().enumerate() {
                if self.areas.down.is_none() {
                    self.count(w, 2..3, a.expert, (first, n));
                }
                let start = |a: &Active, first: usize| down.rows(a.expert, first, 0).data;
                let then = match (active.get(i + 1), next) {
                    (Some(a), _) => Some((start(a, first), Some(a))),
                    (None, Some(next)) => Some((start(&active[0], cuts.get(next).0), Some(&active[0]))),
                    (None, None) => None,
                };
                // SAFETY: packed before the barrier and only read since; this worker's sums.
                unsafe { self.down_block((a, first, n), then, true, |p| sums.wrapping_add(p.token as usize * size)) };
            }
            for token in 0..tokens {
                let to = dst.row(token, 0, 0).wrapping_add(first);
                // SAFETY: n values of the token's sums; columns of dst that are this worker's.
                unsafe { to.copy_from_nonoverlapping(sums.add(token * size), n) };
            }
        });
    }
}
