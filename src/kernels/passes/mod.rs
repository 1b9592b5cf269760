//! How the kernels that multiply rows in place go by them: what to prefetch meanwhile, and the passes of the dot form and the panel form.

mod dots;
mod panels;

pub(super) use dots::dots_by_passes;
pub use dots::{DotPass, side_by_side};
pub(super) use panels::panels_by_passes;
pub use panels::{PanelPass, some_in_l2};

use std::arch::x86_64::*;

use crate::isa::Reading;
use crate::tensor::Rows;

/// Rows that a kernel has in hand side by side: `n` of them from `first` on, `apart` rows apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    pub first: usize,
    pub n: usize,
    pub apart: usize,
    /// The first row of the group behind it.
    next: Option<usize>,
}

impl Group {
    /// Rows `[first, first + n)` of `total`, which is how they all are gone over.
    pub fn neighbours(first: usize, n: usize, total: usize) -> Self {
        Self { first, n, apart: 1, next: (first + n < total).then_some(first + n) }
    }

    /// The number of row `r` of the group.
    pub fn row(self, r: usize) -> usize {
        self.first + r * self.apart
    }

    /// Where the group behind it begins; that of the last one is the next block.
    pub fn behind(self, rows: &Rows<'_>) -> *const u8 {
        self.next.map_or(rows.next, |next| rows.row(next))
    }

    /// Addresses of the group's rows.
    pub fn addresses<const R: usize>(self, rows: &Rows<'_>) -> [*const u8; R] {
        std::array::from_fn(|r| rows.row(self.row(r)))
    }
}

/// All rows in groups of the first of some sizes (the last is 1), then those that are left in groups of the second, and so on.
///
/// Streams through contiguous rows begin as far apart as they are long, so that each goes on where it was in the group before.
pub fn groups<const S: usize>(rows: &Rows<'_>, sizes: [usize; S]) -> impl Iterator<Item = Group> {
    groups_before(rows, rows.n, None, sizes)
}

/// The same for the dot form, `size` rows (4 or more) side by side: up to three rows that are left come in a group of 4 with some that were
/// done before, as one row alone takes as long as four. A row's sums are the same in each group.
pub fn dot_groups(rows: &Rows<'_>, size: usize) -> impl Iterator<Item = Group> {
    let left = if rows.n < 4 { 0 } else { rows.n % size % 4 };
    let last = (left > 0).then(|| Group { first: rows.n - 4, n: 4, apart: 1, next: None });
    groups_before(rows, rows.n - left, last.map(|group| group.first), [size, 4, 1]).chain(last)
}

/// [`groups`] of the first `n` rows, behind which the group from row `last` on is gone over.
fn groups_before<const S: usize>(
    rows: &Rows<'_>,
    n: usize,
    last: Option<usize>,
    sizes: [usize; S],
) -> impl Iterator<Item = Group> {
    let (streams, mut done) = (rows.reading == Reading::Streams && rows.contiguous(), 0);
    sizes.into_iter().flat_map(move |size| {
        let (first, count) = (done, (n - done) / size);
        done += count * size;
        let behind = if done < n { Some(done) } else { last };
        let (apart, step) = if streams { (count, 1) } else { (1, size) };
        (0..count).map(move |j| {
            let next = if j + 1 < count { Some(first + (j + 1) * step) } else { behind };
            Group { first: first + j * step, n: size, apart, next }
        })
    })
}

/// What lies ahead of the row in hand in the order in which this thread reads: where to prefetch.
#[derive(Clone, Copy)]
pub struct Ahead {
    end: *const u8,
    next: *const u8,
}

/// How far ahead of the rows in hand a stretch is prefetched: enough for the latency of memory at one core's share of its bandwidth.
const AHEAD: usize = 16 << 10;

/// How far ahead in each stream: so near that the CPU has it in L2 by itself. What arithmetic leaves of the CPU's window of instructions
/// does not reach so far.
const NEAR: usize = 1 << 10;
/// The same where rows have gaps, and more of them are side by side.
const NEAR_IN_GAPS: usize = 1024;

impl Ahead {
    pub fn of(rows: &Rows<'_>) -> Self {
        Self { end: rows.data.wrapping_add(rows.n * rows.stride), next: rows.next }
    }

    /// Where to prefetch while the rows at `at` are in hand.
    pub fn from(self, at: *const u8) -> *const u8 {
        let ahead = at.wrapping_add(AHEAD);
        if ahead < self.end { ahead } else { self.next.wrapping_add(ahead.addr() - self.end.addr()) }
    }
}

/// Prefetches for rows that are read side by side: some lines a step.
pub struct Sweep {
    at: *const u8,
    /// From a line to the next.
    apart: usize,
    step: usize,
    lines: usize,
    /// Whether they are wanted so soon that they should be in L1.
    near: bool,
    /// In so many steps, go on elsewhere, so much further.
    left: usize,
    jump: usize,
}

impl Sweep {
    /// For a group of rows that are read side by side, `step` bytes of each at a time.
    ///
    /// As a stretch, contiguous rows are one, and so is what lies ahead. Else each row is a stream: what lies ahead of it is what follows
    /// in the row, then the row at its place in the next group. What is in gaps is not wanted, and may lie on another NUMA node.
    pub fn new(rows: &Rows<'_>, group: Group, step: usize) -> Self {
        let first = rows.row(group.first);
        if rows.reading == Reading::Stretch && rows.contiguous() {
            let bytes = group.n * step;
            let (at, lines) = (Ahead::of(rows).from(first), bytes.div_ceil(64));
            return Self { at, apart: 64, step: bytes, lines, near: false, left: usize::MAX, jump: 0 };
        }
        let bytes = rows.dtype.row_bytes(rows.k);
        let next = group.behind(rows);
        let near_by = match rows.reading {
            // All of the next group's rows while this one's are in hand.
            Reading::Stretch => bytes,
            Reading::Streams if rows.contiguous() => NEAR,
            Reading::Streams => NEAR_IN_GAPS,
        };
        let (at, apart) = (first.wrapping_add(near_by.min(bytes)), group.apart * rows.stride);
        let (near, left) = (rows.reading == Reading::Streams, bytes.saturating_sub(near_by) / step);
        // Behind gaps exactly to where that begins: a line before it may lie on another node. Without, what the last step leaves of a row is
        // the next row's first.
        let end = if rows.contiguous() { first.addr() + bytes } else { at.addr() + left * step };
        let jump = next.addr().wrapping_sub(end);
        let mut sweep = Self { at, apart, step, lines: group.n, near, left, jump };
        if sweep.left == 0 {
            sweep.jump();
        }
        sweep
    }

    fn jump(&mut self) {
        self.at = self.at.wrapping_add(self.jump);
    }

    /// Line `i` of the step in hand, if the step has so many.
    #[inline(always)]
    fn address(&self, i: usize) -> Option<*const i8> {
        (i < self.lines).then(|| self.at.wrapping_add(i * self.apart).cast())
    }

    /// Prefetches line `i` of the step in hand, if the step has so many.
    #[inline(always)]
    pub fn line(&self, i: usize) {
        if let Some(at) = self.address(i) {
            // SAFETY: SSE is part of x86-64, and a prefetch only hints.
            unsafe { if self.near { _mm_prefetch::<_MM_HINT_T0>(at) } else { _mm_prefetch::<_MM_HINT_T1>(at) } };
        }
    }

    /// Only some of each step's lines.
    pub fn only(self, lines: std::ops::Range<usize>) -> Self {
        let end = lines.end.min(self.lines);
        let at = self.at.wrapping_add(lines.start * self.apart);
        Self { at, lines: end.saturating_sub(lines.start), ..self }
    }

    /// Prefetches all lines of the step in hand and goes on to the next one.
    #[inline(always)]
    pub fn step(&mut self) {
        (0..self.lines).for_each(|i| self.line(i));
        self.advance();
    }

    /// Goes on to the next step.
    #[inline(always)]
    pub fn advance(&mut self) {
        self.at = self.at.wrapping_add(self.step);
        self.left = self.left.wrapping_sub(1);
        if self.left == 0 {
            self.jump();
        }
    }
}

/// Sizes of the next group when `left` items are done in groups of at most `most`, as even as can be.
pub fn even_group(left: usize, most: usize) -> usize {
    left.div_ceil(left.div_ceil(most))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, Weights};

    fn rows(bytes: &[u8], k: usize, n: usize, reading: Reading) -> Rows<'_> {
        Weights::contiguous(DType::Bf16, bytes, [k, n, 1]).rows(0, 0, n).by(reading)
    }

    #[test]
    fn groups_have_each_row_once() {
        let bytes = [0; 64 * 100];
        for (n, reading) in (1..50).flat_map(|n| Reading::ALL.map(|reading| (n, reading))) {
            let all = groups(&rows(&bytes, 64, n, reading), [16, 4, 1]).collect::<Vec<_>>();
            let mut seen: Vec<_> = all.iter().flat_map(|g| (0..g.n).map(|r| g.row(r))).collect();
            assert!(
                all.windows(2).all(|pair| pair[0].next == Some(pair[1].first)) && all[all.len() - 1].next.is_none()
            );
            seen.sort_unstable();
            assert_eq!(seen, (0..n).collect::<Vec<_>>(), "{n} {reading:?}");
        }
    }

    #[test]
    fn groups_of_the_dot_form_have_each_row_and_none_alone() {
        let bytes = [0; 64 * 100];
        for (n, reading) in (1..80).flat_map(|n| Reading::ALL.map(|reading| (n, reading))) {
            let all = rows(&bytes, 32, n, reading);
            for rows in [all, all.columns(0, 16)] {
                let size = side_by_side(&rows, true);
                let groups = dot_groups(&rows, size).collect::<Vec<_>>();
                let mut seen: Vec<_> = groups.iter().flat_map(|g| (0..g.n).map(|r| g.row(r))).collect();
                seen.sort_unstable();
                seen.dedup();
                assert_eq!(seen, (0..n).collect::<Vec<_>>(), "{n} {reading:?}");
                assert!(n < 4 || groups.iter().all(|g| g.n == size || g.n == 4));
                assert!(groups.windows(2).all(|pair| pair[0].next == Some(pair[1].first)));
            }
        }
    }

    #[test]
    fn streams_go_on_where_they_were_but_not_through_gaps() {
        let bytes = [0; 64 * 100];
        let streams = rows(&bytes, 32, 48, Reading::Streams);
        let first: Vec<_> = groups(&streams, [16, 4, 1]).map(|g| (g.first, g.apart)).collect();
        assert_eq!(first, [(0, 3), (1, 3), (2, 3)]);
        let gaps = streams.columns(0, 16);
        let first: Vec<_> = groups(&gaps, [16, 4, 1]).map(|g| (g.first, g.apart)).collect();
        assert_eq!(first, [(0, 1), (16, 1), (32, 1)]);
    }

    /// The lines that are prefetched while all groups of 4 rows go by, as offsets from the first row, sorted.
    fn prefetched(rows: Rows<'_>, step: usize) -> Vec<usize> {
        let mut lines = vec![];
        for group in groups(&rows, [4, 1]) {
            let mut sweep = Sweep::new(&rows, group, step);
            for _ in 0..rows.k * 2 / step {
                lines
                    .extend((0..8).filter_map(|i| sweep.address(i)).map(|at| at.addr().wrapping_sub(rows.data.addr())));
                sweep.advance();
            }
        }
        lines.sort_unstable();
        lines
    }

    #[test]
    fn each_line_ahead_is_prefetched_once_then_the_next_blocks_first() {
        let bytes = vec![0; 4096 * 8];
        let next = 1 << 20;
        for k in [2048, 768, 256] {
            let rows = rows(&bytes, k, 8, Reading::Streams).then(bytes.as_ptr().wrapping_add(next));
            let (stream, near) = (2 * k * 2, NEAR.min(k * 2));
            let rest = |r: usize| (r * stream + near..(r + 1) * stream).step_by(64);
            let start = |r: usize| (next + r * stream..next + r * stream + near).step_by(64);
            let want: Vec<_> = (0..4).flat_map(rest).chain((0..4).flat_map(start)).collect();
            assert_eq!(prefetched(rows, 64), want, "k {k}");
        }
    }

    #[test]
    fn a_stretch_is_prefetched_far_ahead_and_gaps_never_are() {
        let bytes = vec![0; 4096 * 8];
        let next = bytes.as_ptr().wrapping_add(1 << 20);
        let stretch = rows(&bytes, 2048, 8, Reading::Stretch).then(next);
        let want: Vec<_> = (AHEAD..4096 * 8).step_by(64).chain(((1 << 20)..(1 << 20) + AHEAD).step_by(64)).collect();
        assert_eq!(prefetched(stretch, 64), want);
        // Half a line less or more than whole ones, too.
        for (reading, k) in Reading::ALL.into_iter().flat_map(|reading| [240, 256, 272].map(|k| (reading, k))) {
            let gaps = rows(&bytes, 2048, 8, reading).columns(0, k).then(next);
            let inside = |at: &usize| at % 4096 < k * 2;
            assert!(prefetched(gaps, 64).iter().all(inside), "{reading:?} {k}");
        }
    }
}
