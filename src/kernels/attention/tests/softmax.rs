//! The softmax, and with it `e^x` and `tanh`.

use std::convert::identity;

use proptest::prelude::*;

use super::*;
use crate::testing::on_each_isa;

on_each_isa! {
    [identity, identity]
    exp_is_close_to_the_standard_library
    tanh_is_close_to_the_standard_library
    weights_are_the_oracles
    nothing_and_nan
}

/// `e^x` of 16 values that are not above 0: the weights of scores where the largest so far is 0.
fn exp(isa: impl Attend, x: [f32; LANES]) -> [f32; LANES] {
    let s = floats(LANES * LANES, |i| x[i % LANES]);
    let mut state = State { max: [0.0; LANES], ..State::EMPTY };
    // SAFETY: 16 positions of 16 lanes.
    unsafe { isa.softmax(LANES, s.ptr().cast(), LANES * LANES, &mut state) };
    s.f32()[..LANES].try_into().unwrap()
}

fn exp_is_close_to_the_standard_library(isa: impl Attend) {
    for i in 0..20_000 {
        let x: [f32; LANES] = std::array::from_fn(|j| (i * LANES + j) as f32 * (-87.3 / 320_000.0));
        for (x, got) in x.into_iter().zip(exp(isa, x)) {
            let want = f64::from(x).exp();
            assert!((f64::from(got) - want).abs() <= want * 2.5e-7, "exp {x}: {got} {want}");
        }
    }
    let mut x = [f32::NEG_INFINITY; LANES];
    (x[1], x[2], x[3], x[4], x[5]) = (-87.301, -1e30, 0.0, f32::MIN, -0.0);
    let e = exp(isa, x);
    assert_eq!(e[..7], [0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
}

fn tanh_is_close_to_the_standard_library(isa: impl Attend) {
    let special = [f32::NEG_INFINITY, f32::INFINITY, 1e30, -1e30, 0.0, 1e-40];
    let s = floats(160_000, |i| special.get(i).copied().unwrap_or((i as f32 - 80_000.0) / 4000.0));
    let x = s.f32().to_vec();
    // SAFETY: as many scores.
    unsafe { isa.cap(3.0, s.ptr().cast(), x.len()) };
    for (x, got) in x.into_iter().zip(s.f32()) {
        assert!((f64::from(*got) - 3.0 * f64::from(x).tanh()).abs() < 6e-7, "tanh {x}: {got}");
    }
    let s = floats(LANES, |_| f32::NAN);
    // SAFETY: 16 scores.
    unsafe { isa.cap(3.0, s.ptr().cast(), LANES) };
    assert!(s.f32().iter().all(|x| x.is_nan()));
}

fn weights_are_the_oracles(isa: impl Attend) {
    proptest!(|(l in 0..5usize, blocks in 1..5usize, groups in 1..5usize, seed: u64)| {
        let (lanes, mut rng) = (1 << l, Random(seed));
        let len = groups * LANES * lanes;
        let mut state = State::EMPTY;
        // Sums of the weights, each relative to the largest score so far.
        let (mut max, mut sum) = (vec![f32::NEG_INFINITY; lanes], vec![0f64; lanes]);
        for _ in 0..blocks {
            let closed = rng.below(4);
            let s = floats(len, |_| if rng.below(4) < closed { f32::NEG_INFINITY } else { 20.0 * rng.f32() });
            let before = s.f32()[..len].to_vec();
            // SAFETY: `len` scores.
            unsafe { isa.softmax(lanes, s.ptr().cast(), len, &mut state) };
            for row in 0..lanes {
                let own = || (row..len).step_by(lanes);
                let top = own().fold(max[row], |m, i| m.max(before[i]));
                let weight = |x: f32| if x == f32::NEG_INFINITY { 0.0 } else { (f64::from(x) - f64::from(top)).exp() };
                let rescale = weight(max[row]);
                sum[row] = sum[row] * rescale + own().map(|i| weight(before[i])).sum::<f64>();
                max[row] = top;
                for lane in (row..LANES).step_by(lanes) {
                    prop_assert_eq!(state.max[lane], top);
                    prop_assert!((f64::from(state.rescale[lane]) - rescale).abs() < 1e-6);
                }
                prop_assert!((f64::from(state.row_sum(lanes, row)) - sum[row]).abs() < 1e-5 * (1.0 + sum[row]));
                for i in own() {
                    let (got, want) = (s.f32()[i], weight(before[i]));
                    prop_assert!((f64::from(got) - want).abs() < 1e-6, "score {}: {got} {want}", before[i]);
                    prop_assert!(before[i] > f32::NEG_INFINITY || got == 0.0);
                }
            }
        }
    });
}

/// A row without a score weighs nothing; a row with NaN is NaN; its neighbours are not.
fn nothing_and_nan(isa: impl Attend) {
    for lanes in [2, 4, 8, 16] {
        for bad in [f32::NAN, f32::INFINITY] {
            let len = 64 * lanes;
            let s = floats(len, |i| if i % lanes == 1 { f32::NEG_INFINITY } else { 1.0 });
            // SAFETY: a place of row 0.
            unsafe { *s.ptr().cast::<f32>().add(5 * lanes) = bad };
            let mut state = State::EMPTY;
            // SAFETY: `len` scores.
            unsafe { isa.softmax(lanes, s.ptr().cast(), len, &mut state) };
            assert!(state.row_sum(lanes, 0).is_nan() && s.f32()[5 * lanes].is_nan());
            assert_eq!((state.row_sum(lanes, 1), state.max[1]), (0.0, f32::NEG_INFINITY));
            assert!(s.f32()[..len].iter().skip(1).step_by(lanes).all(|p| *p == 0.0));
            assert!((2..lanes).all(|row| state.row_sum(lanes, row) == 64.0));
        }
    }
}
