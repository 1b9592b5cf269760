//! What the AMX kernels may spend, held against the emulator's counters: loads, products, stores and configurations.
//!
//! The counters belong to the process, so these tests take turns. On a CPU with AMX of its own nothing can be counted.

use std::alloc::{Layout, alloc_zeroed};
use std::sync::{Mutex, MutexGuard};

use amx_emu::{Mode, Op, Stats};
use ggml_hina::attention::{FlashAttn, Params};
use ggml_hina::isa::{Amx, Isa};
use ggml_hina::kernels::Engine;
use ggml_hina::kernels::amx::AmxEngine;
use ggml_hina::moe::{Ids, MulMatId};
use ggml_hina::pack::{PANEL, Panels, panel_bytes};
use ggml_hina::team::{self, Team, Worker};
use ggml_hina::tensor::{DType, View, ViewMut, Weights};

/// The emulator, for this test alone.
fn emulated() -> Option<(Amx, MutexGuard<'static, ()>)> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
    if amx_emu::install().ok() != Some(Mode::Emulated) {
        println!("skipped: nothing counts AMX instructions here (the CPU runs them itself)");
        return None;
    }
    // SAFETY: the emulator was installed just now, for all threads and for good.
    match unsafe { Amx::assume_emulated() } {
        Ok(amx) => Some((amx, turn)),
        Err(e) => {
            println!("skipped: {e}");
            None
        }
    }
}

/// Zeroed, 64-byte aligned, never freed: the counts do not depend on values.
fn zeros(bytes: usize) -> *mut u8 {
    // SAFETY: the size is not zero.
    let at = unsafe { alloc_zeroed(Layout::from_size_align(bytes.max(64), 64).unwrap()) };
    assert!(!at.is_null());
    at
}

fn count(work: impl FnOnce()) -> Stats {
    let before = amx_emu::stats();
    work();
    amx_emu::stats().since(&before)
}

/// Zero weights that begin `offset` bytes behind a cache line.
fn weights(dtype: DType, [k, n, experts]: [usize; 3], offset: usize) -> Weights<'static> {
    let row = dtype.row_bytes(k);
    let at = zeros(offset + row * n * experts);
    // SAFETY: the area has this size, and is never freed.
    unsafe { Weights::from_raw(dtype, at.add(offset), [k, n, experts], [row, row * n]) }
}

/// The counts of `calls` products of one session.
fn products(amx: Amx, dtype: DType, shape: [usize; 3], calls: usize) -> Stats {
    products_off(amx, dtype, shape, calls, 0)
}

/// The same with weights `offset` bytes off the cache lines.
fn products_off(amx: Amx, dtype: DType, shape: [usize; 3], calls: usize, offset: usize) -> Stats {
    products_as(amx, (dtype, dtype), shape, calls, offset)
}

/// The same with tokens packed as `form`.
fn products_as(
    amx: Amx,
    (dtype, form): (DType, DType),
    [k, n, tokens]: [usize; 3],
    calls: usize,
    offset: usize,
) -> Stats {
    let w = weights(dtype, [k, n, 1], offset);
    let panels = tokens.div_ceil(PANEL);
    let (x, c) = (zeros(panels * panel_bytes(form, k)), zeros(panels * n * PANEL * 4));
    let engine = AmxEngine::new(amx);
    count(|| {
        let session = &mut engine.begin();
        for _ in 0..calls {
            // SAFETY: both areas have the size their layout asks for.
            unsafe { engine.product(session, w.rows(0, 0, n), Panels::from_raw(form, x, k, tokens), c.cast(), false) };
        }
    })
}

/// Loads, products, stores.
fn totals(s: &Stats) -> [u64; 3] {
    let loads = s.get(Op::Tileloadd) + s.get(Op::Tileloaddt1);
    [loads, s.get(Op::Tdpbf16ps) + s.get(Op::Tdpfp16ps) + s.get(Op::Tdpbssd), s.get(Op::Tilestored)]
}

#[test]
fn up_to_16_tokens_each_kib_of_weights_is_one_load_and_one_product() {
    let Some((amx, _turn)) = emulated() else { return };
    for (k, n, tokens) in [(2048, 64, 1), (768, 128, 7), (4096, 64, 16), (1024, 48, 16), (7168, 192, 3)] {
        let s = products(amx, DType::Bf16, [k, n, tokens], 1);
        let kib = (k * n * 2 / 1024) as u64;
        assert_eq!(s.get(Op::Tdpbf16ps), kib, "products, k {k} n {n}");
        assert_eq!(s.get(Op::Tileloaddt1), kib, "loads of weights, k {k} n {n}");
        assert_eq!(s.get(Op::Tileloadd), kib, "loads of panels, k {k} n {n}");
        // Each C tile leaves once and never comes back.
        assert_eq!(s.get(Op::Tilestored), (n / 16) as u64, "stores, k {k} n {n}");
    }
}

#[test]
fn rows_off_the_cache_lines_cost_no_product_more() {
    let Some((amx, _turn)) = emulated() else { return };
    for (k, n, tokens) in [(2048, 64, 1), (768, 64, 32), (1024, 128, 128), (32, 16, 16)] {
        let [on, off] = [0, 32].map(|offset| totals(&products_off(amx, DType::Bf16, [k, n, tokens], 1, offset)));
        assert_eq!(on, off, "k {k} n {n} m {tokens}");
    }
}

#[test]
fn up_to_64_tokens_weights_are_loaded_once_for_all() {
    let Some((amx, _turn)) = emulated() else { return };
    for (k, n, tokens) in [(2048, 32, 32), (768, 64, 17), (4096, 64, 64), (1024, 48, 40)] {
        let s = products(amx, DType::Bf16, [k, n, tokens], 1);
        let (kib, panels) = ((k * n * 2 / 1024) as u64, tokens.div_ceil(PANEL) as u64);
        assert_eq!(s.get(Op::Tileloaddt1), kib, "loads of weights, k {k} n {n} m {tokens}");
        assert_eq!(totals(&s), [kib * (1 + panels), kib * panels, n as u64 / 16 * panels], "k {k} n {n} m {tokens}");
    }
}

#[test]
fn further_panels_in_blocks_of_32_rows_and_32_tokens_load_once_for_each_product() {
    let Some((amx, _turn)) = emulated() else { return };
    for (k, n, tokens) in [(2048, 32, 96), (4096, 64, 128), (1024, 128, 128), (768, 64, 65)] {
        let s = products(amx, DType::Bf16, [k, n, tokens], 1);
        let (kib, panels) = ((k * n * 2 / 1024) as u64, tokens.div_ceil(PANEL) as u64);
        // The first four with the weights on their way from memory; an odd last one meets four tiles of rows at a time.
        let (pairs, odd) = ((panels - 4) / 2, panels % 2);
        let loads = kib * (1 + 4) + kib * 2 * pairs + odd * (kib + kib / 4);
        assert_eq!(totals(&s), [loads, kib * panels, n as u64 / 16 * panels], "k {k} n {n} m {tokens}");
        // Weights that come back stay.
        assert_eq!(s.get(Op::Tileloaddt1), kib, "k {k} n {n} m {tokens}");
    }
}

#[test]
fn tails_cost_one_step() {
    let Some((amx, _turn)) = emulated() else { return };
    // One narrow step for what is left of k, one tile moved back for what is left of n.
    let s = products(amx, DType::Bf16, [96 + 18, 64 + 3, 16], 1);
    assert_eq!(totals(&s), [5 * 4 * 2, 5 * 4, 5]);
    assert_eq!(s.get(Op::Ldtilecfg), 1);
}

#[test]
fn q8_0_made_bf16_stores_each_tile_of_c_once() {
    let Some((amx, _turn)) = emulated() else { return };
    for (k, n, tokens) in [(2048, 64, 17), (768, 48, 64), (768, 96, 40)] {
        let s = products_as(amx, (DType::Q8_0, DType::Bf16), [k, n, tokens], 1, 0);
        let (blocks, panels) = ((k / 32 * n / 16) as u64, tokens.div_ceil(PANEL) as u64);
        assert_eq!(
            totals(&s),
            [blocks * (1 + panels), blocks * panels, n as u64 / 16 * panels],
            "k {k} n {n} m {tokens}"
        );
        assert_eq!(s.get(Op::Tdpbf16ps), blocks * panels);
    }
}

#[test]
fn int8_is_two_loads_one_product_one_store_a_block() {
    let Some((amx, _turn)) = emulated() else { return };
    for (k, n, tokens) in [(2048, 64, 1), (768, 32, 32), (4096, 37, 65)] {
        let s = products(amx, DType::Q8_0, [k, n, tokens], 1);
        let blocks = (n.div_ceil(16) * tokens.div_ceil(PANEL) * k / 32) as u64;
        assert_eq!(totals(&s), [2 * blocks, blocks, blocks], "k {k} n {n} m {tokens}");
    }
}

#[test]
fn a_session_configures_once() {
    let Some((amx, _turn)) = emulated() else { return };
    for dtype in [DType::Bf16, DType::Q8_0] {
        let s = products(amx, dtype, [96, 40, 40], 5);
        assert_eq!([s.get(Op::Ldtilecfg), s.get(Op::Tilerelease)], [1, 1], "{dtype:?}");
    }
}

/// A whole `MUL_MAT_ID` of several threads, through routing and row blocks.
#[test]
fn an_operation_configures_each_thread_once_and_reads_weights_once() {
    let Some((amx, _turn)) = emulated() else { return };
    const THREADS: usize = 3;
    let ([k, n, experts], n_used, tokens) = ([512, 768, 8], 2, 18);
    let w = weights(DType::Bf16, [k, n, experts], 0);
    let x = vec![0f32; k * tokens];
    let mut y = vec![1f32; n * n_used * tokens];
    // Experts 0 to 5 get six tokens each: so few that they fit a panel, too many to go as rows.
    let ids: Vec<i32> = (0..n_used * tokens).map(|i| i as i32 % 6).collect();
    // SAFETY: the vectors have these shapes and outlive the views.
    let op = unsafe {
        let x = View::from_raw(DType::F32, x.as_ptr().cast(), [k, 1, tokens, 1], [4, 4 * k, 4 * k, 4 * k * tokens]);
        let nb = [4, 4 * n, 4 * n * n_used, 4 * n * n_used * tokens];
        let y = ViewMut::from_raw(y.as_mut_ptr().cast(), [n, n_used, tokens, 1], nb);
        MulMatId::new(w, x, Ids::from_raw(ids.as_ptr().cast(), n_used, tokens, [4, 4 * n_used]), y)
    };
    let scratch = zeros(op.scratch_bytes(THREADS)).addr();
    let team = Team::new(THREADS);
    let s = count(|| {
        std::thread::scope(|scope| {
            for ith in 0..THREADS {
                let (team, op) = (&team, &op);
                // SAFETY: scratch of the size asked for, used by this team alone.
                let work = move |w: Worker<'_>| unsafe { op.run(Isa::Amx(amx), &w, scratch as *mut u8) };
                scope.spawn(move || team.run(ith, work).unwrap());
            }
        });
    });
    let kib = (6 * n * k * 2 / 1024) as u64;
    assert_eq!([s.get(Op::Tdpbf16ps), s.get(Op::Tileloaddt1), s.get(Op::Tileloadd)], [kib; 3]);
    // A thread that got no block configures nothing.
    assert!((1..=THREADS as u64).contains(&s.get(Op::Ldtilecfg)), "{} configurations", s.get(Op::Ldtilecfg));
    assert_eq!(s.get(Op::Tilerelease), s.get(Op::Ldtilecfg));
    assert!(y.iter().all(|&y| y == 0.0));
}

/// A step of attention with one query position: cache type, head sizes (`dv` 0: the first 512 elements of K's rows),
/// heads for one KV head, positions.
fn attention(amx: Amx, dtype: DType, [d, dv, group, n_kv]: [usize; 4], threads: usize) -> Stats {
    let out = if dv == 0 { 512 } else { dv };
    // SAFETY: areas of these shapes, never freed.
    let op = unsafe {
        let view = |dtype: DType, ne: [usize; 4]| {
            let row = dtype.row_bytes(ne[0]);
            let nb = [dtype.row_bytes(dtype.block()), row, row * ne[1], row * ne[1] * ne[2]];
            View::from_raw(dtype, zeros(nb[3]), ne, nb)
        };
        let (k, mut v) = (view(dtype, [d, n_kv, 1, 1]), view(dtype, [out, n_kv, 1, 1]));
        if dv == 0 {
            (v.data, v.nb) = (k.data, k.nb);
        }
        let q = view(DType::F32, [d, 1, group, 1]);
        let nb = [4, 4 * out, 4 * out * group, 4 * out * group];
        let dst = ViewMut::from_raw(zeros(4 * out * group), [out, group, 1, 1], nb);
        let (mask, sinks, scale, max_bias, logit_softcap) = (None, None, 1.0, 0.0, 0.0);
        FlashAttn::new(Params { q, k, v, mask, sinks, scale, max_bias, logit_softcap, dst }).expect("a shape we handle")
    };
    let scratch = zeros(op.scratch_bytes(threads)).addr();
    // SAFETY: scratch of the size asked for, used by this team alone.
    count(|| team::run(threads, |w| unsafe { op.run(Isa::Amx(amx), &w, scratch as *mut u8) }))
}

/// Of each block of 64 positions: a load of K for each part, of Q for four K tiles; of P for four V tiles; sums pass
/// once.
#[test]
fn attention_of_heads_that_share_a_kv_head() {
    let Some((amx, _turn)) = emulated() else { return };
    const BLOCKS: u64 = 4;
    let old = amx.without_fp16();
    for (amx, dtype, group, loads, products) in [
        // K and V have two parts: three products for each pair of tiles.
        (old, DType::F16, 32, 40 + 48, 48 + 48),
        (amx, DType::Q8_0, 27, 40 + 48, 48 + 48),
        // One part, K in place: two products.
        (amx, DType::Bf16, 11, 24 + 32, 32 + 32),
        (amx, DType::F16, 32, 24 + 32, 32 + 32),
        // Of up to 8 rows, hi and lo parts share a tile: one product. Each 16 rows of K load the queries again.
        (amx, DType::Bf16, 8, 32 + 28, 16 + 16),
        (amx, DType::F16, 4, 32 + 28, 16 + 16),
    ] {
        let s = attention(amx, dtype, [128, 128, group, 64 * BLOCKS as usize], 1);
        let panels = BLOCKS * group.div_ceil(PANEL) as u64;
        assert_eq!(totals(&s), [loads * panels, products * panels, (4 + 8) * panels], "{dtype:?} {group}");
        assert_eq!([s.get(Op::Ldtilecfg), s.get(Op::Tilerelease)], [1, 1], "{dtype:?}");
    }
}

#[test]
fn attention_of_mla_shares_blocks_of_64_among_8_panels() {
    let Some((amx, _turn)) = emulated() else { return };
    const BLOCKS: u64 = 2;
    let steps = 576 / 32;
    for (amx, dtype, loads, products) in [
        (amx.without_fp16(), DType::F16, 8 * steps * 10 + 64 * 24, 8 * steps * 12 + 64 * 24),
        (amx, DType::F16, 8 * steps * 6 + 64 * 16, 8 * steps * 8 + 64 * 16),
        (amx, DType::Bf16, 8 * steps * 6 + 64 * 16, 8 * steps * 8 + 64 * 16),
    ] {
        let s = attention(amx, dtype, [576, 0, 128, 64 * BLOCKS as usize], 1);
        assert_eq!(totals(&s), [loads * BLOCKS, products * BLOCKS, (8 * 4 + 64 * 4) * BLOCKS], "{dtype:?}");
    }
}

#[test]
fn attention_of_few_rows_or_of_f32_is_left_to_the_vectors() {
    let Some((amx, _turn)) = emulated() else { return };
    let old = amx.without_fp16();
    let few = [(DType::F16, 3), (DType::Q8_0, 20), (DType::Bf16, 3), (DType::F32, 64)].map(|(t, n)| (amx, t, n));
    for (amx, dtype, group) in few.into_iter().chain([(old, DType::F16, 20)]) {
        let s = attention(amx, dtype, [64, 64, group, 64], 1);
        assert_eq!([totals(&s)[1], s.get(Op::Sttilecfg)], [0, 0], "{dtype:?}");
    }
}

#[test]
fn attention_configures_each_thread_at_most_once() {
    let Some((amx, _turn)) = emulated() else { return };
    let s = attention(amx, DType::Bf16, [64, 64, 16, 2000], 3);
    assert!((1..=3).contains(&s.get(Op::Ldtilecfg)), "{} configurations", s.get(Op::Ldtilecfg));
    assert_eq!(s.get(Op::Tilerelease), s.get(Op::Ldtilecfg));
}
