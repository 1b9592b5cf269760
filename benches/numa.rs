//! What following the pages costs where it wins nothing: one expert product on one node, plainly and by the segments of a
//! made-up machine of two nodes.
//!
//! `cargo bench --no-default-features --bench numa`, or with part of a name: `-- numa/30B-gate/q8_0`. Both run in turn, because a
//! shared machine drifts, and the median of the ratios counts: below 1.03 up to 32 tokens is the aim.

use std::time::Instant;

use ggml_hina::isa::Isa;
use ggml_hina::moe::{Ids, MulMatId, OnNodes};
use ggml_hina::numa::tally::Tally;
use ggml_hina::numa::tensors::{Numa, Sim};
use ggml_hina::numa::threads::{Mode, Seats};
use ggml_hina::team;
use ggml_hina::tensor::{DType, View, ViewMut, Weights};

const THREADS: usize = 2;
const ROUNDS: usize = 15;
const USED: usize = 8;

/// Memory filled with what are sane values in both types of weights.
struct Memory(Vec<Line>);

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read as bytes")] [u64; 8]);

impl Memory {
    fn new(bytes: usize) -> Self {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // Bytes of 0x00 to 0x3f: BF16 and f16 values between 0 and 1 or so.
            (state >> 3) & 0x3f3f_3f3f_3f3f_3f3f
        };
        Self((0..bytes.div_ceil(64)).map(|_| Line(std::array::from_fn(|_| next()))).collect())
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: plain data.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * 64) }
    }

    fn ptr(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }
}

fn f32_nb(ne: [usize; 4]) -> [usize; 4] {
    [4, 4 * ne[0], 4 * ne[0] * ne[1], 4 * ne[0] * ne[1] * ne[2]]
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --benches` only wants to see that it builds.
    if args.iter().any(|a| a == "--test") {
        return;
    }
    let patterns: Vec<&String> = args.iter().filter(|a| !a.starts_with("--")).collect();
    let Some(isa) = Isa::best() else {
        println!("skipped: this CPU has no AVX2");
        return;
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(THREADS).build().expect("a thread pool");
    // Gate and down of Qwen3-30B-A3B, and of Qwen3-235B-A22B with fewer experts.
    for (name, k, n, experts) in [
        ("30B-gate", 2048, 768, 128),
        ("30B-down", 768, 2048, 128),
        ("235B-gate", 4096, 1536, 32),
        ("235B-down", 1536, 4096, 32),
    ] {
        for dtype in [DType::Bf16, DType::Q8_0] {
            // `cargo bench -- peers` runs this program too.
            let path = format!("numa/{name}/{dtype:?}").to_lowercase();
            if !patterns.is_empty() && !patterns.iter().any(|p| path.contains(&p.to_lowercase())) {
                continue;
            }
            let memory = Memory::new(dtype.row_bytes(k) * n * experts + 64);
            // As a GGUF's tensor: aligned to 32 bytes.
            let w = Weights::contiguous(dtype, &memory.bytes()[32..], [k, n, experts]);
            for tokens in [1, 4, 16, 32] {
                let (plain, ratio) = measure(isa, &pool, w, tokens);
                println!("{name:10} {dtype:?} {tokens:2} tokens: {plain:7.3} ms plain, by segments x {ratio:.3}");
            }
        }
    }
}

/// Milliseconds of the plain path, and the ratio of the segments' path to it.
fn measure(isa: Isa, pool: &rayon::ThreadPool, w: Weights<'_>, tokens: usize) -> (f64, f64) {
    let x = vec![0.5f32; w.k * tokens];
    let ne = [w.k, 1, tokens, 1];
    // SAFETY: as long as the shape says.
    let view = unsafe { View::from_raw(DType::F32, x.as_ptr().cast(), ne, f32_nb(ne)) };
    let mut dst = vec![0f32; w.n * USED * tokens];
    let ne = [w.n, USED, tokens, 1];
    // SAFETY: as above.
    let to = unsafe { ViewMut::from_raw(dst.as_mut_ptr().cast(), ne, f32_nb(ne)) };

    let sim = Sim { nodes: THREADS, run: 4096 };
    let numa = Numa::new(Mode::Auto, Some(sim)).expect("a simulated machine has nodes");
    let (seats, tally) = (Seats::new(THREADS), Tally::new());
    let nodes = OnNodes { numa: &numa, seats: &seats, tally: &tally, count_plain: false };

    let mut times: Vec<(f64, f64)> = Vec::new();
    for round in 0..ROUNDS {
        let time = |on_nodes: bool, round: usize| {
            // Other experts each time, so that none is in a cache.
            let expert = |i: usize| ((i * 37 + round * 53) % w.experts) as i32;
            let id: Vec<i32> = (0..USED * tokens).map(expert).collect();
            // SAFETY: as long as the shape says.
            let ids = unsafe { Ids::from_raw(id.as_ptr().cast(), USED, tokens, [4, 4 * USED]) };
            let op = MulMatId::new(w, view, ids, to);
            let op = if on_nodes { op.follow_pages(nodes) } else { op };
            let scratch = Memory::new(op.scratch_bytes(THREADS));
            let start = Instant::now();
            team::run_on(pool, &|worker| {
                // SAFETY: as large as asked for.
                unsafe { op.run(isa, &worker, scratch.ptr()) }.expect("good ids");
            });
            start.elapsed().as_secs_f64() * 1e3
        };
        times.push((time(false, 2 * round), time(true, 2 * round + 1)));
    }
    let median = |mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    (median(times.iter().map(|t| t.0).collect()), median(times.iter().map(|t| t.1 / t.0).collect()))
}
