//! Rows of the cache: widened, weighed, merged.

use std::convert::identity;

use proptest::prelude::*;

use super::*;
use crate::testing::on_each_isa;

on_each_isa! {
    [identity, identity]
    widened_values_are_exact
    any_bits_are_widened
    weighed_sums_are_the_oracles
    nothing_past_the_last_position_is_read
    merged_sums_are_the_oracles
}

fn widened_values_are_exact(isa: impl Attend) {
    proptest!(|(t in 0..4usize, d in 1..100usize, rows in 1..=64usize, closed: u64, seed: u64)| {
        let cache = Cache::new(TYPES[t], [rows, d], &mut Random(seed), |rng| rng.f32());
        check_widen(isa, &cache, closed & closed >> 1);
    });
}

/// Whatever a row holds: NaN, infinities, denormals, as elements and as scales.
fn any_bits_are_widened(isa: impl Attend) {
    for (i, dtype) in TYPES.into_iter().enumerate() {
        let mut rng = Random(i as u64);
        let mut cache = Cache::new(dtype, [64, 64], &mut rng, |_| 0.0);
        let bytes: Vec<u8> = (0..cache.bytes.len()).map(|_| rng.bits() as u8).collect();
        cache.bytes = Guarded::new(&bytes);
        cache.source.data = cache.bytes.as_ptr();
        check_widen(isa, &cache, 0);
    }
}

fn check_widen(isa: impl Attend, cache: &Cache, closed: u64) {
    let Source { rows, d, dtype, .. } = cache.source;
    let block = floats(block_len(rows, d), |_| f32::NAN);
    // SAFETY: readable rows, and a block for them.
    unsafe { isa.widen(Source { closed, ..cache.source }, block.ptr().cast()) };
    for p in 0..rows.next_multiple_of(LANES) {
        for e in 0..d.next_multiple_of(LANES) {
            let there = p < rows && e < d && closed >> p & 1 == 0;
            let want = if there { cache.get(p, e) } else { 0.0 };
            let got = block.f32()[place(d.div_ceil(LANES), p, e)];
            assert!(same(got, want), "{dtype:?} position {p} element {e}: {got}, not {want}");
        }
    }
}

/// Where a block with this many tiles a row has element `e` of position `p`.
fn place(tiles: usize, p: usize, e: usize) -> usize {
    (p / LANES * tiles + e / LANES) * TILE + p % LANES * LANES + e % LANES
}

fn weighed_sums_are_the_oracles(isa: impl Attend) {
    let shape = (0..4usize, 1..9usize, 0..3usize, 1..=64usize, 1..=16usize);
    proptest!(|((t, tiles, wider, n, rows) in shape, seed: u64)| {
        let mut rng = Random(seed);
        let lanes = panel_lanes(rows);
        let rows = rows.min(lanes);
        let cache = Cache::new(TYPES[t], [n, tiles * LANES], &mut rng, |rng| rng.f32());
        let tiles = cache.source.d / LANES;
        let p = floats(n.next_multiple_of(LANES) * lanes, |i| if i < n * lanes { rng.f32().abs() } else { 0.0 });
        let rescale: Vec<f32> = (0..rows).map(|_| [0.0, 1.0, rng.f32()][rng.below(3)]).collect();
        let o = floats(rows * tiles * LANES, |_| rng.f32());
        let before = o.f32().to_vec();
        let weights = |o: &Aligned| Weights {
            p: p.ptr().cast(), lanes, rows, n, rescale: rescale.as_ptr(), o: o.ptr().cast(), tiles,
        };
        let block = floats(block_len(n, (tiles + wider) * LANES), |_| 0.0);
        for i in 0..n * tiles * LANES {
            let (at, e) = (i / (tiles * LANES), i % (tiles * LANES));
            // SAFETY: a place in the block.
            unsafe { *block.ptr().cast::<f32>().add(place(tiles + wider, at, e)) = cache.get(at, e) };
        }
        let widened = floats(before.len(), |i| before[i]);
        // SAFETY: operands of these shapes.
        unsafe {
            isa.weigh_in_place(weights(&o), cache.source, &mut Ahead::new(cache.source, 3));
            isa.weigh(weights(&widened), block.ptr().cast(), tiles + wider, &mut Ahead::NOTHING.clone());
        }
        for (i, before) in before.iter().enumerate() {
            let (row, e) = (i / (tiles * LANES), i % (tiles * LANES));
            let term = |at: usize| f64::from(p.f32()[at * lanes + row]) * f64::from(cache.get(at, e));
            let want = f64::from(*before) * f64::from(rescale[row]) + (0..n).map(term).sum::<f64>();
            for got in [o.f32()[i], widened.f32()[i]] {
                prop_assert!((f64::from(got) - want).abs() < 1e-5 * (1.0 + n as f64), "{got} {want}");
            }
        }
    });
}

/// Positions past the last one have no V, though their weights are 0 in the scores' padding.
fn nothing_past_the_last_position_is_read(isa: impl Attend) {
    for dtype in TYPES {
        for (n, rows) in [(1, 1), (17, 8), (33, 2), (63, 16)] {
            let cache = Cache::new(dtype, [n, 64], &mut Random(9), |_| 1.0);
            let lanes = panel_lanes(rows);
            let (p, o) = (floats(64 * lanes, |i| f32::from(i < n * lanes)), floats(rows * 64, |_| 0.0));
            let rescale = [1.0; LANES];
            let (p, to) = (p.ptr().cast(), o.ptr().cast());
            let w = Weights { p, lanes, rows, n, rescale: rescale.as_ptr(), o: to, tiles: 4 };
            // SAFETY: operands of these shapes.
            unsafe { isa.weigh_in_place(w, cache.source, &mut Ahead::NOTHING.clone()) };
            assert!(o.f32().iter().all(|x| (x - n as f32).abs() < 1e-3 * n as f32), "{dtype:?} {n}");
        }
    }
}

fn merged_sums_are_the_oracles(isa: impl Attend) {
    proptest!(|(n in 1..300usize, count in 1..6usize, odd in 0..4usize, seed: u64)| {
        let mut rng = Random(seed);
        let parts: Vec<Aligned> = (0..count).map(|_| floats(n.next_multiple_of(LANES), |_| rng.f32())).collect();
        let factors: Vec<f32> = (0..count).map(|_| [0.0, rng.f32()][rng.below(2)]).collect();
        // A part that counts for nothing is nowhere.
        let address = |i: usize| if factors[i] == 0.0 { std::ptr::null() } else { parts[i].ptr().cast::<f32>() };
        let to = vec![0u8; 4 * n + 8];
        // SAFETY: parts and place of `n` f32.
        unsafe {
            let to = to.as_ptr().cast_mut().add(odd);
            isa.merge((0..count).map(|i| (address(i), factors[i])), n, to.cast());
        }
        for i in 0..n {
            let got = f32::from_le_bytes(to[odd + 4 * i..][..4].try_into().unwrap());
            let want: f64 = (0..count).map(|k| f64::from(factors[k]) * f64::from(parts[k].f32()[i])).sum();
            prop_assert!((f64::from(got) - want).abs() < 1e-6 * count as f64);
        }
        prop_assert!(to[odd + 4 * n..].iter().chain(&to[..odd]).all(|b| *b == 0));
    });
}
