//! Many panels: weights made ready once for all, a few rows and columns at a time, so that what the arithmetic reads is in the L1 cache.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, panel and token")]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{Ordering, compiler_fence};

use super::panels::by_blocks;
use crate::kernels::passes::{Group, Sweep, groups, some_in_l2};
use crate::pack::{PANEL, Panels, Q8_PANEL_BLOCK};
use crate::tensor::{Q8_0_BYTES, QK8_0, Rows};

/// Rows that are made ready at a time.
const ROWS: usize = 24;
/// Of which so many meet two panels at a time, all of them one.
const HALF: usize = ROWS / 2;
/// Blocks of 32 k that are made ready at a time: 6 KiB of weights, then 5 KiB of each panel go by.
const BLOCKS: usize = 8;
/// Most panels that meet them.
const MOST_PANELS: usize = 16;

/// Weights made ready, `w + 128` as `[row][block][32]`, their scales as `[block][row]`, and the sums as `[panel][row]`.
///
/// The sums of a group's rows lie side by side here: those of streams are apart by what fills few sets of L1 in C.
#[repr(C, align(64))]
struct Ready {
    w: [[[u8; QK8_0]; BLOCKS]; ROWS],
    scales: [[f32; ROWS]; BLOCKS],
    halves: [[u16; ROWS]; BLOCKS],
    sums: [[[f32; PANEL]; ROWS]; MOST_PANELS],
}
// Whole vectors of 8 scales.
const _: () = assert!(ROWS.is_multiple_of(8));

/// The panel form (see [`super::super::super::Engine::product`]).
///
/// # Safety
/// As `Engine::product`, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
pub unsafe fn ready_first(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    if panels.count() <= 2 {
        // SAFETY: the caller's promise.
        return unsafe { by_blocks(rows, panels, c, add) };
    }
    let mut ready = MaybeUninit::<Ready>::uninit();
    // SAFETY: the halves of rows that a group does not have are converted, too: any bits will do, but not none.
    unsafe { (&raw mut (*ready.as_mut_ptr()).halves).write_bytes(0, 1) };
    for (first, panels) in some_in_l2(panels, 1..=MOST_PANELS) {
        for group in groups(&rows, [ROWS, HALF, 4, 1]) {
            // SAFETY: the group's rows and the panels' C are the caller's.
            unsafe {
                let part = Part { rows, group, panels, c: c.add(first * rows.n * PANEL), ready: ready.as_mut_ptr() };
                match group.n {
                    ROWS | HALF => part.run::<HALF>(add),
                    4 => part.run::<4>(add),
                    _ => part.run::<1>(add),
                }
            }
        }
    }
}

/// A group of rows times some panels.
struct Part<'a> {
    rows: Rows<'a>,
    group: Group,
    panels: Panels<'a>,
    /// The first panel's sums of row 0.
    c: *mut f32,
    ready: *mut Ready,
}

impl Part<'_> {
    /// All k, `R` rows and two panels at a time; of one panel all rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
    // SAFETY: as `ready_first`.
    unsafe fn run<const R: usize>(&self, add: bool) {
        let (n, count, blocks) = (self.group.n, self.panels.count(), self.rows.k / QK8_0);
        let mut ahead = Sweep::new(&self.rows, self.group, Q8_0_BYTES);
        // SAFETY: the group's rows, blocks below the rows' k, and panels.
        unsafe {
            self.each_sum(|sum, c| _mm512_store_ps(sum, if add { _mm512_load_ps(c) } else { _mm512_setzero_ps() }));
            for b in (0..blocks).step_by(BLOCKS) {
                let some = b..blocks.min(b + BLOCKS);
                some.clone().for_each(|_| ahead.step());
                self.prepare(some.clone());
                for p in (0..count).step_by(2) {
                    if p + 2 <= count {
                        for r in (0..n).step_by(R) {
                            self.pass::<R, 2>(some.clone(), r, p);
                        }
                    } else if n == ROWS {
                        self.pass::<ROWS, 1>(some.clone(), 0, p);
                    } else {
                        self.pass::<R, 1>(some.clone(), 0, p);
                    }
                }
            }
            self.each_sum(|sum, c| _mm512_store_ps(c, _mm512_load_ps(sum)));
        }
    }

    /// Sums of 16 tokens, here and in C.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn each_sum(&self, mut f: impl FnMut(*mut f32, *mut f32)) {
        for p in 0..self.panels.count() {
            for r in 0..self.group.n {
                // SAFETY: a sum of the group's.
                let sum = unsafe { (&raw mut (*self.ready).sums[p][r]).cast() };
                f(sum, self.c.wrapping_add((p * self.rows.n + self.group.row(r)) * PANEL));
            }
        }
    }

    /// Makes some blocks of the group's rows ready, at most `BLOCKS`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
    // SAFETY: as `ready_first`.
    unsafe fn prepare(&self, blocks: Range<usize>) {
        let ready = self.ready;
        for r in 0..self.group.n {
            let row = self.rows.row(self.group.row(r)).wrapping_add(blocks.start * Q8_0_BYTES);
            for b in 0..blocks.len() {
                // SAFETY: below the row's end; room for ROWS and BLOCKS.
                unsafe {
                    let block = row.add(b * Q8_0_BYTES);
                    (*ready).halves[b][r] = block.cast::<u16>().read_unaligned();
                    let quants = _mm256_loadu_si256(block.add(2).cast());
                    let w = _mm256_xor_si256(quants, _mm256_set1_epi8(-128));
                    _mm256_store_si256((&raw mut (*ready).w[r][b]).cast(), w);
                }
            }
        }
        for b in 0..blocks.len() {
            for r in (0..self.group.n).step_by(8) {
                // SAFETY: ROWS is a multiple of 8, and all halves are something.
                unsafe {
                    let halves = _mm_loadu_si128((&raw const (*ready).halves[b][r]).cast());
                    _mm256_storeu_ps((&raw mut (*ready).scales[b][r]), _mm256_cvtph_ps(halves));
                }
            }
        }
    }

    /// The ready blocks of rows `[first, first + R)` of the group times panels `[p, p + P)`: the sums of integers within a block are in
    /// registers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
    // SAFETY: as `ready_first`.
    unsafe fn pass<const R: usize, const P: usize>(&self, blocks: Range<usize>, first: usize, p: usize) {
        let x: [*const u8; P] =
            std::array::from_fn(|q| self.panels.panel(p + q).wrapping_add(blocks.start * Q8_PANEL_BLOCK));
        // SAFETY: fields of the rows and panels.
        let (w, scales, sums) = unsafe {
            let ready = self.ready;
            let sums: [*mut f32; P] = std::array::from_fn(|q| (&raw mut (*ready).sums[p + q][first]).cast());
            ((&raw const (*ready).w[first]).cast::<i32>(), (&raw const (*ready).scales[0][first]), sums)
        };
        for b in 0..blocks.len() {
            // SAFETY: a ready block of the rows, and of the panels.
            unsafe {
                let x = x.map(|x| x.add(b * Q8_PANEL_BLOCK));
                let (w, scales) = (w.add(b * QK8_0 / 4), scales.add(b * ROWS));
                let start: [__m512i; P] = std::array::from_fn(|q| _mm512_load_si512(x[q].add(9 * 64).cast()));
                let mut sum = [start; R];
                for g in 0..8 {
                    // Else the compiler loads all of a block at once and spills it.
                    compiler_fence(Ordering::SeqCst);
                    let v: [__m512i; P] = std::array::from_fn(|q| _mm512_load_si512(x[q].add(g * 64).cast()));
                    for r in 0..R {
                        let four = w.add(r * BLOCKS * QK8_0 / 4 + g).read();
                        for q in 0..P {
                            sum[r][q] = _mm512_dpbusd_epi32(sum[r][q], _mm512_set1_epi32(four), v[q]);
                        }
                    }
                }
                compiler_fence(Ordering::SeqCst);
                let scale: [__m512; P] = std::array::from_fn(|q| _mm512_load_ps(x[q].add(8 * 64).cast()));
                for r in 0..R {
                    let w = _mm512_set1_ps(scales.add(r).read());
                    for q in 0..P {
                        let to = sums[q].add(r * PANEL);
                        let (product, both) = (_mm512_cvtepi32_ps(sum[r][q]), _mm512_mul_ps(scale[q], w));
                        _mm512_store_ps(to, _mm512_fmadd_ps(product, both, _mm512_load_ps(to)));
                    }
                }
            }
        }
    }
}
