//! Attention against the oracle, over shapes, types and features; operands end where memory ends.

use half::{bf16, f16};
use proptest::prelude::*;

use super::{FlashAttn, Params, reference};
use crate::isa::{Avx512, Isa};
use crate::team;
use crate::tensor::{DType, View, ViewMut};
use crate::testing::{Aligned, Guarded, Random};

/// The shape and features of one case.
#[derive(Clone, Debug)]
struct Case {
    d: usize,
    dv: usize,
    n_q: usize,
    n_kv: usize,
    k_heads: usize,
    v_heads: usize,
    /// Heads: this times the least common multiple of the KV heads.
    group: usize,
    streams: usize,
    kv_streams: usize,
    k_type: DType,
    v_type: DType,
    /// V is the beginning of K's rows.
    mla: bool,
    /// Rows of all heads of a position lie together, as in a KV cache.
    heads_inside: bool,
    mask: Option<Mask>,
    sinks: bool,
    max_bias: f32,
    logit_softcap: f32,
    seed: u64,
}

/// What a mask looks like.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mask {
    Zero,
    Causal,
    /// Each query sees a window of its own of this many positions.
    Window(usize),
    /// Random values; some closed, some rows wholly.
    Random,
    /// Random, different for each head and stream.
    RandomPerHead,
}

fn bytes(dtype: DType, x: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => x.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::F16 => x.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
        DType::Bf16 => x.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
        DType::Q8_0 => {
            let block = |b: &[f32; 32]| {
                let (scale, quants) = crate::kernels::reference::quantize_q8_0(b);
                [f16::from_f32(scale).to_le_bytes().to_vec(), quants.map(|q| q as u8).to_vec()].concat()
            };
            x.as_chunks::<32>().0.iter().flat_map(block).collect()
        }
    }
}

/// A view of `ne` rows with the given order of dimensions 1 and 2 in memory.
fn view(dtype: DType, data: &[u8], ne: [usize; 4], swapped: bool) -> View<'_> {
    let row = dtype.row_bytes(ne[0]);
    let [n1, n2] = if swapped { [ne[2], 1] } else { [1, ne[1]] };
    let nb = [dtype.row_bytes(dtype.block()), row * n1, row * n2, row * ne[1] * ne[2]];
    assert!(data.len() >= row * ne[1] * ne[2] * ne[3]);
    // SAFETY: the strides stay in `data`, whose length was checked.
    unsafe { View::from_raw(dtype, data.as_ptr(), ne, nb) }
}

/// The same memory with another shape.
fn with_ne(mut view: View<'_>, ne: [usize; 4]) -> View<'_> {
    view.ne = ne;
    view
}

/// A case with its memory.
struct Operands {
    case: Case,
    heads: usize,
    q: Guarded,
    k: Guarded,
    v: Guarded,
    mask: Guarded,
    mask_ne: [usize; 4],
    sinks: Guarded,
}

impl Operands {
    fn new(case: &Case) -> Self {
        let case = case.clone();
        let mut rng = Random(case.seed);
        let heads = case.group * case.k_heads * case.v_heads;
        let q = rng.vec(case.d * case.n_q * heads * case.streams).iter().map(|x| 4.0 * x).collect::<Vec<_>>();
        let k = rng.vec(case.d * case.n_kv * case.k_heads * case.kv_streams);
        let v = rng.vec(case.dv * case.n_kv * case.v_heads * case.kv_streams);
        let per_head = case.mask == Some(Mask::RandomPerHead);
        let mask_ne =
            [case.n_kv, case.n_q + 3, if per_head { heads } else { 1 }, if per_head { case.streams } else { 1 }];
        let mask = Self::mask(&case, mask_ne, &mut rng);
        let sinks = (0..heads).map(|_| 5.0 * rng.f32()).collect::<Vec<_>>();
        Self {
            heads,
            q: Guarded::new(&bytes(DType::F32, &q)),
            k: Guarded::new(&bytes(case.k_type, &k)),
            v: Guarded::new(&bytes(case.v_type, &v)),
            mask: Guarded::new(&bytes(DType::F16, &mask)),
            mask_ne,
            sinks: Guarded::new(&bytes(DType::F32, &sinks)),
            case,
        }
    }

    fn mask(case: &Case, ne: [usize; 4], rng: &mut Random) -> Vec<f32> {
        let closed = f32::NEG_INFINITY;
        let rows = ne[1] * ne[2] * ne[3];
        let values = (0..rows).flat_map(|row| {
            let query = row % ne[1];
            let empty = rng.below(5) == 0;
            (0..ne[0])
                .map(|p| match case.mask {
                    None | Some(Mask::Zero) => 0.0,
                    Some(Mask::Causal) if p + case.n_q > case.n_kv + query => closed,
                    Some(Mask::Window(n)) if p < query * n || p >= (query + 1) * n => closed,
                    Some(Mask::Causal | Mask::Window(_)) => 0.0,
                    Some(Mask::Random | Mask::RandomPerHead) if empty || rng.below(3) == 0 => closed,
                    Some(Mask::Random | Mask::RandomPerHead) => -4.0 * rng.f32().abs(),
                })
                .collect::<Vec<_>>()
        });
        values.collect()
    }

    fn params<'a>(&'a self, dst: &'a Aligned) -> Params<'a> {
        let c = &self.case;
        let k = view(c.k_type, &self.k, [c.d, c.n_kv, c.k_heads, c.kv_streams], c.heads_inside);
        let v = view(c.v_type, &self.v, [c.dv, c.n_kv, c.v_heads, c.kv_streams], c.heads_inside);
        let ne = [c.dv, self.heads, c.n_q, c.streams];
        let nb = [4, 4 * c.dv, 4 * c.dv * self.heads, 4 * c.dv * self.heads * c.n_q];
        Params {
            q: view(DType::F32, &self.q, [c.d, c.n_q, self.heads, c.streams], c.heads_inside),
            k,
            v: if c.mla { with_ne(k, [c.dv, k.ne[1], k.ne[2], k.ne[3]]) } else { v },
            mask: c.mask.map(|_| view(DType::F16, &self.mask, self.mask_ne, false)),
            sinks: c.sinks.then(|| view(DType::F32, &self.sinks, [self.heads, 1, 1, 1], false)),
            scale: 1.0 / (c.d as f32).sqrt(),
            max_bias: c.max_bias,
            logit_softcap: c.logit_softcap,
            // SAFETY: `dst` is as large as its shape (see `run`).
            dst: unsafe { ViewMut::from_raw(dst.ptr(), ne, nb) },
        }
    }

    fn run(&self, isa: Isa, threads: usize) -> Vec<f32> {
        let c = &self.case;
        let len = c.dv * self.heads * c.n_q * c.streams;
        let dst = Aligned::new(4 * len);
        let op = FlashAttn::new(self.params(&dst)).expect("a shape we handle");
        let scratch = Aligned::new(op.scratch_bytes(threads));
        let scratch = &scratch;
        // SAFETY: the views are whole, the scratch is as large as asked for.
        team::run(threads, |w| unsafe { op.run(isa, &w, scratch.ptr()) });
        dst.f32()[..len].to_vec()
    }

    fn check(&self, isa: Isa) {
        let c = &self.case;
        let dst = Aligned::new(4 * c.dv * self.heads * c.n_q * c.streams);
        let params = self.params(&dst);
        let got = self.run(isa, 2);
        for (row, got) in got.chunks(c.dv).enumerate() {
            let (head, query, stream) = (row % self.heads, row / self.heads % c.n_q, row / self.heads / c.n_q);
            let want = reference::row(&params, query, head, stream);
            for (got, want) in got.iter().zip(&want) {
                let near = (f64::from(*got) - want).abs() <= 2e-5 || (got.is_nan() && want.is_nan());
                assert!(near, "head {head} query {query} stream {stream}: {got} {want}");
            }
        }
        assert_eq!(got, self.run(isa, 1), "one thread");
    }
}

fn plain() -> Case {
    Case {
        d: 64,
        dv: 64,
        n_q: 1,
        n_kv: 300,
        k_heads: 2,
        v_heads: 1,
        group: 4,
        streams: 1,
        kv_streams: 1,
        k_type: DType::F16,
        v_type: DType::F16,
        mla: false,
        heads_inside: true,
        mask: Some(Mask::Causal),
        sinks: false,
        max_bias: 0.0,
        logit_softcap: 0.0,
        seed: 7,
    }
}

fn isa() -> Option<Isa> {
    let isa = Avx512::detect();
    if isa.is_none() {
        println!("skipped: no AVX-512");
    }
    isa.map(Isa::Avx512)
}

const TYPES: [DType; 4] = [DType::F32, DType::F16, DType::Bf16, DType::Q8_0];

fn shape() -> impl Strategy<Value = Case> {
    let sizes = (1usize..100, 1usize..100, 1usize..6, 1usize..400, 1usize..3, 1usize..3, 1usize..10);
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn like_the_oracle(case in shape()) {
        if let Some(isa) = isa() {
            Operands::new(&case).check(isa);
        }
    }
}

#[test]
fn groups_and_head_sizes_of_models() {
    let Some(isa) = isa() else { return };
    for (d, dv, group, mla) in [(128, 128, 8, false), (256, 256, 2, false), (192, 128, 16, false), (576, 512, 66, true)]
    {
        let k_type = if mla { DType::Bf16 } else { DType::F16 };
        let case = Case { d, dv, group, mla, k_heads: 1, k_type, v_type: k_type, n_kv: 270, ..plain() };
        Operands::new(&case).check(isa);
    }
}

#[test]
fn many_queries_make_many_tiles() {
    let Some(isa) = isa() else { return };
    for (n_q, group, mask) in [(40, 2, Mask::Causal), (7, 5, Mask::Window(40)), (70, 1, Mask::Random)] {
        Operands::new(&Case { n_q, group, d: 16, dv: 16, mask: Some(mask), ..plain() }).check(isa);
    }
}

#[test]
fn same_bits_for_any_team() {
    let Some(isa) = isa() else { return };
    let case = Operands::new(&Case { n_kv: 2000, n_q: 2, ..plain() });
    let one = case.run(isa, 1);
    for threads in [2, 3, 7] {
        assert!(case.run(isa, threads).iter().zip(&one).all(|(a, b)| a.to_bits() == b.to_bits()), "{threads} threads");
    }
}

/// The cache has memory for the open positions only: touching a closed block would be a crash.
#[test]
fn closed_blocks_are_not_read() {
    let Some(isa) = isa() else { return };
    let mut case = Operands::new(&Case { n_kv: 320, mask: Some(Mask::Window(320)), ..plain() });
    let longer = Operands::new(&Case { n_kv: 4000, mask: Some(Mask::Window(320)), ..plain() });
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
        dst: unsafe { ViewMut::from_raw(dst.ptr(), [64, 8, 1, 1], [4, 256, 2048, 2048]) },
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
#[test]
fn closed_positions_do_not_leak() {
    let Some(isa) = isa() else { return };
    for bad in [f32::NAN, f32::INFINITY] {
        let mut case = Operands::new(&Case { n_q: 4, n_kv: 100, mask: Some(Mask::Window(25)), ..plain() });
        let clean = case.run(isa, 2);
        for (data, heads) in [(&mut case.k, 2), (&mut case.v, 1)] {
            let mut raw = data.to_vec();
            let row = 30 * heads * 128; // seen by query 1 only
            raw[row..row + 2].copy_from_slice(&f16::from_f32(bad).to_le_bytes());
            *data = Guarded::new(&raw);
        }
        for (i, (got, want)) in case.run(isa, 2).iter().zip(&clean).enumerate() {
            let query = i / 64 / 8;
            // The sums of one row at a time are added in another order.
            assert!(query == 1 || (got - want).abs() < 1e-6, "query {query}: {got} {want}");
        }
    }
}

#[test]
fn a_nan_shows() {
    let Some(isa) = isa() else { return };
    let mut case = Operands::new(&plain());
    let mut raw = case.v.to_vec();
    raw[..2].copy_from_slice(&f16::NAN.to_le_bytes());
    case.v = Guarded::new(&raw);
    assert!(case.run(isa, 2).chunks(64).all(|row| row[0].is_nan() && row[1..].iter().all(|x| x.is_finite())));
}

#[test]
fn closed_rows_are_zeros_with_and_without_sinks() {
    let Some(isa) = isa() else { return };
    for sinks in [false, true] {
        for n_kv in [40, 700] {
            let case = Operands::new(&Case { n_kv, mask: Some(Mask::Window(0)), sinks, ..plain() });
            assert!(case.run(isa, 2).iter().all(|&x| x == 0.0));
        }
    }
}

#[test]
fn denormals_and_large_values() {
    let Some(isa) = isa() else { return };
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
