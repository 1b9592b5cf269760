//! The weighted sum of V rows, and the merge of partial sums.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::widen::{Bf16, F16, F32, Load, Q8};
use crate::kernels::attention::{Ahead, LANES, Source, TILE, Weights};
use crate::tensor::DType;

/// Rows that share a pass over V.
const ROWS: usize = 8;

// SAFETY: contract of `Attend::weigh`, on a CPU with the features.
pub unsafe fn weigh(w: Weights, block: *const f32, stride: usize, ahead: &mut Ahead) {
    let w = Weights { n: w.n.next_multiple_of(LANES), ..w };
    // SAFETY: the caller's contract.
    unsafe { all(w, Widened { block, stride }, ahead) }
}

// SAFETY: contract of `Attend::weigh_in_place`, on a CPU with the features.
pub unsafe fn weigh_in_place(w: Weights, source: Source, ahead: &mut Ahead) {
    debug_assert!(source.rows == w.n && source.d == w.tiles * LANES && source.closed == 0);
    let Source { data, stride, .. } = source;
    // SAFETY: the caller's contract.
    unsafe {
        match source.dtype {
            DType::F32 => all(w, InPlace::<F32>(data, stride, PhantomData), ahead),
            DType::F16 => all(w, InPlace::<F16>(data, stride, PhantomData), ahead),
            DType::Bf16 => all(w, InPlace::<Bf16>(data, stride, PhantomData), ahead),
            DType::Q8_0 => all(w, InPlace::<Q8>(data, stride, PhantomData), ahead),
        }
    }
}

/// V, 16 positions at a time.
trait Values: Copy {
    /// The positions from `16 * group` on.
    // SAFETY: for both: the values are readable, and the caller has the features.
    unsafe fn group(self, group: usize) -> *const u8;
    /// Tile `tile` of position `i` of a group.
    // SAFETY: as above.
    unsafe fn tile(self, group: *const u8, i: usize, tile: usize) -> __m512;
}

/// V in a block.
#[derive(Clone, Copy)]
struct Widened {
    block: *const f32,
    stride: usize,
}

impl Values for Widened {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    // SAFETY: the trait's contract.
    unsafe fn group(self, group: usize) -> *const u8 {
        // SAFETY: the trait's contract.
        unsafe { self.block.add(group * self.stride * TILE).cast() }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    // SAFETY: the trait's contract.
    unsafe fn tile(self, group: *const u8, i: usize, tile: usize) -> __m512 {
        // SAFETY: the trait's contract.
        unsafe { _mm512_load_ps(group.cast::<f32>().add(tile * TILE + i * LANES)) }
    }
}

/// V in the cache: the first row and the stride.
struct InPlace<T>(*const u8, usize, PhantomData<T>);

impl<T> Clone for InPlace<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for InPlace<T> {}

impl<T: Load> Values for InPlace<T> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    // SAFETY: the trait's contract.
    unsafe fn group(self, group: usize) -> *const u8 {
        // SAFETY: the trait's contract.
        unsafe { self.0.add(group * LANES * self.1) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    // SAFETY: the trait's contract.
    unsafe fn tile(self, group: *const u8, i: usize, tile: usize) -> __m512 {
        // SAFETY: the trait's contract.
        unsafe { T::full(group.add(i * self.1), tile) }
    }
}

/// All rows, in groups of up to 8.
// SAFETY: `weigh`'s contract.
unsafe fn all<V: Values>(w: Weights, v: V, ahead: &mut Ahead) {
    for row in (0..w.rows).step_by(ROWS) {
        // SAFETY: rows `[row, row + 8)` of the caller's operands, as far as there are.
        unsafe {
            let w = Weights { p: w.p.add(row), rescale: w.rescale.add(row), o: w.o.add(row * w.tiles * LANES), ..w };
            match w.rows - row {
                1 => run::<1, 4, V>(w, v, ahead),
                2 => run::<2, 4, V>(w, v, ahead),
                3 => run::<3, 4, V>(w, v, ahead),
                4 => run::<4, 4, V>(w, v, ahead),
                5 => run::<5, 2, V>(w, v, ahead),
                6 => run::<6, 2, V>(w, v, ahead),
                7 => run::<7, 2, V>(w, v, ahead),
                _ => run::<8, 2, V>(w, v, ahead),
            }
        }
    }
}

/// `R` rows, `N` tiles of V at a time.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
// SAFETY: `weigh`'s contract for `R` rows.
unsafe fn run<const R: usize, const N: usize, V: Values>(w: Weights, v: V, ahead: &mut Ahead) {
    let whole = w.tiles / N * N;
    for tile in (0..whole).step_by(N) {
        // SAFETY: tiles `[tile, tile + N)` exist.
        unsafe { columns::<R, N, V>(w, v, tile, ahead) };
    }
    for tile in whole..w.tiles {
        // SAFETY: the tile exists.
        unsafe { columns::<R, 1, V>(w, v, tile, ahead) };
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
// SAFETY: `weigh`'s contract for `R` rows and tiles `[tile, tile + N)`.
unsafe fn columns<const R: usize, const N: usize, V: Values>(w: Weights, v: V, tile: usize, ahead: &mut Ahead) {
    let mut acc = [[_mm512_setzero_ps(); N]; R];
    // SAFETY: all addresses are inside the operands, by the caller's contract.
    unsafe {
        for (r, acc) in acc.iter_mut().enumerate() {
            let rescale = _mm512_set1_ps(*w.rescale.add(r));
            for (n, acc) in acc.iter_mut().enumerate() {
                *acc = _mm512_mul_ps(_mm512_load_ps(w.o.add((r * w.tiles + tile + n) * LANES)), rescale);
            }
        }
        let whole = w.n / LANES;
        for group in 0..whole {
            ahead.step();
            let (base, p) = (v.group(group), w.p.add(group * LANES * w.lanes));
            for i in 0..LANES {
                add::<R, N, V>(&mut acc, p.add(i * w.lanes), v, base, i, tile);
            }
        }
        if !w.n.is_multiple_of(LANES) {
            let (base, p) = (v.group(whole), w.p.add(whole * LANES * w.lanes));
            for i in 0..w.n % LANES {
                add::<R, N, V>(&mut acc, p.add(i * w.lanes), v, base, i, tile);
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            for (n, acc) in acc.iter().enumerate() {
                _mm512_store_ps(w.o.add((r * w.tiles + tile + n) * LANES), *acc);
            }
        }
    }
}

/// Adds one position.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
// SAFETY: `R` weights at `p`, and `N` tiles of position `i` of the group.
unsafe fn add<const R: usize, const N: usize, V: Values>(
    acc: &mut [[__m512; N]; R],
    p: *const f32,
    v: V,
    group: *const u8,
    i: usize,
    tile: usize,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let v: [__m512; N] = std::array::from_fn(|n| v.tile(group, i, tile + n));
        for (r, acc) in acc.iter_mut().enumerate() {
            let p = _mm512_set1_ps(*p.add(r));
            for (acc, v) in acc.iter_mut().zip(v) {
                *acc = _mm512_fmadd_ps(p, v, *acc);
            }
        }
    }
}

// SAFETY: contract of `Attend::merge`, on a CPU with the features.
pub unsafe fn merge(parts: impl Iterator<Item = (*const f32, f32)> + Clone, n: usize, to: *mut f32) {
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
