//! One MoE FFN against what a user would pick instead, in one process, on the same weights and threads:
//!
//! * `HiNa`: the kernels as the plugin calls them. `ggml`: llama.cpp's chain of nodes on ggml's CPU backend.
//! * `oneDNN`: its products on the weights where they lie; `packed`: on a copy in the layout it likes best, made beforehand.
//!
//! Beside them the roofline: the weights at the read bandwidth, and the arithmetic at the peak, both measured here.
//!
//! ```sh
//! pip install --target target/onednn --no-deps onednn-cpu-gomp        # once; or any libdnnl.so of oneDNN 3
//! export ONEDNN_LIB=$(find $PWD/target/onednn -name libdnnl.so.3) LLAMA_BIN=$PWD/target/llama/bin
//! cargo bench --bench peers -- qwen3-30b-a3b/m16
//! ```
//!
//! Without an argument all shapes and sizes run; a library that is not named is left out. `BENCH_THREADS` sets the threads
//! (all CPUs if not set). Run it on a quiet machine; it is no part of any test.

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use the rest")]
mod common;
mod onednn;

use std::path::Path;
use std::time::{Duration, Instant};

use common::ggml::Ggml;
use common::layer::{Layer, Memory, SHAPES, Shape, even, weight_bytes};
use common::meter::Ceilings;
use ggml_hina::isa::Isa;
use ggml_hina::tensor::DType;
use half::bf16;
use onednn::{Experts, OneDnn};

/// Tokens of each expert.
const TOKENS: [usize; 4] = [1, 4, 16, 64];
/// Between two contenders.
const PAUSE: Duration = Duration::from_millis(30);
/// Rounds; in each one every contender runs once.
const ROUNDS: usize = 7;

struct Bench {
    isa: Isa,
    pool: rayon::ThreadPool,
    ggml: Option<Ggml>,
    onednn: Option<OneDnn>,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // `cargo test --benches` only wants to see that it builds.
    if args.iter().any(|a| a == "--test") {
        return;
    }
    let Some(isa) = common::isa() else {
        println!("skipped: this CPU has no AVX2, or not what BENCH_ISA names");
        return;
    };
    let patterns: Vec<&String> = args.iter().filter(|a| !a.starts_with("--")).collect();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::var("BENCH_THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(cpus);
    // SAFETY: no other thread runs yet; OpenMP reads it when oneDNN and ggml start it.
    unsafe { std::env::set_var("OMP_NUM_THREADS", threads.to_string()) };
    let bench = Bench {
        isa,
        pool: rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads"),
        ggml: open_ggml(threads),
        onednn: open_onednn(),
    };
    println!("{}, {threads} threads; milliseconds, the median of {ROUNDS} rounds", bench.isa);
    for shape in SHAPES {
        let chosen = |m: &usize| {
            // With an end mark, so that m1 is not m16 too.
            let name = format!("peers/{}/m{m}/", shape.name);
            patterns.is_empty() || patterns.iter().any(|p| name.contains(&format!("{p}/")))
        };
        let sizes: Vec<usize> = TOKENS.into_iter().filter(chosen).collect();
        if !sizes.is_empty() {
            bench.shape(shape, &sizes);
        }
    }
}

fn open_ggml(threads: usize) -> Option<Ggml> {
    let folder = common::given("LLAMA_BIN");
    let ggml = folder.as_ref().and_then(|bin| Ggml::load(Path::new(bin), threads));
    if ggml.is_none() {
        println!("ggml is left out: LLAMA_BIN does not name a folder with its libraries");
    }
    ggml
}

fn open_onednn() -> Option<OneDnn> {
    let Some(path) = common::given("ONEDNN_LIB") else {
        println!("oneDNN is left out: ONEDNN_LIB does not name its libdnnl.so");
        return None;
    };
    match OneDnn::open(Path::new(&path)) {
        Ok(lib) => {
            println!("oneDNN {}", lib.version);
            Some(lib)
        }
        Err(e) => {
            println!("oneDNN is left out: {e}");
            None
        }
    }
}

impl Bench {
    fn shape(&self, shape: Shape, sizes: &[usize]) {
        let bytes = weight_bytes(shape, DType::Bf16);
        let memory = Memory::weights(DType::Bf16, bytes);
        let memory = &memory.bytes()[..bytes];
        let ceilings = Ceilings::measure(self.isa, &self.pool, memory, 5);
        println!(
            "\n{} ({} experts of {} x {}): read {:.1} GB/s, BF16 peak {:.0} GFLOP/s",
            shape.name,
            shape.experts,
            shape.n_embd,
            shape.n_ff,
            ceilings.read * 1e-9,
            ceilings.bf16.rate * 1e-9
        );
        println!("{:>4} {:>9} {:>9} {:>9} {:>9} {:>9}", "m", "HiNa", "ggml", "oneDNN", "packed", "roofline");
        for &m in sizes {
            let mut layer = Layer::new(shape, DType::Bf16, memory, even(shape, m));
            let floor = (layer.bytes_read() / ceilings.read).max(layer.operations() / ceilings.bf16.rate);
            let times = self.times(&mut layer, memory, m);
            let cells: Vec<String> = times
                .iter()
                .chain([&Some(floor)])
                .map(|t| t.map_or("-".into(), |t| format!("{:.1}", t * 1e3)))
                .collect();
            println!("{m:>4} {}", cells.iter().map(|c| format!("{c:>9}")).collect::<Vec<_>>().join(" "));
        }
    }

    /// Seconds of HiNa, ggml, oneDNN in place and packed: medians over rounds in which each ran once.
    fn times(&self, layer: &mut Layer<'_>, memory: &[u8], m: usize) -> [Option<f64>; 4] {
        let chain =
            self.ggml.as_ref().map(|g| g.layer(layer.shape, layer.weights, &layer.x, &layer.ids, &layer.router));
        let lib = self.onednn.as_ref();
        let of = |packed| lib.map(|lib| Experts::new(lib, layer.shape, m, memory, &layer.x, packed));
        let peers = [of(false), of(true)];
        peers.iter().flatten().for_each(|experts| check(experts, layer.shape, m, memory, &layer.x));
        let mut all: [Vec<f64>; 4] = Default::default();
        // The first round warms up: pages, threads, ggml's work buffer.
        for round in 0..=ROUNDS {
            let mut timed = |i: usize, run: &mut dyn FnMut()| {
                // The threads of the one before spin for a while, and would take the CPUs of those that sleep between.
                std::thread::sleep(PAUSE);
                let start = Instant::now();
                run();
                if round > 0 {
                    all[i].push(start.elapsed().as_secs_f64());
                }
            };
            timed(0, &mut || layer.run(self.isa, &self.pool));
            if let Some(chain) = &chain {
                timed(1, &mut || chain.run());
            }
            for (i, experts) in peers.iter().enumerate() {
                if let Some(experts) = experts {
                    timed(2 + i, &mut || experts.run());
                }
            }
        }
        all.map(|mut times| {
            times.sort_by(f64::total_cmp);
            times.get(times.len() / 2).copied()
        })
    }
}

/// A contender that computes something else is none: expert 0, token 0, a few outputs, against plain loops.
fn check(experts: &Experts<'_>, Shape { n_embd, n_ff, experts: n, .. }: Shape, m: usize, memory: &[u8], x: &[f32]) {
    let value = |part: usize, at: usize| {
        let at = (part * n * n_embd * n_ff + at) * 2;
        bf16::from_le_bytes([memory[at], memory[at + 1]]).to_f64()
    };
    let dot = |part, row: usize| -> f64 {
        (0..n_embd).map(|k| value(part, row * n_embd + k) * bf16::from_f32(x[k]).to_f64()).sum()
    };
    let hidden: Vec<f64> = (0..n_ff)
        .map(|row| {
            let (gate, up) = (dot(0, row), dot(1, row));
            gate / (1.0 + (-gate).exp()) * up
        })
        .collect();
    let result = experts.expert(0);
    assert_eq!(result.len(), m * n_embd);
    let rows = (0..n_embd).step_by(n_embd / 8);
    let pairs: Vec<(f64, f64)> = rows
        .map(|row| ((0..n_ff).map(|k| value(2, row * n_ff + k) * hidden[k]).sum(), f64::from(result[row])))
        .collect();
    let error: f64 = pairs.iter().map(|(want, got)| (want - got).powi(2)).sum();
    let size: f64 = pairs.iter().map(|(want, _)| want.powi(2)).sum();
    assert!(error < 1e-3 * size, "oneDNN computes something else: {pairs:?}");
}
