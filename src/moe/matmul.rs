//! Single products: `MUL_MAT_ID` and `MUL_MAT`.

use super::awaited::Awaited;
use super::blocks::{Blocks, each, pieces};
use super::cblock::{Chunk, Multiplier, ROOM};
use super::gather::{Packed, gather};
use super::nodes::{OnNodes, Placed, Segments};
use super::routing::{Ids, Pair, Routing};
use super::{Carver, OpError, cost, most_room, on_engine};
use crate::cost::Cost;
use crate::isa::Isa;
use crate::kernels::{Engine, Finish};
use crate::team::Worker;
use crate::tensor::{View, ViewMut, Weights};

/// `MUL_MAT_ID`: `dst[:, slot, token] = w[ids[slot, token]] . x[:, slot % x.ne[1], token]`.
#[derive(Clone, Copy, Debug)]
pub struct MulMatId<'a> {
    w: Weights<'a>,
    x: View<'a>,
    ids: Ids<'a>,
    dst: ViewMut<'a>,
    placed: Option<Placed<'a>>,
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
        Self { w, x, ids, dst, placed: None }
    }

    /// Follows the pages of its weights, where they lie on several nodes and the tokens are few.
    pub fn follow_pages(self, nodes: OnNodes<'a>) -> Self {
        Self { placed: nodes.of(&self.w, self.ids.pairs()), ..self }
    }

    /// What it has to read and compute; for before it runs, as the result may overwrite the ids.
    pub fn cost(&self) -> Cost {
        cost::of_experts(&self.ids, &[self.w])
    }

    /// Bytes of scratch for a team of `nth`.
    pub fn scratch_bytes(&self, nth: usize) -> usize {
        let shape = [self.ids.n_used(), self.ids.n_tokens()];
        Areas::new(std::ptr::null_mut(), &self.w, shape, self.placed, (0, nth)).bytes
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
        let product = Product {
            w: self.w,
            placed: self.placed,
            slots: self.ids.n_used(),
            tokens: self.ids.n_tokens(),
            expert: |slot, token| self.ids.get(slot, token),
            source: |p: Pair| self.x.row(p.slot as usize % self.x.ne[1], p.token as usize, 0).cast(),
            to: |p: Pair| self.dst.row(p.slot as usize, p.token as usize, 0),
        };
        // SAFETY: the caller's promise.
        on_engine!(isa, |engine| unsafe { product.run(engine, w, scratch) })
    }
}

/// `MUL_MAT`: `dst[:, i1, i2, i3] = w[i2 / r2, i3 / r3] . x[:, i1, i2, i3]`, where `x` has `r2` and `r3` times the matrices of `w`
/// in dimensions 2 and 3.
#[derive(Clone, Copy, Debug)]
pub struct MulMat<'a> {
    w: Weights<'a>,
    ratio: [usize; 2],
    x: View<'a>,
    dst: ViewMut<'a>,
    placed: Option<Placed<'a>>,
}

impl<'a> MulMat<'a> {
    /// Weights `[ne3][ne2][n][k]` as `ne2 * ne3` experts (BF16 or Q8_0), `w_ne2` of them in dimension 2; `x` f32
    /// `[k][tokens][ne2 * r2][ne3 * r3]`; `dst` f32 likewise with `n` instead of `k`. `dst` may overlap `x`, never the weights.
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn new(w: Weights<'a>, w_ne2: usize, x: View<'a>, dst: ViewMut<'a>) -> Self {
        let w_ne3 = w.experts / w_ne2;
        assert_eq!(x.ne[0], w.k, "columns of x");
        assert_eq!(dst.ne, [w.n, x.ne[1], x.ne[2], x.ne[3]], "shape of dst");
        assert!(
            w.experts == w_ne2 * w_ne3 && x.ne[2].is_multiple_of(w_ne2) && x.ne[3].is_multiple_of(w_ne3),
            "broadcast"
        );
        Self { w, ratio: [x.ne[2] / w_ne2, x.ne[3] / w_ne3], x, dst, placed: None }
    }

    /// Follows the pages of its weights, where they lie on several nodes and the tokens are few.
    pub fn follow_pages(self, nodes: OnNodes<'a>) -> Self {
        Self { placed: nodes.of(&self.w, self.x.ne[1] * self.x.ne[2] * self.x.ne[3]), ..self }
    }

    /// What it has to read and compute.
    pub fn cost(&self) -> Cost {
        cost::of_matrix(&self.w, self.x.ne[1] * self.x.ne[2] * self.x.ne[3])
    }

    /// Bytes of scratch for a team of `nth`.
    pub fn scratch_bytes(&self, nth: usize) -> usize {
        let shape = [self.x.ne[2] * self.x.ne[3], self.x.ne[1]];
        Areas::new(std::ptr::null_mut(), &self.w, shape, self.placed, (0, nth)).bytes
    }

    /// This worker's part; every worker of the team calls it with the same `scratch`.
    ///
    /// # Errors
    /// None that can happen; the type is that of the other operations.
    ///
    /// # Safety
    /// `scratch` is 64-byte aligned, has [`MulMat::scratch_bytes`] for this team, and is used by nothing else meanwhile.
    // SAFETY: contract above.
    pub unsafe fn run(&self, isa: Isa, w: &Worker<'_>, scratch: *mut u8) -> Result<(), OpError> {
        let [_, tokens, ne2, ne3] = self.x.ne;
        let w_ne2 = ne2 / self.ratio[0];
        // A slot is a pair of indices in dimensions 2 and 3, so that all tokens of a matrix meet.
        let product = Product {
            w: self.w,
            placed: self.placed,
            slots: ne2 * ne3,
            tokens,
            expert: |slot, _| (slot % ne2 / self.ratio[0] + slot / ne2 / self.ratio[1] * w_ne2) as i32,
            source: |p: Pair| self.x.row(p.token as usize, p.slot as usize % ne2, p.slot as usize / ne2).cast(),
            to: |p: Pair| self.dst.row(p.token as usize, p.slot as usize % ne2, p.slot as usize / ne2),
        };
        // SAFETY: the caller's promise.
        on_engine!(isa, |engine| unsafe { product.run(engine, w, scratch) })
    }
}

/// Where the pieces of the scratch memory are, some of them a worker's own.
struct Areas<'a> {
    bytes: usize,
    routing: *mut u8,
    packed: Packed,
    c: *mut f32,
    room: *mut u8,
    segments: Option<Segments<'a>>,
}

impl<'a> Areas<'a> {
    fn new(
        scratch: *mut u8,
        w: &Weights<'_>,
        [slots, tokens]: [usize; 2],
        placed: Option<Placed<'a>>,
        (ith, nth): (usize, usize),
    ) -> Self {
        let pairs = slots * tokens;
        let mut carver = Carver::new(scratch);
        let packed = Packed::carve(&mut carver, w.dtype, w.k, pairs, w.experts);
        let routing = carver.take_each(Routing::scratch_bytes(pairs, w.experts), ith, nth);
        let c = carver.take_each(ROOM * 4, ith, nth).cast();
        let room = carver.take_each(most_room(), ith, nth);
        let segments = Segments::carve(placed, &mut carver, [pairs, w.experts]);
        Self { bytes: carver.used, routing, packed, c, room, segments }
    }
}

/// What both operations are: pairs of slot and token, each with its matrix, its activations and its place in the result.
struct Product<'a, Expert, Source, To> {
    w: Weights<'a>,
    placed: Option<Placed<'a>>,
    slots: usize,
    tokens: usize,
    expert: Expert,
    source: Source,
    to: To,
}

impl<Expert, Source, To> Product<'_, Expert, Source, To>
where
    Expert: Fn(usize, usize) -> i32,
    Source: Fn(Pair) -> *const f32,
    To: Fn(Pair) -> *mut f32,
{
    // SAFETY: as `MulMatId::run`.
    unsafe fn run<E: Engine>(&self, engine: E, w: &Worker<'_>, scratch: *mut u8) -> Result<(), OpError> {
        let mut areas = Areas::new(scratch, &self.w, [self.slots, self.tokens], self.placed, (w.ith(), w.nth()));
        areas.packed = areas.packed.on(engine);
        let dot_tokens = |tokens| match areas.segments {
            Some(_) => engine.dot_tokens_apart(self.w.dtype, tokens),
            None => engine.dot_tokens(self.w.dtype, tokens),
        };
        let shape = [self.slots, self.tokens, self.w.experts];
        // SAFETY: a piece of the scratch for this worker alone.
        let routing = unsafe { Routing::build(&self.expert, shape, dot_tokens, areas.routing) }?;
        let segments = areas.segments.and_then(|s| s.pay(&routing));
        let _pinned = segments.and_then(|s| s.take_seat(w));
        // SAFETY: carved for this many pairs; all workers of the team are here.
        unsafe { gather(engine.vectors(), w, &routing, &self.source, &areas.packed) };
        w.barrier();
        if let Some(segments) = &segments {
            // SAFETY: packed and seated before the barrier.
            unsafe { segments.products(engine, w, &self.w, &routing, &areas.packed, areas.c) };
            w.barrier();
        }
        let blocks = Blocks::new(engine, self.w, &routing, w.nth());
        // SAFETY: carved for this worker alone.
        let mut multiplier = unsafe { Multiplier::new(engine, areas.room) };
        let finish = Finish { bias: std::ptr::null(), add: false };
        each(w, blocks.count(), |block, next| {
            let (active, first, n) = blocks.get(block);
            if let (Some(placed), None) = (&self.placed, &segments) {
                placed.count(w, active.expert, (first, n));
            }
            let mut pieces = pieces(engine, active, n).map(|(at, n)| (first + at, n)).peekable();
            while let Some((first, n)) = pieces.next() {
                let rows = self.w.rows(active.expert, first, n);
                let (rows, then) = match (pieces.peek(), next) {
                    (Some(&(first, _)), _) => (rows.then(blocks.start_of(active, first)), None),
                    (None, Some(next)) => (rows.then(blocks.start(next)), Some(blocks.get(next).0)),
                    (None, None) => (rows, None),
                };
                let then = then.filter(|next| next.expert != active.expert);
                for chunk in Chunk::all(active, n, ROOM) {
                    let pairs = &routing.of(active)[chunk.range()];
                    let to = |t: usize| (self.to)(pairs[t]).wrapping_add(first);
                    // SAFETY: packed before the barrier and only read since; this worker's C block; rows of dst of this
                    // expert's pairs, in columns that are this worker's.
                    unsafe {
                        let c = match &segments {
                            Some(segments) => segments.block(active, (first, n), chunk, areas.c),
                            None => multiplier.product(rows, &areas.packed, active, (chunk, then), areas.c),
                        };
                        c.finish(engine.vectors(), finish, |_| 1.0, to, &mut Awaited::behind(&rows));
                    }
                }
            }
        });
        Ok(())
    }
}
