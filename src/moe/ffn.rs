//! The expert FFN as one pipeline: `sum over slots of router weight * (down . glu(gate . x, up . x))`.
//!
//! Three phases with a barrier between (paper, section 4): route and gather; gate, up and GLU, whose result is stored as the
//! panels of the next product; down, whose result is transposed, weighted and summed as it is stored.

mod down;

use super::awaited::Awaited;
use super::blocks::{Blocks, MOST_ROWS, each, pieces};
use super::cblock::{CBlock, Chunk, Multiplier, ROOM};
use super::gather::{Packed, gather};
use super::nodes::{OnNodes, Placed, Segments};
use super::routing::{Active, Ids, Pair, Routing};
use super::{Carver, OpError, cost, most_room, on_engine};
use crate::cost::Cost;
use crate::isa::Isa;
use crate::kernels::Engine;
use crate::kernels::glu::Glu;
use crate::team::Worker;
use crate::tensor::{Rows, View, ViewMut, Weights};

/// A bias of each expert (`ADD_ID`): f32 `[n][experts]`, rows contiguous.
#[derive(Clone, Copy, Debug)]
pub struct Bias<'a>(pub View<'a>);

impl Bias<'_> {
    /// Address of an expert's bias from row `first` on; null if there is none.
    fn at(bias: Option<Self>, expert: usize, first: usize) -> *const f32 {
        bias.map_or(std::ptr::null(), |b| b.0.row(expert, 0, 0).cast::<f32>().wrapping_add(first))
    }
}

/// Where the result goes.
#[derive(Clone, Copy, Debug)]
pub enum Output<'a> {
    /// f32 `[n_embd][slots][tokens]`: each slot for itself.
    Slots(ViewMut<'a>),
    /// f32 `[n_embd][tokens]`: the sum over the slots.
    Sum(ViewMut<'a>),
}

/// What to compute. A merged gate/up matrix is two views of it (see [`Weights::split`]).
#[derive(Clone, Copy, Debug)]
pub struct FfnParts<'a> {
    /// Activations, f32 `[n_embd][slots or 1][tokens]`.
    pub x: View<'a>,
    /// The router's choice.
    pub ids: Ids<'a>,
    /// Gate weights `[expert][n_ff][n_embd]`.
    pub gate: Weights<'a>,
    /// Up weights, of the same type and shape.
    pub up: Weights<'a>,
    /// Biases of gate and up.
    pub gate_bias: Option<Bias<'a>>,
    /// As `gate_bias`.
    pub up_bias: Option<Bias<'a>>,
    /// The gated unit.
    pub glu: Glu,
    /// Down weights `[expert][n_out][n_ff]`, of any type that has kernels.
    pub down: Weights<'a>,
    /// Bias of down.
    pub down_bias: Option<Bias<'a>>,
    /// Router weights, f32 `[1][slots][tokens]`; without them all are 1.
    pub router: Option<View<'a>>,
    /// Where the result goes.
    pub output: Output<'a>,
}

/// The fused expert FFN.
#[derive(Clone, Copy, Debug)]
pub struct Ffn<'a> {
    parts: FfnParts<'a>,
    /// Gate, up and down, on a machine with several nodes.
    placed: [Option<Placed<'a>>; 3],
}

/// Where the pieces of the scratch memory are, some of them a worker's own.
struct Areas<'a> {
    bytes: usize,
    x: Packed,
    h: Packed,
    routing: *mut u8,
    weights: *mut f32,
    c: *mut f32,
    room: *mut u8,
    sums: *mut f32,
    /// Gate and up, and down, where they follow the pages of their weights.
    gate_up: Option<[Segments<'a>; 2]>,
    down: Option<Segments<'a>>,
}

/// One worker's state while it runs.
struct Run<'a, E: Engine> {
    parts: &'a FfnParts<'a>,
    placed: [Option<Placed<'a>>; 3],
    areas: Areas<'a>,
    routing: Routing<'a>,
    multiplier: Multiplier<E>,
}

impl<'a> Ffn<'a> {
    /// The result may overlap the activations, ids and router weights: they are copied before the first write to it. It may not
    /// overlap weights or biases.
    ///
    /// # Panics
    /// If the shapes do not agree.
    pub fn new(parts: FfnParts<'a>) -> Self {
        let FfnParts { x, ids, gate, up, down, router, output, .. } = parts;
        assert_eq!((x.ne[0], x.ne[2]), (gate.k, ids.n_tokens()), "shape of x");
        assert_eq!((up.dtype, up.k, up.n), (gate.dtype, gate.k, gate.n), "gate and up");
        assert_eq!((up.experts, down.experts, down.k), (gate.experts, gate.experts, gate.n), "gate and down");
        for (bias, w) in [(parts.gate_bias, gate), (parts.up_bias, up), (parts.down_bias, down)] {
            assert!(bias.is_none_or(|b| b.0.ne[..2] == [w.n, w.experts] && b.0.nb[0] == 4), "shape of a bias");
        }
        let slots = [ids.n_used(), ids.n_tokens()];
        assert!(router.is_none_or(|r| r.ne[..3] == [1, slots[0], slots[1]]), "shape of the router weights");
        match output {
            Output::Slots(dst) => assert_eq!(dst.ne[..3], [down.n, slots[0], slots[1]], "shape of the result"),
            Output::Sum(dst) => assert_eq!(dst.ne[..2], [down.n, slots[1]], "shape of the result"),
        }
        Self { parts, placed: [None; 3] }
    }

    /// Follows the pages of its weights, where they lie on several nodes and the tokens are few; gate and up only together.
    pub fn follow_pages(self, nodes: OnNodes<'a>) -> Self {
        let FfnParts { gate, up, down, ids, .. } = &self.parts;
        Self { placed: [gate, up, down].map(|w| nodes.of(w, ids.pairs())), ..self }
    }

    /// What it has to read and compute; for before it runs, as the result may overwrite the ids.
    pub fn cost(&self) -> Cost {
        cost::of_experts(&self.parts.ids, &[self.parts.gate, self.parts.up, self.parts.down])
    }

    /// Bytes of scratch for a team of `nth`.
    pub fn scratch_bytes(&self, nth: usize) -> usize {
        self.areas(std::ptr::null_mut(), 0, nth).bytes
    }

    fn areas(&self, scratch: *mut u8, ith: usize, nth: usize) -> Areas<'a> {
        let FfnParts { ids, gate, down, .. } = &self.parts;
        let (pairs, experts) = (ids.pairs(), gate.experts);
        let mut carver = Carver::new(scratch);
        let x = Packed::carve(&mut carver, gate.dtype, gate.k, pairs, experts);
        let h = Packed::carve(&mut carver, down.dtype, down.k, pairs, experts);
        let routing = carver.take_each(Routing::scratch_bytes(pairs, experts), ith, nth);
        let weights = carver.take_each(pairs * 4, ith, nth).cast();
        let c = carver.take_each(ROOM * 4, ith, nth).cast();
        let room = carver.take_each(most_room(), ith, nth);
        let sums = match self.parts.output {
            Output::Sum(_) => carver.take_each(ids.n_tokens() * sum_rows(ids.n_tokens()) * 4, ith, nth).cast(),
            Output::Slots(_) => std::ptr::null_mut(),
        };
        let shape = [pairs, experts];
        // The partial sums of gate and up are done with when those of down begin.
        let mut over = carver;
        let [gate, up] = [0, 1].map(|i| Segments::carve(self.placed[i], &mut carver, shape));
        let down = Segments::carve(self.placed[2], &mut over, shape);
        let gate_up = gate.zip(up).map(|(gate, up)| [gate, up]);
        Areas { bytes: carver.used.max(over.used), x, h, routing, weights, c, room, sums, gate_up, down }
    }

    /// This worker's part; every worker of the team calls it with the same `scratch`.
    ///
    /// # Errors
    /// [`OpError::ExpertId`]: then no worker wrote to the result.
    ///
    /// # Safety
    /// `scratch` is 64-byte aligned, has [`Ffn::scratch_bytes`] for this team, and is used by nothing else meanwhile.
    // SAFETY: contract above.
    pub unsafe fn run(&self, isa: Isa, w: &Worker<'_>, scratch: *mut u8) -> Result<(), OpError> {
        // SAFETY: the caller's promise.
        on_engine!(isa, |engine| unsafe { self.run_on(engine, w, scratch) })
    }

    // SAFETY: as `run`.
    unsafe fn run_on<E: Engine>(&self, engine: E, w: &Worker<'_>, scratch: *mut u8) -> Result<(), OpError> {
        let FfnParts { x, ids, gate, down, .. } = &self.parts;
        let mut areas = self.areas(scratch, w.ith(), w.nth());
        (areas.x, areas.h) = (areas.x.on(engine), areas.h.on(engine));
        // Gate and down may differ in type, but a token is packed in one way for both.
        let apart = areas.gate_up.is_some() && areas.down.is_some();
        let rows = |w: &Weights<'_>, tokens: usize| {
            if apart { engine.dot_tokens_apart(w.dtype, tokens) } else { engine.dot_tokens(w.dtype, tokens) }
        };
        let rows = |tokens| rows(gate, tokens).min(rows(down, tokens));
        let shape = [ids.n_used(), ids.n_tokens(), gate.experts];
        // SAFETY: a piece of the scratch for this worker alone.
        let routing = unsafe { Routing::build(&|slot, token| ids.get(slot, token), shape, rows, areas.routing) }?;
        if let Some(router) = &self.parts.router {
            for (i, pair) in routing.pairs.iter().enumerate() {
                // SAFETY: an element of the view; room for one of each pair.
                unsafe {
                    let weight = router.row(pair.slot as usize, pair.token as usize, 0).cast::<f32>();
                    areas.weights.add(i).write(weight.read_unaligned());
                }
            }
        }
        areas.gate_up = areas.gate_up.and_then(|[gate, up]| Some([gate.pay(&routing)?, up.pay(&routing)?]));
        areas.down = areas.down.and_then(|down| down.pay(&routing));
        let _pinned = areas.down.or(areas.gate_up.map(|s| s[0])).and_then(|s| s.take_seat(w));
        let source = |p: Pair| x.row(p.slot as usize % x.ne[1], p.token as usize, 0).cast();
        // SAFETY: carved for this many pairs; all workers of the team are here.
        unsafe { gather(engine.vectors(), w, &routing, &source, &areas.x) };
        w.barrier();
        // SAFETY: carved for this worker alone.
        let multiplier = unsafe { Multiplier::new(engine, areas.room) };
        let mut run = Run { parts: &self.parts, placed: self.placed, areas, routing, multiplier };
        // SAFETY: the tokens are packed; then, behind the barrier, the next product's tokens are.
        unsafe {
            run.gate_up(w);
            w.barrier();
            run.down_products(w);
            match self.parts.output {
                Output::Slots(dst) => run.down(w, dst),
                Output::Sum(dst) => run.down_sum(w, dst),
            }
        }
        Ok(())
    }
}

/// Rows of a block of the down product with a sum: so that a thread's sums of all tokens stay in the L2
/// cache (512 KiB up to 2048 tokens); at least any engine's [`Engine::GROUP`].
fn sum_rows(tokens: usize) -> usize {
    ((128 << 10) / tokens.max(1)).clamp(64, MOST_ROWS)
}

impl<E: Engine> Run<'_, E> {
    /// Phase 2: gate, up and GLU of the blocks that fall to this worker, into the down product's packed tokens.
    // SAFETY: the tokens are packed in `areas.x`, all workers are here.
    unsafe fn gate_up(&mut self, w: &Worker<'_>) {
        let FfnParts { gate, up, gate_bias, up_bias, glu, .. } = *self.parts;
        let gates = Blocks::new(self.multiplier.engine(), gate, &self.routing, w.nth());
        let segments = self.areas.gate_up;
        if let Some([g, u]) = segments {
            // SAFETY: packed and seated before the barrier.
            unsafe {
                self.products(&g, w, &gate, &self.areas.x);
                self.products(&u, w, &up, &self.areas.x);
            }
            w.barrier();
        }
        let (c, room) = (self.areas.c, ROOM / 2);
        each(w, gates.count(), |block, next| {
            let (active, first, n) = gates.get(block);
            if segments.is_none() {
                self.count(w, 0..2, active.expert, (first, n));
            }
            let mut pieces = pieces(self.multiplier.engine(), active, n).map(|(at, n)| (first + at, n)).peekable();
            while let Some((first, n)) = pieces.next() {
                let [gate, up] = [gate, up].map(|m| m.rows(active.expert, first, n));
                let gate = gate.then(up.data);
                let (up, then) = match (pieces.peek(), next) {
                    (Some(&(first, _)), _) => (up.then(gates.start_of(active, first)), None),
                    (None, Some(next)) => (up.then(gates.start(next)), Some(gates.get(next).0)),
                    (None, None) => (up, None),
                };
                let then = then.filter(|next| next.expert != active.expert);
                let bias = [gate_bias, up_bias].map(|b| Bias::at(b, active.expert, first));
                for chunk in Chunk::all(active, n, room) {
                    // SAFETY: packed before the barrier and only read since; this worker's two C blocks; columns of the next
                    // tokens that are this worker's.
                    unsafe {
                        let [sg, su] = segments.map_or([None; 2], |s| s.map(Some));
                        let (x, v) = (self.areas.x, self.multiplier.engine().vectors());
                        let g = self.block(sg, gate, &x, (active, first), (chunk, None), c);
                        let u = self.block(su, up, &x, (active, first), (chunk, then), c.add(room));
                        g.glu(v, glu, &u, bias, &mut Awaited::behind(&up));
                        g.repack(v, &self.areas.h, active, first);
                    }
                }
            }
        });
    }

    /// This worker's part of a tensor's products by segments.
    // SAFETY: as `Segments::products`.
    unsafe fn products(&self, segments: &Segments<'_>, w: &Worker<'_>, weights: &Weights<'_>, packed: &Packed) {
        // SAFETY: the caller's promise.
        unsafe { segments.products(self.multiplier.engine(), w, weights, &self.routing, packed, self.areas.c) };
    }

    /// The C block of some rows: a product, or the sum of the segments' products.
    // SAFETY: as `Multiplier::product` and `Segments::block`.
    unsafe fn block(
        &mut self,
        segments: Option<Segments<'_>>,
        rows: Rows<'_>,
        packed: &Packed,
        (active, first): (&Active, usize),
        (chunk, then): (Chunk, Option<&Active>),
        c: *mut f32,
    ) -> CBlock {
        // SAFETY: the caller's promise.
        unsafe {
            match segments {
                Some(segments) => segments.block(active, (first, rows.n), chunk, c),
                None => self.multiplier.product(rows, packed, active, (chunk, then), c),
            }
        }
    }

    /// Counts the bytes of rows that are multiplied plainly, where that is wanted.
    fn count(&self, w: &Worker<'_>, which: std::ops::Range<usize>, expert: usize, rows: (usize, usize)) {
        self.placed[which].iter().flatten().for_each(|placed| placed.count(w, expert, rows));
    }
}
