//! Q8_0 weights that become BF16 on their way to the tiles: any number of blocks, rows and tokens.
//!
//! `tdpbssd` leaves an i32 for each row, token and block of 32, which goes through L1 to be scaled: three vector operations for 16
//! products of a row, again for each panel (see `int8.rs`). Here the scale meets the weights, seven vector operations for 32 weights and
//! once for up to four panels, and all blocks are added in one tile of f32. Measured on a Xeon 6, a block of 16 rows in L2: 43 ns with
//! two panels and 63 with four, against 50 and 95; memory takes 34 to bring it. With one panel 32 against 26: that one stays INT8.
//!
//! Tokens are rounded to BF16 (8 bits of mantissa, each value for itself) instead of to 8 bits of a block's largest, and so are weights, by
//! the product of quant and scale: squared, a fifth (normally distributed tokens) to two fifths (uniform ones) of the error that quantised
//! tokens make.

mod convert;

use self::convert::{Conversion, Scales};
use super::tile::{Config, Tiles};
use super::{AmxSession, C_ROW, TILE, Tiling, bf16, each, long_runs, parts_of_k, store_fresh};
use crate::isa::{Amx, Reading};
use crate::pack::{PANEL, Panels};
use crate::tensor::{DType, QK8_0, Rows, Weights};

/// Most panels that meet a tile of weights: as many as there are tiles for C.
const PANELS: usize = 4;
/// Bytes of a tile, of weights or of a panel's 32 k.
const TILE_BYTES: usize = TILE * C_ROW;
/// Most k of the panels together that weights meet on their way from memory: half of what BF16 weights do, which is 10 to 15 % faster on a
/// Xeon 6 with 14336 k and 64 tokens; a quarter is not.
const MOST_K: usize = 16 << 10;
/// Bytes that rows of BF16 in a session's room are apart beyond their own: rows of a power of two would all be in the same sets of the caches.
const APART: usize = 64;
/// Fewer columns at a time make the sums come and go too often.
const LEAST_COLUMNS: usize = 512;
/// Bytes of a session's room: 128 rows of 2048 columns.
pub const ROOM: usize = 128 * (2048 * 2 + APART);

/// A block's weights of 16 rows as BF16, ready to be loaded as a tile.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Wide([[u8; C_ROW]; TILE]);

impl Wide {
    /// Where to write, and the distance of its lines.
    fn at(&mut self) -> (*mut u8, usize) {
        (self.0.as_mut_ptr().cast(), C_ROW)
    }
}

/// Some panels and all rows.
struct Product<'a> {
    tiles: Tiles<'a>,
    weights: Conversion<'a>,
    panels: Panels<'a>,
    c: *mut f32,
    add: bool,
}

/// See [`super::Engine::product`].
///
/// # Safety
/// As [`super::Engine::product`], for weights of Q8_0 and panels of BF16.
// SAFETY: contract above.
pub unsafe fn product(amx: Amx, session: &mut AmxSession, rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    if panels.count() > PANELS && !session.room.is_null() && columns_in_room(rows.n) >= LEAST_COLUMNS {
        // SAFETY: the caller's contract.
        return unsafe { converted_first(amx, session, rows, panels, c, add) };
    }
    for first in (0..panels.count()).step_by(PANELS) {
        let some = panels.some(first, PANELS.min(panels.count() - first));
        // The weights of further panels are not far: they came with the first.
        let rows = if first > 0 { rows.by(Reading::Stretch) } else { rows };
        // SAFETY: the caller's contract, for some of the panels and their part of C.
        unsafe { in_parts(amx, session, rows, some, c.add(first * rows.n * PANEL), (add, first == 0)) };
    }
}

/// A product with up to [`PANELS`] panels, so few k at a time that all panels stay in L2.
///
/// # Safety
/// As [`few`].
// SAFETY: contract above.
unsafe fn in_parts(
    amx: Amx,
    session: &mut AmxSession,
    rows: Rows<'_>,
    panels: Panels<'_>,
    c: *mut f32,
    (add, fresh): (bool, bool),
) {
    for (rows, panels, more) in parts_of_k(rows, panels, MOST_K / panels.count(), QK8_0) {
        // SAFETY: the caller's contract, for some columns of all rows and panels.
        unsafe { few(amx, session, rows, panels, c, (add || more, fresh)) };
    }
}

/// The same for so few k that all stays in L2, for `fresh` weights, which come from memory, or such as are in L2.
///
/// # Safety
/// As [`product`], with that many panels.
// SAFETY: contract above.
unsafe fn few(
    amx: Amx,
    session: &mut AmxSession,
    rows: Rows<'_>,
    panels: Panels<'_>,
    c: *mut f32,
    (add, fresh): (bool, bool),
) {
    let _avx512 = amx.avx512();
    let tiling = if fresh { Tiling::of(&rows) } else { Tiling::neighbours(rows.n) };
    let (c_tile, weights, panel) = ([tiling.height, C_ROW], [tiling.height, C_ROW], [TILE, C_ROW]);
    let tiles = session.tiles.configure(&Config::new([c_tile, c_tile, c_tile, c_tile, weights, panel, panel, panel]));
    // SAFETY: the caller's contract; the token proves AVX-512.
    unsafe {
        let weights = Conversion::new(rows, tiling, fresh && long_runs(&rows));
        let product = Product { tiles, weights, panels, c, add };
        match panels.count() {
            1 => product.all::<1>(),
            2 => product.all::<2>(),
            3 => product.all::<3>(),
            _ => product.all::<4>(),
        }
    }
}

/// Columns of `n` rows that fit in a session's room, as BF16: a multiple of a block.
fn columns_in_room(n: usize) -> usize {
    (ROOM / n.max(1)).saturating_sub(APART) / 2 / QK8_0 * QK8_0
}

/// A product with many panels: some columns of all rows become BF16 in the session's room, and then all panels meet them there.
///
/// # Safety
/// As [`product`]; the session has room.
// SAFETY: contract above.
unsafe fn converted_first(
    amx: Amx,
    session: &mut AmxSession,
    rows: Rows<'_>,
    panels: Panels<'_>,
    c: *mut f32,
    add: bool,
) {
    for (rows, panels, more) in parts_of_k(rows, panels, columns_in_room(rows.n), QK8_0) {
        let stride = rows.k * 2 + APART;
        // SAFETY: the caller's contract, for some columns of all rows and panels; the room has a line for each block, and the rows' BF16
        // in it last until the next part's.
        unsafe {
            convert_all(amx, rows, (session.room, stride));
            let wide = Weights::from_raw(DType::Bf16, session.room, [rows.k, rows.n, 1], [stride, stride * rows.n]);
            let wide = wide.rows(0, 0, rows.n).by(Reading::Stretch);
            bf16::product(amx, &mut session.tiles, wide, panels, c, add || more);
        }
    }
}

/// All weights as BF16 to rows that are so many bytes apart.
///
/// # Safety
/// The rows are as their type promises; there is room for as many, aligned to 64 bytes as their distance.
// SAFETY: contract above.
unsafe fn convert_all(amx: Amx, rows: Rows<'_>, (to, apart): (*mut u8, usize)) {
    let _avx512 = amx.avx512();
    let tiling = Tiling::of(&rows);
    // SAFETY: the caller's contract; the token proves AVX-512.
    unsafe {
        let weights = Conversion::new(rows, tiling, true);
        let mut scales = Scales::CHUNK;
        for t in 0..tiling.count() {
            let to = to.add(tiling.start(t) * apart);
            for b in 0..weights.blocks {
                weights.block(t, b, &mut scales, (to.add(b * C_ROW), tiling.apart * apart));
            }
        }
    }
}

impl Product<'_> {
    /// All of C, for `P` panels: each block is converted while the one before it is multiplied, also from one tile of rows to the next.
    ///
    /// # Safety
    /// As [`product`]; there are `P` panels; AVX-512 is there.
    // SAFETY: contract above.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi")]
    unsafe fn all<const P: usize>(&self) {
        let mut scales = Scales::CHUNK;
        let mut wide = [Wide([[0; C_ROW]; TILE]); 2];
        let [mut now, mut before] = wide.each_mut();
        let (blocks, count) = (self.weights.blocks, self.weights.tiling.count());
        // SAFETY: the caller's contract: all these tiles and blocks exist, and each block but the first follows another.
        unsafe {
            for t in 0..count {
                self.weights.block(t, 0, &mut scales, now.at());
                if t > 0 {
                    self.finish::<P>(t - 1, before);
                }
                each!(P, I => self.begin::<I>(t));
                for b in 1..blocks {
                    (now, before) = (before, now);
                    self.weights.block(t, b, &mut scales, now.at());
                    self.multiply::<P>(b - 1, before);
                }
                (now, before) = (before, now);
            }
            self.finish::<P>(count - 1, before);
        }
    }

    /// Adds the products of block `b`, which is `wide`, to C in tiles 0 to `P - 1`.
    ///
    /// # Safety
    /// As [`Product::all`]; the block exists.
    // SAFETY: contract above.
    #[inline(always)]
    unsafe fn multiply<const P: usize>(&self, b: usize, wide: &Wide) {
        let tiles = &self.tiles;
        // SAFETY: a tile of weights in memory, a block of each panel.
        unsafe {
            tiles.load::<4>(wide.0.as_ptr().cast(), C_ROW);
            each!(P, I => {
                let x = self.panels.panel(I as usize).add(b * TILE_BYTES);
                if I.is_multiple_of(2) {
                    tiles.load::<5>(x, C_ROW);
                    tiles.dp_bf16::<I, 4, 5>();
                } else {
                    tiles.load::<6>(x, C_ROW);
                    tiles.dp_bf16::<I, 4, 6>();
                }
            });
        }
    }

    /// The last block of tile `t`, whose weights are `wide`, and then its C to memory.
    ///
    /// # Safety
    /// As [`Product::all`]; the tile exists, and all its other blocks were multiplied.
    // SAFETY: contract above.
    #[inline(always)]
    unsafe fn finish<const P: usize>(&self, t: usize, wide: &Wide) {
        // SAFETY: the caller's contract.
        unsafe {
            self.multiply::<P>(self.weights.blocks - 1, wide);
            each!(P, I => self.end::<I>(t));
        }
    }

    /// C for tile `t` and panel `p`: the address of its first row, bytes from a row to the next.
    fn c(&self, t: usize, p: usize) -> (*mut u8, usize) {
        let Conversion { rows, tiling, .. } = &self.weights;
        let at = (p * rows.n + tiling.start(t)) * PANEL;
        // SAFETY: inside the C block, by the contract of `product`.
        (unsafe { self.c.add(at).cast() }, C_ROW * tiling.apart)
    }

    /// Makes tile `I` zero, or where it is added to, what C has for tile `t` and panel `I`.
    ///
    /// # Safety
    /// As [`Product::all`]; both exist.
    // SAFETY: contract above.
    #[inline(always)]
    unsafe fn begin<const I: u8>(&self, t: usize) {
        if self.add {
            let (c, stride) = self.c(t, I as usize);
            // SAFETY: 16 lanes for each row of the tile.
            unsafe { self.tiles.load::<I>(c, stride) };
        } else {
            self.tiles.zero::<I>();
        }
    }

    /// Stores tile `I` as C of tile `t` and panel `I`.
    ///
    /// # Safety
    /// As [`Product::begin`].
    // SAFETY: contract above.
    #[inline(always)]
    unsafe fn end<const I: u8>(&self, t: usize) {
        let (c, stride) = self.c(t, I as usize);
        // SAFETY: 16 lanes for each row of the tile.
        unsafe { store_fresh::<I>(&self.tiles, c, stride, self.weights.tiling.fresh(t)) };
    }
}
