//! Panels and scores.

use std::convert::identity;

use proptest::prelude::*;

use super::*;
use crate::testing::on_each_isa;

on_each_isa! {
    [identity, identity]
    scores_are_the_oracles
    scores_in_place_are_the_oracles
    a_position_that_is_not_finite_stays_alone
}

/// Query rows of `d` elements.
fn queries(rows: usize, d: usize, rng: &mut Random) -> Vec<Vec<f32>> {
    (0..rows).map(|_| rng.vec(d)).collect()
}

/// Whether a score is the product of a query row and a K row.
fn near(got: f32, q: &[f32], k: impl Fn(usize) -> f32) -> bool {
    let want: f64 = q.iter().enumerate().map(|(i, q)| 0.5 * f64::from(*q) * f64::from(k(i))).sum();
    (f64::from(got) - want).abs() < 1e-6 * q.len() as f64
}

/// The scores of a panel's rows and 16 positions of K, by way of a block.
fn scores(isa: impl Attend, q: &[Vec<f32>], lanes: usize, cache: &Cache) -> Aligned {
    let d = cache.source.d;
    let panel = floats(panel_len(lanes, d), |_| f32::NAN);
    let block = floats(block_len(LANES, d), |_| f32::NAN);
    let s = floats(LANES * lanes, |_| f32::NAN);
    // SAFETY: operands of these shapes.
    unsafe {
        pack(q.iter().map(|q| q.as_ptr()), lanes, d, 0.5, panel.ptr().cast());
        isa.widen(cache.source, block.ptr().cast());
        let (panel, block) = (panel.ptr().cast(), block.ptr().cast());
        isa.scores(lanes, panel, block, d.div_ceil(LANES), s.ptr().cast(), &mut Ahead::new(cache.source, 5));
    }
    s
}

fn scores_are_the_oracles(isa: impl Attend) {
    proptest!(|(l in 0..5usize, missing in 0..16usize, d in 1..150usize, n in 1..=16usize, seed: u64)| {
        let (lanes, mut rng) = (1 << l, Random(seed));
        let rows = lanes - missing % lanes;
        let cache = Cache::new(DType::F16, [n, d], &mut rng, |rng| rng.f32());
        let q = queries(rows, d, &mut rng);
        let s = scores(isa, &q, lanes, &cache);
        for (i, &got) in s.f32()[..LANES * lanes].iter().enumerate() {
            let (p, row) = (i / lanes, i % lanes);
            let zero = p >= n || row >= rows;
            let right = if zero { got == 0.0 } else { near(got, &q[row], |e| cache.get(p, e)) };
            prop_assert!(right, "row {row} position {p}: {got}");
        }
    });
}

fn scores_in_place_are_the_oracles<A: Attend>(isa: A) {
    proptest!(|(t in 0..4usize, rows in 1..=16usize, tiles in 1..12usize, n in 1..=64usize, closed: u64, seed: u64)| {
        let (dtype, mut rng) = (TYPES[t], Random(seed));
        if rows > A::k_in_place(dtype) {
            return Ok(());
        }
        let lanes = panel_lanes(rows);
        let cache = Cache::new(dtype, [n, tiles * LANES], &mut rng, |rng| rng.f32());
        let d = cache.source.d;
        let q = queries(rows, d, &mut rng);
        // At least one position is open.
        let closed = closed & u64::MAX >> (64 - n) & !(1 << rng.below(n));
        let panel = floats(panel_len(lanes, d), |_| f32::NAN);
        let s = floats(n.next_multiple_of(LANES) * lanes, |_| f32::NAN);
        // SAFETY: operands of these shapes.
        unsafe {
            pack_for(dtype, q.iter().map(|q| q.as_ptr()), lanes, d, 0.5, panel.ptr().cast());
            let k = Source { closed, ..cache.source };
            isa.scores_in_place(panel.ptr().cast(), [lanes, rows], k, s.ptr().cast(), &mut Ahead::new(k, 3));
        }
        for (i, &got) in s.f32()[..n * lanes].iter().enumerate() {
            let (p, row) = (i / lanes, i % lanes);
            let right = match row < rows {
                true => closed >> p & 1 == 1 || near(got, &q[row], |e| cache.get(p, e)),
                false => got == 0.0,
            };
            prop_assert!(right, "{dtype:?} row {row} position {p}: {got}");
        }
    });
}

fn a_position_that_is_not_finite_stays_alone<A: Attend>(isa: A) {
    for lanes in [1, 2, 4, 8, 16] {
        let mut rng = Random(lanes as u64);
        let mut cache = Cache::new(DType::F32, [16, 48], &mut rng, |rng| rng.f32());
        let mut bytes = cache.bytes.to_vec();
        bytes[5 * cache.source.stride + 7 * 4..][..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        cache.bytes = Guarded::new(&bytes);
        cache.source.data = cache.bytes.as_ptr();
        let q = queries(lanes, 48, &mut rng);
        let mut all = vec![scores(isa, &q, lanes, &cache)];
        if lanes <= A::k_in_place(DType::F32) {
            let (panel, s) = (floats(48 * lanes, |_| 0.0), floats(16 * lanes, |_| 0.0));
            // SAFETY: operands of these shapes.
            unsafe {
                pack_for(DType::F32, q.iter().map(|q| q.as_ptr()), lanes, 48, 0.5, panel.ptr().cast());
                let (panel, to) = (panel.ptr().cast(), s.ptr().cast());
                isa.scores_in_place(panel, [lanes, lanes], cache.source, to, &mut Ahead::NOTHING.clone());
            }
            all.push(s);
        }
        for s in all {
            let finite = |(i, x): (usize, &f32)| x.is_finite() != (i / lanes == 5);
            assert!(s.f32()[..16 * lanes].iter().enumerate().all(finite), "{lanes} lanes");
        }
    }
}
