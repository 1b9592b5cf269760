//! The weighted sum of V rows, and the merge of partial sums.

use std::arch::x86_64::*;

use super::{LANES, TILE};
use crate::isa::Avx512;

/// Rows that share a pass over V.
const ROWS: usize = 8;

/// `o[row] = o[row] * rescale[row] + sum over positions of p[position * lanes + row] * v[position]`.
///
/// `o` has `tiles * 16` f32 for each of the `rows <= lanes` rows; `tiles` is the number of 16-element tiles of a V row.
///
/// # Safety
/// `p` has `positions` (rounded up to 16) `* lanes` f32, `block` the same positions with `stride >= tiles` tiles each;
/// `rescale` has `rows` f32; `block` and `o` are 64-byte aligned.
// SAFETY: contract above; the token proves the features.
#[expect(clippy::too_many_arguments, reason = "a kernel's operands and extents")]
pub unsafe fn weigh(
    _: Avx512,
    p: *const f32,
    [lanes, rows]: [usize; 2],
    positions: usize,
    block: *const f32,
    [stride, tiles]: [usize; 2],
    rescale: *const f32,
    o: *mut f32,
) {
    let groups = positions.div_ceil(LANES);
    let mut row = 0;
    while row < rows {
        let n = (rows - row).min(ROWS);
        // SAFETY: rows `[row, row + n)` of the caller's operands.
        unsafe {
            let a = Operands { p: p.add(row), lanes, groups, block, stride, tiles, rescale: rescale.add(row) };
            let o = o.add(row * tiles * LANES);
            match n {
                1 => run::<1, 4>(a, o),
                2 => run::<2, 4>(a, o),
                3 => run::<3, 4>(a, o),
                4 => run::<4, 4>(a, o),
                5 => run::<5, 2>(a, o),
                6 => run::<6, 2>(a, o),
                7 => run::<7, 2>(a, o),
                _ => run::<8, 2>(a, o),
            }
        }
        row += n;
    }
}

#[derive(Clone, Copy)]
struct Operands {
    p: *const f32,
    lanes: usize,
    groups: usize,
    block: *const f32,
    stride: usize,
    tiles: usize,
    rescale: *const f32,
}

/// `R` rows, `N` tiles of V at a time.
#[target_feature(enable = "avx512f")]
// SAFETY: `weigh`'s contract for `R` rows.
unsafe fn run<const R: usize, const N: usize>(a: Operands, o: *mut f32) {
    let whole = a.tiles / N * N;
    for tile in (0..whole).step_by(N) {
        // SAFETY: tiles `[tile, tile + N)` exist.
        unsafe { columns::<R, N>(a, tile, o) };
    }
    for tile in whole..a.tiles {
        // SAFETY: the tile exists.
        unsafe { columns::<R, 1>(a, tile, o) };
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
// SAFETY: `weigh`'s contract for `R` rows and tiles `[tile, tile + N)`.
unsafe fn columns<const R: usize, const N: usize>(a: Operands, tile: usize, o: *mut f32) {
    let mut acc = [[_mm512_setzero_ps(); N]; R];
    // SAFETY: all addresses are inside the operands, by the caller's contract.
    unsafe {
        for (r, acc) in acc.iter_mut().enumerate() {
            let rescale = _mm512_set1_ps(*a.rescale.add(r));
            for (n, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_mul_ps(_mm512_load_ps(o.add((r * a.tiles + tile + n) * LANES)), rescale);
            }
        }
        for group in 0..a.groups {
            let v = a.block.add((group * a.stride + tile) * TILE);
            let p = a.p.add(group * LANES * a.lanes);
            for position in 0..LANES {
                let v: [__m512; N] = std::array::from_fn(|n| _mm512_load_ps(v.add(n * TILE + position * LANES)));
                for (r, acc) in acc.iter_mut().enumerate() {
                    let p = _mm512_set1_ps(*p.add(position * a.lanes + r));
                    for (acc, v) in acc.iter_mut().zip(v) {
                        *acc = _mm512_fmadd_ps(p, v, *acc);
                    }
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                _mm512_store_ps(o.add((r * a.tiles + tile + n) * LANES), *acc);
            }
        }
    }
}

/// `to[i] = sum over parts of factor * part[i]` for `n` f32, in the order of the parts. A part with factor 0 is not read.
///
/// # Safety
/// Each part whose factor is not 0 has `n` (rounded up to 16) readable f32, 64-byte aligned; `to` is writable for `n` f32,
/// at any alignment.
// SAFETY: contract above; the token proves the features.
pub unsafe fn merge(_: Avx512, parts: impl Iterator<Item = (*const f32, f32)> + Clone, n: usize, to: *mut f32) {
    #[target_feature(enable = "avx512f")]
    // SAFETY: `merge`'s contract.
    unsafe fn run(parts: impl Iterator<Item = (*const f32, f32)> + Clone, n: usize, to: *mut f32) {
        for i in (0..n).step_by(LANES) {
            let mut acc = _mm512_setzero_ps();
            for (part, factor) in parts.clone().filter(|(_, factor)| *factor != 0.0) {
                // SAFETY: inside the part, which is padded to 16.
                acc = _mm512_fmadd_ps(_mm512_set1_ps(factor), unsafe { _mm512_load_ps(part.add(i)) }, acc);
            }
            let some = (0xffff_u32 >> (LANES - (n - i).min(LANES))) as u16;
            // SAFETY: masked lanes are not written.
            unsafe { _mm512_mask_storeu_ps(to.add(i), some, acc) };
        }
    }
    // SAFETY: the caller's contract.
    unsafe { run(parts, n, to) }
}
