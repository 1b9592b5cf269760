//! Attention on BF16 tiles: the two products of a block of positions. The rest (mask, softmax, merge) is AVX-512's.
//!
//! Scores are `S^T[position][row] = K[position][d] x Q^T`: rows of K are the left operand, and a tile of the result
//! is 16 positions of `s[position * 16 + row]` as it stands. Sums are `O[row][d] += P[row][position] x
//! V[position][d]`, added to where they are.
//!
//! Values that BF16 does not hold are two BF16 values, hi + lo (`split.rs`): exact for F16 caches, 2^-17 for Q8_0's
//! products of a scale and a quant, for queries and for weights. F32 caches have more bits and stay with AVX-512. A
//! product is `hi hi + hi lo + lo hi` (BF16 caches have no lo: two), which is f32's but for an error of some 2^-17.
//!
//! K is split once for a block (BF16 is used where it lies), V once for 64 elements of a block; both serve all panels
//! of 16 query rows. In MLA V comes from the split K. An infinity times two parts of other signs would be NaN: where
//! scores are not finite, the caller computes them on AVX-512, and elements of V that hold any are weighed in f32.

mod scores;
mod split;
#[cfg(test)]
mod tests;
mod values;

use super::tile::{Config, Session};
use crate::isa::Amx;
use crate::kernels::attention::{Ahead, LANES, Source, Weights};
use crate::kernels::avx512::attention::widen::{Bf16, F16, Q8};
use crate::tensor::DType;
use scores::{GROUPS, Keys};
pub use values::WIDTH;

/// Elements of K, or positions of V, that one product takes.
pub const STEP: usize = 32;
/// Most positions of a block.
pub const BLOCK: usize = GROUPS * LANES;
/// Bytes of a tile.
const PART: usize = 1024;
/// All tiles are full ones, so that a thread is configured once.
const TILES: [[usize; 2]; 8] = [[16, 64]; 8];

/// Whether AMX takes a tile of `rows` query rows, rather than AVX-512.
///
/// Measured on a Xeon 6, d 128, 4096 positions (docs/AMX.md). A panel of 16 rows costs the same full or not, and F16 and Q8_0 have
/// to be split, so AVX-512 is ahead up to here. F32 has more bits than two BF16 values hold.
pub fn takes(rows: usize, k: DType, v: DType) -> bool {
    match (k, v) {
        (DType::F32, _) | (_, DType::F32) => false,
        (DType::Bf16, DType::Bf16) => rows > 10,
        _ => rows > 26,
    }
}

/// Which two elements of 32 make pair `j` of a left operand's row, and of the right one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOrder {
    /// `2 j` and `2 j + 1`: BF16, as it lies in memory.
    Memory,
    /// `j` and `j + 16`: split rows, one shift from vectors of 16.
    Halves,
}

/// One thread's tiles and scratch for attention.
#[derive(Debug)]
pub struct TileAttention {
    session: Session,
    d: usize,
    k_type: DType,
    /// V is the beginning of K's rows.
    shared: bool,
    keys: [Keys; GROUPS],
    /// Groups of 16 positions of this block.
    groups: usize,
    /// 16 rows' queries (for each panel), split K of a block, 16 rows' weights (for each panel), V.
    parts: [*mut u8; 4],
}

impl TileAttention {
    /// f32 of scratch for panels of `lanes` rows in all, each of 16.
    pub const fn scratch_len(lanes: usize, d: usize) -> usize {
        let [q, k, p, v] = Self::lens(lanes, d);
        q + k + p + v
    }

    const fn lens(lanes: usize, d: usize) -> [usize; 4] {
        let padded = d.next_multiple_of(STEP);
        [lanes * padded, BLOCK * padded, lanes * BLOCK, BLOCK / STEP * WIDTH * 2 * PART / 4]
    }

    /// Saves the thread's tile configuration, until this is dropped.
    ///
    /// # Safety
    /// `scratch` is 64-byte aligned and writable for `scratch_len(lanes, d)` f32 as long as this lives.
    // SAFETY: contract above.
    pub unsafe fn new(amx: Amx, k_type: DType, d: usize, shared: bool, lanes: usize, scratch: *mut f32) -> Self {
        let mut at = scratch;
        let parts = Self::lens(lanes, d).map(|len| {
            let part = at;
            at = at.wrapping_add(len);
            part.cast()
        });
        let keys = [Keys { data: std::ptr::null(), stride: 0, step: 0 }; GROUPS];
        Self { session: Session::begin(amx), d, k_type, shared, keys, groups: 0, parts }
    }

    /// 32 elements of K, as often as there are, the last ones filled up.
    fn steps(&self) -> usize {
        self.d.div_ceil(STEP)
    }

    /// Panel `i`'s queries.
    fn queries(&self, i: usize) -> *mut u8 {
        self.parts[0].wrapping_add(i * self.steps() * 2 * PART)
    }

    /// Panel `i`'s weights.
    fn weights(&self, i: usize) -> *mut u8 {
        self.parts[2].wrapping_add(i * BLOCK * LANES * 4)
    }

    /// Takes panel `i`'s 16 query rows from the f32 panel.
    ///
    /// # Safety
    /// `panel` is a panel of 16 lanes and `d` elements; `i` is less than the panels that there is scratch for.
    // SAFETY: contract above.
    pub unsafe fn pack(&mut self, i: usize, panel: *const f32) {
        let order = if self.k_type == DType::Bf16 { KeyOrder::Memory } else { KeyOrder::Halves };
        // SAFETY: the caller's contract; the session proves the features.
        unsafe { scores::pack_queries(panel, self.d, order, self.queries(i)) };
    }

    /// Takes a block of K.
    ///
    /// # Safety
    /// The rows (1 to 64) that are not closed are readable, and stay so until the block's scores are there.
    // SAFETY: contract above.
    pub unsafe fn block(&mut self, k: Source) {
        debug_assert!(k.rows <= BLOCK && k.d == self.d && k.dtype == self.k_type);
        let bytes = self.steps() * PART;
        self.groups = k.rows.div_ceil(LANES);
        for g in 0..self.groups {
            let group = k.part(g * LANES, LANES.min(k.rows - g * LANES));
            let to = self.parts[1].wrapping_add(g * 2 * bytes);
            let whole = group.rows == LANES && group.closed & 0xffff == 0 && self.d.is_multiple_of(STEP);
            // SAFETY: the caller's contract; the session proves the features.
            self.keys[g] = unsafe {
                match k.dtype {
                    DType::Bf16 if whole => Keys { data: group.data, stride: group.stride, step: STEP * 2 },
                    DType::Bf16 => {
                        scores::copy_rows(group, to);
                        Keys { data: to, stride: 64, step: PART }
                    }
                    DType::F16 => {
                        scores::split_rows::<F16>(group, to);
                        Keys { data: to, stride: 64, step: 2 * PART }
                    }
                    _ => {
                        scores::split_rows::<Q8>(group, to);
                        Keys { data: to, stride: 64, step: 2 * PART }
                    }
                }
            };
        }
    }

    /// Panel `i`'s scores with the block's positions, as `Attend::scores` gives them. Bit `g` of the result is set
    /// where those of positions `[16 g, 16 g + 16)` are not finite: then they may be NaN where f32 has an infinity.
    ///
    /// # Safety
    /// The panel and the block are there; `s` has 16 f32 for each position, rounded up to 16, and is 64-byte aligned.
    // SAFETY: contract above.
    pub unsafe fn scores(&mut self, i: usize, s: *mut f32, ahead: &mut Ahead) -> u32 {
        let (q, steps, split) = (self.queries(i), self.steps(), self.k_type != DType::Bf16);
        let tiles = self.session.configure(&Config::new(TILES));
        // SAFETY: the caller's contract; the session proves the features.
        unsafe { scores::scores(&tiles, split, &self.keys[..self.groups], q, steps, s, ahead) }
    }

    /// Takes panel `i`'s weights for `n` positions.
    ///
    /// # Safety
    /// `s` has `n` positions, rounded up to 16, of 16 weights each, 64-byte aligned.
    // SAFETY: contract above.
    pub unsafe fn weigh(&mut self, i: usize, s: *const f32, n: usize) {
        // SAFETY: the caller's contract; the session proves the features.
        unsafe { values::pack_weights(s, n, self.weights(i)) };
    }

    /// Adds V's rows to the sums of `panels`, as `Attend::weigh` does. Where V is the beginning of K's rows, those of
    /// the last block are used.
    ///
    /// # Safety
    /// The rows that are not closed are readable. The weights of each panel are there, and what its number comes with
    /// is as in `Attend::weigh`, with sums for 16 rows.
    // SAFETY: contract above.
    pub unsafe fn values(
        &mut self,
        v: Source,
        panels: impl Iterator<Item = (usize, Weights)> + Clone,
        ahead: &mut Ahead,
    ) {
        let split = v.dtype != DType::Bf16;
        let (tiles, to) = (v.d.div_ceil(LANES), self.parts[3]);
        for first in (0..tiles).step_by(WIDTH) {
            let n = WIDTH.min(tiles - first);
            // SAFETY: the caller's contract; the session proves the features.
            let special = unsafe {
                match v.dtype {
                    DType::Bf16 => values::pack_values::<Bf16>(v, first, n, to),
                    _ if self.shared => values::pack_values_of_keys(&self.keys[..self.groups], first, n, to),
                    DType::F16 => values::pack_values::<F16>(v, first, n, to),
                    _ => values::pack_values::<Q8>(v, first, n, to),
                }
            };
            for (i, w) in panels.clone() {
                ahead.step();
                let p = self.weights(i);
                // SAFETY: as above.
                unsafe {
                    values::rescale(&w, first, n);
                    match v.dtype {
                        _ if !special => {
                            let tiles = self.session.configure(&Config::new(TILES));
                            values::weigh(&tiles, split, &w, p, to, first, n);
                        }
                        DType::Bf16 => values::weigh_in_f32::<Bf16>(&w, v, first, n),
                        DType::F16 => values::weigh_in_f32::<F16>(&w, v, first, n),
                        _ => values::weigh_in_f32::<Q8>(&w, v, first, n),
                    }
                }
            }
        }
    }
}
