//! The pipelines against the oracle, on teams of several sizes.

use proptest::prelude::*;

use super::{Bias, Ffn, FfnParts, Ids, MulMat, MulMatId, OnNodes, OpError, Output};
use crate::isa::Isa;
use crate::kernels::Engine;
use crate::kernels::amx::AmxEngine;
use crate::kernels::glu::Glu;
use crate::kernels::reference::{magnitudes, matvec_by, nmse};
use crate::numa::tally::Tally;
use crate::numa::tensors::{Numa, Sim};
use crate::numa::threads::{Mode, Seats};
use crate::team::{self, Team, WorkerError};
use crate::tensor::{DType, View, ViewMut, Weights};
use crate::testing::{Aligned, Guarded, Random};

/// One of the engines that this CPU has: another with another seed.
fn isa(seed: u64) -> Option<Isa> {
    let all = Isa::all();
    if all.is_empty() {
        println!("skipped: this CPU has no AVX2");
        return None;
    }
    Some(all[seed as usize % all.len()])
}

/// What an expert's tokens are packed as.
fn form(isa: Isa, dtype: DType, tokens: usize) -> DType {
    if let Isa::Amx(amx) = isa { AmxEngine::new(amx).panel_dtype(dtype, tokens) } else { dtype }
}

/// How many of `ids` are `expert`.
fn count(ids: &[i32], expert: i32) -> usize {
    ids.iter().filter(|&&id| id == expert).count()
}

/// A contiguous view of f32.
fn view(data: &[f32], ne: [usize; 3]) -> View<'_> {
    assert!(data.len() >= ne.iter().product());
    let nb = [4, 4 * ne[0], 4 * ne[0] * ne[1], 4 * ne[0] * ne[1] * ne[2]];
    // SAFETY: the length was checked just now.
    unsafe { View::from_raw(DType::F32, data.as_ptr().cast(), [ne[0], ne[1], ne[2], 1], nb) }
}

/// A contiguous writable view of f32.
fn view_mut(data: &mut [f32], ne: [usize; 3]) -> ViewMut<'_> {
    let View { ne, nb, .. } = view(data, ne);
    // SAFETY: as above; the borrow is unique.
    unsafe { ViewMut::from_raw(data.as_mut_ptr().cast(), ne, nb) }
}

fn ids(data: &[i32], n_used: usize, n_tokens: usize) -> Ids<'_> {
    assert_eq!(data.len(), n_used * n_tokens);
    // SAFETY: the length was checked just now.
    unsafe { Ids::from_raw(data.as_ptr().cast(), n_used, n_tokens, [4, 4 * n_used]) }
}

/// A made-up machine of three nodes.
struct OnSim {
    numa: Numa,
    seats: Seats,
    tally: Tally,
}

impl OnSim {
    fn new(run: Option<usize>) -> Option<Self> {
        let numa = Numa::new(Mode::Auto, Some(Sim { nodes: 3, run: run? })).unwrap();
        Some(Self { numa, seats: Seats::new(4), tally: Tally::new() })
    }

    fn nodes(&self) -> OnNodes<'_> {
        OnNodes { numa: &self.numa, seats: &self.seats, tally: &self.tally, count_plain: true }
    }
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    k: usize,
    n: usize,
    experts: usize,
    n_used: usize,
    tokens: usize,
    shared: bool,
}

fn mul_mat_id(dtype: DType, s: Shape, seed: u64) -> Result<(), TestCaseError> {
    let Some(isa) = isa(seed) else { return Ok(()) };
    let mut random = Random(seed);
    let bytes = Guarded::new(&random.weights(dtype, s.k * s.n * s.experts));
    let w = Weights::contiguous(dtype, &bytes, [s.k, s.n, s.experts]);
    let slots = if s.shared { 1 } else { s.n_used };
    let x = random.vec(s.k * slots * s.tokens);
    // Half of the ids are of expert 0: skewed, so that some experts have panels.
    let id: Vec<i32> = (0..s.n_used * s.tokens)
        .map(|_| if random.below(2) == 0 { 0 } else { random.below(s.experts) as i32 })
        .collect();
    let (mut first, mut on_nodes): (Option<Vec<f32>>, Option<Vec<f32>>) = (None, None);
    for (threads, run) in [(1, None), (3, None), (1, Some(4096)), (3, Some(4096))] {
        let sim = OnSim::new(run);
        // On nodes, partial sums are added in another order.
        let first = if run.is_some() { &mut on_nodes } else { &mut first };
        let mut dst = vec![f32::NAN; s.n * s.n_used * s.tokens];
        let to = view_mut(&mut dst, [s.n, s.n_used, s.tokens]);
        let op = MulMatId::new(w, view(&x, [s.k, slots, s.tokens]), ids(&id, s.n_used, s.tokens), to);
        let op = sim.as_ref().map_or(op, |sim| op.follow_pages(sim.nodes()));
        let scratch = Aligned::new(op.scratch_bytes(threads));
        team::run(threads, |w| {
            // SAFETY: as large as asked for.
            unsafe { op.run(isa, &w, scratch.ptr()) }.unwrap();
        });
        if let Some(sim) = sim.filter(|sim| sim.numa.known(&w).is_some()) {
            let used: std::collections::BTreeSet<i32> = id.iter().copied().collect();
            let (local, remote) = sim.tally.bytes();
            prop_assert_eq!(local + remote, (used.len() * w.expert_bytes()) as u64, "bytes of weights");
        }
        let first = first.get_or_insert_with(|| dst.clone());
        prop_assert_eq!(&*first, &dst, "other bits on {} threads", threads);
        for (pair, got) in dst.chunks(s.n).enumerate() {
            let (slot, token) = (pair % s.n_used, pair / s.n_used);
            let x = &x[(token * slots + slot % slots) * s.k..][..s.k];
            let rows = w.rows(id[pair] as usize, 0, s.n);
            let form = form(isa, dtype, count(&id, id[pair]));
            for ((&got, want), magnitude) in got.iter().zip(matvec_by(form, rows, x)).zip(magnitudes(rows, x)) {
                let error = (f64::from(got) - want).abs();
                prop_assert!(error <= 4e-6 * magnitude, "slot {slot}, token {token}: {got}, not {want}");
            }
        }
    }
    Ok(())
}

#[test]
fn pages_are_followed_where_experts_have_few_tokens_each() {
    let (k, n, experts) = (2048, 36, 4);
    let Some(isa) = isa(0) else { return };
    let bytes = Guarded::new(&Random(1).weights(DType::Bf16, k * n * experts));
    let w = Weights::contiguous(DType::Bf16, &bytes, [k, n, experts]);
    // All have the same number of tokens, but on so many experts.
    let bytes_of = |tokens: usize, used: usize| {
        let (x, mut dst) = (vec![1.0; k * tokens], vec![0.0; n * tokens]);
        let id: Vec<i32> = (0..tokens).map(|t| (t % used) as i32).collect();
        let sim = OnSim::new(Some(4096)).unwrap();
        let op = MulMatId::new(w, view(&x, [k, 1, tokens]), ids(&id, 1, tokens), view_mut(&mut dst, [n, 1, tokens]));
        let op = op.follow_pages(sim.nodes());
        let scratch = Aligned::new(op.scratch_bytes(3));
        team::run(3, |w| {
            // SAFETY: as large as asked for.
            unsafe { op.run(isa, &w, scratch.ptr()) }.unwrap();
        });
        let (local, remote) = sim.tally.bytes();
        assert_eq!(local + remote, (used * w.expert_bytes()) as u64);
        [local, remote, sim.tally.segment_bytes()]
    };
    for (tokens, used, follows) in [(16, 1, true), (17, 1, false), (64, 4, true), (64, 3, false), (65, 4, false)] {
        let [local, remote, segments] = bytes_of(tokens, used);
        assert_eq!(segments, if follows { local + remote } else { 0 }, "{tokens} tokens on {used} experts");
        assert!(!follows || local > 19 * remote, "{tokens} tokens on {used} experts: {local} local, {remote} remote");
    }
}

fn shapes(k: impl Strategy<Value = usize>) -> impl Strategy<Value = Shape> {
    let rest = (1usize..150, 1usize..7, 1usize..5, 1usize..50, any::<bool>());
    (k, rest).prop_map(|(k, (n, experts, n_used, tokens, shared))| Shape { k, n, experts, n_used, tokens, shared })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn mul_mat_id_bf16_is_the_oracles(shape in shapes(1usize..200), seed: u64) {
        mul_mat_id(DType::Bf16, shape, seed)?;
    }

    #[test]
    fn mul_mat_id_q8_0_is_the_oracles(shape in shapes((1usize..9).prop_map(|b| b * 32)), seed: u64) {
        mul_mat_id(DType::Q8_0, shape, seed)?;
    }
}

/// A plain product with batches in dimensions 2 and 3, broadcast as ggml does.
fn mul_mat(
    dtype: DType,
    [k, n, tokens]: [usize; 3],
    [w2, w3]: [usize; 2],
    [r2, r3]: [usize; 2],
    seed: u64,
) -> Result<(), TestCaseError> {
    let Some(isa) = isa(seed) else { return Ok(()) };
    let mut random = Random(seed);
    let bytes = Guarded::new(&random.weights(dtype, k * n * w2 * w3));
    let w = Weights::contiguous(dtype, &bytes, [k, n, w2 * w3]);
    let (ne2, ne3) = (w2 * r2, w3 * r3);
    let x = random.vec(k * tokens * ne2 * ne3);
    let mut dst = vec![f32::NAN; n * tokens * ne2 * ne3];
    let four = |rows: usize| ([rows, tokens, ne2, ne3], [4, 4 * rows, 4 * rows * tokens, 4 * rows * tokens * ne2]);
    // SAFETY: the vectors have these shapes.
    let op = unsafe {
        let x = View::from_raw(DType::F32, x.as_ptr().cast(), four(k).0, four(k).1);
        MulMat::new(w, w2, x, ViewMut::from_raw(dst.as_mut_ptr().cast(), four(n).0, four(n).1))
    };
    let scratch = Aligned::new(op.scratch_bytes(2));
    team::run(2, |w| {
        // SAFETY: as large as asked for.
        unsafe { op.run(isa, &w, scratch.ptr()) }.unwrap();
    });
    for (i, (got, x)) in dst.chunks(n).zip(x.chunks(k)).enumerate() {
        let (i2, i3) = (i / tokens % ne2, i / tokens / ne2);
        let rows = w.rows(i2 / r2 + i3 / r3 * w2, 0, n);
        let form = form(isa, dtype, tokens * r2 * r3);
        for ((&got, want), magnitude) in got.iter().zip(matvec_by(form, rows, x)).zip(magnitudes(rows, x)) {
            prop_assert!((f64::from(got) - want).abs() <= 4e-6 * magnitude, "row {i}: {got}, not {want}");
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug)]
struct FfnCase {
    shape: Shape,
    types: [DType; 2],
    n_out: usize,
    glu: Glu,
    merged: bool,
    biases: bool,
    router: bool,
    sum: bool,
}

/// The fused FFN against its parts one by one; on one thread and on three, with the result in memory of its own or over the
/// activations.
fn ffn(case: FfnCase, seed: u64) -> Result<(), TestCaseError> {
    let Some(isa) = isa(seed) else { return Ok(()) };
    let FfnCase { shape: Shape { k, n: n_ff, experts, n_used, tokens, .. }, types: [t0, t1], n_out, .. } = case;
    let mut random = Random(seed);
    let bytes = [random.weights(t0, k * n_ff * experts * 2), random.weights(t1, n_ff * n_out * experts)];
    let both = Weights::contiguous(t0, &bytes[0], [k, 2 * n_ff, experts]);
    let [gate, up] = if case.merged {
        both.split(n_ff)
    } else {
        let half = bytes[0].len() / 2;
        [&bytes[0][..half], &bytes[0][half..]].map(|b| Weights::contiguous(t0, b, [k, n_ff, experts]))
    };
    let down = Weights::contiguous(t1, &bytes[1], [n_ff, n_out, experts]);
    let biases = [n_ff, n_ff, n_out].map(|n| random.vec(n * experts));
    let bias = |i: usize, n: usize| case.biases.then(|| Bias(view(&biases[i], [n, experts, 1])));
    let router = random.vec(n_used * tokens);
    let x = random.vec(k * tokens);
    let id: Vec<i32> = (0..n_used * tokens).map(|_| random.below(experts).min(random.below(experts)) as i32).collect();
    let want = ffn_want(isa, &case, [gate, up, down], &biases, &router, &x, &id);
    let (mut first, mut on_nodes): (Option<Vec<f32>>, Option<Vec<f32>>) = (None, None);
    let cases = [(1, false, None), (3, false, None), (2, true, None), (1, false, Some(4096)), (3, true, Some(4096))];
    for (threads, alias, run) in cases {
        let sim = OnSim::new(run);
        let first = if run.is_some() { &mut on_nodes } else { &mut first };
        let len = n_out * tokens * if case.sum { 1 } else { n_used };
        let mut memory = x.clone();
        memory.resize(x.len().max(len) + len, f32::NAN);
        let to = memory[if alias { 0 } else { x.len().max(len) }..].as_mut_ptr().cast();
        let x = view(&memory, [k, 1, tokens]);
        let ne = if case.sum { [n_out, tokens, 1, 1] } else { [n_out, n_used, tokens, 1] };
        // SAFETY: room for len values.
        let dst = unsafe { ViewMut::from_raw(to, ne, [4, 4 * ne[0], 4 * ne[0] * ne[1], 4 * len]) };
        let op = Ffn::new(FfnParts {
            x,
            ids: ids(&id, n_used, tokens),
            gate,
            up,
            gate_bias: bias(0, n_ff),
            up_bias: bias(1, n_ff),
            glu: case.glu,
            down,
            down_bias: bias(2, n_out),
            router: case.router.then(|| view(&router, [1, n_used, tokens])),
            output: if case.sum { Output::Sum(dst) } else { Output::Slots(dst) },
        });
        let op = sim.as_ref().map_or(op, |sim| op.follow_pages(sim.nodes()));
        let scratch = Aligned::new(op.scratch_bytes(threads));
        team::run(threads, |w| {
            // SAFETY: as large as asked for.
            unsafe { op.run(isa, &w, scratch.ptr()) }.unwrap();
        });
        // SAFETY: written by the operation.
        let got = unsafe { std::slice::from_raw_parts(to.cast::<f32>(), len) }.to_vec();
        let error = nmse(&got, &want);
        prop_assert!(error < 2e-6, "NMSE {error}");
        prop_assert_eq!(first.get_or_insert_with(|| got.clone()), &got, "other bits on {} threads", threads);
    }
    Ok(())
}

fn ffn_want(
    isa: Isa,
    case: &FfnCase,
    [gate, up, down]: [Weights<'_>; 3],
    biases: &[Vec<f32>; 3],
    router: &[f32],
    x: &[f32],
    id: &[i32],
) -> Vec<f64> {
    let FfnCase { shape: Shape { k, n: n_ff, n_used, tokens, .. }, n_out, .. } = *case;
    let mut want = vec![0f64; n_out * tokens * if case.sum { 1 } else { n_used }];
    let bias = |i: usize, n: usize, e: usize, j: usize| if case.biases { f64::from(biases[i][e * n + j]) } else { 0.0 };
    for pair in 0..n_used * tokens {
        let (token, e) = (pair / n_used, id[pair] as usize);
        let x = &x[token * k..][..k];
        let forms = case.types.map(|dtype| form(isa, dtype, count(id, id[pair])));
        let [g, u] = [gate, up].map(|m| matvec_by(forms[0], m.rows(e, 0, n_ff), x));
        let h = |j: usize| case.glu.of((g[j] + bias(0, n_ff, e, j)) as f32, (u[j] + bias(1, n_ff, e, j)) as f32) as f32;
        let h: Vec<f32> = (0..n_ff).map(h).collect();
        let weight = if case.router { f64::from(router[pair]) } else { 1.0 };
        let at = if case.sum { token } else { pair } * n_out;
        for (j, y) in matvec_by(forms[1], down.rows(e, 0, n_out), &h).into_iter().enumerate() {
            want[at + j] += weight * (y + bias(2, n_out, e, j));
        }
    }
    want
}

fn glus() -> impl Strategy<Value = Glu> {
    prop_oneof![
        Just(Glu::SwiGlu),
        Just(Glu::ReGlu),
        Just(Glu::GeGlu),
        Just(Glu::GeGluErf),
        Just(Glu::GeGluQuick),
        Just(Glu::SwiGluOai { alpha: 1.702, limit: 7.0 }),
        Just(Glu::SwiGluClamp { limit: 1.5 }),
    ]
}

fn ffn_cases(types: [DType; 2]) -> impl Strategy<Value = FfnCase> {
    let odd = |t: DType| (1usize..150).prop_map(move |k| if t == DType::Q8_0 { k.next_multiple_of(32) } else { k });
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let rest = (1usize..7, 1usize..5, 1usize..50, 1usize..150, glus(), flags);
    (odd(types[0]), odd(types[1]), rest).prop_map(move |(k, n, (experts, n_used, tokens, n_out, glu, flags))| FfnCase {
        shape: Shape { k, n, experts, n_used, tokens, shared: true },
        types,
        n_out,
        glu,
        merged: flags.0,
        biases: flags.1,
        router: flags.2,
        sum: flags.3,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn ffn_bf16_is_its_parts(case in ffn_cases([DType::Bf16; 2]), seed: u64) {
        ffn(case, seed)?;
    }

    #[test]
    fn ffn_q8_0_is_its_parts(case in ffn_cases([DType::Q8_0; 2]), seed: u64) {
        ffn(case, seed)?;
    }

    #[test]
    fn ffn_of_two_types_is_its_parts(case in ffn_cases([DType::Bf16, DType::Q8_0]), seed: u64) {
        ffn(case, seed)?;
    }

    #[test]
    fn mul_mat_is_the_oracles(
        blocks in 1usize..5, n in 1usize..70, tokens in 1usize..40, w in (1usize..3, 1usize..3), r in (1usize..3, 1usize..3), seed: u64,
    ) {
        mul_mat(DType::Bf16, [blocks * 32 - 5, n, tokens], [w.0, w.1], [r.0, r.1], seed)?;
        mul_mat(DType::Q8_0, [blocks * 32, n, tokens], [w.0, w.1], [r.0, r.1], seed)?;
    }
}

#[test]
fn a_bad_id_stops_every_worker_and_writes_nothing() {
    let Some(isa) = isa(0) else { return };
    let bytes = vec![0u8; 32 * 4 * 2 * 2];
    let w = Weights::contiguous(DType::Bf16, &bytes, [32, 4, 2]);
    let x = vec![1f32; 32 * 3];
    let mut dst = vec![7f32; 4 * 2 * 3];
    let id = [0, 1, 1, 2, 0, 0];
    let op = MulMatId::new(w, view(&x, [32, 1, 3]), ids(&id, 2, 3), view_mut(&mut dst, [4, 2, 3]));
    let scratch = Aligned::new(op.scratch_bytes(2));
    let team = Team::new(2);
    let ends = std::thread::scope(|s| {
        let (team, op, scratch) = (&team, &op, &scratch);
        // SAFETY: as large as asked for.
        let part = |i| s.spawn(move || team.run(i, |w| unsafe { op.run(isa, &w, scratch.ptr()) }));
        [0, 1].map(part).map(|t| t.join().unwrap())
    });
    for end in ends {
        let bad =
            matches!(end, Err(WorkerError::Op(OpError::ExpertId { id: 2, slot: 1, token: 1 }) | WorkerError::Broken));
        assert!(bad, "{end:?}");
    }
    assert!(dst.iter().all(|&y| y == 7.0));
}
