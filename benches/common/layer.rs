//! An MoE FFN layer with random weights and a routing of one's choice.

use ggml_hina::isa::Isa;
use ggml_hina::kernels::glu::Glu;
use ggml_hina::moe::{Ffn, FfnParts, Ids, Output};
use ggml_hina::team;
use ggml_hina::tensor::{DType, View, ViewMut, Weights};

/// Sizes of a layer; experts may be fewer than the model has, so that the weights fit in memory.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub name: &'static str,
    pub n_embd: usize,
    pub n_ff: usize,
    pub experts: usize,
    pub n_used: usize,
}

/// The shapes of the paper's Table 3.
pub const SHAPES: [Shape; 4] = [
    Shape { name: "mixtral-8x7b", n_embd: 4096, n_ff: 14336, experts: 4, n_used: 2 },
    Shape { name: "qwen3-30b-a3b", n_embd: 2048, n_ff: 768, experts: 128, n_used: 8 },
    Shape { name: "qwen3-235b-a22b", n_embd: 4096, n_ff: 1536, experts: 32, n_used: 8 },
    Shape { name: "deepseek-v3", n_embd: 7168, n_ff: 2048, experts: 16, n_used: 8 },
];

/// Memory for weights.
pub struct Memory(Vec<Line>);

/// A cache line: ggml wants buffers aligned to 32 bytes.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u64; 8]);

impl Memory {
    /// Plausible weights of `dtype`: values or quants are random, scales are small.
    pub fn weights(dtype: DType, bytes: usize) -> Self {
        let mut state = 0x243F_6A88_85A3_08D3_u64;
        let mut memory = Self(vec![Line([0; 8]); bytes.div_ceil(64)]);
        for v in memory.0.iter_mut().flat_map(|line| &mut line.0) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // BF16: exponents near 2^-6, any sign and mantissa.
            *v = if dtype == DType::Q8_0 { state } else { state & 0x807F_807F_807F_807F | 0x3C80_3C80_3C80_3C80 };
        }
        if dtype == DType::Q8_0 {
            memory.bytes_mut().chunks_mut(34).filter(|b| b.len() > 1).for_each(|b| b[..2].copy_from_slice(&[0, 0x14]));
        }
        memory
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: plain data.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 64) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: plain data.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * 64) }
    }
}

/// Everything an FFN needs, ready to run any number of times.
pub struct Layer<'a> {
    pub shape: Shape,
    pub tokens: usize,
    pub ids: Vec<i32>,
    pub x: Vec<f32>,
    pub router: Vec<f32>,
    pub weights: [Weights<'a>; 3],
    pub dst: Vec<f32>,
    scratch: Vec<[u64; 8]>,
}

/// Bytes of the weights of a layer.
pub fn weight_bytes(shape: Shape, dtype: DType) -> usize {
    3 * dtype.row_bytes(shape.n_embd) * shape.n_ff * shape.experts
}

/// Ids with `m` tokens for each expert.
pub fn even(shape: Shape, m: usize) -> Vec<i32> {
    (0..(shape.experts * m).next_multiple_of(shape.n_used)).map(|i| (i % shape.experts) as i32).collect()
}

/// Ids of as many pairs as [`even`], of which half are the first expert's.
pub fn skewed(shape: Shape, m: usize) -> Vec<i32> {
    let other = |i: usize| (1 + i / 2 % (shape.experts - 1)) as i32;
    (0..shape.experts * m).map(|i| if i % 2 == 0 { 0 } else { other(i) }).collect()
}

/// Ids with 0 to 3 tokens for each expert.
pub fn few(shape: Shape) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..shape.experts as i32).flat_map(|e| vec![e; e as usize * 7 % 4]).collect();
    ids.truncate(ids.len() / shape.n_used * shape.n_used);
    ids
}

impl<'a> Layer<'a> {
    pub fn new(shape: Shape, dtype: DType, memory: &'a [u8], ids: Vec<i32>) -> Self {
        let Shape { n_embd, n_ff, experts, n_used, .. } = shape;
        let third = weight_bytes(shape, dtype) / 3;
        let part = |i: usize, shape: [usize; 3]| Weights::contiguous(dtype, &memory[i * third..(i + 1) * third], shape);
        let weights =
            [part(0, [n_embd, n_ff, experts]), part(1, [n_embd, n_ff, experts]), part(2, [n_ff, n_embd, experts])];
        let tokens = ids.len() / n_used;
        let wave = |n: usize| (0..n).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect::<Vec<f32>>();
        Self {
            shape,
            tokens,
            ids,
            x: wave(n_embd * tokens),
            router: wave(n_used * tokens),
            weights,
            dst: vec![0.0; n_embd * tokens],
            scratch: vec![],
        }
    }

    /// Bytes of the experts that have tokens.
    pub fn bytes_read(&self) -> f64 {
        let used = (0..self.shape.experts as i32).filter(|e| self.ids.contains(e)).count();
        used as f64 * 3.0 * self.weights[0].expert_bytes() as f64
    }

    /// Operations: two for a multiplication and its addition.
    pub fn operations(&self) -> f64 {
        (6 * self.shape.n_embd * self.shape.n_ff * self.ids.len()) as f64
    }

    /// Runs the layer once.
    pub fn run(&mut self, isa: Isa, pool: &rayon::ThreadPool) {
        let (n_used, tokens, n_embd) = (self.shape.n_used, self.tokens, self.shape.n_embd);
        let nb = |a: usize, b: usize| [4, 4 * a, 4 * a * b, 4 * a * b * tokens];
        let [gate, up, down] = self.weights;
        // SAFETY: the vectors have these shapes and live as long as `op`.
        let op = unsafe {
            Ffn::new(FfnParts {
                x: View::from_raw(DType::F32, self.x.as_ptr().cast(), [n_embd, 1, tokens, 1], nb(n_embd, 1)),
                ids: Ids::from_raw(self.ids.as_ptr().cast(), n_used, tokens, [4, 4 * n_used]),
                gate,
                up,
                gate_bias: None,
                up_bias: None,
                glu: Glu::SwiGlu,
                down,
                down_bias: None,
                router: Some(View::from_raw(
                    DType::F32,
                    self.router.as_ptr().cast(),
                    [1, n_used, tokens, 1],
                    nb(1, n_used),
                )),
                output: Output::Sum(ViewMut::from_raw(
                    self.dst.as_mut_ptr().cast(),
                    [n_embd, tokens, 1, 1],
                    nb(n_embd, tokens),
                )),
            })
        };
        let bytes = op.scratch_bytes(pool.current_num_threads()) + 64;
        if self.scratch.len() * 64 < bytes {
            self.scratch = vec![[0; 8]; bytes.div_ceil(64)];
        }
        let scratch = self.scratch.as_mut_ptr().cast::<u8>();
        let scratch = Scratch(scratch.wrapping_add(scratch.align_offset(64)));
        team::run_on(pool, &|w| {
            let scratch = &scratch;
            // SAFETY: aligned and as large as asked for.
            unsafe { op.run(isa, &w, scratch.0) }.unwrap();
        });
    }
}

struct Scratch(*mut u8);
// SAFETY: the workers share it as `Ffn::run` says.
unsafe impl Sync for Scratch {}
