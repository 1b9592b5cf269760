//! The pipelines against the oracle, on teams of several sizes.

use proptest::prelude::*;

use super::{Ids, MulMatId, OpError};
use crate::isa::Isa;
use crate::kernels::reference::{magnitudes, matvec};
use crate::team::{self, Team, WorkerError};
use crate::tensor::{DType, View, ViewMut, Weights};
use crate::testing::{Aligned, Guarded, Random};

fn isa() -> Option<Isa> {
    let isa = Isa::best();
    if isa.is_none() {
        println!("skipped: this CPU has no AVX-512 BF16 and VNNI");
    }
    isa
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
    let Some(isa) = isa() else { return Ok(()) };
    let mut random = Random(seed);
    let bytes = Guarded::new(&random.weights(dtype, s.k * s.n * s.experts));
    let w = Weights::contiguous(dtype, &bytes, [s.k, s.n, s.experts]);
    let slots = if s.shared { 1 } else { s.n_used };
    let x = random.vec(s.k * slots * s.tokens);
    // Half of the ids are of expert 0: skewed, so that some experts have panels.
    let id: Vec<i32> = (0..s.n_used * s.tokens)
        .map(|_| if random.below(2) == 0 { 0 } else { random.below(s.experts) as i32 })
        .collect();
    let mut first: Option<Vec<f32>> = None;
    for threads in [1, 3] {
        let mut dst = vec![f32::NAN; s.n * s.n_used * s.tokens];
        let to = view_mut(&mut dst, [s.n, s.n_used, s.tokens]);
        let op = MulMatId::new(w, view(&x, [s.k, slots, s.tokens]), ids(&id, s.n_used, s.tokens), to);
        let scratch = Aligned::new(op.scratch_bytes(threads));
        team::run(threads, |w| {
            // SAFETY: as large as asked for.
            unsafe { op.run(isa, &w, scratch.ptr()) }.unwrap();
        });
        let first = first.get_or_insert_with(|| dst.clone());
        prop_assert_eq!(&*first, &dst, "other bits on {} threads", threads);
        for (pair, got) in dst.chunks(s.n).enumerate() {
            let (slot, token) = (pair % s.n_used, pair / s.n_used);
            let x = &x[(token * slots + slot % slots) * s.k..][..s.k];
            let rows = w.rows(id[pair] as usize, 0, s.n);
            for ((&got, want), magnitude) in got.iter().zip(matvec(rows, x)).zip(magnitudes(rows, x)) {
                let error = (f64::from(got) - want).abs();
                prop_assert!(error <= 4e-6 * magnitude, "slot {slot}, token {token}: {got}, not {want}");
            }
        }
    }
    Ok(())
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

#[test]
fn a_bad_id_stops_every_worker_and_writes_nothing() {
    let Some(isa) = isa() else { return };
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
