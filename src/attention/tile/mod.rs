//! Tiles of query rows over one chunk of the cache.

mod block;
mod on_amx;
mod open;

use std::ops::Range;

use open::{Coming, Work};

use super::plan::{MAX_BUNDLE, MAX_PANELS, MAX_TILE_ROWS, Plan};
use super::{Params, sink, slope, weight};
use crate::isa::Amx;
use crate::kernels::amx::attention::{self as tiles, EARLY_PANELS, TileAttention};
use crate::kernels::attention::{Attend, LANES, Source, State, Weights, pack, pack_for, panel_lanes, panel_len};
use crate::tensor::View;

/// Some tiles and a chunk: what a thread does at a time. Several tiles are different KV heads of one stream.
#[derive(Clone, Debug)]
pub struct Item {
    pub tiles: Range<usize>,
    pub chunk: usize,
}

/// A thread's place to work: the panels of the tiles it is at, and its scratch.
pub struct Tile<'a, A> {
    isa: A,
    /// AMX, where it may take tiles.
    amx: Option<TileAttention>,
    params: &'a Params<'a>,
    plan: &'a Plan,
    /// K and V are used where they lie, not widened first: too few rows share them.
    in_place: [bool; 2],
    /// The tiles and their rows that the panels hold, and whether AMX might have taken them.
    packed: Option<(Range<usize>, Range<usize>, bool)>,
    parts: [Part; MAX_BUNDLE],
    /// Where the work goes on after this chunk.
    then: Option<Item>,
    /// Panels of a block on AMX whose V is still to be weighed.
    waiting: [Option<Weights>; EARLY_PANELS],
    rows: [Row; MAX_TILE_ROWS],
    panels: [Panel; MAX_PANELS],
    k: *mut f32,
    v: *mut f32,
    q: *mut f32,
    s: *mut f32,
    o: *mut f32,
    states: *mut State,
}

/// One of the packed tiles: `rows` from row `row` on, in panels `[first, first + count)`.
#[derive(Clone, Copy, Default)]
struct Part {
    row: usize,
    rows: usize,
    first: usize,
    count: usize,
    /// AMX takes it; and whether its scores are finite so far.
    on_amx: bool,
    finite: bool,
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
    pub unsafe fn new(isa: A, amx: Option<Amx>, params: &'a Params<'a>, plan: &'a Plan, scratch: *mut f32) -> Self {
        let mut at = scratch;
        let [k, v, q, s, o, states, tiles] = plan.thread_parts().map(|len| {
            let part = at;
            // SAFETY: the parts add up to less than `thread_bytes`.
            at = unsafe { at.add(len) };
            part
        });
        let v = if plan.shared { k } else { v };
        let amx = amx.map(|amx| {
            let types = [params.k.dtype, params.v.dtype];
            // SAFETY: the last part is as long as this asks for.
            unsafe { TileAttention::new(amx, types, plan.shared, plan.amx_room(), tiles) }
        });
        let few = |view: &View<'_>, rows| !plan.shared && plan.tile_rows <= rows && view.ne[0].is_multiple_of(LANES);
        let in_place = [few(&params.k, A::k_in_place(params.k.dtype)), few(&params.v, A::v_in_place(params.v.dtype))];
        let rows = [Row { mask: std::ptr::null(), slope: 1.0 }; MAX_TILE_ROWS];
        let panels = [Panel::default(); MAX_PANELS];
        let parts = [Part::default(); MAX_BUNDLE];
        let states = states.cast();
        Self {
            isa,
            amx,
            params,
            plan,
            in_place,
            packed: None,
            parts,
            then: None,
            waiting: [None; EARLY_PANELS],
            rows,
            panels,
            k,
            v,
            q,
            s,
            o,
            states,
        }
    }

    /// Computes an item: into its slots of `partial`, or into `dst` if there is one chunk. Asks for the beginning of the item
    /// that comes next in the end.
    ///
    /// # Safety
    /// The views are as they promise, `partial` as large as the plan says; nobody else computes these tiles and chunk.
    // SAFETY: contract above.
    pub unsafe fn item(&mut self, item: Item, then: Option<Item>, partial: *mut f32) {
        let Item { tiles, chunk } = item;
        self.then = then;
        let rows = 0..self.plan.rows(tiles.start);
        // SAFETY: the caller's contract.
        let mut lost = unsafe { self.rows(tiles.clone(), chunk, rows, true, partial) };
        if !self.parts[0].on_amx && self.params.mask.is_none() {
            return;
        }
        while lost != 0 {
            let i = lost.trailing_zeros() as usize;
            // SAFETY: as above.
            unsafe { self.again(tiles.start + i, chunk, partial) };
            lost &= lost - 1;
        }
    }

    /// A tile whose sums are not all finite, once more.
    // SAFETY: `item`'s contract.
    #[cold]
    unsafe fn again(&mut self, tile: usize, chunk: usize, partial: *mut f32) {
        let rows = 0..self.plan.rows(tile);
        // On AMX, infinities may have become NaN in two parts of a number. On vectors this only brings the tile to the front.
        // SAFETY: the caller's contract.
        let lost = unsafe { self.rows(tile..tile + 1, chunk, rows.clone(), false, partial) };
        if lost == 0 || self.params.mask.is_none() {
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
            unsafe { self.rows(tile..tile + 1, chunk, start..end, false, partial) };
        }
    }

    /// Some rows of tiles over the chunk, on AMX only if it may. Bit `i` of the result is set where sums of the tile `i` are not
    /// all finite.
    // SAFETY: `item`'s contract.
    unsafe fn rows(
        &mut self,
        tiles: Range<usize>,
        chunk: usize,
        rows: Range<usize>,
        amx: bool,
        partial: *mut f32,
    ) -> u32 {
        let plan = self.plan;
        let packed = Some((tiles.clone(), rows.clone(), amx));
        if self.packed != packed {
            // SAFETY: the caller's contract.
            unsafe { self.pack(tiles.clone(), rows.clone(), amx) };
            self.packed = packed;
        }
        for part in &mut self.parts[..tiles.len()] {
            part.finite = true;
            let sums = if part.on_amx { part.rows.next_multiple_of(LANES) } else { part.rows };
            // SAFETY: this thread's states and sums; on AMX they are those of 16 rows.
            unsafe {
                for panel in part.first..part.first + part.count {
                    *self.states.add(panel) = State::EMPTY;
                }
                let o = self.o.add(part.row * plan.dv_padded());
                std::slice::from_raw_parts_mut(o, sums * plan.dv_padded()).fill(0.0);
            }
        }
        // SAFETY: the slots of these tiles and chunk are ours, and follow each other for a tile's rows.
        unsafe {
            self.blocks(tiles.clone(), chunk);
            (0..tiles.len())
                .fold(0, |lost, i| lost | u32::from(!self.store(i, tiles.start + i, chunk, rows.start, partial)) << i)
        }
    }

    /// Packs query rows and looks up their masks.
    // SAFETY: `item`'s contract.
    unsafe fn pack(&mut self, tiles: Range<usize>, rows: Range<usize>, amx: bool) {
        let (mut first, room) = (0, rows.len().next_multiple_of(LANES));
        for (i, tile) in tiles.enumerate() {
            let part = Part { row: i * room, rows: rows.len(), first, ..Part::default() };
            // SAFETY: the caller's contract.
            self.parts[i] = unsafe { self.pack_part(part, tile, rows.start, amx) };
            first += self.parts[i].count;
        }
    }

    /// Packs one tile's rows from `start` on.
    // SAFETY: `item`'s contract.
    unsafe fn pack_part(&mut self, mut part: Part, tile: usize, start: usize, amx: bool) -> Part {
        let (plan, params) = (self.plan, self.params);
        for row in 0..part.rows {
            let p = plan.place(tile, start + row);
            let at = |m: View<'_>| m.row(p.query, p.head % m.ne[2], p.stream % m.ne[3]).cast::<u16>();
            let slope = slope(params.max_bias, params.q.ne[2], p.head);
            self.rows[part.row + row] = Row { mask: params.mask.map_or(std::ptr::null(), at), slope };
        }
        let scale = if params.logit_softcap == 0.0 { params.scale } else { params.scale / params.logit_softcap };
        let mut amx = self.amx.as_mut().filter(|of| amx && of.takes(part.rows));
        part.on_amx = amx.is_some();
        let (mut row, mut q, mut s) = (0, part.row * plan.d.next_multiple_of(LANES), 0);
        while row < part.rows {
            let left = part.rows - row;
            let lanes = if part.on_amx { tiles::panel_lanes(left) } else { panel_lanes(left) };
            // AMX packs from 16 lanes, and has both parts of 8 rows' scores in 16 lanes at first.
            let room = if part.on_amx { LANES } else { lanes };
            let panel = Panel { row: part.row + row, rows: lanes.min(left), lanes, q, s };
            let sources = (row..row + panel.rows).map(|row| {
                let p = plan.place(tile, start + row);
                params.q.row(p.query, p.head, p.stream).cast::<f32>()
            });
            // SAFETY: the rows are in the view; the panels' lanes add up to at most the tile's rows rounded up to 16.
            unsafe {
                if self.in_place[0] && !part.on_amx {
                    pack_for(params.k.dtype, sources, lanes, plan.d, scale, self.q.add(q));
                } else {
                    pack(sources, room, plan.d, scale, self.q.add(q));
                }
                if let Some(amx) = &mut amx {
                    amx.pack(part.first + part.count, lanes, self.q.add(q));
                }
            }
            self.panels[part.first + part.count] = panel;
            part.count += 1;
            (row, q, s) = (row + panel.rows, q + panel_len(room, plan.d), s + room * plan.block);
        }
        part
    }

    /// Goes over the open blocks of a chunk: each for all tiles, because the rows of their heads lie side by side.
    // SAFETY: `item`'s contract, with the rows packed.
    unsafe fn blocks(&mut self, tiles: Range<usize>, chunk: usize) {
        let plan = self.plan;
        let end = ((chunk + 1) * plan.chunk_len).min(plan.n_kv);
        // SAFETY: the mask's rows have `n_kv` values.
        let mut next = unsafe { self.open(tiles.len(), chunk * plan.chunk_len, end) };
        while let Some((start, blocks)) = next {
            // SAFETY: as above; then the block's positions are in the views.
            unsafe {
                next = self.open(tiles.len(), start + blocks[0].n, end);
                let coming = match (&next, &self.then) {
                    (Some((start, blocks)), _) => {
                        Some(Coming { tile: tiles.start, tiles: tiles.len(), start: *start, rows: blocks[0].n })
                    }
                    (None, Some(Item { tiles, chunk })) => {
                        let start = chunk * plan.chunk_len;
                        let rows = plan.block.min(plan.n_kv - start);
                        Some(Coming { tile: tiles.start, tiles: tiles.len(), start, rows })
                    }
                    (None, None) => None,
                };
                let work = Work { blocks: &blocks[..tiles.len()], tile: tiles.start, coming };
                for i in 0..tiles.len() {
                    match self.job(&work, i) {
                        Some(job) if self.parts[i].on_amx => self.block_on_amx(job),
                        Some(job) => self.block(job),
                        None => {}
                    }
                }
            }
        }
        // SAFETY: the caller's contract.
        unsafe { self.weigh_last() };
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

    /// Hands the results of part `i`, tile `tile` from row `start` on, on; whether all are finite.
    // SAFETY: `item`'s contract; the chunk is done.
    unsafe fn store(&self, i: usize, tile: usize, chunk: usize, start: usize, partial: *mut f32) -> bool {
        let (plan, part) = (self.plan, self.parts[i]);
        let mut finite = part.finite;
        for i in part.first..part.first + part.count {
            let panel = self.panels[i];
            // SAFETY: this thread's state.
            let state = unsafe { &*self.states.add(i) };
            if let Some(amx) = self.amx.as_ref().filter(|_| part.on_amx) {
                // SAFETY: this thread's sums, of 16 rows on AMX.
                unsafe { amx.settle(panel.lanes, self.o.add(panel.row * plan.dv_padded()), plan.dv_padded() / LANES) };
            }
            for row in 0..panel.rows {
                let (max, sum) = (state.max[row], state.row_sum(panel.lanes, row));
                // SAFETY: this thread's sums.
                let o = unsafe { self.o.add((panel.row + row) * plan.dv_padded()) };
                // SAFETY: as above.
                finite &= sum.is_finite() && unsafe { all_finite(o, plan.dv) };
                let row = start + panel.row - part.row + row;
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
    // SAFETY: `item`'s contract.
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
