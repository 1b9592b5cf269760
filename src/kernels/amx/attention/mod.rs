//! Attention on BF16 tiles: the two products of a block of positions. The rest (mask, softmax, merge) is AVX-512's.
//!
//! Scores are `S^T[position][row] = K[position][d] x Q^T`: rows of K are the left operand, and a tile of the result
//! is 16 positions of `s[position * 16 + row]` as it stands. Sums are `O[row][d] += P[row][position] x
//! V[position][d]`, added to where they are.
//!
//! BF16 caches are used as they lie, and F16 ones where tiles multiply F16 (`form.rs`). Other values are two BF16 values,
//! hi + lo (`split.rs`): exact for F16 caches, 2^-17 for Q8_0's products of a scale and a quant. Queries and weights are
//! hi + lo of the cache's kind of number. F32 caches have more bits and stay with AVX-512. A product is `hi hi + hi lo + lo hi`
//! (caches used as they lie have no lo: two), which is f32's but for an error of some 2^-16, or 2^-21 in F16.
//!
//! A panel of 16 query rows has tiles of its hi parts and tiles of its lo parts. One of up to 8 rows is a *twin*: both are in
//! one tile, side by side, so that one product does for two.
//!
//! K is split once for a block, V brought into pairs once for 64 elements of a block; both serve all panels. In MLA V comes
//! from the split K. An infinity times two parts of other signs would be NaN: where a score or a sum is not finite, the caller
//! computes all of the rows again on AVX-512.

mod form;
mod scores;
mod split;
#[cfg(test)]
mod tests;
mod values;

use super::tile::{Config, Session};
use crate::isa::Amx;
use crate::kernels::attention::{Ahead, LANES, Source, Weights};
use crate::kernels::avx512::attention::widen::{F16, Q8};
use crate::tensor::DType;
use form::Form;
use scores::{GROUPS, Keys, Queries};
pub use values::WIDTH;

/// Elements of K, or positions of V, that one product takes.
pub const STEP: usize = 32;
/// Most positions of a block.
pub const BLOCK: usize = GROUPS * LANES;
/// Lanes of a panel whose hi and lo parts share a tile.
pub const TWIN: usize = LANES / 2;
/// Bytes of a tile.
const PART: usize = 1024;
/// Most tiles of 16 elements of V that are taken before the block's scores are.
const EARLY: usize = 16;
/// Most panels for which that is done.
pub const EARLY_PANELS: usize = 2;
/// Bytes of [`WIDTH`] tiles of 16 elements of a block of V.
const VALUES: usize = BLOCK / STEP * WIDTH * 2 * PART;
/// All tiles are full ones, so that a thread is configured once.
const TILES: [[usize; 2]; 8] = [[16, 64]; 8];

/// Whether AMX takes a tile of `rows` query rows, rather than AVX-512.
///
/// Measured on a Xeon 6, d 64 to 256, 4096 positions (docs/AMX.md): values that have to be split cost more than they save up to here.
/// F32 has more bits than two BF16 values hold.
pub fn takes(amx: Amx, rows: usize, k: DType, v: DType) -> bool {
    if k == DType::F32 || v == DType::F32 {
        return false;
    }
    let split = Form::of(amx, k).is_split() || Form::of(amx, v).is_split();
    rows > if split { 20 } else { 3 }
}

/// Lanes of the next panel when `rows` query rows are left.
pub const fn panel_lanes(rows: usize) -> usize {
    if rows <= TWIN { TWIN } else { LANES }
}

/// What a thread has room for.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Rows of a block's panels, each of 16.
    pub lanes: usize,
    /// Rows of all panels.
    pub queries: usize,
    /// Elements of a row of K.
    pub d: usize,
    /// Elements of a row of V.
    pub dv: usize,
}

/// One thread's tiles and scratch for attention.
#[derive(Debug)]
pub struct TileAttention {
    amx: Amx,
    session: Session,
    d: usize,
    /// Types of K and V.
    types: [DType; 2],
    /// Forms of K and V.
    forms: [Form; 2],
    /// V is the beginning of K's rows.
    shared: bool,
    keys: [Keys; GROUPS],
    /// Groups of 16 positions of this block.
    groups: usize,
    /// Panels' queries and factors, split K of a block, panels' weights, V.
    parts: [*mut u8; 4],
}

impl TileAttention {
    /// f32 of scratch.
    pub const fn scratch_len(room: Room) -> usize {
        let [q, k, p, v] = Self::lens(room);
        q + k + p + v
    }

    const fn lens(Room { lanes, queries, d, dv }: Room) -> [usize; 4] {
        let padded = d.next_multiple_of(STEP);
        let tiles = dv.div_ceil(LANES);
        let tiles = if tiles > EARLY { WIDTH } else { tiles };
        [queries * (padded + 1), BLOCK * padded, lanes * BLOCK, tiles.div_ceil(WIDTH) * VALUES / 4]
    }

    /// Saves the thread's tile configuration, until this is dropped.
    ///
    /// # Safety
    /// `scratch` is 64-byte aligned and writable for `scratch_len(room)` f32 as long as this lives.
    // SAFETY: contract above.
    pub unsafe fn new(amx: Amx, types: [DType; 2], shared: bool, room: Room, scratch: *mut f32) -> Self {
        let mut at = scratch;
        let parts = Self::lens(room).map(|len| {
            let part = at;
            at = at.wrapping_add(len);
            part.cast()
        });
        let keys = [Keys { data: std::ptr::null(), stride: 0, step: 0 }; GROUPS];
        let forms = types.map(|t| Form::of(amx, t));
        Self { amx, session: Session::begin(amx), d: room.d, types, forms, shared, keys, groups: 0, parts }
    }

    /// Whether so many query rows are better here than on AVX-512.
    pub fn takes(&self, rows: usize) -> bool {
        let [k, v] = self.types;
        takes(self.amx, rows, k, v)
    }

    /// 32 elements of K, as often as there are, the last ones filled up.
    fn steps(&self) -> usize {
        self.d.div_ceil(STEP)
    }

    /// Panel `i`'s factors, then its queries.
    fn queries(&self, i: usize) -> [*mut u8; 2] {
        let at = self.parts[0].wrapping_add(i * (self.steps() * 2 * PART + LANES * 4));
        [at, at.wrapping_add(LANES * 4)]
    }

    /// Panel `i`'s weights.
    fn weights(&self, i: usize) -> *mut u8 {
        self.parts[2].wrapping_add(i * BLOCK * LANES * 4)
    }

    /// Takes panel `i`'s query rows, 8 or 16 as `lanes` says, from an f32 panel of 16 lanes.
    ///
    /// # Safety
    /// `panel` is a panel of 16 lanes and `d` elements; `i` is less than the panels that there is scratch for.
    // SAFETY: contract above.
    pub unsafe fn pack(&mut self, i: usize, lanes: usize, panel: *const f32) {
        let [unscale, to] = self.queries(i);
        // SAFETY: the caller's contract; the session proves the features.
        unsafe { scores::pack_queries(self.forms[0], lanes, panel, self.d, to, unscale.cast()) };
    }

    /// Takes a block of K.
    ///
    /// # Safety
    /// The rows (1 to 64) that are not closed are readable, and stay so until the block's scores are there.
    // SAFETY: contract above.
    pub unsafe fn block(&mut self, k: Source) {
        debug_assert!(k.rows <= BLOCK && k.d == self.d && k.dtype == self.types[0]);
        let bytes = self.steps() * PART;
        self.groups = k.rows.div_ceil(LANES);
        for g in 0..self.groups {
            let group = k.part(g * LANES, LANES.min(k.rows - g * LANES));
            let to = self.parts[1].wrapping_add(g * 2 * bytes);
            let whole = group.rows == LANES && group.closed & 0xffff == 0 && self.d.is_multiple_of(STEP);
            // SAFETY: the caller's contract; the session proves the features.
            self.keys[g] = unsafe {
                match (self.forms[0], k.dtype) {
                    (Form::Split, DType::F16) => scores::split_rows::<F16>(group, to),
                    (Form::Split, _) => scores::split_rows::<Q8>(group, to),
                    _ if whole => Keys { data: group.data, stride: group.stride, step: STEP * 2 },
                    _ => scores::copy_rows(group, to),
                }
            };
        }
    }

    /// The products of panel `i`, of `lanes` lanes, with the block's positions: of them [`TileAttention::settle_scores`] makes
    /// scores.
    ///
    /// # Safety
    /// The panel and the block are there; `s` has 16 f32 for each position, rounded up to 16, and is 64-byte aligned.
    // SAFETY: contract above.
    pub unsafe fn scores(&mut self, i: usize, lanes: usize, s: *mut f32, ahead: &mut Ahead) {
        let (q, form) = (self.queries_of(i, lanes), self.forms[0]);
        let tiles = self.session.configure(&Config::new(TILES));
        // SAFETY: the caller's contract; the session proves the features.
        unsafe { scores::scores(&tiles, form, &self.keys[..self.groups], q, s, ahead) };
    }

    /// Makes panel `i`'s products scores as `Attend::scores` gives them; whether all are finite. Where they are not, some may be
    /// NaN that f32 has as infinities.
    ///
    /// # Safety
    /// As [`TileAttention::scores`], which was called for the same panel and block.
    // SAFETY: contract above.
    pub unsafe fn settle_scores(&self, i: usize, lanes: usize, s: *mut f32) -> bool {
        // SAFETY: the caller's contract; the session proves the features.
        unsafe { scores::settle(self.queries_of(i, lanes), s, self.groups) }
    }

    fn queries_of(&self, i: usize, lanes: usize) -> Queries {
        let [unscale, data] = self.queries(i);
        Queries { lanes, data, unscale: unscale.cast(), steps: self.steps() }
    }

    /// Takes the weights of panel `i`, of `lanes` lanes, for `n` positions.
    ///
    /// # Safety
    /// `s` has `n` positions, rounded up to 16, of `lanes` weights each, 64-byte aligned.
    // SAFETY: contract above.
    pub unsafe fn weigh(&mut self, i: usize, lanes: usize, s: *const f32, n: usize) {
        let pack = if lanes == TWIN { values::pack_weights_twin } else { values::pack_weights };
        // SAFETY: the caller's contract; the session proves the features.
        unsafe { pack(self.forms[1], s, n, self.weights(i)) };
    }

    /// Whether all of a block of V with `tiles` tiles of 16 elements, for so many panels, is taken at once, and multiplied only after
    /// the products of the block after it: tile loads wait for stores that are on their way. Where many panels share V they do so
    /// but once.
    pub fn early(tiles: usize, panels: usize) -> bool {
        tiles <= EARLY && panels <= EARLY_PANELS
    }

    /// Takes tiles `[first, first + n)` of a block of V, with a step of `ahead` for each pair of rows; `first`
    /// is a multiple of 4, `n` at most 4, or all 16 early ones. Where V is the beginning of K's rows, the block of K is there.
    ///
    /// # Safety
    /// The rows that are not closed are readable.
    // SAFETY: contract above.
    pub unsafe fn take_values(&mut self, v: Source, first: usize, n: usize, ahead: &mut Ahead) {
        for group in 0..n.div_ceil(WIDTH) {
            let (first, n) = (first + group * WIDTH, WIDTH.min(n - group * WIDTH));
            let to = self.parts[3].wrapping_add(group * self.values_bytes());
            // SAFETY: the caller's contract; the session proves the features.
            unsafe {
                match (self.forms[1], v.dtype) {
                    (Form::Split, _) if self.shared => {
                        values::pack_values_of_keys(&self.keys[..self.groups], first, n, to)
                    }
                    (Form::Split, DType::F16) => values::split_values::<F16>(v, first, n, to, ahead),
                    (Form::Split, _) => values::split_values::<Q8>(v, first, n, to, ahead),
                    (Form::F16(_) | Form::Bf16, _) => values::pack_values(v, first, n, to, ahead),
                }
            }
        }
    }

    /// Bytes of 4 tiles of a block of V in its form.
    fn values_bytes(&self) -> usize {
        if self.forms[1].is_split() { VALUES } else { VALUES / 2 }
    }

    /// Steps of a block's K in a panel's scores, and of its V.
    pub fn portions(&self, rows: usize, panels: usize, tiles: usize) -> [usize; 2] {
        [panels * self.steps() * rows.div_ceil(LANES), tiles.div_ceil(WIDTH) * rows.div_ceil(STEP) * LANES]
    }

    /// Adds the tiles that [`TileAttention::take_values`] took to the sums of panel `i`, as `Attend::weigh` does.
    ///
    /// # Safety
    /// The panel's weights are there, and `w` is as in `Attend::weigh`, with factors and sums for 16 rows.
    // SAFETY: contract above.
    pub unsafe fn values(&mut self, i: usize, w: Weights, first: usize, n: usize) {
        let (form, p, bytes) = (self.forms[1], self.weights(i), self.values_bytes());
        let tiles = self.session.configure(&Config::new(TILES));
        for group in 0..n.div_ceil(WIDTH) {
            let (first, n) = (first + group * WIDTH, WIDTH.min(n - group * WIDTH));
            let v = self.parts[3].wrapping_add(group * bytes);
            // SAFETY: the caller's contract; the session proves the features.
            unsafe {
                values::rescale(&w, first, n);
                values::weigh(&tiles, form, &w, p, v, first, n);
            }
        }
    }

    /// Makes the sums of a panel of `lanes` lanes what they stand for, after its last block.
    ///
    /// # Safety
    /// `o` has 16 rows of `16 * tiles` sums, 64-byte aligned.
    // SAFETY: contract above.
    pub unsafe fn settle(&self, lanes: usize, o: *mut f32, tiles: usize) {
        // SAFETY: the caller's contract; the session proves the features.
        unsafe { values::settle(self.forms[1], lanes, o, tiles) };
    }
}
