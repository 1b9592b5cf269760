//! Scores: a panel of query rows times a block of K.

use std::arch::x86_64::*;

use crate::kernels::attention::{Ahead, LANES, TILE, with_lanes};

// SAFETY: contract of `Attend::scores`, on a CPU with the features.
pub unsafe fn scores(lanes: usize, panel: *const f32, block: *const f32, tiles: usize, s: *mut f32, ahead: &mut Ahead) {
    // SAFETY: the caller's contract.
    unsafe { with_lanes!(lanes, run(panel, block, tiles, s, ahead)) }
}

#[target_feature(enable = "avx512f,avx512dq")]
// SAFETY: `scores`' contract.
unsafe fn run<const L: usize>(panel: *const f32, block: *const f32, tiles: usize, s: *mut f32, ahead: &mut Ahead) {
    let width = LANES / L; // elements of a row in one vector
    let mut acc = [_mm512_setzero_ps(); LANES];
    for tile in 0..tiles {
        ahead.step();
        for step in 0..L {
            // SAFETY: inside the panel (`tiles * L` vectors) and the block.
            unsafe {
                let q = _mm512_load_ps(panel.add((tile * L + step) * LANES));
                let k = block.add(tile * TILE + step * width);
                for (p, acc) in acc.iter_mut().enumerate() {
                    *acc = _mm512_fmadd_ps(q, broadcast::<L>(k.add(p * LANES)), *acc);
                }
            }
        }
    }
    let sums = fold::<L>(acc);
    for (i, v) in sums.iter().take(L).enumerate() {
        // SAFETY: `L` vectors for 16 positions, inside `s`.
        unsafe { _mm512_store_ps(s.add(i * LANES), *v) };
    }
}

/// `16 / L` consecutive elements, repeated for each of the `L` rows of a panel's vector.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
// SAFETY: those elements are readable.
unsafe fn broadcast<const L: usize>(k: *const f32) -> __m512 {
    // SAFETY: the caller's contract.
    unsafe {
        match L {
            16 => _mm512_set1_ps(*k),
            8 => _mm512_castpd_ps(_mm512_set1_pd(k.cast::<f64>().read_unaligned())),
            4 => _mm512_broadcast_f32x4(_mm_loadu_ps(k)),
            2 => _mm512_broadcast_f32x8(_mm256_loadu_ps(k)),
            _ => _mm512_loadu_ps(k),
        }
    }
}

/// Adds up the `16 / L` neighbours in each of 16 vectors and packs the sums: the first `L` vectors of the result hold
/// `[position][row]`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn fold<const L: usize>(mut v: [__m512; LANES]) -> [__m512; LANES] {
    let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    let mut n = LANES;
    while n > L {
        n /= 2;
        for i in 0..n {
            let (a, b) = (v[2 * i], v[2 * i + 1]);
            v[i] = _mm512_add_ps(_mm512_permutex2var_ps(a, even, b), _mm512_permutex2var_ps(a, odd, b));
        }
    }
    v
}
