//! Weights made ready once for all panels, a few rows and columns at a time, so that what the arithmetic reads is in the L1 cache (see
//! [`Int8Form::ReadyFirst`](crate::isa::Int8Form::ReadyFirst)).

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, panel and token")]

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::sync::atomic::{Ordering, compiler_fence};

use super::make_ready;
use crate::kernels::passes::{Group, even_group, groups, some_in_l2};
use crate::pack::{PANEL, Panels, Q8_PANEL_BLOCK};
use crate::tensor::{Q8_0_BYTES, QK8_0, Rows};

/// Rows that are made ready at a time.
const ROWS: usize = 24;
/// Blocks of 32 k that are made ready at a time: 6 KiB of weights, then 5 KiB of each panel go by.
const BLOCKS: usize = 8;
/// Panels that meet some rows at a time. Of 24 rows and one to four panels there are always 24 sums in registers; the more panels, the
/// fewer broadcasts: with another thread on the core, instructions count as much as the units that multiply.
const SIDE_BY_SIDE: usize = 4;
/// Most panels that meet ready rows.
const MOST_PANELS: usize = 16;
/// How many times [`BLOCKS`] ahead in its row each is prefetched.
const AHEAD: usize = 4;

/// Some blocks of a group's rows made ready: weights as `[row][block][32]` of `w + 128`, scales as `[block][row]`.
#[repr(C, align(64))]
struct Ready {
    w: [[[u8; QK8_0]; BLOCKS]; ROWS],
    scales: [[f32; ROWS]; BLOCKS],
    halves: [[u16; ROWS]; BLOCKS],
}
/// Rows of a pass's, at most, that are made ready for each block: 24 rows in eight blocks.
const AT_ONCE: usize = ROWS / BLOCKS;
// Whole vectors of 8 scales.
const _: () = assert!(ROWS.is_multiple_of(8));

/// A thread's memory: the blocks in hand and those behind them, and the sums as `[panel][row]`.
///
/// The sums of a group's rows lie side by side here: those of streams are apart by what fills few sets of L1 in C.
#[repr(C, align(64))]
struct Memory {
    ready: [Ready; 2],
    sums: [[[f32; PANEL]; ROWS]; MOST_PANELS],
}

/// The panel form (see [`Engine::product`](crate::kernels::Engine::product)).
///
/// # Safety
/// As `Engine::product`, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
pub unsafe fn panels(rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    let mut memory = MaybeUninit::<Memory>::uninit();
    let memory = memory.as_mut_ptr();
    // SAFETY: two of them. The halves of rows that a group does not have are converted, too: any bits will do, but not none.
    let mut ready = [0, 1].map(|i| unsafe {
        let ready = &raw mut (*memory).ready[i];
        (&raw mut (*ready).halves).write_bytes(0, 1);
        ready
    });
    for (first, panels) in some_in_l2(panels, 1..=MOST_PANELS) {
        // SAFETY: the sums of panel `first`, and this thread's.
        let (c, sums) = unsafe { (c.add(first * rows.n * PANEL), (&raw mut (*memory).sums).cast()) };
        let mut parts = groups(&rows, [ROWS, 8, 4, 1]).map(|group| Part { rows, group, panels, c, sums }).peekable();
        let Some(mut coming) = parts.peek().map(|part| part.coming(0, ready[0])) else { continue };
        while let Some(part) = parts.next() {
            // SAFETY: the group's rows and the panels' C are the caller's.
            unsafe { part.run(add, &mut ready, &mut coming, parts.peek()) };
        }
    }
}

/// A block of a row, and where it goes.
#[derive(Clone, Copy)]
struct Block {
    from: *const u8,
    w: *mut u8,
    half: *mut u16,
}

impl Block {
    /// Makes it ready: the next one of the row. A step is an addition for each of them, so that loops hardly take longer for it.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vl")]
    // SAFETY: a block of the caller's rows; room for it, 32-byte aligned.
    unsafe fn ready(self) -> Self {
        let Self { from, w, half } = self;
        // SAFETY: the caller's promise.
        unsafe {
            half.write(from.cast::<u16>().read_unaligned());
            make_ready(from, w);
        }
        Self { from: from.wrapping_add(Q8_0_BYTES), w: w.wrapping_add(QK8_0), half: half.wrapping_add(ROWS) }
    }
}

/// Blocks of a group's rows that are made ready, a row at a time, while others are multiplied.
struct Coming {
    /// The first block of the row in hand.
    row: Block,
    /// Blocks of each row, and rows that are left.
    blocks: usize,
    rows: usize,
    /// From there to the next row's, and to what is to be prefetched.
    apart: usize,
    ahead: usize,
    ready: *mut Ready,
}

impl Coming {
    /// The first block of the row `i` rows behind the one in hand.
    #[inline]
    fn row(&self, i: usize) -> Block {
        let Block { from, w, half } = self.row;
        Block {
            from: from.wrapping_add(i * self.apart),
            w: w.wrapping_add(i * BLOCKS * QK8_0),
            half: half.wrapping_add(i),
        }
    }

    /// Calls `line` with each line of what lies ahead of the row in hand.
    #[inline(always)]
    fn each_line(&self, mut line: impl FnMut(*const i8)) {
        let from = self.row.from.wrapping_add(self.ahead);
        let mut at = |at: usize| line(from.wrapping_add(at).cast());
        if self.blocks == BLOCKS {
            (0..BLOCKS * Q8_0_BYTES).step_by(64).for_each(&mut at);
        } else {
            // No more than there is: what is behind may lie on another NUMA node.
            (0..self.blocks * Q8_0_BYTES).step_by(64).for_each(&mut at);
        }
    }

    /// Prefetches what lies ahead of the row in hand, into L2: in L1 it would be in the way until it is wanted. Goes on to the next row.
    #[inline]
    fn next(&mut self) {
        // SAFETY: SSE is part of x86-64, and a prefetch only hints.
        self.each_line(|at| unsafe { _mm_prefetch::<_MM_HINT_T1>(at) });
        self.row = self.row(1);
        self.rows -= 1;
    }

    /// Makes what is left ready, and all scales.
    #[target_feature(enable = "avx512f,avx512vl,f16c")]
    // SAFETY: the rows are the caller's of `panels`.
    unsafe fn rest(&mut self) -> *const Ready {
        while self.rows > 0 {
            // SAFETY: blocks of a row that is left.
            (0..self.blocks).fold(self.row, |block, _| unsafe { block.ready() });
            self.next();
        }
        let ready = self.ready;
        for b in 0..self.blocks {
            for r in (0..ROWS).step_by(8) {
                // SAFETY: ROWS is a multiple of 8, and all halves are something.
                unsafe {
                    let halves = _mm_loadu_si128((&raw const (*ready).halves[b][r]).cast());
                    _mm256_storeu_ps((&raw mut (*ready).scales[b][r]), _mm256_cvtph_ps(halves));
                }
            }
        }
        ready
    }
}

/// A group of rows times some panels.
struct Part<'a> {
    rows: Rows<'a>,
    group: Group,
    panels: Panels<'a>,
    /// The first panel's sums of row 0.
    c: *mut f32,
    sums: *mut f32,
}

/// Ready blocks of 32 k, from number `first` on.
#[derive(Clone, Copy)]
struct Blocks {
    ready: *const Ready,
    first: usize,
    count: usize,
}

impl Part<'_> {
    /// Blocks of the group from `first` on, a multiple of [`BLOCKS`].
    fn coming(&self, first: usize, ready: *mut Ready) -> Coming {
        let (rows, group, blocks) = (&self.rows, self.group, self.rows.k / QK8_0);
        let start = rows.row(group.first);
        // In this row or, at its place, in that of the group behind, and inside.
        let (ahead, last) = (first + (AHEAD * BLOCKS).min(blocks), blocks.saturating_sub(BLOCKS));
        let ahead = match ahead.checked_sub(blocks) {
            None => start.wrapping_add(ahead.min(last) * Q8_0_BYTES),
            Some(ahead) => group.behind(rows).wrapping_add(ahead.min(last) * Q8_0_BYTES),
        };
        let from = start.wrapping_add(first * Q8_0_BYTES);
        // SAFETY: fields of this thread's memory.
        let (w, half) = unsafe { ((&raw mut (*ready).w).cast(), (&raw mut (*ready).halves).cast()) };
        Coming {
            row: Block { from, w, half },
            blocks: BLOCKS.min(blocks - first),
            rows: group.n,
            apart: group.apart * rows.stride,
            ahead: ahead.addr().wrapping_sub(from.addr()),
            ready,
        }
    }

    /// All k; `coming` are the group's first blocks, then those of the part behind it.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
    // SAFETY: as `panels`.
    unsafe fn run(&self, add: bool, ready: &mut [*mut Ready; 2], coming: &mut Coming, behind: Option<&Self>) {
        let blocks = self.rows.k / QK8_0;
        // SAFETY: the group's rows, blocks below the rows' k, and panels.
        unsafe {
            self.each_sum(|sum, c| _mm512_store_ps(sum, if add { _mm512_load_ps(c) } else { _mm512_setzero_ps() }));
            for first in (0..blocks).step_by(BLOCKS) {
                let some = Blocks { ready: coming.rest(), first, count: BLOCKS.min(blocks - first) };
                ready.reverse();
                if first + BLOCKS < blocks {
                    *coming = self.coming(first + BLOCKS, ready[0]);
                } else if let Some(behind) = behind {
                    *coming = behind.coming(0, ready[0]);
                }
                self.passes(some, coming);
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
                let sum = unsafe { self.sums.add((p * ROWS + r) * PANEL) };
                f(sum, self.c.wrapping_add((p * self.rows.n + self.group.row(r)) * PANEL));
            }
        }
    }

    /// Ready blocks of all the group's rows times all panels.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
    // SAFETY: as `pass`.
    unsafe fn passes(&self, some: Blocks, coming: &mut Coming) {
        let (n, mut p) = (self.group.n, 0);
        while p < self.panels.count() {
            let panels = even_group(self.panels.count() - p, if n == ROWS { SIDE_BY_SIDE } else { 2 });
            // SAFETY: the group's rows, the caller's panels.
            unsafe {
                match (n, panels) {
                    (ROWS, 4) => (0..ROWS).step_by(6).for_each(|r| self.pass::<6, 4>(some, r, p, coming)),
                    (ROWS, 3) => (0..ROWS).step_by(8).for_each(|r| self.pass::<8, 3>(some, r, p, coming)),
                    (ROWS, 2) => (0..ROWS).step_by(8).for_each(|r| self.pass::<8, 2>(some, r, p, coming)),
                    (ROWS, _) => self.pass::<ROWS, 1>(some, 0, p, coming),
                    (8, 2) => self.pass::<8, 2>(some, 0, p, coming),
                    (8, _) => self.pass::<8, 1>(some, 0, p, coming),
                    (4, 2) => self.pass::<4, 2>(some, 0, p, coming),
                    (4, _) => self.pass::<4, 1>(some, 0, p, coming),
                    (_, 2) => self.pass::<1, 2>(some, 0, p, coming),
                    _ => self.pass::<1, 1>(some, 0, p, coming),
                }
            }
            p += panels;
        }
    }

    /// The ready blocks of rows `[first, first + R)` of the group times panels `[p, p + P)`: the sums of integers within a block are in
    /// registers. Meanwhile rows of what comes next are made ready, with loads and stores that the arithmetic does not need.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
    // SAFETY: as `panels`; the blocks are ready.
    unsafe fn pass<const R: usize, const P: usize>(&self, some: Blocks, first: usize, p: usize, coming: &mut Coming) {
        let (mut block, stride) = (self.panels.panel(p).wrapping_add(some.first * Q8_PANEL_BLOCK), self.panels.stride);
        // SAFETY: fields of the rows and panels.
        let (mut w, mut scales, sums) = unsafe {
            let ready = some.ready;
            let sums = self.sums.add((p * ROWS + first) * PANEL);
            ((&raw const (*ready).w[first]).cast::<u8>(), (&raw const (*ready).scales[0][first]).cast::<f32>(), sums)
        };
        for _ in 0..some.count {
            // Enough for 24 rows to be ready when eight blocks have met all rows, however many panels there are.
            let per = R.div_ceil(BLOCKS);
            let left: [usize; AT_ONCE] = std::array::from_fn(|i| if i < coming.rows { coming.blocks } else { 0 });
            // SAFETY: a ready block of the rows, and of the panels.
            unsafe {
                let x: [*const u8; P] = std::array::from_fn(|q| block.add(q * stride));
                let start: [__m512i; P] = std::array::from_fn(|q| _mm512_load_si512(x[q].add(9 * 64).cast()));
                let mut sum = [start; R];
                let mut next: [Block; AT_ONCE] = std::array::from_fn(|i| coming.row(i));
                for g in 0..8 {
                    // Else the compiler loads all of a block at once and spills it.
                    compiler_fence(Ordering::SeqCst);
                    for i in 0..per {
                        if g < left[i] {
                            next[i] = next[i].ready();
                        }
                    }
                    let v: [__m512i; P] = std::array::from_fn(|q| _mm512_load_si512(x[q].add(g * 64).cast()));
                    for r in 0..R {
                        let four = _mm512_set1_epi32(w.add(r * BLOCKS * QK8_0).cast::<i32>().add(g).read());
                        for q in 0..P {
                            sum[r][q] = _mm512_dpbusd_epi32(sum[r][q], four, v[q]);
                        }
                    }
                }
                compiler_fence(Ordering::SeqCst);
                let scale: [__m512; P] = std::array::from_fn(|q| _mm512_load_ps(x[q].add(8 * 64).cast()));
                for r in 0..R {
                    let w = _mm512_set1_ps(scales.add(r).read());
                    for q in 0..P {
                        let to = sums.add((q * ROWS + r) * PANEL);
                        let (product, both) = (_mm512_cvtepi32_ps(sum[r][q]), _mm512_mul_ps(scale[q], w));
                        _mm512_store_ps(to, _mm512_fmadd_ps(product, both, _mm512_load_ps(to)));
                    }
                }
                (block, w, scales) = (block.add(Q8_PANEL_BLOCK), w.add(QK8_0), scales.add(ROWS));
            }
            (0..per.min(coming.rows)).for_each(|_| coming.next());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Reading;
    use crate::tensor::{DType, Weights};

    /// What is prefetched while all rows go by, as offsets from the first row, sorted.
    fn prefetched(rows: Rows<'_>) -> Vec<usize> {
        // SAFETY: one token, of which nothing is read.
        let panels = unsafe { Panels::from_raw(DType::Q8_0, std::ptr::without_provenance(64), rows.k, 1) };
        let mut ready = MaybeUninit::<Ready>::uninit();
        let mut lines = vec![];
        for group in groups(&rows, [ROWS, 8, 4, 1]) {
            let part = Part { rows, group, panels, c: std::ptr::null_mut(), sums: std::ptr::null_mut() };
            for first in (0..rows.k / QK8_0).step_by(BLOCKS) {
                let mut coming = part.coming(first, ready.as_mut_ptr());
                while coming.rows > 0 {
                    coming.each_line(|at| lines.push(at.addr().wrapping_sub(rows.data.addr())));
                    coming.next();
                }
            }
        }
        lines.sort_unstable();
        lines
    }

    #[test]
    fn all_ahead_is_prefetched_then_the_next_blocks_first() {
        let (k, n, next) = (2048, 48, 1 << 20);
        let bytes = vec![0; DType::Q8_0.row_bytes(k) * n];
        let rows = Weights::contiguous(DType::Q8_0, &bytes, [k, n, 1]).rows(0, 0, n).by(Reading::Streams);
        let lines = prefetched(rows.then(bytes.as_ptr().wrapping_add(next)));
        let some = BLOCKS * Q8_0_BYTES;
        // Two rows a stream.
        let (row, stream, ahead) = (some * 8, some * 16, some * AHEAD);
        let each = |from: usize, to: usize| (from..to).step_by(some).flat_map(|at| (at..at + some).step_by(64));
        let rest = (0..ROWS).flat_map(|r| each(r * stream + ahead, (r + 1) * stream));
        let first = (0..ROWS).flat_map(|r| each(next + r * stream, next + r * stream + ahead));
        assert_eq!(row, DType::Q8_0.row_bytes(k));
        assert_eq!(lines, rest.chain(first).collect::<Vec<_>>());
    }

    #[test]
    fn gaps_never_are_prefetched() {
        let (wide, n) = (4096, 45);
        let bytes = vec![0; DType::Q8_0.row_bytes(wide) * n];
        let all = Weights::contiguous(DType::Q8_0, &bytes, [wide, n, 1]).rows(0, 0, n);
        for (reading, blocks) in Reading::ALL.into_iter().flat_map(|r| [1, 3, 8, 10, 40, 90].map(|blocks| (r, blocks)))
        {
            let next = bytes.as_ptr().wrapping_add(all.stride * 1000);
            let lines = prefetched(all.columns(0, blocks * QK8_0).by(reading).then(next));
            let inside = |at: &usize| at % all.stride < blocks * Q8_0_BYTES;
            assert!(!lines.is_empty() && lines.iter().all(inside), "{reading:?} {blocks}");
        }
    }
}
