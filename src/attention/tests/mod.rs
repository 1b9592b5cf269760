//! Attention against the oracle, over shapes, types and features, on each engine that this CPU has.

mod amx;
mod operands;

use half::f16;
use proptest::prelude::*;

use super::{FlashAttn, Params, reference};
use crate::isa::Isa;
use crate::team;
use crate::tensor::{DType, ViewMut};
use crate::testing::{Aligned, Guarded, Random, bytes, on_each_isa};
use operands::{Case, Mask, Operands, plain, view, with_ne};

on_each_isa! {
    [Isa::Avx512, Isa::Avx2]
    like_the_oracle
    groups_and_head_sizes_of_models
    many_queries_make_many_tiles
    heads_side_by_side
    same_bits_for_any_team
    closed_blocks_are_not_read
    closed_positions_do_not_leak
    a_nan_shows
    closed_rows_are_zeros_with_and_without_sinks
    denormals_and_large_values
}

const TYPES: [DType; 4] = [DType::F32, DType::F16, DType::Bf16, DType::Q8_0];

fn shape() -> impl Strategy<Value = Case> {
    // Whole tiles are what kernels can use in place.
    let size = || prop_oneof![1usize..100, (1usize..7).prop_map(|tiles| 16 * tiles)];
    let sizes = (size(), size(), 1usize..6, 1usize..400, 1usize..3, 1usize..3, 1usize..10);
    let types = (0..4usize, 0..4usize, prop::bool::weighted(0.2), any::<bool>(), 1usize..3, 1usize..3);
    let mask = prop::option::weighted(
        0.8,
        prop_oneof![
            Just(Mask::Zero),
            Just(Mask::Causal),
            (1usize..90).prop_map(Mask::Window),
            Just(Mask::Random),
            Just(Mask::RandomPerHead)
        ],
    );
    let features = (mask, any::<bool>(), prop_oneof![Just(0.0f32), Just(8.0)], prop_oneof![Just(0.0f32), Just(3.0)]);
    (sizes, types, features, any::<u64>()).prop_map(|(sizes, types, features, seed)| {
        let (d, dv, n_q, n_kv, k_heads, v_heads, group) = sizes;
        let (k_type, v_type, mla, heads_inside, streams, kv_streams) = types;
        let (mask, sinks, max_bias, logit_softcap) = features;
        let round = |d: usize, t: DType| d.next_multiple_of(t.block());
        let (k_type, v_type) = (TYPES[k_type], TYPES[if mla { k_type } else { v_type }]);
        let d = round(d, k_type);
        let dv = round(if mla { dv.min(d) } else { dv }, v_type);
        let v_heads = if mla { k_heads } else { v_heads };
        let kv_streams = if kv_streams > streams { 1 } else { kv_streams };
        let max_bias = if mask.is_some() { max_bias } else { 0.0 };
        Case {
            d,
            dv,
            n_q,
            n_kv,
            k_heads,
            v_heads,
            group,
            streams,
            kv_streams,
            k_type,
            v_type,
            mla,
            heads_inside,
            mask,
            sinks,
            max_bias,
            logit_softcap,
            seed,
        }
    })
}

/// A plain case, with enough rows for AMX's tiles there.
fn base(isa: Isa) -> Case {
    Case { group: if matches!(isa, Isa::Amx(_)) { 32 } else { plain().group }, ..plain() }
}

fn like_the_oracle(isa: Isa) {
    let config = ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(case in shape())| Operands::new(&case).check(isa));
}

fn groups_and_head_sizes_of_models(isa: Isa) {
    for (d, dv, group, mla) in [(128, 128, 8, false), (256, 256, 2, false), (192, 128, 16, false), (576, 512, 66, true)]
    {
        let k_type = if mla { DType::Bf16 } else { DType::F16 };
        let case = Case { d, dv, group, mla, k_heads: 1, k_type, v_type: k_type, n_kv: 270, ..plain() };
        Operands::new(&case).check(isa);
    }
}

fn many_queries_make_many_tiles(isa: Isa) {
    for (n_q, group, mask) in [(40, 2, Mask::Causal), (7, 5, Mask::Window(40)), (70, 1, Mask::Random)] {
        Operands::new(&Case { n_q, group, d: 16, dv: 16, mask: Some(mask), ..plain() }).check(isa);
    }
}

/// Heads whose rows lie side by side are gone over together: all of them, some, and the last few of many; with masks of their own,
/// in several streams, and where one of them has a NaN.
fn heads_side_by_side(isa: Isa) {
    for (heads, n_kv, mask) in [(3, 700, Mask::RandomPerHead), (8, 300, Mask::Causal), (10, 520, Mask::Window(400))] {
        for k_type in [DType::F16, DType::Bf16, DType::Q8_0] {
            let case = Case { k_heads: heads, v_heads: heads, group: 1, n_kv, k_type, v_type: k_type, ..plain() };
            let mut case = Operands::new(&Case { mask: Some(mask), streams: 2, kv_streams: 2, d: 32, dv: 32, ..case });
            case.check(isa);
            if k_type == DType::F16 {
                let mut raw = case.v.to_vec();
                raw[2 * 32 + 6..][..2].copy_from_slice(&f16::NAN.to_le_bytes());
                case.v = Guarded::new(&raw);
                case.check(isa);
            }
            let one = case.run(isa, 1);
            for threads in [4, 40] {
                let same = case.run(isa, threads).iter().zip(&one).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{heads} heads, {threads} threads");
            }
        }
    }
}

fn same_bits_for_any_team(isa: Isa) {
    let case = Operands::new(&Case { n_kv: 2000, n_q: 2, ..base(isa) });
    let one = case.run(isa, 1);
    for threads in [2, 3, 7] {
        assert!(case.run(isa, threads).iter().zip(&one).all(|(a, b)| a.to_bits() == b.to_bits()), "{threads} threads");
    }
}

/// The cache has memory for the open positions only: touching a closed block would be a crash.
fn closed_blocks_are_not_read(isa: Isa) {
    let mut case = Operands::new(&Case { n_kv: 320, mask: Some(Mask::Window(320)), ..base(isa) });
    let longer = Operands::new(&Case { n_kv: 4000, mask: Some(Mask::Window(320)), ..base(isa) });
    let short = case.run(isa, 2);
    (case.case, case.mask, case.mask_ne) = (longer.case, longer.mask, longer.mask_ne);
    let dst = Aligned::new(4 * short.len());
    let c = &case.case;
    let short_cache = |dtype, data, d, heads| with_ne(view(dtype, data, [d, 320, heads, 1], true), [d, 4000, heads, 1]);
    let mask = view(DType::F16, &case.mask, case.mask_ne, false);
    let params = Params {
        q: view(DType::F32, &case.q, [c.d, 1, case.heads, 1], true),
        k: short_cache(c.k_type, &case.k, c.d, c.k_heads),
        v: short_cache(c.v_type, &case.v, c.dv, c.v_heads),
        mask: Some(mask),
        sinks: None,
        scale: 0.125,
        max_bias: 0.0,
        logit_softcap: 0.0,
        // SAFETY: as large as its shape.
        dst: unsafe {
            ViewMut::from_raw(dst.ptr(), [64, case.heads, 1, 1], [4, 256, 256 * case.heads, 256 * case.heads])
        },
    };
    let op = FlashAttn::new(params).unwrap();
    let scratch = Aligned::new(op.scratch_bytes(2));
    let scratch = &scratch;
    // SAFETY: the open positions are there; the others are not read.
    team::run(2, |w| unsafe { op.run(isa, &w, scratch.ptr()) });
    for (a, b) in dst.f32().iter().zip(&short) {
        assert!((a - b).abs() < 1e-5, "{a} {b}");
    }
}

/// Cells of a cache that a row may not see can hold anything: also NaN and infinities that another row does see.
fn closed_positions_do_not_leak(isa: Isa) {
    for bad in [f32::NAN, f32::INFINITY] {
        let mut case = Operands::new(&Case { n_q: 4, n_kv: 100, mask: Some(Mask::Window(25)), ..base(isa) });
        let clean = case.run(isa, 2);
        for (data, heads) in [(&mut case.k, 2), (&mut case.v, 1)] {
            let mut raw = data.to_vec();
            let row = 30 * heads * 128; // seen by query 1 only
            raw[row..row + 2].copy_from_slice(&f16::from_f32(bad).to_le_bytes());
            *data = Guarded::new(&raw);
        }
        for (i, (got, want)) in case.run(isa, 2).iter().zip(&clean).enumerate() {
            let query = i / 64 / case.heads;
            // The sums of one row at a time are added in another order, and not on AMX's tiles.
            let most = if matches!(isa, Isa::Amx(_)) { 2e-5 } else { 1e-6 };
            assert!(query == 1 || (got - want).abs() < most, "query {query}: {got} {want}");
        }
    }
}

fn a_nan_shows(isa: Isa) {
    let mut case = Operands::new(&base(isa));
    let mut raw = case.v.to_vec();
    raw[..2].copy_from_slice(&f16::NAN.to_le_bytes());
    case.v = Guarded::new(&raw);
    assert!(case.run(isa, 2).chunks(64).all(|row| row[0].is_nan() && row[1..].iter().all(|x| x.is_finite())));
}

fn closed_rows_are_zeros_with_and_without_sinks(isa: Isa) {
    for sinks in [false, true] {
        for n_kv in [40, 700] {
            let case = Operands::new(&Case { n_kv, mask: Some(Mask::Window(0)), sinks, ..base(isa) });
            assert!(case.run(isa, 2).iter().all(|&x| x == 0.0));
        }
    }
}

fn denormals_and_large_values(isa: Isa) {
    for factor in [1e-40f32, 1e4] {
        let mut case = Operands::new(&Case { k_type: DType::F32, v_type: DType::F32, ..plain() });
        let mut rng = Random(3);
        let scaled = |n: usize, rng: &mut Random| -> Vec<f32> { rng.vec(n).iter().map(|x| x * factor).collect() };
        case.k = Guarded::new(&bytes(DType::F32, &scaled(64 * 300 * 2, &mut rng)));
        let dst = Aligned::new(4 * 64 * case.heads);
        let params = case.params(&dst);
        let got = case.run(isa, 2);
        for (head, got) in got.chunks(64).enumerate() {
            let want = reference::row(&params, 0, head, 0);
            // Scores of 1e4 are themselves known to about 1e-3 only.
            let near = |(got, want): (&f32, &f64)| (f64::from(*got) - want).abs() <= 2e-5 + 1e-6 * f64::from(factor);
            assert!(got.iter().zip(&want).all(near), "head {head}");
        }
    }
}

#[test]
fn what_is_not_handled_is_refused() {
    let case = Operands::new(&plain());
    let dst = Aligned::new(4 * 64 * case.heads);
    let good = case.params(&dst);
    assert!(FlashAttn::new(good).is_some());
    let mut strided = good;
    strided.k.nb[0] = 4;
    let mut short = good;
    short.v.ne[1] -= 1;
    let mut uneven = good;
    uneven.k.ne[2] = 3;
    let mut half = good;
    half.q.dtype = DType::F16;
    for bad in [strided, short, uneven, half] {
        assert!(FlashAttn::new(bad).is_none());
    }
}

#[test]
fn a_v_inside_the_rows_of_k_is_read_with_them() {
    let case = Operands::new(&plain());
    let dst = Aligned::new(4 * 64 * case.heads);
    let apart = case.params(&dst);
    let mut inside = apart;
    (inside.v.data, inside.v.nb) = (apart.k.data, apart.k.nb);
    let cost = |params| FlashAttn::new(params).unwrap().cost();
    // Two heads of K, one of V.
    assert_eq!(2 * cost(apart).bytes, 3 * cost(inside).bytes);
    assert_eq!(cost(apart).operations, cost(inside).operations);
}
