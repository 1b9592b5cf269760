//! Single products: `MUL_MAT_ID`.

use super::blocks::{Blocks, CBlock, Multiplier};
use super::gather::{Packed, gather};
use super::routing::{Active, Ids, Pair, Routing};
use super::{Carver, OpError};
use crate::isa::{Avx512, Isa};
use crate::kernels::Engine;
use crate::kernels::amx::AmxEngine;
use crate::team::Worker;
use crate::tensor::{View, ViewMut, Weights};

/// `MUL_MAT_ID`: `dst[:, slot, token] = w[ids[slot, token]] . x[:, slot % x.ne[1], token]`.
#[derive(Clone, Copy, Debug)]
pub struct MulMatId<'a> {
    w: Weights<'a>,
    x: View<'a>,
    ids: Ids<'a>,
    dst: ViewMut<'a>,
}

/// Where a worker's pieces of the scratch memory are.
struct Areas {
    bytes: usize,
    routing: *mut u8,
    packed: Packed,
    c: *mut f32,
}

impl<'a> MulMatId<'a> {
    /// Weights `[expert][n][k]` (BF16 or Q8_0), `x` f32 `[k][slots or 1][tokens]`, `dst` f32 `[n][slots][tokens]`.
    ///
    /// `dst` may overlap `x` and `ids`, never the weights.
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn new(w: Weights<'a>, x: View<'a>, ids: Ids<'a>, dst: ViewMut<'a>) -> Self {
        assert_eq!(x.ne[0], w.k, "columns of x");
        assert_eq!(x.ne[2], ids.n_tokens(), "tokens of x");
        assert_eq!(dst.ne[..3], [w.n, ids.n_used(), ids.n_tokens()], "shape of dst");
        Self { w, x, ids, dst }
    }

    /// Bytes of scratch for a team of `nth`.
    pub fn scratch_bytes(&self, nth: usize) -> usize {
        self.areas(std::ptr::null_mut(), 0, nth).bytes
    }

    fn areas(&self, scratch: *mut u8, ith: usize, nth: usize) -> Areas {
        let pairs = self.ids.pairs();
        let mut carver = Carver::new(scratch);
        let packed = Packed::carve(&mut carver, self.w.dtype, self.w.k, pairs, self.w.experts);
        let routing_bytes = Routing::scratch_bytes(pairs, self.w.experts);
        let routing = carver.take::<u8>(routing_bytes * nth).wrapping_add(routing_bytes * ith);
        let c_len = CBlock::MAX;
        let c = carver.take::<f32>(c_len * nth).wrapping_add(c_len * ith);
        Areas { bytes: carver.used, routing, packed, c }
    }

    /// This worker's part; every worker of the team calls it with the same `scratch`.
    ///
    /// # Errors
    /// [`OpError::ExpertId`]: then no worker wrote to `dst`.
    ///
    /// # Safety
    /// `scratch` is 64-byte aligned, has [`MulMatId::scratch_bytes`] for this team, and is used by nothing else meanwhile.
    // SAFETY: contract above.
    pub unsafe fn run(&self, isa: Isa, w: &Worker<'_>, scratch: *mut u8) -> Result<(), OpError> {
        match isa {
            // SAFETY: the caller's promise.
            Isa::Amx(amx) => unsafe { self.run_on(AmxEngine::new(amx), isa.avx512(), w, scratch) },
            // SAFETY: the caller's promise.
            Isa::Avx512(avx512) => unsafe { self.run_on(avx512, avx512, w, scratch) },
        }
    }

    // SAFETY: as `run`.
    unsafe fn run_on<E: Engine>(
        &self,
        engine: E,
        proof: Avx512,
        w: &Worker<'_>,
        scratch: *mut u8,
    ) -> Result<(), OpError> {
        let areas = self.areas(scratch, w.ith(), w.nth());
        let dot_tokens = |tokens| engine.dot_tokens(self.w.dtype, tokens);
        // SAFETY: a piece of the scratch for this worker alone.
        let routing = unsafe { Routing::build(&self.ids, self.w.experts, dot_tokens, areas.routing) }?;
        // SAFETY: carved for this many pairs; all workers of the team are here.
        unsafe { gather(proof, w, &routing, &self.x, &areas.packed) };
        w.barrier();
        let blocks = Blocks::new(&self.w, routing.active.len(), w.nth());
        // SAFETY: this worker's C block.
        let mut multiplier = unsafe { Multiplier::new(engine, proof, areas.c) };
        let row = |pair: Pair| self.dst.row(pair.slot as usize, pair.token as usize, 0);
        blocks.each(w, &self.w, &routing, |a: &Active, rows, first| {
            // SAFETY: packed before the barrier and only read since; rows of dst of this expert's pairs, in columns that
            // are this worker's.
            unsafe {
                multiplier.products(rows, &areas.packed, a, |c, at| {
                    c.scatter(proof, &routing.of(a)[at..], first, &row);
                });
            }
        });
        Ok(())
    }
}
