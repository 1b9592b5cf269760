//! INT8 (`tdpbssd`) on Q8_0 blocks in place: any number of blocks, rows and tokens.
//!
//! A weight tile is one block of 16 rows: 32 quants each, `stride` bytes apart, 2 bytes into the block. Every block has
//! scales of its own, so each product starts from zero and C (i32) goes through L1 into 16 vectors of f32, one a row:
//! `acc[row] += f32(C[row]) * x_scale * w_scale[row]`. That is three vector operations a row, about 1.5 times as long as the
//! product itself takes; two tiles and two buffers let both run at the same time, but for `tilestored`, during which the vectors wait
//! (docs/AMX.md).
//!
//! The scales of 16 rows are gathered and converted once for up to `CHUNK` blocks and serve all panels.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::tile::{Config, Session, Tiles};
use super::{C_ROW, Later, TILE, Tiling, each, long_runs, prefetch};
use crate::isa::Amx;
use crate::pack::{PANEL, Panels, Q8_PANEL_BLOCK};
use crate::tensor::{Q8_0_BYTES, QK8_0, Rows};

/// Blocks whose scales are held at a time: 2 KiB of scales, and 17 KiB of weights that stay in L1 for the panels to come.
const CHUNK: usize = 32;
/// Rows of a panel tile: groups of 4 k in a block.
const FOURS: usize = QK8_0 / 4;

/// Vectors of 16 f32 or i32 in memory.
#[repr(align(64))]
struct Lines<T, const N: usize>([[T; 16]; N]);

/// What a product needs beside its operands.
struct Buffers {
    /// `scales[block][row]` of the chunk in hand.
    scales: Lines<f32, CHUNK>,
    /// C of the two products under way.
    c: [Lines<i32, TILE>; 2],
    later: Later,
}

/// 16 rows (or all, where there are fewer), of which those in `fresh` are to be written.
struct RowTile {
    first: *const u8,
    stride: usize,
    height: usize,
    fresh: Range<usize>,
    /// From a row of C to the next.
    c_row: usize,
    /// What is read after these rows.
    next: *const u8,
    /// Whether to prefetch: not where rows have gaps, as the hardware does better by itself there (BF16 likewise).
    along: bool,
}

/// See [`super::Engine::product`].
///
/// # Safety
/// As [`super::Engine::product`], for Q8_0.
// SAFETY: contract above.
pub unsafe fn product(amx: Amx, session: &mut Session, rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    let tiling = Tiling::of(&rows);
    let tiles = session.configure(&config(tiling.height));
    let _avx512 = amx.avx512();
    let later = Later::of(&panels, tiling.count() * panels.k / QK8_0);
    let mut buffers = Buffers { scales: Lines([[0.0; 16]; CHUNK]), c: [const { Lines([[0; 16]; TILE]) }; 2], later };
    for t in 0..tiling.count() {
        let start = tiling.start(t);
        let tile = RowTile {
            first: rows.row(start),
            stride: rows.stride * tiling.apart,
            height: tiling.height,
            fresh: tiling.fresh(t),
            c_row: PANEL * tiling.apart,
            next: if t + 1 < tiling.count() { rows.row(tiling.start(t + 1)) } else { rows.next },
            along: long_runs(&rows),
        };
        // SAFETY: the caller's contract; the tile's rows exist, and C has 16 lanes for each; the token proves AVX-512.
        unsafe { row_tile(&tiles, &mut buffers, &tile, panels, c.add(start * PANEL), rows.n, add) };
    }
}

/// Tiles 0 and 1 are C, 2 and 3 weights, 4 and 5 panels; 6 and 7 are not used.
fn config(height: usize) -> Config {
    let (c, weights, panel) = ([height, C_ROW], [height, QK8_0], [FOURS, C_ROW]);
    Config::new([c, c, weights, weights, panel, panel, c, c])
}

/// C of one row tile for all panels; `c` is its first row in the first panel's part of a C block of `n` rows.
///
/// # Safety
/// As [`product`]; AVX-512 is there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn row_tile(
    tiles: &Tiles<'_>,
    buffers: &mut Buffers,
    tile: &RowTile,
    panels: Panels<'_>,
    c: *mut f32,
    n: usize,
    add: bool,
) {
    let blocks = panels.k / QK8_0;
    for chunk in (0..blocks).step_by(CHUNK) {
        let count = CHUNK.min(blocks - chunk);
        // SAFETY: blocks `chunk..chunk + count` lie inside each row and each panel.
        unsafe {
            let weights = tile.first.add(chunk * Q8_0_BYTES);
            gather_scales(tile, weights, &mut buffers.scales.0[..count]);
            let last = chunk + count == blocks;
            let ahead = if last { tile.next } else { weights.wrapping_add(count * Q8_0_BYTES) };
            for p in 0..panels.count() {
                let run = Run {
                    tiles,
                    weights,
                    stride: tile.stride,
                    panel: panels.panel(p).add(chunk * Q8_PANEL_BLOCK),
                    ahead,
                };
                let c = c.add(p * n * PANEL);
                let mut acc = if add || chunk > 0 { load(c, tile) } else { [_mm512_setzero_ps(); TILE] };
                if p == 0 && tile.along {
                    run.all::<true>(buffers, count, &mut acc);
                } else {
                    run.all::<false>(buffers, count, &mut acc);
                }
                store(c, tile, &acc);
            }
        }
    }
}

/// The f16 scales of some blocks of a row tile, from `weights` on, as f32. Rows past the tile's height repeat the last.
///
/// # Safety
/// The tile has `scales.len()` blocks from `weights` on; AVX-512 F is there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f")]
unsafe fn gather_scales(tile: &RowTile, weights: *const u8, scales: &mut [[f32; 16]]) {
    debug_assert!(tile.stride * TILE < i32::MAX as usize);
    let offsets: [i32; 16] = std::array::from_fn(|row| (row.min(tile.height - 1) * tile.stride) as i32);
    // SAFETY: an array of 64 bytes.
    let offsets = unsafe { _mm512_loadu_si512(offsets.as_ptr().cast()) };
    for (b, scales) in scales.iter_mut().enumerate() {
        // SAFETY: the first 4 bytes of each row's block; `scales` is 64 bytes.
        unsafe {
            let words = _mm512_i32gather_epi32::<1>(offsets, weights.add(b * Q8_0_BYTES).cast());
            _mm512_storeu_ps(scales.as_mut_ptr(), _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)));
        }
    }
}

/// The rows of `fresh` of a C block, the others zero.
///
/// # Safety
/// `c` has 16 lanes for each row of `fresh`; AVX-512 F is there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f")]
unsafe fn load(c: *const f32, tile: &RowTile) -> [__m512; TILE] {
    std::array::from_fn(|row| {
        if tile.fresh.contains(&row) {
            // SAFETY: the caller's contract; C is 64-byte aligned.
            unsafe { _mm512_load_ps(c.add(row * tile.c_row)) }
        } else {
            _mm512_setzero_ps()
        }
    })
}

/// Writes the rows of `fresh` to a C block.
///
/// # Safety
/// As [`load`], writable.
// SAFETY: contract above.
#[target_feature(enable = "avx512f")]
unsafe fn store(c: *mut f32, tile: &RowTile, acc: &[__m512; TILE]) {
    for (row, &acc) in acc.iter().enumerate() {
        if tile.fresh.contains(&row) {
            // SAFETY: the caller's contract; C is 64-byte aligned.
            unsafe { _mm512_store_ps(c.add(row * tile.c_row), acc) };
        }
    }
}

/// A run of blocks of one row tile and one panel.
struct Run<'a> {
    tiles: &'a Tiles<'a>,
    weights: *const u8,
    stride: usize,
    panel: *const u8,
    /// What is read after these blocks.
    ahead: *const u8,
}

impl Run<'_> {
    /// Adds all `count` blocks to `acc`, the product of each block under way while the one before it is scaled. `FIRST`
    /// prefetches what follows.
    ///
    /// # Safety
    /// The rows and the panel have `count` (at least 1, at most [`CHUNK`]) blocks, whose scales are in `buffers`; AVX-512 F
    /// is there.
    // SAFETY: contract above.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn all<const FIRST: bool>(&self, buffers: &mut Buffers, count: usize, acc: &mut [__m512; TILE]) {
        let Buffers { scales: Lines(scales), c: [even, odd], later } = buffers;
        // SAFETY: the caller's contract: `b` stays below `count`.
        unsafe {
            self.multiply::<0, 2, 4, FIRST>(0, even, later);
            let mut b = 1;
            while b + 1 < count {
                self.multiply::<1, 3, 5, FIRST>(b, odd, later);
                self.scale(b - 1, even, &scales[b - 1], acc);
                self.multiply::<0, 2, 4, FIRST>(b + 1, even, later);
                self.scale(b, odd, &scales[b], acc);
                b += 2;
            }
            if b < count {
                self.multiply::<1, 3, 5, FIRST>(b, odd, later);
                self.scale(b - 1, even, &scales[b - 1], acc);
                self.scale(b, odd, &scales[b], acc);
            } else {
                self.scale(b - 1, even, &scales[b - 1], acc);
            }
        }
    }

    /// The product of block `b` in tiles `C`, `A`, `B`, stored to `c`.
    ///
    /// # Safety
    /// The rows and the panel have block `b`.
    // SAFETY: contract above.
    #[inline(always)]
    unsafe fn multiply<const C: u8, const A: u8, const B: u8, const FIRST: bool>(
        &self,
        b: usize,
        c: &mut Lines<i32, TILE>,
        later: &mut Later,
    ) {
        let tiles = self.tiles;
        let weights = self.weights.wrapping_add(b * Q8_0_BYTES);
        // SAFETY: the caller's contract: 32 quants behind the scale of each row's block, eight groups of the panel's.
        unsafe {
            tiles.zero::<C>();
            tiles.load::<A>(weights.add(2), self.stride);
            tiles.load::<B>(self.panel.add(b * Q8_PANEL_BLOCK), C_ROW);
            tiles.dp_i8::<C, A, B>();
            tiles.store::<C>(c.0.as_mut_ptr().cast(), C_ROW);
        }
        // A line of each row is about two blocks.
        if FIRST && b.is_multiple_of(2) {
            prefetch(self.ahead.wrapping_add(b * Q8_0_BYTES), self.stride);
        }
        if FIRST {
            later.step();
        }
    }

    /// `acc[row] += f32(c[row]) * x_scale * w_scale[row]` for block `b`.
    ///
    /// # Safety
    /// The panel has block `b`; AVX-512 F is there.
    // SAFETY: contract above.
    #[inline]
    #[target_feature(enable = "avx512f")]
    unsafe fn scale(&self, b: usize, c: &Lines<i32, TILE>, w_scale: &[f32; 16], acc: &mut [__m512; TILE]) {
        // SAFETY: the scales are 64 bytes behind the block's quants, and a row of `c` is 64 bytes; both are aligned.
        unsafe {
            let x_scale = _mm512_load_ps(self.panel.add(b * Q8_PANEL_BLOCK + QK8_0 * PANEL).cast());
            each!(16, ROW => {
                let row = ROW as usize;
                let c = _mm512_cvtepi32_ps(_mm512_load_si512(c.0[row].as_ptr().cast()));
                acc[row] = add_scaled::<ROW>(acc[row], _mm512_mul_ps(c, x_scale), w_scale);
            });
        }
    }
}

/// `acc + x * factors[I]`, the factor broadcast by the load. Written out because the compiler prefers to load pairs of
/// factors and to broadcast them by shuffles, which take the multiplier's ports.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_scaled<const I: u8>(mut acc: __m512, x: __m512, factors: &[f32; 16]) -> __m512 {
    // SAFETY: reads `factors[I]`, 4 bytes an element; writes `acc` only.
    unsafe {
        asm!("vfmadd231ps {acc}, {x}, dword ptr [{f} + 4 * {i}]{{1to16}}", acc = inout(zmm_reg) acc, x = in(zmm_reg) x,
            f = in(reg) factors, i = const I, options(pure, readonly, nostack, preserves_flags));
    }
    acc
}
