//! How fast the products are, beside how fast memory can be read and how fast the tiles multiply.
//!
//! Every thread has weights and tokens of its own and starts each pass with the others; the slowest counts. What is compared is
//! timed in turn, many times, and the best pass of each is given: other users of the machine then disturb all alike.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use ggml_hina::isa::{Amx, Avx512, Isa};
use ggml_hina::kernels::Engine;
use ggml_hina::kernels::amx::AmxEngine;
use ggml_hina::kernels::amx::tile::{Config, Session};
use ggml_hina::moe::MulMat;
use ggml_hina::pack::PANEL;
use ggml_hina::team;
use ggml_hina::tensor::{DType, View, ViewMut, Weights};

use crate::memory::{Aligned, Packed, Random, read_all};

/// Columns of the models of the paper's Table 3: n_embd and n_ff_exp of Qwen3-30B-A3B, Qwen3-235B-A22B, Mixtral-8x7B, DeepSeek-V3.
const COLUMNS: [usize; 6] = [768, 1536, 2048, 4096, 7168, 14336];
/// Passes of each measurement.
const ROUNDS: usize = 9;
/// Rows of a block.
const BLOCK: usize = 64;
/// Bytes off the cache lines: GGUF promises 32-byte alignment only.
const OFFSETS: [usize; 2] = [0, 32];
/// Whole matrices `[n, k]`: Qwen3-30B-A3B's query projection and one expert's gate, Mixtral's down.
const MATRICES: [[usize; 2]; 3] = [[4096, 2048], [768, 2048], [4096, 14336]];
/// Tokens that the whole matrices are multiplied with.
const TOKENS: [usize; 7] = [1, 16, 32, 64, 128, 512, 2048];

/// What can be reached at most.
#[derive(Clone, Copy)]
struct Ceilings {
    /// Bytes a second.
    read: f64,
    /// FLOP a second of `tdpbf16ps`; 0 without AMX.
    tiles: f64,
}

pub fn run(amx: Option<Amx>, avx512: Avx512, threads: usize, bytes: usize) {
    let [one, all] = [1, threads].map(|threads| ceilings(amx, avx512, threads, bytes));
    println!("memory reads: {:.1} GB/s with 1 thread, {:.1} GB/s with {threads}", one.read / 1e9, all.read / 1e9);
    println!("tdpbf16ps: {:.2} TFLOP/s with 1 thread, {:.2} with {threads}", one.tiles / 1e12, all.tiles / 1e12);
    if let Some(amx) = amx {
        streams(AmxEngine::new(amx), "AMX", avx512, threads, bytes, all);
    }
    streams(avx512, "AVX-512", avx512, threads, bytes, all);
    let isas: Vec<_> =
        amx.map(|amx| ("AMX", Isa::Amx(amx))).into_iter().chain([("AVX-512", Isa::Avx512(avx512))]).collect();
    for dtype in [DType::Bf16, DType::Q8_0] {
        matrices(&isas, dtype, threads, bytes);
    }
}

fn ceilings(amx: Option<Amx>, avx512: Avx512, threads: usize, bytes: usize) -> Ceilings {
    let read = timed(threads, |_| {
        let area = Aligned::new(bytes);
        move || {
            black_box(read_all(avx512, area.bytes()));
        }
    });
    const PRODUCTS: usize = 4 << 14;
    let tiles = amx.map(|amx| {
        timed(threads, |_| {
            move || {
                let mut session = Session::begin(amx);
                let tiles = session.configure(&Config::new([[16, 64]; 8]));
                for _ in 0..PRODUCTS / 4 {
                    tiles.dp_bf16::<0, 4, 5>();
                    tiles.dp_bf16::<1, 4, 6>();
                    tiles.dp_bf16::<2, 7, 5>();
                    tiles.dp_bf16::<3, 7, 6>();
                }
            }
        })
    });
    let flop = (threads * PRODUCTS * 2 * 16 * 16 * 32) as f64;
    Ceilings { read: (threads * bytes) as f64 / read, tiles: tiles.map_or(0.0, |time| flop / time) }
}

/// The products of blocks of rows that come from memory.
fn streams<E: Engine>(engine: E, name: &str, avx512: Avx512, threads: usize, bytes: usize, most: Ceilings) {
    for dtype in [DType::Bf16, DType::Q8_0] {
        for offset in OFFSETS {
            println!("\n{name}, {dtype:?}, weights {offset} bytes off the cache lines: GB/s (of the reads' speed)");
            println!("{:>8} {:>16} {:>16} {:>16} {:>16}", "k", "1 token", "4", "16", "32");
            for k in COLUMNS {
                let rows = (bytes / dtype.row_bytes(k) / BLOCK).max(1) * BLOCK;
                let cells = [1, 4, 16, 32].map(|tokens| {
                    let time = product(engine, avx512, dtype, [k, rows, tokens, offset], threads);
                    let speed = (threads * rows * dtype.row_bytes(k)) as f64 / time;
                    format!("{:.1} ({:.0}%)", speed / 1e9, 100.0 * speed / most.read)
                });
                println!("{k:>8} {:>16} {:>16} {:>16} {:>16}", cells[0], cells[1], cells[2], cells[3]);
            }
        }
    }
}

/// Seconds for one pass over `rows` rows in blocks, each of `threads` threads with its own.
fn product<E: Engine>(
    engine: E,
    avx512: Avx512,
    dtype: DType,
    [k, rows, tokens, offset]: [usize; 4],
    threads: usize,
) -> f64 {
    timed(threads, |ith| {
        let mut random = Random(ith as u64 + 1);
        let mut bytes = Aligned::new(offset + rows * dtype.row_bytes(k));
        random.weights(dtype, &mut bytes.bytes_mut()[offset..]);
        let x: Vec<_> = (0..tokens).map(|_| random.vec(k)).collect();
        let packed = Packed::new(avx512, dtype, k, &x);
        let c = Aligned::new(tokens.div_ceil(PANEL) * BLOCK * PANEL * 4);
        move || {
            let w = Weights::contiguous(dtype, &bytes.bytes()[offset..], [k, rows, 1]);
            let session = &mut engine.begin();
            for row in (0..rows).step_by(BLOCK) {
                // SAFETY: C has the size that the product asks for.
                unsafe { engine.product(session, w.rows(0, row, BLOCK), packed.panels(), c.ptr().cast(), false) };
            }
            black_box(c.f32());
        }
    })
}

/// Whole `MUL_MAT`s of all threads together, each with the next of so many matrices that none is in a cache.
fn matrices(isas: &[(&str, Isa)], dtype: DType, threads: usize, bytes: usize) {
    println!("\nMUL_MAT, {dtype:?}, {threads} threads: TFLOP/s (GB/s of weights)");
    print!("{:>8} {:>13} {:>6}", "engine", "n x k", "offset");
    TOKENS.iter().for_each(|tokens| print!(" {:>12}", format!("{tokens} tok")));
    println!();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
    for [n, k] in MATRICES {
        let (row, most) = (dtype.row_bytes(k), TOKENS[TOKENS.len() - 1]);
        let experts = (threads * bytes / (n * row)).max(1);
        let mut random = Random(7);
        let mut area = Aligned::new(64 + experts * n * row);
        random.weights(dtype, area.bytes_mut());
        let mut x = Aligned::new(most * k * 4);
        x.f32_mut().fill_with(|| random.f32());
        let y = Aligned::new(most * n * 4);
        let mut times = vec![[f64::MAX; TOKENS.len()]; isas.len() * OFFSETS.len()];
        let mut next = 0;
        for _ in 0..ROUNDS {
            for (t, tokens) in TOKENS.into_iter().enumerate() {
                for (i, &(_, isa)) in isas.iter().enumerate() {
                    for (o, offset) in OFFSETS.into_iter().enumerate() {
                        let w = Weights::contiguous(dtype, &area.bytes()[offset..][next * n * row..], [k, n, 1]);
                        next = (next + 1) % experts;
                        let time = &mut times[i * OFFSETS.len() + o][t];
                        *time = time.min(mul_mat(&pool, isa, w, tokens, &x, &y));
                    }
                }
            }
        }
        for (i, row) in times.iter().enumerate() {
            let (name, offset) = (isas[i / OFFSETS.len()].0, OFFSETS[i % OFFSETS.len()]);
            print!("{name:>8} {:>13} {offset:>6}", format!("{n} x {k}"));
            for (time, tokens) in row.iter().zip(TOKENS) {
                let speed = |amount: usize| amount as f64 / time;
                let (flop, bytes) = (speed(2 * n * k * tokens), speed(n * dtype.row_bytes(k)));
                print!(" {:>12}", format!("{:.2} ({:.0})", flop / 1e12, bytes / 1e9));
            }
            println!();
        }
    }
}

/// Seconds for one `MUL_MAT`.
fn mul_mat(pool: &rayon::ThreadPool, isa: Isa, w: Weights<'_>, tokens: usize, x: &Aligned, y: &Aligned) -> f64 {
    let view = |k: usize| ([k, tokens, 1, 1], [4, 4 * k, 4 * k * tokens, 4 * k * tokens]);
    let ((x_ne, x_nb), (y_ne, y_nb)) = (view(w.k), view(w.n));
    // SAFETY: both areas have room for the most tokens.
    let op = unsafe {
        let x = View::from_raw(DType::F32, x.ptr(), x_ne, x_nb);
        MulMat::new(w, 1, x, ViewMut::from_raw(y.ptr(), y_ne, y_nb))
    };
    let scratch = Aligned::new(op.scratch_bytes(pool.current_num_threads()));
    let at = scratch.ptr().addr();
    let start = Instant::now();
    // SAFETY: scratch of the size asked for, used by this team alone.
    team::run_on(pool, &|w| unsafe { op.run(isa, &w, at as *mut u8) }.expect("ids in range"));
    start.elapsed().as_secs_f64()
}

/// Seconds for a pass of what `prepare` makes for each thread: the best of some passes that all threads start together.
fn timed<W: FnMut()>(threads: usize, prepare: impl Fn(usize) -> W + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let run = |ith: usize| {
        let mut pass = prepare(ith);
        pass();
        let passes = (0..ROUNDS).map(|_| {
            barrier.wait();
            let start = Instant::now();
            pass();
            start.elapsed().as_secs_f64()
        });
        passes.collect::<Vec<_>>()
    };
    let all: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|ith| scope.spawn(move || run(ith))).collect();
        all.into_iter().map(|t| t.join().expect("a thread that ends well")).collect()
    });
    let slowest = |round: usize| all.iter().map(|times| times[round]).fold(0.0, f64::max);
    (0..ROUNDS).map(slowest).fold(f64::MAX, f64::min)
}
