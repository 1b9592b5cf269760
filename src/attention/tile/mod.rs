//! One tile of query rows over one chunk of the cache.

mod open;

use std::ops::Range;

use super::plan::{MAX_PANELS, MAX_TILE_ROWS, Plan};
use super::{Params, sink, slope, weight};
use crate::kernels::attention::{
    Ahead, Attend, LANES, Source, State, TILE, Weights, pack, pack_for, panel_lanes, panel_len,
};
use crate::tensor::View;
use open::Block;

/// A thread's place to work: the panels of the tile it is at, and its scratch.
pub struct Tile<'a, A> {
    isa: A,
    params: &'a Params<'a>,
    plan: &'a Plan,
    /// K and V are used where they lie, not widened first: too few rows share them.
    in_place: [bool; 2],
    /// The tile and its rows that the panels hold.
    packed: Option<(usize, Range<usize>)>,
    /// Where the work goes on after this chunk: a tile and a position.
    then: Option<(usize, usize)>,
    rows: [Row; MAX_TILE_ROWS],
    panels: [Panel; MAX_PANELS],
    count: usize,
    k: *mut f32,
    v: *mut f32,
    q: *mut f32,
    s: *mut f32,
    o: *mut f32,
    states: *mut State,
}

/// The mask of a query row at position 0 (null: none), and its ALiBi slope.
#[derive(Clone, Copy)]
struct Row {
    mask: *const u16,
    slope: f32,
}

/// Rows `[row, row + rows)` of the packed ones, in `lanes` lanes; its panel and scores in f32 of scratch.
#[derive(Clone, Copy, Default)]
struct Panel {
    row: usize,
    rows: usize,
    lanes: usize,
    q: usize,
    s: usize,
}

impl<'a, A: Attend> Tile<'a, A> {
    /// # Safety
    /// `scratch` is 64-byte aligned and writable for `plan.thread_bytes()` bytes, for as long as this lives.
    // SAFETY: contract above.
    pub unsafe fn new(isa: A, params: &'a Params<'a>, plan: &'a Plan, scratch: *mut f32) -> Self {
        let mut at = scratch;
        let [k, v, q, s, o, states] = plan.thread_parts().map(|len| {
            let part = at;
            // SAFETY: the parts add up to less than `thread_bytes`.
            at = unsafe { at.add(len) };
            part
        });
        let v = if plan.shared { k } else { v };
        let few = |view: &View<'_>, rows| !plan.shared && plan.tile_rows <= rows && view.ne[0].is_multiple_of(LANES);
        let in_place = [few(&params.k, A::k_in_place(params.k.dtype)), few(&params.v, A::v_in_place(params.v.dtype))];
        let rows = [Row { mask: std::ptr::null(), slope: 1.0 }; MAX_TILE_ROWS];
        let panels = [Panel::default(); MAX_PANELS];
        Self {
            isa,
            params,
            plan,
            in_place,
            packed: None,
            then: None,
            rows,
            panels,
            count: 0,
            k,
            v,
            q,
            s,
            o,
            states: states.cast(),
        }
    }

    /// Computes tile `tile` over chunk `chunk`: into its slots of `partial`, or into `dst` if there is one chunk. Asks for the
    /// beginning of what comes next, tile and chunk, in the end.
    ///
    /// # Safety
    /// The views are as they promise, `partial` as large as the plan says; nobody else computes this tile and chunk.
    // SAFETY: contract above.
    pub unsafe fn chunk(&mut self, [tile, chunk]: [usize; 2], then: Option<[usize; 2]>, partial: *mut f32) {
        self.then = then.map(|[tile, chunk]| (tile, chunk * self.plan.chunk_len));
        let rows = 0..self.plan.rows(tile);
        // SAFETY: the caller's contract.
        let finite = unsafe { self.rows(tile, chunk, rows.clone(), partial) };
        if finite || self.params.mask.is_none() {
            return;
        }
        // In a tile a position may be open for one row and closed for another: 0 * Inf of the closed one's V is NaN in the
        // sum. With one mask row at a time a position is either read for all rows or for none.
        let same = |a: &usize, b: &usize| self.rows[*a].mask == self.rows[*b].mask;
        let mut parts = [(0, 0); MAX_TILE_ROWS];
        let mut count = 0;
        let mut start = 0;
        for row in rows.clone() {
            if row + 1 == rows.end || !same(&row, &(row + 1)) {
                (parts[count], count, start) = ((start, row + 1), count + 1, row + 1);
            }
        }
        for &(start, end) in parts[..count].iter().filter(|_| count > 1) {
            // SAFETY: the caller's contract.
            unsafe { self.rows(tile, chunk, start..end, partial) };
        }
    }

    /// Some rows of the tile over the chunk; whether their sums are all finite.
    // SAFETY: `chunk`'s contract.
    unsafe fn rows(&mut self, tile: usize, chunk: usize, rows: Range<usize>, partial: *mut f32) -> bool {
        let plan = self.plan;
        if self.packed.as_ref() != Some(&(tile, rows.clone())) {
            // SAFETY: the caller's contract.
            unsafe { self.pack(tile, rows.clone()) };
        }
        // SAFETY: the slots of this tile and chunk are ours, and follow each other for the tile's rows.
        unsafe {
            for panel in 0..self.count {
                *self.states.add(panel) = State::EMPTY;
            }
            std::slice::from_raw_parts_mut(self.o, rows.len() * plan.dv_padded()).fill(0.0);
            self.blocks(tile, chunk);
            self.store(tile, chunk, rows, partial)
        }
    }

    /// Packs query rows and looks up their masks.
    // SAFETY: `chunk`'s contract.
    unsafe fn pack(&mut self, tile: usize, rows: Range<usize>) {
        let (plan, params) = (self.plan, self.params);
        for (i, row) in rows.clone().enumerate() {
            let p = plan.place(tile, row);
            let at = |m: View<'_>| m.row(p.query, p.head % m.ne[2], p.stream % m.ne[3]).cast::<u16>();
            let slope = slope(params.max_bias, params.q.ne[2], p.head);
            self.rows[i] = Row { mask: params.mask.map_or(std::ptr::null(), at), slope };
        }
        let scale = if params.logit_softcap == 0.0 { params.scale } else { params.scale / params.logit_softcap };
        let (mut row, mut q, mut s) = (0, 0, 0);
        self.count = 0;
        while row < rows.len() {
            let lanes = panel_lanes(rows.len() - row);
            let panel = Panel { row, rows: lanes.min(rows.len() - row), lanes, q, s };
            let sources = (rows.start + row..rows.start + row + panel.rows).map(|row| {
                let p = plan.place(tile, row);
                params.q.row(p.query, p.head, p.stream).cast::<f32>()
            });
            // SAFETY: the rows are in the view; the panels' lanes add up to at most the tile's rows rounded up to 16.
            unsafe {
                if self.in_place[0] {
                    pack_for(params.k.dtype, sources, lanes, plan.d, scale, self.q.add(q));
                } else {
                    pack(sources, lanes, plan.d, scale, self.q.add(q));
                }
            }
            self.panels[self.count] = panel;
            self.count += 1;
            (row, q, s) = (row + panel.rows, q + panel_len(lanes, plan.d), s + lanes * plan.block);
        }
        self.packed = Some((tile, rows));
    }

    /// Goes over the open blocks of a chunk.
    // SAFETY: `chunk`'s contract, with the rows packed.
    unsafe fn blocks(&mut self, tile: usize, chunk: usize) {
        let plan = self.plan;
        let end = ((chunk + 1) * plan.chunk_len).min(plan.n_kv);
        let k = self.cache(&self.params.k, tile);
        let v = self.cache(&self.params.v, tile);
        // SAFETY: the mask's rows have `n_kv` values.
        let mut next = unsafe { self.open(chunk * plan.chunk_len, end) };
        while let Some(block) = next {
            // SAFETY: as above; then the block's positions are in the views.
            unsafe {
                next = self.open(block.start + block.n, end);
                let coming = match (next, self.then) {
                    (Some(next), _) => Some([&k, &v].map(|s| s.part(next.start, next.n))),
                    (None, Some((tile, start))) => Some([&self.params.k, &self.params.v].map(|view| {
                        let n = plan.block.min(plan.n_kv - start);
                        self.cache(view, tile).part(start, n)
                    })),
                    (None, None) => None,
                };
                self.block(block, coming, k, v);
            }
        }
    }

    /// The rows of a cache tensor that `tile` uses, from position 0.
    fn cache(&self, view: &View<'_>, tile: usize) -> Source {
        let p = self.plan.place(tile, 0);
        let head = p.head / (self.params.q.ne[2] / view.ne[2]);
        let stream = p.stream / (self.params.q.ne[3] / view.ne[3]);
        Source {
            dtype: view.dtype,
            data: view.row(0, head, stream),
            stride: view.nb[1],
            rows: 0,
            d: view.ne[0],
            closed: 0,
        }
    }

    /// One block: scores, weights, weighted sums. Asks for the rows of K and V that come next meanwhile.
    // SAFETY: `chunk`'s contract, with the rows packed.
    unsafe fn block(&mut self, block: Block, coming: Option<[Source; 2]>, k: Source, v: Source) {
        let here = |s: Source| Source { closed: block.closed, ..s.part(block.start, block.n) };
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
                let w = Weights {
                    p: self.s.add(panel.s),
                    lanes: panel.lanes,
                    rows: panel.rows,
                    n: block.n,
                    rescale: (*self.states.add(i)).rescale.as_ptr(),
                    o: self.o.add(panel.row * plan.dv_padded()),
                    tiles,
                };
                if in_place {
                    self.isa.weigh_in_place(w, v, &mut ahead);
                } else {
                    self.isa.weigh(w, self.v, stride, &mut ahead);
                }
            }
        }
    }

    /// The panels for which the block is open.
    fn busy(&self, block: Block) -> impl Iterator<Item = (usize, Panel)> + use<A> {
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

    /// Hands the rows' results on; whether all are finite.
    // SAFETY: `chunk`'s contract; the chunk is done.
    unsafe fn store(&self, tile: usize, chunk: usize, rows: Range<usize>, partial: *mut f32) -> bool {
        let plan = self.plan;
        let mut finite = true;
        for (i, panel) in self.panels[..self.count].iter().enumerate() {
            // SAFETY: this thread's state.
            let state = unsafe { &*self.states.add(i) };
            for row in 0..panel.rows {
                let (max, sum) = (state.max[row], state.row_sum(panel.lanes, row));
                // SAFETY: this thread's sums.
                let o = unsafe { self.o.add((panel.row + row) * plan.dv_padded()) };
                // SAFETY: as above.
                finite &= sum.is_finite() && unsafe { all_finite(o, plan.dv) };
                let row = rows.start + panel.row + row;
                // SAFETY: the row's slot or its row of `dst` is ours.
                unsafe {
                    if plan.chunks == 1 {
                        self.finish(tile, row, o, max, sum);
                    } else {
                        let slot = partial.add(plan.slot(tile, chunk, row));
                        std::ptr::copy_nonoverlapping(o, slot, plan.dv_padded());
                        *slot.add(plan.dv_padded()) = max;
                        *slot.add(plan.dv_padded() + 1) = sum;
                    }
                }
            }
        }
        finite
    }

    /// Writes a row's result when there is nothing to merge with.
    // SAFETY: `chunk`'s contract.
    unsafe fn finish(&self, tile: usize, row: usize, o: *const f32, max: f32, sum: f32) {
        let p = self.plan.place(tile, row);
        let sink = sink(self.params, p.head);
        let top = max.max(sink);
        let factor = weight(max, top);
        let sum = sum * factor + weight(sink, top);
        let inverse = if sum == 0.0 { 0.0 } else { 1.0 / sum };
        let to = self.params.dst.row(p.head, p.query, p.stream);
        // SAFETY: `o` is padded and aligned, the row of `dst` has `dv` elements.
        unsafe { self.isa.merge(std::iter::once((o, factor * inverse)), self.plan.dv, to) };
    }
}

/// Whether `n` values are all finite.
// SAFETY: they are readable.
unsafe fn all_finite(x: *const f32, n: usize) -> bool {
    // SAFETY: the caller's contract.
    let x = unsafe { std::slice::from_raw_parts(x, n) };
    x.iter().fold(0u32, |bad, v| bad | u32::from(v.to_bits() & 0x7f80_0000 == 0x7f80_0000)) == 0
}
