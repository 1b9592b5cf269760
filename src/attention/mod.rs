//! Decode attention as matrix-matrix products (paper section 6): ggml's FLASH_ATTN_EXT, with every query
//! row that shares a KV head handled together, so that K and V are read once for a group of heads.
//!
//! The work is cut into *tiles* of query rows of one KV head and *chunks* of cache positions. The cut depends on the shapes
//! alone, never on the number of threads, and partial results merge by (maximum, sum) in the order of the chunks: the
//! same operands give the same bits for any team. Blocks that the mask closes for all rows of a tile are not read.

mod plan;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
mod tile;

use crate::cost::Cost;
use crate::isa::{Amx, Isa};
use crate::kernels::amx::attention::takes;
use crate::kernels::attention::Attend;
use crate::team::Worker;
use crate::tensor::{DType, View, ViewMut};
use plan::{MAX_CHUNKS, Plan};
use tile::{Item, Tile};

/// The operands of ggml's FLASH_ATTN_EXT: `dst = softmax(scale * q k^T + slope * mask) v` for each head.
///
/// With `heads % kv_heads == 0` and `streams % kv_streams == 0`: head `h` reads KV head `h / (heads / kv_heads)`, and
/// streams likewise; K and V may differ in their number of heads.
#[derive(Clone, Copy, Debug)]
pub struct Params<'a> {
    /// Queries, F32 `[d, n_q, heads, streams]`.
    pub q: View<'a>,
    /// Keys `[d, n_kv, kv_heads, kv_streams]`, of any [`DType`].
    pub k: View<'a>,
    /// Values `[dv, n_kv, kv_heads, kv_streams]`, of any [`DType`]; may be the first `dv` elements of K's own rows (MLA).
    pub v: View<'a>,
    /// F16 `[>= n_kv, >= n_q, a, b]`: head `h` of stream `s` reads `[.., .., h % a, s % b]`. -Inf closes a position.
    pub mask: Option<View<'a>>,
    /// F32 `[heads]`: a score without a value that takes part in each head's softmax.
    pub sinks: Option<View<'a>>,
    /// Factor of `q . k`.
    pub scale: f32,
    /// ALiBi's largest bias: head `h`'s slope of the mask follows from it; 0: every slope is 1.
    pub max_bias: f32,
    /// If not 0, a score becomes `cap * tanh(score / cap)` before the mask is added.
    pub logit_softcap: f32,
    /// Result, F32 `[dv, heads, n_q, streams]`.
    pub dst: ViewMut<'a>,
}

/// One attention operation, checked and planned.
#[derive(Clone, Copy, Debug)]
pub struct FlashAttn<'a> {
    params: Params<'a>,
    plan: Plan,
}

impl<'a> FlashAttn<'a> {
    /// Checks types, shapes and strides and plans the work; `None` for what these kernels do not handle.
    pub fn new(params: Params<'a>) -> Option<Self> {
        let plan = Plan::new(&params)?;
        Some(Self { params, plan })
    }

    /// What it has to read and compute, as if no position were closed; V counts for nothing where it lies in K's own rows.
    pub fn cost(&self) -> Cost {
        let Params { q, k, v, .. } = &self.params;
        let bytes = |x: &View<'_>| x.dtype.row_bytes(x.ne[0]) * x.ne[1] * x.ne[2] * x.ne[3];
        let v_bytes = if k.data == v.data { 0 } else { bytes(v) };
        let scores = k.ne[1] * q.ne[1] * q.ne[2] * q.ne[3];
        Cost { bytes: (bytes(k) + v_bytes) as u64, operations: (2 * (k.ne[0] + v.ne[0]) * scores) as u64 }
    }

    /// Bytes of scratch for a team of `nth` threads.
    pub fn scratch_bytes(&self, nth: usize) -> usize {
        self.plan.partial_bytes() + nth * self.plan.thread_bytes()
    }

    /// Computes the operation; every worker of the team calls it with the same arguments. Allocates nothing.
    ///
    /// Rows whose positions are all closed give zeros (with or without a sink); a score that is NaN or +Inf makes its row
    /// NaN. A position that is closed for a row never touches it, whatever its K and V hold.
    ///
    /// # Safety
    /// The views are as they promise; `scratch` is 64-byte aligned, the same for all workers, and writable for
    /// `scratch_bytes(w.nth())` bytes that nobody else uses until every worker has returned.
    // SAFETY: contract above.
    pub unsafe fn run(&self, isa: Isa, w: &Worker<'_>, scratch: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            match isa {
                Isa::Amx(amx) => {
                    let tiled = takes(amx, self.plan.tile_rows, self.params.k.dtype, self.params.v.dtype);
                    self.run_on(amx.avx512(), tiled.then_some(amx), w, scratch);
                }
                Isa::Avx512(avx512) => self.run_on(avx512, None, w, scratch),
                Isa::Avx2(avx2) => self.run_on(avx2, None, w, scratch),
            }
        }
    }

    /// On a vector instruction set, and AMX's tiles where they are worth it.
    // SAFETY: as `run`.
    unsafe fn run_on(&self, isa: impl Attend, amx: Option<Amx>, w: &Worker<'_>, scratch: *mut u8) {
        let plan = &if amx.is_some() { self.plan.on_tiles() } else { self.plan };
        // SAFETY: partial results first, then a part for each thread.
        let local = unsafe { scratch.add(plan.partial_bytes() + w.ith() * plan.thread_bytes()) };
        // SAFETY: the operands are the caller's; `local` is this worker's own.
        let mut tile = unsafe { Tile::new(isa, amx, &self.params, plan, local.cast()) };
        w.barrier();
        let mut items = Items::new(plan, w);
        let mut item = items.next();
        while let Some(this) = item {
            item = items.next();
            // SAFETY: each item is done by one worker, and owns its partial results or its rows of `dst`.
            unsafe { tile.item(this, item.clone(), scratch.cast()) };
        }
        drop(tile);
        w.barrier();
        if plan.chunks == 1 {
            return;
        }
        for row in w.share(plan.all_rows()) {
            // SAFETY: all partial results are written (barrier), and each row of `dst` belongs to one worker.
            unsafe { self.merge_row(isa, row, scratch.cast()) };
        }
    }

    /// Merges the chunks of one query row.
    // SAFETY: contract: the partial results are complete, and nobody else writes this row.
    unsafe fn merge_row(&self, isa: impl Attend, row: usize, partial: *const f32) {
        let plan = &self.plan;
        let (unit, row) = (row / plan.unit_rows, row % plan.unit_rows);
        let (tile, row) = (unit * plan.tiles + row / plan.tile_rows, row % plan.tile_rows);
        let place = plan.place(tile, row);
        // SAFETY: slots inside the partial results.
        let slot = |chunk| unsafe { partial.add(plan.slot(tile, chunk, row)) };
        // SAFETY: a slot's maximum and sum lie behind its values.
        let max_sum = |chunk| unsafe { (*slot(chunk).add(plan.dv_padded()), *slot(chunk).add(plan.dv_padded() + 1)) };
        let max = (0..plan.chunks).map(|c| max_sum(c).0).fold(self.sink(place.head), f32::max);
        let mut factors = [0.0; MAX_CHUNKS];
        let mut sum = 0.0;
        for (c, factor) in factors[..plan.chunks].iter_mut().enumerate() {
            let (top, weights) = max_sum(c);
            *factor = weight(top, max);
            sum += weights * *factor;
        }
        sum += weight(self.sink(place.head), max);
        let inverse = if sum == 0.0 { 0.0 } else { 1.0 / sum };
        let factors = &factors[..plan.chunks];
        let parts = factors.iter().enumerate().map(|(c, factor)| (slot(c), factor * inverse));
        let to = self.params.dst.row(place.head, place.query, place.stream);
        // SAFETY: the slots are padded and aligned, the row of `dst` has `dv` elements.
        unsafe { isa.merge(parts, plan.dv, to) };
    }

    fn sink(&self, head: usize) -> f32 {
        sink(&self.params, head)
    }
}

/// A worker's work, as threads become free.
///
/// The tiles of a chunk come one after the other, and as many as leave work for all threads together: the rows of all KV heads
/// of a position often lie side by side. Who does what does not change any result.
struct Items<'a> {
    plan: &'a Plan,
    w: &'a Worker<'a>,
    /// Tiles that are taken together, the last ones of a stream fewer.
    bundle: usize,
}

impl<'a> Items<'a> {
    fn new(plan: &'a Plan, w: &'a Worker<'a>) -> Self {
        let mut bundle = plan.bundle;
        while bundle > 1 && plan.streams * plan.stream_tiles().div_ceil(bundle) * plan.chunks < 2 * w.nth() {
            bundle = bundle.div_ceil(2);
        }
        Self { plan, w, bundle }
    }
}

impl Iterator for Items<'_> {
    type Item = Item;

    fn next(&mut self) -> Option<Item> {
        let i = self.w.next();
        let (tiles, bundles) = (self.plan.stream_tiles(), self.plan.stream_tiles().div_ceil(self.bundle));
        let (unit, first) = (i / bundles, i % bundles * self.bundle);
        let (chunk, tile) = (unit / self.plan.streams, unit % self.plan.streams * tiles + first);
        (chunk < self.plan.chunks).then(|| Item { tiles: tile..tile + self.bundle.min(tiles - first), chunk })
    }
}

/// A head's sink; -Inf, which weighs nothing, where there are none.
fn sink(params: &Params<'_>, head: usize) -> f32 {
    params.sinks.map_or(f32::NEG_INFINITY, |s| {
        // SAFETY: one f32 a head, at any alignment, by the view's contract.
        unsafe { s.data.add(head * s.nb[0]).cast::<f32>().read_unaligned() }
    })
}

/// `e^(score - max)`; 0 for -Inf, also where the maximum is -Inf.
fn weight(score: f32, max: f32) -> f32 {
    if score == f32::NEG_INFINITY { 0.0 } else { (score - max).exp() }
}

/// ALiBi's slope of a head (Press et al. 2022, as ggml computes it); 1 without ALiBi.
fn slope(max_bias: f32, heads: usize, head: usize) -> f32 {
    if max_bias <= 0.0 {
        return 1.0;
    }
    let power = 1usize << heads.ilog2();
    let base = |bias: f32| (-bias / power as f32).exp2();
    if head < power {
        base(max_bias).powi(head as i32 + 1)
    } else {
        base(max_bias / 2.0).powi(2 * (head - power) as i32 + 1)
    }
}

/// Whether the elements of a row follow each other.
fn dense(view: &View<'_>) -> bool {
    view.nb[0] == view.dtype.row_bytes(view.dtype.block()) && view.ne[0].is_multiple_of(view.dtype.block())
}

/// The mask is F16: the only type ggml gives it.
fn is_mask(view: &View<'_>) -> bool {
    view.dtype == DType::F16 && dense(view)
}
