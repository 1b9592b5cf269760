//! The mask.

use std::convert::identity;

use half::f16;
use proptest::prelude::*;

use super::*;
use crate::testing::on_each_isa;

on_each_isa! {
    [identity, identity]
    bits_of_odd_lengths
    bias_is_added_in_score_order
}

/// Mask values at the end of memory, or at an odd address.
struct Values {
    bytes: Guarded,
    odd: usize,
}

impl Values {
    fn new(values: &[f32], odd: usize) -> Self {
        let mut bytes: Vec<u8> = values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
        // With a byte more behind them they begin at an odd one.
        bytes.resize(bytes.len() + odd, 0xff);
        Self { bytes: Guarded::new(&bytes), odd }
    }

    fn ptr(&self) -> *const u16 {
        debug_assert!(self.bytes.as_ptr().addr() % 2 == self.odd);
        self.bytes.as_ptr().cast()
    }
}

fn bits_of_odd_lengths(isa: impl Attend) {
    let value = |i: usize| [0.0, f32::NEG_INFINITY, -1.5, -0.0, f32::NAN, f32::INFINITY, 1e-7][i * 7 / 3 % 7];
    for n in 1..=64 {
        let row: Vec<f32> = (0..n).map(value).collect();
        for odd in [0, 1] {
            // SAFETY: `n` values.
            let got = unsafe { isa.mask_bits(Values::new(&row, odd).ptr(), n) };
            let bits = |f: fn(f32) -> bool| (0..n).fold(0, |b, i| b | u64::from(f(value(i))) << i);
            assert_eq!(got.closed, bits(|x| x == f32::NEG_INFINITY));
            assert_eq!(got.valued, bits(|x| x != f32::NEG_INFINITY && x != 0.0));
        }
    }
}

fn bias_is_added_in_score_order(isa: impl Attend) {
    proptest!(|(l in 0..5usize, missing in 0..16usize, n in 1..=64usize, odd in 0..2usize, seed: u64)| {
        let (lanes, mut rng) = (1usize << l, Random(seed));
        let rows = lanes - missing % lanes;
        let value = |rng: &mut Random| [f32::NEG_INFINITY, 0.0, f16::from_f32(3.0 * rng.f32()).to_f32()][rng.below(3)];
        let mask: Vec<Vec<f32>> = (0..rows).map(|_| (0..n).map(|_| value(&mut rng)).collect()).collect();
        let stored: Vec<Values> = mask.iter().map(|row| Values::new(row, odd)).collect();
        let slope = |row: usize| 1.0 / (1 << (row % 5)) as f32;
        let s = floats(n.next_multiple_of(LANES) * lanes, |_| [rng.f32(), f32::NAN, -0.0][rng.below(3)]);
        let before = s.f32().to_vec();
        let sources = stored.iter().enumerate().map(|(row, values)| (values.ptr(), slope(row)));
        // SAFETY: rows of `n` values, scores of as many positions.
        unsafe { isa.bias(sources, lanes, n, s.ptr().cast()) };
        for (i, got) in s.f32()[..n.next_multiple_of(LANES) * lanes].iter().enumerate() {
            let (p, row) = (i / lanes, i % lanes);
            let want = match row {
                _ if row >= rows => before[i],
                _ if p >= n || mask[row][p] == f32::NEG_INFINITY => f32::NEG_INFINITY,
                _ => before[i] + slope(row) * mask[row][p],
            };
            prop_assert!(same(*got, want), "row {row} position {p}: {got}, not {want}");
        }
    });
}
