//! Scores: a panel of query rows times a block of K.

use std::arch::x86_64::*;

use crate::kernels::attention::{Ahead, LANES, TILE, with_lanes};

/// The sums of one position: sixteen lanes.
type Sums = [__m256; 2];

// SAFETY: contract of `Attend::scores`, on a CPU with the features.
pub unsafe fn scores(lanes: usize, panel: *const f32, block: *const f32, tiles: usize, s: *mut f32, ahead: &mut Ahead) {
    // SAFETY: the caller's contract.
    unsafe { with_lanes!(lanes, run(panel, block, tiles, s, ahead)) }
}

#[target_feature(enable = "avx2,fma")]
// SAFETY: `scores`' contract.
unsafe fn run<const L: usize>(panel: *const f32, block: *const f32, tiles: usize, s: *mut f32, ahead: &mut Ahead) {
    // SAFETY: positions of the block, which are one vector of a tile apart, and `s`, by the caller's contract.
    unsafe {
        let a = sums::<L, 6>(panel, block, tiles, ahead);
        let b = sums::<L, 5>(panel, block.add(6 * LANES), tiles, &mut Ahead::NOTHING.clone());
        let c = sums::<L, 5>(panel, block.add(11 * LANES), tiles, &mut Ahead::NOTHING.clone());
        let mut all = [a[0]; LANES];
        all[..6].copy_from_slice(&a);
        all[6..11].copy_from_slice(&b);
        all[11..].copy_from_slice(&c);
        fold::<L>(&all, s);
    }
}

/// The sums of `P` positions: enough of them to hide the latency of an FMA, few enough to stay in registers.
#[inline]
#[target_feature(enable = "avx2,fma")]
// SAFETY: `scores`' contract for the block's first `P` positions.
unsafe fn sums<const L: usize, const P: usize>(
    panel: *const f32,
    block: *const f32,
    tiles: usize,
    ahead: &mut Ahead,
) -> [Sums; P] {
    let width = LANES / L; // elements of a row in 16 lanes
    let mut sums = [[_mm256_setzero_ps(); 2]; P];
    for tile in 0..tiles {
        ahead.step();
        for step in 0..L {
            // SAFETY: inside the panel (`tiles * L` times 16 lanes) and the block.
            unsafe {
                let q = panel.add((tile * L + step) * LANES);
                let q = [_mm256_load_ps(q), _mm256_load_ps(q.add(8))];
                let k = block.add(tile * TILE + step * width);
                for (p, sums) in sums.iter_mut().enumerate() {
                    let k = broadcast::<L>(k.add(p * LANES));
                    sums[0] = _mm256_fmadd_ps(q[0], k[0], sums[0]);
                    sums[1] = _mm256_fmadd_ps(q[1], k[1], sums[1]);
                }
            }
        }
    }
    sums
}

/// `16 / L` consecutive elements, repeated for each of the `L` rows of a panel's lanes.
#[inline]
#[target_feature(enable = "avx2,fma")]
// SAFETY: those elements are readable.
unsafe fn broadcast<const L: usize>(k: *const f32) -> [__m256; 2] {
    // SAFETY: the caller's contract.
    unsafe {
        match L {
            16 => [_mm256_broadcast_ss(&*k); 2],
            8 => [_mm256_castpd_ps(_mm256_set1_pd(k.cast::<f64>().read_unaligned())); 2],
            4 => [_mm256_broadcast_ps(&*k.cast()); 2],
            2 => [_mm256_loadu_ps(k); 2],
            _ => [_mm256_loadu_ps(k), _mm256_loadu_ps(k.add(8))],
        }
    }
}

/// Adds up the `16 / L` neighbours of each position's lanes and stores the sums, `[position][row]`.
#[inline]
#[target_feature(enable = "avx2,fma")]
// SAFETY: `s` has `16 * L` f32, 64-byte aligned.
unsafe fn fold<const L: usize>(v: &[Sums; LANES], s: *mut f32) {
    // SAFETY: the `2 * L` vectors of `s`.
    unsafe {
        for i in 0..2 * L {
            _mm256_store_ps(s.add(8 * i), folded::<L>(v, i));
        }
    }
}

/// Vector `i` of the scores.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn folded<const L: usize>(v: &[Sums; LANES], i: usize) -> __m256 {
    match L {
        16 => v[i / 2][i % 2],
        // Pairs: rows 0, 1, 4, 5 and 2, 3, 6, 7 in the halves.
        8 => {
            let x = _mm256_hadd_ps(v[i][0], v[i][1]);
            _mm256_castpd_ps(_mm256_permute4x64_pd::<0b11_01_10_00>(_mm256_castps_pd(x)))
        }
        // Fours: rows 0 and 2 of both positions in one half, 1 and 3 in the other.
        4 => {
            let [a, b] = [2 * i, 2 * i + 1].map(|p| _mm256_hadd_ps(v[p][0], v[p][1]));
            _mm256_permutevar8x32_ps(_mm256_hadd_ps(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
        }
        // Eights: a row's two halves are left to add.
        2 => {
            let x = [0, 1, 2, 3].map(|p| _mm256_hadd_ps(v[4 * i + p][0], v[4 * i + p][1]));
            halves(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]))
        }
        _ => {
            let x = [0, 1, 2, 3, 4, 5, 6, 7].map(|p| _mm256_add_ps(v[8 * i + p][0], v[8 * i + p][1]));
            let y = [0, 2, 4, 6].map(|p| _mm256_hadd_ps(x[p], x[p + 1]));
            halves(_mm256_hadd_ps(y[0], y[1]), _mm256_hadd_ps(y[2], y[3]))
        }
    }
}

/// The sum of each vector's two halves.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn halves(a: __m256, b: __m256) -> __m256 {
    _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b))
}
