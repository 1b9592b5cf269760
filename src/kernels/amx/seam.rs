//! The step that gathers what lies beside a row's whole cache lines.
//!
//! Where all weight rows begin `head` bytes before a cache line and are whole steps long, the steps in between load whole lines,
//! and one tile takes the `head` bytes at the row's start and the `64 - head` at its end. The panel's tile for it is
//! gathered likewise. Nothing is padded, so no zero meets an Inf. Where rows end with a line (a NUMA node's part of them does), only the
//! start is gathered, and both tiles are zeros behind it.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::{C_ROW, TILE};
use crate::isa::Avx512;
use crate::tensor::Rows;

/// Bytes of a cache line, of a row's step and of a pair's lanes in a panel.
const LINE: usize = 64;
/// Bytes of a pair of k in a row.
const PAIR: usize = 4;

/// How the rows of a product lie to the cache lines.
#[derive(Clone, Copy, Debug)]
pub struct Seam {
    avx512: Avx512,
    head: usize,
    /// Whether it takes the rows' ends as well.
    ends: bool,
}

/// A tile of 16 rows x 64 bytes, in memory.
#[repr(align(64))]
pub struct SeamTile([MaybeUninit<u8>; TILE * C_ROW]);

impl SeamTile {
    /// For where there is no seam.
    pub fn unused() -> Self {
        Self([MaybeUninit::uninit(); TILE * C_ROW])
    }

    /// Address of its first row; rows are 64 bytes apart.
    pub fn at(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }

    fn row(&mut self, i: usize) -> *mut u8 {
        self.0[i * C_ROW..][..C_ROW].as_mut_ptr().cast()
    }
}

impl Seam {
    /// The seam of BF16 rows that are all off the cache lines by the same whole pairs and are whole steps long, or that and the bytes
    /// before a line.
    pub fn of(avx512: Avx512, rows: &Rows<'_>) -> Option<Self> {
        let head = rows.data.addr().wrapping_neg() % LINE;
        let alike = rows.n == 1 || rows.stride.is_multiple_of(LINE);
        let (bytes, ends) = (rows.k * 2, (rows.k * 2).is_multiple_of(LINE));
        let whole = bytes > 0 && (ends || bytes % LINE == head);
        (head > 0 && head.is_multiple_of(PAIR) && alike && whole).then_some(Self { avx512, head, ends })
    }

    /// Full steps of a row of `k` columns beside the seam.
    pub fn steps(&self, k: usize) -> usize {
        k * 2 / LINE - usize::from(self.ends)
    }

    /// Bytes of a row before its first whole line.
    pub fn head_bytes(&self) -> usize {
        self.head
    }

    /// The tile of `n` weight rows, at most 16, from `first` on and `apart` rows apart; further rows are unspecified.
    ///
    /// # Safety
    /// The rows exist, and this is their seam.
    // SAFETY: contract above.
    #[inline]
    pub unsafe fn weights(&self, rows: &Rows<'_>, first: usize, n: usize, apart: usize) -> SeamTile {
        // SAFETY: the caller's contract; the token proves AVX-512.
        unsafe { weights(rows, |i| rows.row(first + i * apart), n, (self.head, self.ends)) }
    }

    /// The tile of a panel of `k` columns, for these rows.
    ///
    /// # Safety
    /// `panel` is readable for `k` columns, as many as the rows have.
    // SAFETY: contract above.
    #[inline]
    pub unsafe fn panel(&self, panel: *const u8, k: usize) -> SeamTile {
        let _avx512 = self.avx512;
        // SAFETY: the caller's contract; the token proves AVX-512.
        unsafe { panel_tile(panel, k, (self.head, self.ends)) }
    }
}

// SAFETY: as `Seam::weights`; AVX-512 F is there.
#[target_feature(enable = "avx512f")]
unsafe fn weights(
    rows: &Rows<'_>,
    row: impl Fn(usize) -> *const u8,
    n: usize,
    (head, ends): (usize, bool),
) -> SeamTile {
    let mut tile = SeamTile::unused();
    let before: __mmask16 = (1 << (head / PAIR)) - 1;
    let behind = if ends { !before } else { 0 };
    for i in 0..n {
        let row = row(i);
        // SAFETY: the first `head` bytes of the row, and of its last 64 those behind as many; nothing masked out is touched.
        unsafe {
            let start = _mm512_maskz_loadu_epi32(before, row.cast());
            let end = row.wrapping_add(rows.k * 2).wrapping_sub(LINE);
            _mm512_store_si512(tile.row(i).cast(), _mm512_mask_loadu_epi32(start, behind, end.cast()));
        }
    }
    tile
}

// SAFETY: as `Seam::panel`; AVX-512 F is there.
#[target_feature(enable = "avx512f")]
unsafe fn panel_tile(panel: *const u8, k: usize, (head, ends): (usize, bool)) -> SeamTile {
    let mut tile = SeamTile::unused();
    for i in 0..TILE {
        // SAFETY: a pair of the panel's `k / 2` is 64 bytes, aligned, and so is a row of the tile.
        unsafe {
            let lanes = match i {
                _ if i < head / PAIR => _mm512_load_si512(panel.add(i * LINE).cast()),
                _ if ends => _mm512_load_si512(panel.add((k / 2 - TILE + i) * LINE).cast()),
                _ => _mm512_setzero_si512(),
            };
            _mm512_store_si512(tile.row(i).cast(), lanes);
        }
    }
    tile
}
