//! Attention kernels, in f32: K and V blocks are widened once and then serve every query row of a tile. This module has the
//! layouts and what is the same on every CPU; [`Attend`] is what each vector instruction set brings.
//!
//! A *block* holds up to a few dozen cache positions as f32 in tiles of 16 positions x 16 elements, 1 KiB each:
//! `[position / 16][element / 16][position % 16][element % 16]`, zero past the last element and the last position. Every
//! inner loop then walks constant offsets, whatever the head size.
//!
//! A *panel* holds the query rows that share 16 lanes: 16, 8, 4, 2 or 1 *lanes* (rows), and `16 / lanes` consecutive
//! elements of each, `[element group][row][element]`. Sixteen lanes of the panel times one broadcast group of K give partial
//! scores for all rows at once, so a group of 8 heads fills vectors as well as one of 16, and the sums across a vector are
//! log2(16 / lanes) steps for 16 positions.

mod ahead;
mod queries;
#[cfg(test)]
mod tests;

pub use ahead::Ahead;
pub use queries::{pack, pack_for};

use crate::tensor::DType;

/// Lanes of a panel's vector, and positions and elements of a block's tile.
pub const LANES: usize = 16;
/// f32 values in a tile of 16 positions x 16 elements.
pub const TILE: usize = LANES * LANES;

/// f32 values in a block of `positions` rows of `d` elements.
pub const fn block_len(positions: usize, d: usize) -> usize {
    positions.div_ceil(LANES) * d.div_ceil(LANES) * TILE
}

/// f32 values in a panel of `lanes` query rows of `d` elements.
pub const fn panel_len(lanes: usize, d: usize) -> usize {
    lanes * d.next_multiple_of(LANES)
}

/// Lanes of the next panel when `rows` query rows are left: the widest that wastes little.
///
/// Rows that do not fill a power of two are split (12 = 8 + 4), except where a wider panel costs no more (11 to 15, 5 to 7, 3).
pub const fn panel_lanes(rows: usize) -> usize {
    match rows {
        13.. | 11 => 16,
        5..=12 => 8,
        3 | 4 => 4,
        _ => rows,
    }
}

/// Calls a function with a const lane count.
macro_rules! with_lanes {
    ($lanes:expr, $f:ident ( $($arg:expr),* )) => {
        match $lanes {
            1 => $f::<1>($($arg),*),
            2 => $f::<2>($($arg),*),
            4 => $f::<4>($($arg),*),
            8 => $f::<8>($($arg),*),
            _ => $f::<16>($($arg),*),
        }
    };
}
pub(crate) use with_lanes;

/// Rows of the cache to widen.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Element type.
    pub dtype: DType,
    /// Address of the first row.
    pub data: *const u8,
    /// Bytes from a row to the next.
    pub stride: usize,
    /// Rows, at most 64.
    pub rows: usize,
    /// Elements of a row.
    pub d: usize,
    /// Bit `i` set: row `i` is not read and counts as zeros.
    pub closed: u64,
}

impl Source {
    /// Rows `[first, first + rows)` of these.
    pub fn part(self, first: usize, rows: usize) -> Self {
        let data = self.data.wrapping_add(first * self.stride);
        Self { data, rows, closed: self.closed.checked_shr(first as u32).unwrap_or(0), ..self }
    }
}

/// What a mask row says about up to 64 positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskBits {
    /// Bit `i` set: position `i` is closed (its value is -Inf).
    pub closed: u64,
    /// Bit `i` set: the value is neither closed nor zero, so that it has to be added.
    pub valued: u64,
}

/// Maximum, sum and last rescaling of the rows of a panel. Lane `i` belongs to row `i % lanes`.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct State {
    /// Largest score so far; -Inf when there was none. The same in every lane of a row.
    pub max: [f32; LANES],
    /// Sum of the weights so far, relative to `max`: a row's sum is that of its lanes.
    pub sum: [f32; LANES],
    /// What the last block's new maximum scaled earlier weights by. The same in every lane of a row.
    pub rescale: [f32; LANES],
}

impl State {
    /// Before the first block.
    pub const EMPTY: Self = Self { max: [f32::NEG_INFINITY; LANES], sum: [0.0; LANES], rescale: [1.0; LANES] };

    /// The sum of `row`'s weights.
    pub fn row_sum(&self, lanes: usize, row: usize) -> f32 {
        self.sum.iter().skip(row).step_by(lanes).sum()
    }
}

/// The weights of a panel's rows and where their sums go.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// `p[position * lanes + row]`.
    pub p: *const f32,
    /// Lanes of the panel.
    pub lanes: usize,
    /// Rows, at most `lanes`.
    pub rows: usize,
    /// Positions.
    pub n: usize,
    /// What to multiply each row's earlier sums by.
    pub rescale: *const f32,
    /// The sums: `tiles * 16` f32 for each row.
    pub o: *mut f32,
    /// 16-element tiles of a V row.
    pub tiles: usize,
}

/// The steps of attention on a vector instruction set.
pub trait Attend: Copy + Send + Sync {
    /// Widens the rows into `block`, zeros up to the next 16 positions and elements.
    ///
    /// Values are exact; a Q8_0 value is `scale * quant` rounded to f32. Nothing outside the rows' own bytes is read.
    ///
    /// # Safety
    /// The rows that are not closed are readable; `block` is 64-byte aligned and writable for `block_len(rows, d)` f32.
    // SAFETY: contract above.
    unsafe fn widen(self, from: Source, block: *mut f32);

    /// `s[position * lanes + row] = q[row] . k[position]` for 16 positions.
    ///
    /// `tiles` is the number of 16-element tiles of a row (`d / 16`, rounded up).
    ///
    /// # Safety
    /// `panel` is `lanes * tiles * 16` f32, `block` is `tiles` tiles, `s` has `16 * lanes` f32; all 64-byte aligned.
    // SAFETY: contract above.
    unsafe fn scores(
        self,
        lanes: usize,
        panel: *const f32,
        block: *const f32,
        tiles: usize,
        s: *mut f32,
        ahead: &mut Ahead,
    );

    /// Rows of a tile up to which [`Attend::scores_in_place`] takes less time than [`Attend::widen`] and
    /// [`Attend::scores`]; 0 where there is no such thing.
    fn k_in_place(_k: DType) -> usize {
        0
    }

    /// As [`Attend::scores`], with K where the cache has it, for up to 64 positions: for few rows, where a block would be
    /// written for one or two uses. The panel is one of [`pack_for`] for K's type. Lanes past the last row get 0;
    /// positions that are closed or past the last one (up to the next 16) get any score.
    ///
    /// # Safety
    /// The rows of K that are not closed are readable, at least one; `k.d` is a multiple of 16. `panel` is `lanes * k.d`
    /// f32, `s` has `k.rows` (rounded up to 16) `* lanes` f32; both are 64-byte aligned.
    // SAFETY: contract above.
    unsafe fn scores_in_place(
        self,
        _panel: *const f32,
        [_lanes, _rows]: [usize; 2],
        _k: Source,
        _s: *mut f32,
        _ahead: &mut Ahead,
    ) {
        unreachable!("`k_in_place` is 0")
    }

    /// `s = cap * tanh(s)` for `len` scores: the soft limit of Gemma 2 (the scores come divided by `cap`).
    ///
    /// # Safety
    /// `len` is a multiple of 16; `s` is 64-byte aligned and has `len` f32.
    // SAFETY: contract above.
    unsafe fn cap(self, cap: f32, s: *mut f32, len: usize);

    /// Turns `len` scores `s[position * lanes + row]` into weights `e^(s - max)` in place and moves `state` on.
    ///
    /// A score of -Inf weighs 0, also where a row has no other; NaN gives NaN.
    ///
    /// # Safety
    /// `len` is a multiple of `16 * lanes`, more than 0; `s` is 64-byte aligned and has `len` f32.
    // SAFETY: contract above.
    unsafe fn softmax(self, lanes: usize, s: *mut f32, len: usize, state: &mut State);

    /// Looks at `n <= 64` F16 values of a mask row.
    ///
    /// # Safety
    /// `n` F16 values at `mask` are readable, at any alignment.
    // SAFETY: contract above.
    unsafe fn mask_bits(self, mask: *const u16, n: usize) -> MaskBits;

    /// Adds `slope * mask` to the scores `s[position * lanes + row]`; a closed position gets exactly -Inf, whatever its score.
    ///
    /// `rows` are each row's mask values at position 0 of the block, with its ALiBi slope (more than 0). Positions from `n` up
    /// to the next 16 are closed; lanes past the last row keep their scores there and everywhere else.
    ///
    /// # Safety
    /// `n` F16 values of each row are readable, at any alignment; at most `lanes` rows; `s` has `n` (rounded up to 16)
    /// `* lanes` f32, 64-byte aligned.
    // SAFETY: contract above.
    unsafe fn bias(
        self,
        rows: impl ExactSizeIterator<Item = (*const u16, f32)> + Clone,
        lanes: usize,
        n: usize,
        s: *mut f32,
    );

    /// `o[row] = o[row] * rescale[row] + sum over positions of p[position][row] * v[position]`, with V in a block whose rows
    /// have `stride >= w.tiles` tiles.
    ///
    /// # Safety
    /// `w.p` has `w.n` (rounded up to 16) positions, `block` too; `w.rescale` has `w.rows` f32; block and sums are 64-byte
    /// aligned.
    // SAFETY: contract above.
    unsafe fn weigh(self, w: Weights, block: *const f32, stride: usize, ahead: &mut Ahead);

    /// Rows of a tile up to which [`Attend::weigh_in_place`] takes less time than [`Attend::widen`] and [`Attend::weigh`].
    fn v_in_place(v: DType) -> usize {
        if v == DType::Q8_0 { LANES / 2 } else { LANES }
    }

    /// As [`Attend::weigh`], with V where the cache has it: for few rows, where a block would be written for one or two uses.
    ///
    /// # Safety
    /// As [`Attend::weigh`], with all of the source's rows readable and open, `source.rows == w.n` and
    /// `source.d == w.tiles * 16`.
    // SAFETY: contract above.
    unsafe fn weigh_in_place(self, w: Weights, source: Source, ahead: &mut Ahead);

    /// `to[i] = sum over parts of factor * part[i]` for `n` f32, in the order of the parts. A part with factor 0 is not read.
    ///
    /// # Safety
    /// Each part whose factor is not 0 has `n` (rounded up to 16) readable f32, 64-byte aligned; `to` is writable for `n` f32,
    /// at any alignment.
    // SAFETY: contract above.
    unsafe fn merge(self, parts: impl Iterator<Item = (*const f32, f32)> + Clone, n: usize, to: *mut f32);
}

/// Makes `impl Attend` of a token whose module has the steps in files of the same names: `widen::widen`, `scores::scores`,
/// `softmax::{cap, softmax}`, `mask::{mask_bits, bias}`, `weigh::{weigh, weigh_in_place, merge}`. `$own` is what it has
/// beyond that, or otherwise than the trait's defaults.
macro_rules! attend_by_modules {
    ($isa:ty { $($own:item)* }) => {
        impl $crate::kernels::attention::Attend for $isa {
            $($own)*

            // SAFETY: contract of `Attend::widen`.
            unsafe fn widen(self, from: $crate::kernels::attention::Source, block: *mut f32) {
                // SAFETY: the token proves the features; the rest is the caller's promise.
                unsafe { widen::widen(from, block) }
            }

            // SAFETY: contract of `Attend::scores`.
            unsafe fn scores(
                self,
                lanes: usize,
                panel: *const f32,
                block: *const f32,
                tiles: usize,
                s: *mut f32,
                ahead: &mut $crate::kernels::attention::Ahead,
            ) {
                // SAFETY: as above.
                unsafe { scores::scores(lanes, panel, block, tiles, s, ahead) }
            }

            // SAFETY: contract of `Attend::cap`.
            unsafe fn cap(self, cap: f32, s: *mut f32, len: usize) {
                // SAFETY: as above.
                unsafe { softmax::cap(cap, s, len) }
            }

            // SAFETY: contract of `Attend::softmax`.
            unsafe fn softmax(self, lanes: usize, s: *mut f32, len: usize, state: &mut $crate::kernels::attention::State) {
                // SAFETY: as above.
                unsafe { softmax::softmax(lanes, s, len, state) }
            }

            // SAFETY: contract of `Attend::mask_bits`.
            unsafe fn mask_bits(self, mask: *const u16, n: usize) -> $crate::kernels::attention::MaskBits {
                // SAFETY: as above.
                unsafe { mask::mask_bits(mask, n) }
            }

            // SAFETY: contract of `Attend::bias`.
            unsafe fn bias(
                self,
                rows: impl ExactSizeIterator<Item = (*const u16, f32)> + Clone,
                lanes: usize,
                n: usize,
                s: *mut f32,
            ) {
                // SAFETY: as above.
                unsafe { mask::bias(rows, lanes, n, s) }
            }

            // SAFETY: contract of `Attend::weigh`.
            unsafe fn weigh(self, w: $crate::kernels::attention::Weights, block: *const f32, stride: usize, ahead: &mut $crate::kernels::attention::Ahead) {
                // SAFETY: as above.
                unsafe { weigh::weigh(w, block, stride, ahead) }
            }

            // SAFETY: contract of `Attend::weigh_in_place`.
            unsafe fn weigh_in_place(self, w: $crate::kernels::attention::Weights, source: $crate::kernels::attention::Source, ahead: &mut $crate::kernels::attention::Ahead) {
                // SAFETY: as above.
                unsafe { weigh::weigh_in_place(w, source, ahead) }
            }

            // SAFETY: contract of `Attend::merge`.
            unsafe fn merge(self, parts: impl Iterator<Item = (*const f32, f32)> + Clone, n: usize, to: *mut f32) {
                // SAFETY: as above.
                unsafe { weigh::merge(parts, n, to) }
            }
        }
    };
}
pub(crate) use attend_by_modules;
