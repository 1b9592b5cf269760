//! What becomes of C blocks: transform (b), the next product's tokens, and transform (c), rows of the result.

use std::arch::x86_64::*;

use super::pack::to_bf16_pairs;
use super::part::{self, LANES};
use super::quantize::quantize_lanes;
use super::transpose::transpose8;
use crate::kernels::vectors::Finish;
use crate::pack::{PANEL, Q8_PANEL_BLOCK};
use crate::tensor::{DType, QK8_0};

#[target_feature(enable = "avx2,fma")]
// SAFETY: contract of `Vectors::finish_lanes`, on a CPU with the features.
pub unsafe fn finish_lanes(finish: Finish, c: *const f32, n: usize, rows: &[*mut f32], weights: &[f32; PANEL]) {
    // 8 rows at a time: 16 that are a power of two apart have no room in the L1 cache with its 8 ways.
    for (half, rows) in rows.chunks(LANES).enumerate() {
        for i in (0..n).step_by(LANES) {
            let left = n - i;
            // SAFETY: half of vectors i .. i + left of c.
            let load = |j: usize| unsafe { _mm256_load_si256(c.add((i + j) * PANEL + half * LANES).cast()) };
            let m = std::array::from_fn(|j| if j < left { load(j) } else { _mm256_setzero_si256() });
            // A fixed number of turns keeps the vectors in registers.
            for (t, v) in transpose8(m).into_iter().enumerate() {
                let Some(&row) = rows.get(t) else { break };
                // SAFETY: elements i .. i + left of the row.
                unsafe { vector(finish, row, i, left, _mm256_castsi256_ps(v), weights[half * LANES + t]) };
            }
        }
    }
}

#[target_feature(enable = "avx2,fma")]
// SAFETY: contract of `Vectors::finish_row`, on a CPU with the features.
pub unsafe fn finish_row(finish: Finish, c: *const f32, n: usize, row: *mut f32, weight: f32) {
    // SAFETY: elements i .. i + left.
    part::each(n, |i, left| unsafe { vector(finish, row, i, left, part::load(c.add(i), left), weight) });
}

/// Ends up to 8 of `left` values at element `i` of a row.
#[inline]
#[target_feature(enable = "avx2,fma")]
// SAFETY: elements i .. i + left of the row and of the bias are there.
unsafe fn vector(finish: Finish, row: *mut f32, i: usize, left: usize, v: __m256, weight: f32) {
    let weight = _mm256_set1_ps(weight);
    // SAFETY: the caller's promise.
    unsafe {
        let to = row.add(i);
        let v = if finish.bias.is_null() { v } else { _mm256_add_ps(v, part::load(finish.bias.add(i), left)) };
        let v = match finish.add {
            true => _mm256_fmadd_ps(v, weight, part::load(to, left)),
            false => _mm256_mul_ps(v, weight),
        };
        part::store(to, left, v);
    }
}

// SAFETY: contract of `Vectors::lanes_to_panel`, on a CPU with the features.
pub unsafe fn lanes_to_panel(dtype: DType, h: *const f32, n: usize, panel: *mut u8, first: usize) {
    debug_assert!(first.is_multiple_of(32));
    match dtype {
        // SAFETY: the token proves the features; the rest is the caller's promise.
        DType::Bf16 => unsafe { lanes_to_bf16(h, n, panel.add(first * 2 * PANEL)) },
        // SAFETY: as above.
        DType::Q8_0 => unsafe { lanes_to_int8(h, n, panel.add(first / QK8_0 * Q8_PANEL_BLOCK)) },
        other => unreachable!("no panels for {other:?}"),
    }
}

#[target_feature(enable = "avx2")]
// SAFETY: as `lanes_to_panel`; `panel` is that of the first column.
unsafe fn lanes_to_bf16(h: *const f32, n: usize, panel: *mut u8) {
    // SAFETY: vectors below n.
    let half =
        |i: usize, lane| unsafe { if i < n { _mm256_load_ps(h.add(i * PANEL + lane)) } else { _mm256_setzero_ps() } };
    for pair in 0..n.next_multiple_of(32) / 2 {
        for lane in [0, LANES] {
            let v = to_bf16_pairs(half(2 * pair, lane), half(2 * pair + 1, lane));
            // SAFETY: below n rounded up to 32.
            unsafe { _mm256_store_si256(panel.add(pair * 64 + lane * 4).cast(), v) };
        }
    }
}

#[target_feature(enable = "avx2,f16c")]
// SAFETY: as `lanes_to_panel`; `panel` is that of the first column, `n` a multiple of 32.
unsafe fn lanes_to_int8(h: *const f32, n: usize, panel: *mut u8) {
    for b in 0..n / QK8_0 {
        for lane in [0, LANES] {
            // SAFETY: half of block b of h and of the panel.
            unsafe { quantize_lanes(h.add(b * QK8_0 * PANEL + lane), panel.add(b * Q8_PANEL_BLOCK + lane * 4)) };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::Vectors;
    use crate::kernels::reference::Reference;
    use crate::testing::{Guarded, Random, avx2, floats, guarded, same};

    /// Rows of `n` values that the oracle and the engine end, each at the end of a page.
    struct Case {
        n: usize,
        bias: Option<Guarded>,
        rows: [Vec<Guarded>; 2],
        weights: [f32; PANEL],
        add: bool,
    }

    impl Case {
        fn new(random: &mut Random, n: usize, tokens: usize, shift: usize) -> Self {
            let old: Vec<_> = (0..tokens).map(|_| random.wild(n)).collect();
            let rows = [(); 2].map(|()| old.iter().map(|old| guarded(old, shift)).collect());
            let bias = (random.below(2) == 0).then(|| guarded(&random.wild(n), shift));
            Self { n, bias, rows, weights: std::array::from_fn(|_| random.odd()), add: random.below(2) == 0 }
        }

        fn finish(&self) -> Finish {
            let bias = self.bias.as_ref().map_or(std::ptr::null(), |b| b.ptr().cast_const().cast());
            Finish { bias, add: self.add }
        }

        fn addresses(&self) -> [Vec<*mut f32>; 2] {
            self.rows.each_ref().map(|rows| rows.iter().map(|row| row.ptr().cast()).collect())
        }

        fn check(&self) -> Result<(), TestCaseError> {
            let [got, want] = self.rows.each_ref().map(|rows| rows.iter().flat_map(|row| floats(row)));
            for (i, (got, want)) in got.zip(want).enumerate() {
                prop_assert!(same(got, want), "token {}, row {}: {got}, not {want}", i / self.n, i % self.n);
            }
            Ok(())
        }
    }

    proptest! {
        #[test]
        fn rows_of_lanes_are_the_oracles(n in 1usize..70, tokens in 1usize..=16, shift in 0usize..4, seed: u64) {
            let Some(isa) = avx2() else { return Ok(()) };
            let mut random = Random(seed);
            let c = guarded(&random.wild(n * PANEL), 0);
            let case = Case::new(&mut random, n, tokens, shift);
            let [got, want] = case.addresses();
            // SAFETY: n vectors that end with a page; n values in each row and the bias.
            unsafe {
                isa.finish_lanes(case.finish(), c.ptr().cast(), n, &got, &case.weights);
                Reference.finish_lanes(case.finish(), c.ptr().cast(), n, &want, &case.weights);
            }
            case.check()?;
        }

        #[test]
        fn rows_are_the_oracles(n in 1usize..70, shift in 0usize..4, seed: u64) {
            let Some(isa) = avx2() else { return Ok(()) };
            let mut random = Random(seed);
            let c = guarded(&random.wild(n), shift);
            let case = Case::new(&mut random, n, 1, shift);
            let [got, want] = case.addresses();
            // SAFETY: n values in each.
            unsafe {
                isa.finish_row(case.finish(), c.ptr().cast(), n, got[0], case.weights[0]);
                Reference.finish_row(case.finish(), c.ptr().cast(), n, want[0], case.weights[0]);
            }
            case.check()?;
        }
    }
}
