//! Attention on AMX's tiles, the CPU's or the emulator's: small cases, because in the emulator each instruction is a
//! signal.

use proptest::prelude::*;

use super::operands::{Case, Mask, Operands, plain};
use super::shape;
use crate::isa::Isa;
use crate::kernels::amx::attention::takes;
use crate::tensor::DType;
use crate::testing::amx_kinds;

macro_rules! on_amx {
    ($($test:ident)*) => {$(
        #[test]
        fn $test() {
            for amx in amx_kinds() {
                super::$test(Isa::Amx(amx));
            }
        }
    )*};
}

on_amx! {
    heads_side_by_side
    same_bits_for_any_team
    closed_blocks_are_not_read
    closed_positions_do_not_leak
    a_nan_shows
    closed_rows_are_zeros_with_and_without_sinks
}

const TYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::Q8_0];

/// Cases whose tiles have rows enough, of types that are split or used in place.
fn tiled() -> impl Strategy<Value = Case> {
    (shape(), 27usize..60).prop_map(|(case, group)| {
        let types = [case.k_type, case.v_type].map(|t| if t == DType::F32 { DType::F16 } else { t });
        let [k_type, v_type] = types;
        Case {
            n_q: case.n_q.min(2),
            n_kv: case.n_kv.min(150),
            group,
            k_type,
            v_type,
            streams: 1,
            kv_streams: 1,
            ..case
        }
    })
}

#[test]
fn like_the_oracle() {
    for amx in amx_kinds() {
        let config = ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() };
        proptest!(config, |(case in tiled())| {
            prop_assert!(takes(amx, case.group, case.k_type, case.v_type));
            Operands::new(&case).check(Isa::Amx(amx));
        });
    }
}

#[test]
fn all_types_and_odd_heads() {
    for amx in amx_kinds() {
        for (k_type, v_type) in TYPES.into_iter().flat_map(|k| TYPES.map(|v| (k, v))) {
            let size = |t: DType, d: usize| d.next_multiple_of(t.block());
            for (d, dv) in [(40, 72), (65, 33)] {
                let (d, dv) = (size(k_type, d), size(v_type, dv));
                let case = Case { d, dv, k_type, v_type, group: 27, k_heads: 1, n_kv: 85, ..plain() };
                Operands::new(&case).check(Isa::Amx(amx));
            }
        }
    }
}

#[test]
fn groups_of_1_to_128() {
    for amx in amx_kinds() {
        for group in [1, 4, 5, 8, 9, 11, 16, 21, 24, 27, 40, 128] {
            for k_type in [DType::F16, DType::Bf16] {
                let case = Case { group, k_heads: 1, k_type, v_type: k_type, d: 32, dv: 32, n_kv: 40, ..plain() };
                Operands::new(&case).check(Isa::Amx(amx));
            }
        }
    }
}

/// V is the beginning of K's rows: DeepSeek's sizes, and odd ones.
#[test]
fn mla() {
    for amx in amx_kinds() {
        for k_type in TYPES {
            for (d, dv, group, n_kv) in [(576usize, 512, 33, 81), (96, 80, 30, 50)] {
                let dv = dv.min(d).next_multiple_of(k_type.block());
                let mask = Some(Mask::Random);
                let case = Case { d, dv, group, n_kv, k_type, v_type: k_type, mla: true, k_heads: 1, mask, ..plain() };
                Operands::new(&case).check(Isa::Amx(amx));
            }
        }
    }
}

#[test]
fn all_features_at_once() {
    for amx in amx_kinds() {
        for mask in [Mask::Causal, Mask::Window(30), Mask::RandomPerHead] {
            let case = Case { n_q: 3, n_kv: 90, group: 27, k_heads: 1, d: 32, dv: 48, mask: Some(mask), ..plain() };
            Operands::new(&Case { sinks: true, max_bias: 8.0, logit_softcap: 3.0, ..case }).check(Isa::Amx(amx));
        }
    }
}

/// Products of hi and lo with an infinity would be NaN where the product with f32 is not.
#[test]
fn infinities_are_as_in_f32() {
    for amx in amx_kinds() {
        for dtype in [DType::F16, DType::Bf16] {
            let infinity = if dtype == DType::F16 { [0x00, 0x7c] } else { [0x80, 0x7f] };
            let mut case = Operands::new(&Case { k_type: dtype, v_type: dtype, group: 32, n_kv: 90, ..plain() });
            for data in [&mut case.k, &mut case.v] {
                let mut raw = data.to_vec();
                raw[3 * 256 + 10..][..2].copy_from_slice(&infinity);
                *data = crate::testing::Guarded::new(&raw);
            }
            let (tiles, vectors) = (case.run(Isa::Amx(amx), 2), case.run(Isa::Avx512(amx.avx512()), 2));
            assert!(vectors.iter().any(|x| x.is_infinite()) && vectors.iter().any(|x| x.is_nan()), "{dtype:?}");
            for (a, b) in tiles.iter().zip(&vectors) {
                assert!(a == b || (a - b).abs() < 2e-5 || (a.is_nan() && b.is_nan()), "{dtype:?}: {a} {b}");
            }
        }
    }
}
