//! The expert FFN against the ceilings of this machine and against ggml's own chain.
//!
//! `cargo bench --bench ffn [-- FILTER]`. With `LLAMA_BIN` naming the `bin` folder of a llama.cpp build with shared libraries
//! (`/…/build/bin`), ggml's chain runs beside ours and the results are compared. After criterion's lines, a table gives, for
//! each layer, the best times, bytes and operations a second, and percent of the ceilings measured in the same run, all at the
//! same number of threads (`BENCH_THREADS`, 2 if not set), on the CPU's best engine or the one that `BENCH_ISA` names.

mod common;

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use common::ggml::Ggml;
use common::layer::{Layer, Memory, SHAPES, Shape, even, few, skewed, weight_bytes};
use common::meter::Ceilings;
use criterion::{BenchmarkId, Criterion};
use ggml_hina::tensor::DType;

/// Tokens of an expert.
const TOKENS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

/// One line of the table.
struct Line {
    name: String,
    bytes: f64,
    operations: f64,
    ours: f64,
    ggml: Option<f64>,
    nmse: Option<f64>,
    ceilings: Ceilings,
    peak: f64,
}

impl Line {
    fn print(&self) {
        let (t, roofline) = (self.ours, (self.bytes / self.ceilings.read).max(self.operations / self.peak));
        print!(
            "{:34} {:8.2} ms {:6.1} GB/s ({:3.0} %) {:7.0} Gop/s ({:3.0} %), {:.2} of the roofline",
            self.name,
            t * 1e3,
            self.bytes / t / 1e9,
            100.0 * self.bytes / t / self.ceilings.read,
            self.operations / t / 1e9,
            100.0 * self.operations / t / self.peak,
            t / roofline,
        );
        match (self.ggml, self.nmse) {
            (Some(ggml), Some(nmse)) => {
                println!("; ggml {:8.2} ms: {:.2} times as long, NMSE {nmse:.1e}", ggml * 1e3, ggml / t)
            }
            _ => println!(),
        }
    }
}

/// The best time of one run, in seconds; 0 where criterion's filter left it out.
fn timed(c: &mut Criterion, id: BenchmarkId, bytes: f64, mut run: impl FnMut()) -> f64 {
    let best = RefCell::new(f64::MAX);
    let mut group = c.benchmark_group("ffn");
    group.throughput(criterion::Throughput::Bytes(bytes as u64));
    group.bench_function(id, |b| {
        b.iter_custom(|n| {
            let one = |_| {
                let start = Instant::now();
                run();
                let time = start.elapsed();
                let mut best = best.borrow_mut();
                *best = best.min(time.as_secs_f64());
                time
            };
            (0..n).map(one).sum()
        });
    });
    group.finish();
    let best = best.into_inner();
    if best == f64::MAX { 0.0 } else { best }
}

fn nmse(got: &[f32], want: &[f32]) -> f64 {
    let error: f64 = got.iter().zip(want).map(|(g, w)| f64::from(g - w).powi(2)).sum();
    error / want.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>()
}

fn main() {
    let Some(isa) = common::isa() else {
        println!("skipped: this CPU has no AVX2, or not what BENCH_ISA names");
        return;
    };
    let threads = std::env::var("BENCH_THREADS").ok().and_then(|t| t.parse().ok()).unwrap_or(2);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
    let ggml = common::given("LLAMA_BIN").and_then(|bin| Ggml::load(&PathBuf::from(bin), threads));
    let time = Duration::from_millis(800);
    let mut c = Criterion::default()
        .sample_size(10)
        .warm_up_time(time / 4)
        .measurement_time(time)
        .without_plots()
        .configure_from_args();
    let mut lines = vec![];
    for dtype in [DType::Bf16, DType::Q8_0] {
        for shape in SHAPES {
            let memory = Memory::weights(dtype, weight_bytes(shape, dtype));
            let ceilings = Ceilings::measure(isa, &pool, memory.bytes(), 5);
            let peak = if dtype == DType::Q8_0 { ceilings.int8.rate } else { ceilings.bf16.rate };
            let mut bench = |case: String, shape: Shape, ids: Vec<i32>| {
                let name = format!("{}/{dtype:?}/{case}", shape.name);
                let mut layer = Layer::new(shape, dtype, memory.bytes(), ids);
                let (bytes, operations) = (layer.bytes_read(), layer.operations());
                let ours = timed(&mut c, BenchmarkId::new("hina", &name), bytes, || layer.run(isa, &pool));
                let theirs = ggml.as_ref().filter(|_| ours > 0.0).map(|ggml| {
                    let theirs = ggml.layer(shape, layer.weights, &layer.x, &layer.ids, &layer.router);
                    let time = timed(&mut c, BenchmarkId::new("ggml", &name), bytes, || theirs.run());
                    (time, nmse(&layer.dst, &theirs.result()))
                });
                let (ggml, nmse) = theirs.filter(|t| t.0 > 0.0).unzip();
                if ours > 0.0 {
                    lines.push(Line { name, bytes, operations, ours, ggml, nmse, ceilings, peak });
                }
            };
            for m in TOKENS {
                bench(format!("{m}"), shape, even(shape, m));
            }
            if shape.experts >= 128 {
                bench("half-on-one".into(), shape, skewed(shape, 32));
                bench("0-to-3".into(), shape, few(shape));
            }
        }
    }
    c.final_summary();
    for line in &lines {
        let Ceilings { read, bf16, int8 } = line.ceilings;
        if line.name.ends_with("/1") {
            println!(
                "ceilings: read {:.1} GB/s; BF16 {:.0} Gop/s ({}), INT8 {:.0} Gop/s ({})",
                read / 1e9,
                bf16.rate / 1e9,
                bf16.by,
                int8.rate / 1e9,
                int8.by
            );
        }
        line.print();
    }
}
