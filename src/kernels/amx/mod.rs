//! AMX: weight rows, in place, are the left operand; panels of tokens are the right one (paper section 4.1).
//!
//! A tile of weights is 16 rows x 64 bytes (BF16) or x 32 bytes (Q8_0), loaded by the row stride. A tile of C is 16 rows x
//! 16 tokens of f32 or i32; stored with a stride of 64 bytes it is a part of the C block as it stands.

pub mod attention;
pub mod bf16;
pub mod int8;
mod seam;
pub mod tile;
pub mod trial;
pub mod widened;

use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

use self::tile::Tiles;
use super::Engine;
use crate::isa::{Amx, Avx512, Q8Tokens, Reading};
use crate::pack::{PANEL, Panels};
use crate::tensor::{DType, Rows};

/// Runs a statement for each of the first `$n` (at most 4, or 16 if it says so), with the number as the constant `$i`.
macro_rules! each {
    (16, $i:ident => $body:expr) => {
        each!(@ 16, $i => $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    ($n:expr, $i:ident => $body:expr) => {
        each!(@ $n, $i => $body, 0 1 2 3)
    };
    (@ $n:expr, $i:ident => $body:expr, $($t:literal)*) => {
        $(if $n > $t {
            const $i: u8 = $t;
            $body
        })*
    };
}
use each;

/// Rows of a tile.
const TILE: usize = 16;
/// Bytes of a row of C in a tile and in a C block.
const C_ROW: usize = 64;

/// The AMX engine.
#[derive(Clone, Copy, Debug)]
pub struct AmxEngine(Amx);

impl AmxEngine {
    /// The engine of a CPU with AMX.
    pub fn new(amx: Amx) -> Self {
        Self(amx)
    }
}

/// A thread's tiles, and memory for weights that are converted before many panels meet them, or null.
#[derive(Debug)]
pub struct AmxSession {
    tiles: tile::Session,
    room: *mut u8,
}

impl Engine for AmxEngine {
    type Session = AmxSession;
    type Vectors = Avx512;

    /// Measured on a Xeon 6 with 512 tokens: 15 % faster than 64, and as fast as 256.
    const MANY_TOKENS_ROWS: usize = 128;

    /// Half a step is a seam, or a step by itself.
    const PANEL_STEP: usize = 16;

    fn vectors(self) -> Avx512 {
        self.0.avx512()
    }

    fn dot_tokens(self, dtype: DType, tokens: usize) -> usize {
        // Few streams of whole rows come from memory faster than the 16 of a tile, as long as the vectors keep up. Measured on a Xeon 6, in
        // shares of the time that plain reads take: BF16 1.03 against 1.11 for 3 tokens, 1.06 against 1.08 for 4; Q8_0 1.05 against 1.19
        // for 2, 1.10 against 1.20 for 3, as fast for 4. On a Sapphire Rapids, whose vectors are slower, the FFN takes 1.07 times as long
        // with 4 rows in BF16 as with a tile, 0.9 of it in Q8_0.
        let most = if dtype == DType::Q8_0 { 4 } else { 3 };
        if tokens <= most { tokens } else { 0 }
    }

    fn dot_tokens_apart(self, _: DType, tokens: usize) -> usize {
        // As many as one pass of the vectors takes: 16 rows with gaps side by side come from memory slower than four, and a token's
        // sums are a sixteenth of a panel's (measured on a Xeon 6: two to five tokens 2 to 25 % faster by rows, six slower).
        if tokens <= 5 { tokens } else { 0 }
    }

    const ROOM: usize = widened::ROOM;

    fn panel_dtype(self, dtype: DType, tokens: usize) -> DType {
        // A second panel pays for the conversion of the weights to BF16.
        let bf16 = dtype == DType::Q8_0 && tokens > PANEL && Q8Tokens::here() == Q8Tokens::Faster;
        if bf16 { DType::Bf16 } else { dtype }
    }

    fn begin(self) -> AmxSession {
        AmxSession { tiles: tile::Session::begin(self.0), room: std::ptr::null_mut() }
    }

    // SAFETY: contract in the trait.
    unsafe fn lend(self, session: &mut AmxSession, room: *mut u8) {
        session.room = room;
    }

    // SAFETY: contract in the trait.
    unsafe fn product(self, session: &mut AmxSession, rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
        debug_assert!(rows.k == panels.k && c.addr().is_multiple_of(64));
        match (rows.dtype, panels.dtype) {
            // SAFETY: the caller's contract.
            (DType::Bf16, DType::Bf16) => unsafe { bf16::product(self.0, &mut session.tiles, rows, panels, c, add) },
            // SAFETY: the caller's contract.
            (DType::Q8_0, DType::Q8_0) => unsafe { int8::product(self.0, &mut session.tiles, rows, panels, c, add) },
            // SAFETY: the caller's contract.
            (DType::Q8_0, DType::Bf16) => unsafe { widened::product(self.0, session, rows, panels, c, add) },
            other => unreachable!("no AMX product for {other:?}"),
        }
    }
}

/// Whether rows go on for more than a page, so that something may be prefetched ahead in them. Rows with gaps (a NUMA node's part of them)
/// are better left to the hardware, which reads 16 streams ahead by itself: 15 to 20 % faster on a Xeon 6.
fn long_runs(rows: &Rows<'_>) -> bool {
    rows.contiguous() || rows.dtype.row_bytes(rows.k) > 4096
}

/// The weight tiles of a block of rows: 16 rows each. A block of fewer than 16 rows is one shorter tile.
///
/// Tiles of neighbouring rows are the plain way; the last one is moved back so that it ends with the rows. Where weights come from memory
/// and the rows are a multiple of 16, each row of a tile is the next one of a stream of its own (see [`Reading::Streams`]): that is how this
/// CPU's prefetcher likes them.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    n: usize,
    height: usize,
    /// From a row of a tile to the next one.
    apart: usize,
}

impl Tiling {
    fn neighbours(n: usize) -> Self {
        Self { n, height: n.min(TILE), apart: 1 }
    }

    /// The tiles of rows that come from memory, in the order that they ask for.
    fn of(rows: &Rows<'_>) -> Self {
        Self::by(if long_runs(rows) { rows.reading } else { Reading::Stretch }, rows.n)
    }

    fn by(reading: Reading, n: usize) -> Self {
        let apart = if reading == Reading::Streams && n.is_multiple_of(TILE) { n / TILE } else { 1 };
        Self { apart: apart.max(1), ..Self::neighbours(n) }
    }

    /// Number of tiles.
    fn count(self) -> usize {
        self.n.div_ceil(TILE)
    }

    /// First row of tile `t`; of a `t` past the last, that of the last.
    fn start(self, t: usize) -> usize {
        if self.apart > 1 { t.min(self.apart - 1) } else { (t * TILE).min(self.n - self.height) }
    }

    /// Which of a tile's rows are new in it: a last tile that was moved back overlaps the one before it.
    fn fresh(self, t: usize) -> Range<usize> {
        if self.apart > 1 { 0..TILE } else { t * TILE - self.start(t)..self.height }
    }

    /// The tiles in groups of at most `size` (2 or more), as ranges of their numbers. The smaller group comes first, so a
    /// last tile that was moved back shares its group with the tile that it overlaps: both read C before either writes.
    fn groups(self, size: usize) -> impl Iterator<Item = Range<usize>> {
        let (count, first) = (self.count(), self.count() % size);
        let starts = (first > 0).then_some(0).into_iter().chain((first..count).step_by(size));
        starts.map(move |at| if at < first { 0..first } else { at..at + size })
    }
}

/// A product's columns in even parts of at most about `most` k, each but the last of whole `unit`s: its rows and panels, with what is read
/// after them, and whether it adds to a part before it. Without columns, one part without.
fn parts_of_k<'a>(
    rows: Rows<'a>,
    panels: Panels<'a>,
    most: usize,
    unit: usize,
) -> impl Iterator<Item = (Rows<'a>, Panels<'a>, bool)> {
    let parts = rows.k.div_ceil(most).max(1);
    let size = rows.k.div_ceil(parts).next_multiple_of(unit).max(1);
    (0..rows.k.max(1)).step_by(size).map(move |k0| {
        let k = size.min(rows.k - k0);
        let last = k0 + k == rows.k;
        let next = if last { rows.next } else { rows.columns(k0 + k, 0).data };
        let panels = if last { panels } else { panels.then(std::ptr::null(), 0) };
        (rows.columns(k0, k).then(next), panels.columns(k0, k), k0 > 0)
    })
}

/// C of a tile of which not all rows are wanted.
#[repr(align(64))]
struct Aside([[f32; TILE]; TILE]);

/// Stores tile `T` at `c`, rows `stride` bytes apart; of a last tile that was moved back, only the rows in `fresh`, because those before are
/// done and may have been added to.
///
/// # Safety
/// `c` has room for 16 f32 of each of the tile's rows.
// SAFETY: contract above.
#[inline(always)]
unsafe fn store_fresh<const T: u8>(tiles: &Tiles<'_>, c: *mut u8, stride: usize, fresh: Range<usize>) {
    // SAFETY: the caller's contract; a tile moved back has neighbouring rows, whose C is contiguous.
    unsafe {
        if fresh.start == 0 {
            return tiles.store::<T>(c, stride);
        }
        let mut aside = Aside([[0.0; TILE]; TILE]);
        tiles.store::<T>(aside.0.as_mut_ptr().cast(), C_ROW);
        let rows = aside.0[fresh.clone()].as_flattened();
        c.cast::<f32>().add(fresh.start * TILE).copy_from_nonoverlapping(rows.as_ptr(), rows.len());
    }
}

/// Panels that are read after a product, which come near during it: some lines at each step, so that memory has them for no time that it
/// would be missed. They were written by several threads, and are in those cores' caches.
struct Later {
    at: *const u8,
    end: *const u8,
    lines: usize,
}

impl Later {
    /// What comes after `panels`, during a product of so many steps.
    fn of(panels: &Panels<'_>, steps: usize) -> Self {
        let (at, bytes) = panels.next;
        Self { at, end: at.wrapping_add(bytes), lines: bytes.div_ceil(64).div_ceil(steps.max(1)) }
    }

    /// One step's lines into L2.
    #[inline(always)]
    fn step(&mut self) {
        if self.at < self.end {
            for line in 0..self.lines {
                // SAFETY: SSE is part of x86-64, and a prefetch only hints.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(self.at.wrapping_add(line * 64).cast()) };
            }
            self.at = self.at.wrapping_add(self.lines * 64);
        }
    }
}

/// Prefetches one line of each of 16 rows from `at` on, into L1. Never a fault, wherever that is.
///
/// In assembler because the compiler else keeps 16 addresses for each tile, and has not the registers.
#[inline(always)]
fn prefetch(at: *const u8, stride: usize) {
    macro_rules! four {
        () => {
            "prefetcht0 [{p}]\nprefetcht0 [{p} + {s}]\nprefetcht0 [{p} + 2 * {s}]\nprefetcht0 [{p} + {t}]"
        };
    }
    // SAFETY: a prefetch only hints.
    unsafe {
        asm!(
            four!(), "lea {p}, [{p} + 4 * {s}]", four!(), "lea {p}, [{p} + 4 * {s}]",
            four!(), "lea {p}, [{p} + 4 * {s}]", four!(),
            p = inout(reg) at.addr() => _, s = in(reg) stride, t = in(reg) 3 * stride,
            options(nomem, nostack, preserves_flags)
        )
    }
}

#[cfg(test)]
mod tests;
