//! What following the pages costs where it wins nothing: expert products on one node, plainly and by the segments of a
//! made-up machine of two nodes.
//!
//! `cargo bench --no-default-features --bench numa`, or with part of a name: `-- numa/amx/30b-gate/q8_0/8x16` (8 experts with 16 tokens
//! each, pages of 4 KiB in turn), `…/8x16/run64k` and `…/8x16/run2m` (runs of so many bytes); with a `$` behind it, a name's end:
//! `numa/amx/30b-gate/q8_0/8x1$`. The ways run in turn, because a shared machine drifts, and the median of the ratios counts:
//!
//! * *segments* to *plain*: what segments cost; below 1.03 is the aim. On two cores of a Xeon 6, BF16, AMX, one token: 1.06 to 1.20 with
//!   pages of 4 KiB, 1.04 to 1.06 with runs of 64 KiB, 1.03 to 1.07 with 2 MiB (docs/NUMA.md has all);
//! * *one node* to *plain*: where all pages are on one node the normal path runs, so this is the noise;
//! * *reads* and *floor*: reads of as many experts, one half by each thread; the same of every other page by each, to that. No code that
//!   follows the pages is faster.

use std::arch::x86_64::*;
use std::hint::black_box;
use std::time::Instant;

use ggml_hina::isa::Isa;
use ggml_hina::moe::{Ids, MulMatId, OnNodes};
use ggml_hina::numa::tally::Tally;
use ggml_hina::numa::tensors::{Numa, Sim};
use ggml_hina::numa::threads::{CpuSet, Mode, Seats};
use ggml_hina::team::{self, Worker};
use ggml_hina::tensor::{DType, View, ViewMut, Weights};

/// Nodes of the made-up machine.
const NODES: usize = 2;
const ROUNDS: usize = 31;
/// Experts in use.
const USED: [usize; 2] = [8, 64];
const PAGE: usize = 4096;
/// Pages that plain reads read side by side.
const STREAMS: usize = 8;
/// Tokens of each expert in use.
const TOKENS: [usize; 9] = [1, 2, 4, 5, 8, 16, 32, 64, 128];
/// Bytes in a row on one node, and how a case says so: single pages, large folios of the page cache, huge pages.
const RUNS: [(usize, &str); 3] = [(PAGE, ""), (64 << 10, "/run64k"), (2 << 20, "/run2m")];

/// Memory filled with what are sane values in both types of weights.
struct Memory(Vec<Line>);

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read as bytes")] [u64; 8]);

impl Memory {
    fn new(dtype: DType, bytes: usize) -> Self {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            match dtype {
                // Bytes of 0x00 to 0x3f: f16 scales between 0 and 1 or so.
                DType::Q8_0 => (state >> 3) & 0x3f3f_3f3f_3f3f_3f3f,
                // Values near 2^-6, none of them a denormal: Intel's FMAs take hundreds of cycles for one.
                _ => state & 0x807f_807f_807f_807f | 0x3c80_3c80_3c80_3c80,
            }
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
    let patterns: Vec<String> = args.iter().filter(|a| !a.starts_with("--")).map(|a| a.to_lowercase()).collect();
    // `cargo bench -- peers` runs this program too.
    let wanted = |path: &str| {
        let whole = |p: &String| p.strip_suffix('$').is_some_and(|p| path.ends_with(p));
        patterns.is_empty() || patterns.iter().any(|p| path.contains(p) || whole(p))
    };
    let threads = std::env::var("BENCH_THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(NODES);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).start_handler(keep).build().expect("a thread pool");
    // Gate and down of Qwen3-30B-A3B and of Qwen3-235B-A22B, more experts than fit in any cache.
    for (name, k, n, experts) in [
        ("30b-gate", 2048, 768, 512),
        ("30b-down", 768, 2048, 512),
        ("235b-gate", 4096, 1536, 128),
        ("235b-down", 1536, 4096, 128),
    ] {
        for dtype in [DType::Bf16, DType::Q8_0] {
            let cases: Vec<_> = Isa::all()
                .into_iter()
                .flat_map(|isa| USED.map(|used| (isa, used)))
                .flat_map(|(isa, used)| TOKENS.map(|tokens| (isa, [used, tokens])))
                .flat_map(|(isa, shape)| RUNS.map(|(run, part)| (isa, shape, run, part)))
                .map(|(isa, [used, tokens], run, part)| {
                    let engine = isa.name();
                    let path = format!("numa/{engine}/{name}/{dtype:?}/{used}x{tokens}{part}").to_lowercase();
                    (isa, [used, tokens], run, path)
                })
                .filter(|(.., path)| wanted(path))
                .collect();
            if cases.is_empty() {
                continue;
            }
            let memory = Memory::new(dtype, dtype.row_bytes(k) * n * experts + 2 * PAGE);
            // As a GGUF's tensor lies: aligned to 32 bytes and not more, and no row begins with a page.
            let at = memory.bytes().as_ptr().addr().wrapping_neg() % PAGE + 37 * 32;
            let w = Weights::contiguous(dtype, &memory.bytes()[at..], [k, n, experts]);
            for (isa, shape, run, path) in cases {
                let [plain, segments, one_node, reads, floor] = measure(isa, &pool, w, shape, run);
                println!(
                    "{path:36} plain {plain:7.3} ms; segments x {segments:.3}, one node x {one_node:.3}; reads {reads:7.3} ms, floor x {floor:.3}"
                );
            }
        }
    }
}

/// Keeps a thread on a CPU of its own: products take less time than Linux does to notice that two threads wait for one CPU.
fn keep(thread: usize) {
    if let Some(allowed) = CpuSet::of_this_thread() {
        let cpus: Vec<usize> = (0..1024).filter(|&cpu| allowed.contains(cpu)).collect();
        let _ = CpuSet::new([cpus[thread % cpus.len()]]).bind();
    }
}

/// Experts that were not used for as long as can be, so that no cache has them.
struct Fresh {
    experts: usize,
    at: usize,
}

impl Fresh {
    fn next(&mut self, n: usize) -> Vec<usize> {
        // Scattered, and all of them before any comes again: 37 has no factor in common with their number.
        self.at += n;
        (self.at - n..self.at).map(|i| i * 37 % self.experts).collect()
    }
}

/// Of the head of this file: milliseconds of the plain path, two ratios, milliseconds of reads, the floor.
fn measure(isa: Isa, pool: &rayon::ThreadPool, w: Weights<'_>, [used, tokens]: [usize; 2], run: usize) -> [f64; 5] {
    let x = vec![0.5f32; w.k * tokens];
    let ne = [w.k, 1, tokens, 1];
    // SAFETY: as long as the shape says.
    let view = unsafe { View::from_raw(DType::F32, x.as_ptr().cast(), ne, f32_nb(ne)) };
    let mut dst = vec![0f32; w.n * used * tokens];
    let ne = [w.n, used, tokens, 1];
    // SAFETY: as above.
    let to = unsafe { ViewMut::from_raw(dst.as_mut_ptr().cast(), ne, f32_nb(ne)) };

    // Runs in turn, and all on the first node.
    let machines = [run, 1 << 46].map(|run| Numa::new(Mode::Auto, Some(Sim { nodes: NODES, run })).expect("nodes"));
    let (seats, tally) = (Seats::new(pool.current_num_threads()), Tally::new());
    let op = |numa: Option<usize>, ids| {
        let op = MulMatId::new(w, view, ids, to);
        let nodes = |i: usize| OnNodes { numa: &machines[i], seats: &seats, tally: &tally, count_plain: false };
        numa.map_or(op, |i| op.follow_pages(nodes(i)))
    };
    let ids = |id: &[i32]| {
        assert_eq!(id.len(), used * tokens);
        // SAFETY: as long as the shape says; `id` outlives each operation below.
        unsafe { Ids::from_raw(id.as_ptr().cast(), used, tokens, [4, 4 * used]) }
    };
    // One memory for all, as ggml's graphs have it, and no page of it is new when time counts.
    let zeros = vec![0; used * tokens];
    let most = [None, Some(0), Some(1)].map(|numa| op(numa, ids(&zeros)).scratch_bytes(pool.current_num_threads()));
    let scratch = Memory::new(DType::Q8_0, most.into_iter().max().unwrap_or(0));

    let mut fresh = Fresh { experts: w.experts, at: 0 };
    let product = |numa: Option<usize>, fresh: &mut Fresh| {
        let experts = fresh.next(used);
        let id: Vec<i32> = (0..used * tokens).map(|i| experts[i % used] as i32).collect();
        let op = op(numa, ids(&id));
        milliseconds(pool, &|worker| {
            // SAFETY: as large as any of the operations asked for.
            unsafe { op.run(isa, worker, scratch.ptr()) }.expect("good ids");
        })
    };
    let read = |by_page: bool, fresh: &mut Fresh| {
        let experts = fresh.next(used);
        milliseconds(pool, &|worker| experts.iter().for_each(|&expert| read(w, expert, worker, by_page)))
    };
    let mut ratios: [Vec<f64>; 5] = Default::default();
    for _ in 0..ROUNDS {
        let plain = product(None, &mut fresh);
        let segments = product(Some(0), &mut fresh);
        let one_node = product(Some(1), &mut fresh);
        let reads = read(false, &mut fresh);
        let all = [plain, segments / plain, one_node / plain, reads, read(true, &mut fresh) / reads];
        ratios.iter_mut().zip(all).for_each(|(all, one)| all.push(one));
    }
    ratios.map(|mut all| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    })
}

/// How long a team takes.
fn milliseconds(pool: &rayon::ThreadPool, work: &(impl Fn(&Worker<'_>) + Sync)) -> f64 {
    let start = Instant::now();
    team::run_on(pool, &|worker| work(&worker));
    start.elapsed().as_secs_f64() * 1e3
}

/// Reads this worker's part of an expert: its half, or every other page.
fn read(w: Weights<'_>, expert: usize, worker: &Worker<'_>, by_page: bool) {
    let first = w.rows(expert, 0, 1).data.map_addr(|at| at.next_multiple_of(PAGE));
    let mine = worker.share(w.expert_bytes() / PAGE - 1);
    let page = |i: usize| if by_page { i * worker.nth() + worker.ith() } else { mine.start + i };
    for i in (0..mine.len() / STREAMS * STREAMS).step_by(STREAMS) {
        let pages = std::array::from_fn(|stream| first.wrapping_add(page(i + stream) * PAGE));
        // SAFETY: every engine's CPU has AVX2; pages inside the expert.
        black_box(unsafe { sum(pages) });
    }
}

/// Sums pages side by side, which is read faster than one after the other.
#[target_feature(enable = "avx2")]
// SAFETY: the pages are readable.
unsafe fn sum(pages: [*const u8; STREAMS]) -> [__m256i; STREAMS] {
    let mut acc = [_mm256_setzero_si256(); STREAMS];
    for line in (0..PAGE).step_by(64) {
        for (acc, page) in acc.iter_mut().zip(pages) {
            // SAFETY: a line of the page.
            let line = unsafe { _mm256_load_si256(page.add(line).cast()) };
            *acc = _mm256_add_epi32(*acc, line);
        }
    }
    acc
}
