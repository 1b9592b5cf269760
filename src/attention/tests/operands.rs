//! The operands of a case; they end where memory ends.

use crate::attention::{FlashAttn, Params, reference};
use crate::isa::Isa;
use crate::team;
use crate::tensor::{DType, View, ViewMut};
use crate::testing::{Aligned, Guarded, Random, bytes};

/// The shape and features of one case.
#[derive(Clone, Debug)]
pub struct Case {
    pub d: usize,
    pub dv: usize,
    pub n_q: usize,
    pub n_kv: usize,
    pub k_heads: usize,
    pub v_heads: usize,
    /// Heads: this times the least common multiple of the KV heads.
    pub group: usize,
    pub streams: usize,
    pub kv_streams: usize,
    pub k_type: DType,
    pub v_type: DType,
    /// V is the beginning of K's rows.
    pub mla: bool,
    /// Rows of all heads of a position lie together, as in a KV cache.
    pub heads_inside: bool,
    pub mask: Option<Mask>,
    pub sinks: bool,
    pub max_bias: f32,
    pub logit_softcap: f32,
    pub seed: u64,
}

/// What a mask looks like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mask {
    Zero,
    Causal,
    /// Each query sees a window of its own of this many positions.
    Window(usize),
    /// Random values; some closed, some rows wholly.
    Random,
    /// Random, different for each head and stream.
    RandomPerHead,
}

/// A view of `ne` rows with the given order of dimensions 1 and 2 in memory.
pub fn view(dtype: DType, data: &[u8], ne: [usize; 4], swapped: bool) -> View<'_> {
    let row = dtype.row_bytes(ne[0]);
    let [n1, n2] = if swapped { [ne[2], 1] } else { [1, ne[1]] };
    let nb = [dtype.row_bytes(dtype.block()), row * n1, row * n2, row * ne[1] * ne[2]];
    assert!(data.len() >= row * ne[1] * ne[2] * ne[3]);
    // SAFETY: the strides stay in `data`, whose length was checked.
    unsafe { View::from_raw(dtype, data.as_ptr(), ne, nb) }
}

/// The same memory with another shape.
pub fn with_ne(mut view: View<'_>, ne: [usize; 4]) -> View<'_> {
    view.ne = ne;
    view
}

/// A case with its memory.
pub struct Operands {
    pub case: Case,
    pub heads: usize,
    pub q: Guarded,
    pub k: Guarded,
    pub v: Guarded,
    pub mask: Guarded,
    pub mask_ne: [usize; 4],
    pub sinks: Guarded,
}

impl Operands {
    pub fn new(case: &Case) -> Self {
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

    pub fn params<'a>(&'a self, dst: &'a Aligned) -> Params<'a> {
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

    pub fn run(&self, isa: Isa, threads: usize) -> Vec<f32> {
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

    pub fn check(&self, isa: Isa) {
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
        let one = self.run(isa, 1);
        assert!(got.iter().zip(&one).all(|(a, b)| a.to_bits() == b.to_bits()), "one thread: other bits");
    }
}

pub fn plain() -> Case {
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
