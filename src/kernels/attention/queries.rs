//! Query rows into a panel.

use super::{LANES, with_lanes};
use crate::tensor::DType;

/// Packs `rows.len()` query rows of `d` f32, times `scale`, into a panel of `lanes` rows; the rest is zeros.
///
/// Layout: `[element / width][row][element % width]` with `width = 16 / lanes`.
///
/// # Safety
/// Each row has `d` readable f32, of any alignment; `panel` is writable for `panel_len(lanes, d)` f32.
// SAFETY: contract above.
pub unsafe fn pack(
    rows: impl ExactSizeIterator<Item = *const f32>,
    lanes: usize,
    d: usize,
    scale: f32,
    panel: *mut f32,
) {
    debug_assert!(rows.len() <= lanes);
    let used = rows.len();
    for (row, q) in rows.enumerate() {
        // SAFETY: the caller's contract.
        unsafe { with_lanes!(lanes, place(q, d, scale, row, d, panel)) };
    }
    for row in used..lanes {
        // SAFETY: as above; with `n` = 0 nothing is read.
        unsafe { with_lanes!(lanes, place(panel, 0, scale, row, d, panel)) };
    }
}

/// Puts the first `n` elements of a query into its places of the panel, and zeros behind them up to `d` rounded up to 16.
// SAFETY: contract of `pack`.
unsafe fn place<const L: usize>(q: *const f32, n: usize, scale: f32, row: usize, d: usize, panel: *mut f32) {
    let width = LANES / L;
    // SAFETY: `group` is one of the panel's vectors, and the row has `width` places in each.
    let place = |group: usize| unsafe { panel.add(group * LANES + row * width) };
    for group in 0..n / width {
        for i in 0..width {
            // SAFETY: an element in front of `n`; the place is in the panel.
            unsafe { *place(group).add(i) = q.add(group * width + i).read_unaligned() * scale };
        }
    }
    for group in n / width..d.next_multiple_of(LANES) / width {
        for i in 0..width {
            let e = group * width + i;
            // SAFETY: as above, where the element is in front of `n`.
            unsafe { *place(group).add(i) = if e < n { q.add(e).read_unaligned() * scale } else { 0.0 } };
        }
    }
}

/// Packs as [`pack`] does, for [`Attend::scores_in_place`] with K of `dtype`: `[element / 16][row][element % 16]`. Of each
/// 16 elements those with even numbers come first where K is BF16: they are the lower halves of its 32-bit words.
///
/// [`Attend::scores_in_place`]: super::Attend::scores_in_place
///
/// # Safety
/// As [`pack`], with `d` a multiple of 16.
// SAFETY: contract above.
pub unsafe fn pack_for(
    dtype: DType,
    rows: impl ExactSizeIterator<Item = *const f32>,
    lanes: usize,
    d: usize,
    scale: f32,
    panel: *mut f32,
) {
    debug_assert!(rows.len() <= lanes && d.is_multiple_of(LANES));
    for (row, q) in rows.enumerate() {
        for tile in 0..d / LANES {
            // SAFETY: 16 elements of the row, and their place in the panel.
            let (q, to) = unsafe {
                let q = q.add(tile * LANES).cast::<[f32; LANES]>().read_unaligned().map(|x| x * scale);
                (q, &mut *panel.add((tile * lanes + row) * LANES).cast::<[f32; LANES]>())
            };
            *to = q;
            if dtype == DType::Bf16 {
                for i in 0..LANES / 2 {
                    (to[i], to[LANES / 2 + i]) = (q[2 * i], q[2 * i + 1]);
                }
            }
        }
    }
}
