//! How fast the products are, beside how fast memory can be read.
//!
//! Every thread has weights and tokens of its own and starts each pass with the others; the slowest counts.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use ggml_hina::isa::{Amx, Avx512};
use ggml_hina::kernels::Engine;
use ggml_hina::kernels::amx::AmxEngine;
use ggml_hina::pack::PANEL;
use ggml_hina::tensor::{DType, Weights};

use crate::memory::{Aligned, Packed, Random};

/// Columns of the models of the paper's Table 3: n_embd and n_ff_exp of Qwen3-30B-A3B, Qwen3-235B-A22B, Mixtral-8x7B, DeepSeek-V3.
const COLUMNS: [usize; 6] = [768, 1536, 2048, 4096, 7168, 14336];
/// How long a measurement lasts, about.
const LENGTH: Duration = Duration::from_millis(300);
/// Rows of a block.
const BLOCK: usize = 64;

pub fn run(amx: Option<Amx>, avx512: Avx512, threads: usize, bytes: usize) {
    let one = read(1, bytes);
    let all = read(threads, bytes);
    println!("memory reads: {one:.1} GB/s with 1 thread, {all:.1} GB/s with {threads}");
    if let Some(amx) = amx {
        engine(AmxEngine::new(amx), "AMX", avx512, threads, bytes, all);
    }
    engine(avx512, "AVX-512 panels", avx512, threads, bytes, all);
}

fn engine<E: Engine>(engine: E, name: &str, avx512: Avx512, threads: usize, bytes: usize, read: f64) {
    for dtype in [DType::Bf16, DType::Q8_0] {
        println!("\n{name}, {dtype:?}: weights from memory with {threads} threads, GB/s (of the reads' speed)");
        println!("{:>8} {:>16} {:>16} {:>16} {:>16}", "k", "1 token", "4", "16", "32");
        for k in COLUMNS {
            let rows = (bytes / dtype.row_bytes(k) / BLOCK).max(1) * BLOCK;
            let cells = [1, 4, 16, 32].map(|tokens| {
                let time = product(engine, avx512, dtype, [k, rows, tokens], threads);
                let speed = (threads * rows * dtype.row_bytes(k)) as f64 / time / 1e9;
                format!("{speed:.1} ({:.0}%)", 100.0 * speed / read)
            });
            println!("{k:>8} {:>16} {:>16} {:>16} {:>16}", cells[0], cells[1], cells[2], cells[3]);
        }
        println!("{name}, {dtype:?}: weights from L2, TFLOP/s");
        println!("{:>8} {:>16} {:>16} {:>16} {:>16}", "k", "32 tokens, 1 thr", "512, 1 thr", "32", "512");
        for k in [2048, 4096] {
            let cells = [(1, 32), (1, 512), (threads, 32), (threads, 512)].map(|(threads, tokens)| {
                let time = product(engine, avx512, dtype, [k, BLOCK, tokens], threads);
                format!("{:.2}", (2 * threads * k * BLOCK * tokens) as f64 / time / 1e12)
            });
            println!("{k:>8} {:>16} {:>16} {:>16} {:>16}", cells[0], cells[1], cells[2], cells[3]);
        }
    }
}

/// Seconds for one pass over `rows` rows in blocks, each of `threads` threads with its own.
fn product<E: Engine>(engine: E, avx512: Avx512, dtype: DType, [k, rows, tokens]: [usize; 3], threads: usize) -> f64 {
    timed(threads, |ith| {
        let mut random = Random(ith as u64 + 1);
        let mut bytes = Aligned::new(rows * dtype.row_bytes(k));
        random.weights(dtype, bytes.bytes_mut());
        let x: Vec<_> = (0..tokens).map(|_| random.vec(k)).collect();
        let packed = Packed::new(avx512, dtype, k, &x);
        let c = Aligned::new(tokens.div_ceil(PANEL) * BLOCK * PANEL * 4);
        move || {
            let w = Weights::contiguous(dtype, bytes.bytes(), [k, rows, 1]);
            let session = &mut engine.begin();
            for row in (0..rows).step_by(BLOCK) {
                // SAFETY: C has the size that the product asks for.
                unsafe { engine.product(session, w.rows(0, row, BLOCK), packed.panels(), c.ptr().cast(), false) };
            }
            black_box(c.f32());
        }
    })
}

/// GB/s of plain reads, each of `threads` threads with `bytes` of its own.
fn read(threads: usize, bytes: usize) -> f64 {
    let time = timed(threads, |_| {
        let area = Aligned::new(bytes);
        move || {
            let sums = area.f32().chunks_exact(64).fold([0u32; 64], |mut sums, line| {
                sums.iter_mut().zip(line).for_each(|(sum, v)| *sum = sum.wrapping_add(v.to_bits()));
                sums
            });
            black_box(sums);
        }
    });
    (threads * bytes) as f64 / time / 1e9
}

/// Seconds for a pass of what `prepare` makes for each thread: passes for about [`LENGTH`] that all threads start together.
fn timed<W: FnMut()>(threads: usize, prepare: impl Fn(usize) -> W + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let passes = std::sync::OnceLock::new();
    let slowest = std::thread::scope(|scope| {
        let run = |ith: usize| {
            let mut pass = prepare(ith);
            pass();
            barrier.wait();
            let start = Instant::now();
            pass();
            let once = start.elapsed();
            barrier.wait();
            let passes = *passes.get_or_init(|| (LENGTH.as_nanos() / once.as_nanos().max(1)).clamp(1, 1 << 24) as u32);
            barrier.wait();
            let start = Instant::now();
            (0..passes).for_each(|_| pass());
            start.elapsed() / passes
        };
        let all: Vec<_> = (0..threads).map(|ith| scope.spawn(move || run(ith))).collect();
        all.into_iter().map(|t| t.join().expect("a thread that ends well")).max()
    });
    slowest.unwrap_or_default().as_secs_f64()
}
