//! The expert FFN against the ceilings of this machine and against ggml's own chain.
//!
//! `cargo bench --bench ffn [-- FILTER]`. With `LLAMA_BIN` naming the `bin` folder of a llama.cpp build with shared libraries
//! (`/…/build/bin`), ggml's chain runs beside ours and the results are compared. After criterion's lines, a table gives, for
//! each layer, the best time, bytes and operations a second, and the medians of percents of the ceilings measured beside each sample, all at the
//! same number of threads (`BENCH_THREADS`, 2 if not set), on the CPU's best engine or the one that `BENCH_ISA` names.

mod common;

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
    ours: Timed,
    ggml: Option<f64>,
    nmse: Option<f64>,
    ceilings: Ceilings,
}

/// What a run took.
struct Timed {
    /// The best time, in seconds.
    best: f64,
    /// Average times over those that reading the weights and the operations would have taken at the average ceilings just before, each a median
    /// over the samples: a shared machine is as fast as others let it be, so that figures of different moments do not compare.
    over_read: f64,
    over_peak: f64,
    over_roofline: f64,
}

impl Line {
    fn print(&self) {
        let Timed { best: t, over_read, over_peak, over_roofline } = self.ours;
        print!(
            "{:34} {:8.2} ms {:6.1} GB/s ({:3.0} %) {:7.0} Gop/s ({:3.0} %), {over_roofline:.2} of the roofline",
            self.name,
            t * 1e3,
            self.bytes / t / 1e9,
            100.0 / over_read,
            self.operations / t / 1e9,
            100.0 / over_peak,
        );
        match (self.ggml, self.nmse) {
            (Some(ggml), Some(nmse)) => {
                println!("; ggml {:8.2} ms: {:.2} times as long, NMSE {nmse:.1e}", ggml * 1e3, ggml / t)
            }
            _ => println!(),
        }
    }
}

/// One of criterion's samples: what was measured before it, and times in seconds.
struct Sample<T> {
    before: T,
    best: f64,
    average: f64,
}

/// Times `run`; no samples where criterion's filter leaves it out.
fn timed<T>(
    c: &mut Criterion,
    id: BenchmarkId,
    bytes: f64,
    mut before: impl FnMut() -> T,
    mut run: impl FnMut(),
) -> Vec<Sample<T>> {
    let mut samples = vec![];
    let mut group = c.benchmark_group("ffn");
    group.throughput(criterion::Throughput::Bytes(bytes as u64));
    group.bench_function(id, |b| {
        b.iter_custom(|n| {
            let before = before();
            let mut best = Duration::MAX;
            let mut one = || {
                let start = Instant::now();
                run();
                let time = start.elapsed();
                best = best.min(time);
                time
            };
            let all: Duration = (0..n).map(|_| one()).sum();
            samples.push(Sample { before, best: best.as_secs_f64(), average: all.as_secs_f64() / n as f64 });
            all
        });
    });
    group.finish();
    samples
}

/// The best of some times; none of none.
fn best<T>(samples: &[Sample<T>]) -> Option<f64> {
    samples.iter().map(|s| s.best).reduce(f64::min)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
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
            let peak = |of: &Ceilings| if dtype == DType::Q8_0 { of.int8.rate } else { of.bf16.rate };
            let at_first = Ceilings::measure(isa, &pool, memory.bytes(), 5);
            let ceilings = || Ceilings::on_average(isa, &pool, memory.bytes());
            let mut bench = |case: String, shape: Shape, ids: Vec<i32>| {
                let name = format!("{}/{dtype:?}/{case}", shape.name);
                let mut layer = Layer::new(shape, dtype, memory.bytes(), ids);
                let (bytes, operations) = (layer.bytes_read(), layer.operations());
                let id = |who: &str| BenchmarkId::new(who, &name);
                let ours = timed(&mut c, id("hina"), bytes, ceilings, || layer.run(isa, &pool));
                let Some(first) = best(&ours) else { return };
                let theirs = ggml.as_ref().and_then(|ggml| {
                    let theirs = ggml.layer(shape, layer.weights, &layer.x, &layer.ids, &layer.router);
                    let time = best(&timed(&mut c, id("ggml"), bytes, || (), || theirs.run()));
                    time.map(|time| (time, nmse(&layer.dst, &theirs.result())))
                });
                let (ggml, nmse) = theirs.unzip();
                let over = |of: &dyn Fn(&Ceilings) -> f64| median(ours.iter().map(|s| s.average / of(&s.before)));
                let read = |at: &Ceilings| bytes / at.read;
                let arithmetic = |at: &Ceilings| operations / peak(at);
                let ours = Timed {
                    best: first,
                    over_read: over(&read),
                    over_peak: over(&arithmetic),
                    over_roofline: over(&|at| read(at).max(arithmetic(at))),
                };
                lines.push(Line { name, bytes, operations, ours, ggml, nmse, ceilings: at_first });
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
