//! Attention on a cache that lies in memory, beside the read bandwidth of the same machine: throughput counts the bytes of K
//! and V once. `cargo bench --bench attention -- PATTERN`; names are `type/d/group/depth`.

#[path = "common/meter.rs"]
#[allow(dead_code, reason = "other benches use the rest")]
mod meter;

use std::hint::black_box;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use ggml_hina::attention::{FlashAttn, Params};
use ggml_hina::isa::{Avx512, Isa};
use ggml_hina::team;
use ggml_hina::tensor::{DType, View, ViewMut};
use half::{bf16, f16};
use rayon::ThreadPool;

/// Bytes that one pass touches at least, so that no cache holds them all.
const BEYOND_CACHES: usize = 640 << 20;
/// Bytes of the buffer that caches lie in.
const MEMORY: usize = 1 << 30;

/// One shape of cache and queries.
#[derive(Clone, Copy)]
struct Shape {
    name: &'static str,
    dtype: DType,
    d: usize,
    /// `None`: V is the first 512 elements of K's rows.
    dv: Option<usize>,
    kv_heads: usize,
    group: usize,
    n_q: usize,
    depth: usize,
}

impl Shape {
    fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.d)
    }

    fn k_bytes(&self) -> usize {
        self.row_bytes() * self.kv_heads * self.depth
    }

    /// Bytes of K and V, each counted once.
    fn bytes(&self) -> usize {
        self.k_bytes() * if self.dv.is_some() { 2 } else { 1 }
    }
}

/// Bytes that begin at a cache line, as ggml's buffers do: a load that straddles lines costs as much as two.
struct Memory {
    bytes: Vec<u8>,
    start: usize,
}

impl std::ops::Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..][..MEMORY]
    }
}

/// `MEMORY` bytes that are small values whatever type they are read as: a short pattern over and over.
fn memory(dtype: DType) -> Memory {
    let value = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 64.0;
    let unit: Vec<u8> = match dtype {
        DType::F32 => (0..101).flat_map(|i| value(i).to_le_bytes()).collect(),
        DType::F16 => (0..101).flat_map(|i| f16::from_f32(value(i)).to_le_bytes()).collect(),
        DType::Bf16 => (0..101).flat_map(|i| bf16::from_f32(value(i)).to_le_bytes()).collect(),
        DType::Q8_0 => {
            let block = |b: usize| {
                let scale = f16::from_f32(1.0 / 127.0).to_le_bytes();
                scale.into_iter().chain((0..32).map(move |i| (b * 32 + i) as u8))
            };
            (0..101).flat_map(block).collect()
        }
    };
    let mut bytes: Vec<u8> = Vec::with_capacity(64 + MEMORY + unit.len());
    let start = bytes.as_ptr().align_offset(64);
    bytes.resize(start, 0);
    while bytes.len() < start + MEMORY {
        bytes.extend_from_slice(&unit);
    }
    Memory { bytes, start }
}

fn view(dtype: DType, data: *const u8, ne: [usize; 4], heads_inside: bool) -> View<'static> {
    let row = dtype.row_bytes(ne[0]);
    let [n1, n2] = if heads_inside { [ne[2], 1] } else { [1, ne[1]] };
    let nb = [dtype.row_bytes(dtype.block()), row * n1, row * n2, row * ne[1] * ne[2]];
    // SAFETY: callers hold the memory for the whole bench.
    unsafe { View::from_raw(dtype, data, ne, nb) }
}

/// One operation for each cache that fits the memory: the layers of a model.
fn layers<'a>(s: Shape, memory: &'a [u8], q: &'a [f32], mask: &'a [u16], dst: &'a mut [f32]) -> Vec<FlashAttn<'a>> {
    let heads = s.kv_heads * s.group;
    let dv = s.dv.unwrap_or(512);
    let count = BEYOND_CACHES.div_ceil(s.bytes()).min(MEMORY / s.bytes()).max(1);
    let dst = dst.as_mut_ptr();
    let layer = |i: usize| {
        let data = memory[i * s.bytes()..][..s.bytes()].as_ptr();
        let k = view(s.dtype, data, [s.d, s.depth, s.kv_heads, 1], true);
        let mut v = k;
        if s.dv.is_some() {
            v = view(s.dtype, data.wrapping_add(s.k_bytes()), [dv, s.depth, s.kv_heads, 1], true);
        }
        v.ne[0] = dv;
        let (ne, row) = ([dv, heads, s.n_q, 1], 4 * dv);
        let params = Params {
            q: view(DType::F32, q.as_ptr().cast(), [s.d, s.n_q, heads, 1], true),
            k,
            v,
            mask: Some(view(DType::F16, mask.as_ptr().cast(), [s.depth, s.n_q, 1, 1], false)),
            sinks: None,
            scale: 1.0 / (s.d as f32).sqrt(),
            max_bias: 0.0,
            logit_softcap: 0.0,
            // SAFETY: the bench sized it for the largest shape.
            dst: unsafe { ViewMut::from_raw(dst.cast(), ne, [4, row, row * heads, row * heads * s.n_q]) },
        };
        FlashAttn::new(params).expect("a shape we handle")
    };
    (0..count).map(layer).collect()
}

fn case(group: &mut BenchmarkGroup<'_, WallTime>, isa: Isa, pool: &ThreadPool, memory: &[u8], s: Shape) {
    let heads = s.kv_heads * s.group;
    let q: Vec<f32> = (0..s.d * heads * s.n_q).map(|i| (i * 31 % 97) as f32 / 97.0 - 0.5).collect();
    let mask = vec![0u16; s.depth * s.n_q];
    let mut dst = vec![0f32; s.dv.unwrap_or(512) * heads * s.n_q];
    let ops = layers(s, memory, &q, &mask, &mut dst);
    let mut scratch = vec![0u8; ops[0].scratch_bytes(pool.current_num_threads()) + 64];
    let offset = scratch.as_ptr().align_offset(64);
    let scratch = scratch[offset..].as_mut_ptr().addr();
    group.throughput(Throughput::Bytes((s.bytes() * ops.len()) as u64));
    let name = format!("{}/{}/g{}/q{}/{}", s.name, s.d, s.group, s.n_q, s.depth);
    group.bench_function(name, |b| {
        b.iter(|| {
            team::run_on(pool, &|w| {
                for op in &ops {
                    // SAFETY: views and scratch live, the scratch is as large as asked for; all workers run this loop.
                    unsafe { op.run(isa, &w, std::ptr::with_exposed_provenance_mut(scratch)) };
                    w.barrier();
                }
            });
        });
    });
}

/// The bound: every thread sums its share of the memory.
fn read(group: &mut BenchmarkGroup<'_, WallTime>, pool: &ThreadPool, memory: &[u8]) {
    group.throughput(Throughput::Bytes(memory.len() as u64));
    let wide = Avx512::detect().is_some();
    group.bench_function("read", |b| {
        b.iter(|| {
            team::run_on(pool, &|w| {
                // SAFETY: every engine's CPU has AVX2.
                black_box(unsafe { meter::sum(wide, &memory[w.share(memory.len())]) });
            });
        });
    });
}

fn shapes() -> Vec<Shape> {
    let base =
        Shape { name: "f16", dtype: DType::F16, d: 128, dv: Some(128), kv_heads: 4, group: 8, n_q: 1, depth: 4096 };
    let mut all = Vec::new();
    for depth in [512, 4096, 16384, 65536] {
        all.push(Shape { depth, ..base });
    }
    for (d, group) in [(64, 1), (64, 8), (128, 1), (128, 4), (128, 16), (256, 1), (256, 4), (256, 8), (256, 16)] {
        all.push(Shape { d, dv: Some(d), group, ..base });
    }
    let types = [("bf16", DType::Bf16), ("q8_0", DType::Q8_0), ("f32", DType::F32)];
    for (name, dtype) in types {
        all.push(Shape { name, dtype, ..base });
    }
    for (name, dtype) in [("f16", DType::F16), ("bf16", DType::Bf16), ("q8_0", DType::Q8_0)] {
        all.push(Shape { name, dtype, d: 576, dv: None, kv_heads: 1, group: 128, ..base });
    }
    for n_q in [8, 64] {
        all.push(Shape { n_q, ..base });
    }
    all
}

fn attention(c: &mut Criterion) {
    let Some(isa) = Isa::best() else { return println!("skipped: this CPU has no AVX2") };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
    let mut group = c.benchmark_group("attention");
    group.sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_secs(1));
    let all = shapes();
    for dtype in [DType::F16, DType::Bf16, DType::Q8_0, DType::F32] {
        let memory = memory(dtype);
        if dtype == DType::F16 {
            read(&mut group, &pool, &memory);
        }
        for shape in all.iter().filter(|s| s.dtype == dtype) {
            case(&mut group, isa, &pool, &memory, *shape);
        }
    }
    group.finish();
}

criterion_group!(benches, attention);
criterion_main!(benches);
