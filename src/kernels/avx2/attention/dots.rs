//! Scores of few query rows, with K where the cache has it: dot products, a vector of sums for each position and row.

use std::arch::x86_64::*;

use super::widen::{Bf16, F16, F32, Load};
use crate::kernels::attention::{Ahead, LANES, Source};
use crate::tensor::DType;

// SAFETY: contract of `Attend::scores_in_place`, on a CPU with the features.
pub unsafe fn scores(panel: *const f32, lanes: usize, rows: usize, k: Source, s: *mut f32, ahead: &mut Ahead) {
    debug_assert!(k.d.is_multiple_of(LANES) && rows <= lanes && k.closed != u64::MAX >> (64 - k.rows));
    // SAFETY: the caller's contract.
    unsafe {
        if rows < lanes {
            std::slice::from_raw_parts_mut(s, k.rows.next_multiple_of(LANES) * lanes).fill(0.0);
        }
        match k.dtype {
            DType::F32 => all::<F32>(panel, lanes, rows, k, s, ahead),
            DType::F16 => all::<F16>(panel, lanes, rows, k, s, ahead),
            DType::Bf16 => all::<Bf16>(panel, lanes, rows, k, s, ahead),
            DType::Q8_0 => unreachable!("`k_in_place` is 0"),
        }
    }
}

/// All positions, 8 at a time, in groups of 4, 2 and 1 rows. With 8 sums there is one for each FMA that is under way.
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: `scores`' contract.
unsafe fn all<T: Load>(panel: *const f32, lanes: usize, rows: usize, k: Source, s: *mut f32, ahead: &mut Ahead) {
    let fours = rows / 4 * 4;
    // A position that is closed or past the last one counts as the first open one: its score will be thrown away.
    let open = k.closed.trailing_ones() as usize;
    // Adding up within vectors waits until all sums are there: it would hold the next FMAs up.
    let mut sums = [[_mm256_setzero_ps(); 8]; 4];
    for first in (0..k.rows.next_multiple_of(LANES)).step_by(8) {
        let at = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| {
            let i = first + i;
            let i = if i >= k.rows || k.closed >> i & 1 == 1 { open } else { i };
            k.data.wrapping_add(i * k.stride)
        });
        let x = Eight { panel, lanes, tiles: k.d / LANES, at, s: s.wrapping_add(first * lanes) };
        // SAFETY: open positions of K, rows of the panel, and scores up to the next 16 positions.
        unsafe {
            for row in (0..fours).step_by(4) {
                group::<2, 4, T>(&x, row, &mut sums, ahead);
            }
            if rows & 2 != 0 {
                group::<4, 2, T>(&x, fours, &mut sums, ahead);
            }
            if rows & 1 != 0 {
                group::<8, 1, T>(&x, rows - 1, &mut sums, ahead);
            }
        }
    }
}

/// A panel, 8 positions of K, and the place of their scores.
struct Eight {
    panel: *const f32,
    lanes: usize,
    tiles: usize,
    at: [*const u8; 8],
    s: *mut f32,
}

/// The scores of `R` rows from `row` on, `P = 8 / R` positions at a time.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: as `all`.
unsafe fn group<const P: usize, const R: usize, T: Load>(
    x: &Eight,
    row: usize,
    sums: &mut [[__m256; 8]; 4],
    ahead: &mut Ahead,
) {
    let mut nothing = Ahead::NOTHING;
    // A step for each tile of 16 positions.
    let ahead = if row == 0 { ahead } else { &mut nothing };
    for (i, sums) in sums.iter_mut().take(R).enumerate() {
        let at: [*const u8; P] = std::array::from_fn(|p| x.at[i * P + p]);
        // SAFETY: the caller's contract.
        unsafe { *sums = add_up::<P, R, T>(x.panel.add(row * LANES), x.lanes, at, x.tiles, ahead) };
    }
    for (i, sums) in sums.iter().take(R).enumerate() {
        // SAFETY: the scores of these positions and rows.
        unsafe { store::<R>(fold(sums), x.s.add(i * P * x.lanes + row), x.lanes) };
    }
}

/// The sums of `P` positions and `R` rows, position by position.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: as `all`, with the panel from these rows on.
unsafe fn add_up<const P: usize, const R: usize, T: Load>(
    panel: *const f32,
    lanes: usize,
    at: [*const u8; P],
    tiles: usize,
    ahead: &mut Ahead,
) -> [__m256; 8] {
    let mut sums = [[_mm256_setzero_ps(); R]; P];
    for tile in 0..tiles {
        if tile % (LANES / P) == 0 {
            ahead.step();
        }
        let mut k = [[_mm256_setzero_ps(); 2]; P];
        for (k, at) in k.iter_mut().zip(at) {
            // SAFETY: a tile of an open position.
            *k = unsafe { T::tile(at, tile) };
        }
        for half in 0..2 {
            for r in 0..R {
                // SAFETY: a row of the panel.
                let q = unsafe { _mm256_load_ps(panel.add((tile * lanes + r) * LANES + 8 * half)) };
                for (sums, k) in sums.iter_mut().zip(&k) {
                    sums[r] = _mm256_fmadd_ps(q, k[half], sums[r]);
                }
            }
        }
    }
    let mut all = [_mm256_setzero_ps(); 8];
    all.copy_from_slice(sums.as_flattened());
    all
}

/// The sum of each of 8 vectors.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fold(v: &[__m256; 8]) -> __m256 {
    // Each step adds what lies apart by half as much, and leaves half as many vectors.
    let [a, b, c, d] = [0, 1, 2, 3].map(|i| {
        let (x, y) = (v[i], v[i + 4]);
        _mm256_add_ps(_mm256_blend_ps::<0b1111_0000>(x, y), _mm256_permute2f128_ps::<0x21>(x, y))
    });
    let [a, b] = [(a, b), (c, d)]
        .map(|(x, y)| _mm256_add_ps(_mm256_blend_ps::<0b1100_1100>(x, y), _mm256_shuffle_ps::<0b01_00_11_10>(x, y)));
    _mm256_add_ps(_mm256_shuffle_ps::<0b10_00_10_00>(a, b), _mm256_shuffle_ps::<0b11_01_11_01>(a, b))
}

/// Puts the scores of `8 / R` positions and `R` rows where they belong.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: positions of `s` that are `lanes` apart and have `R` rows.
unsafe fn store<const R: usize>(v: __m256, s: *mut f32, lanes: usize) {
    let [low, high] = [_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v)];
    // SAFETY: the caller's contract.
    unsafe {
        match R {
            4 => {
                _mm_storeu_ps(s, low);
                _mm_storeu_ps(s.add(lanes), high);
            }
            2 => {
                for (i, v) in [low, high].into_iter().enumerate() {
                    _mm_storel_pd(s.add(2 * i * lanes).cast(), _mm_castps_pd(v));
                    _mm_storeh_pd(s.add((2 * i + 1) * lanes).cast(), _mm_castps_pd(v));
                }
            }
            _ if lanes == 1 => _mm256_storeu_ps(s, v),
            _ => {
                let mut all = [0f32; 8];
                _mm256_storeu_ps(all.as_mut_ptr(), v);
                all.iter().enumerate().for_each(|(i, x)| *s.add(i * lanes) = *x);
            }
        }
    }
}
