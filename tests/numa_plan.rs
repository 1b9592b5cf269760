//! Plans over made-up placements: every element is in exactly one segment, the paper's worked values, remote shares.
#![allow(clippy::single_range_in_vec_init, reason = "a list of one range is what is meant")]

use ggml_hina::numa::NodeId;
use ggml_hina::numa::period::Pattern;
use ggml_hina::numa::placement::{Pages, Placement};
use ggml_hina::numa::plan::{BLOCK_ROWS, Matrix, Plan, granule};
use ggml_hina::tensor::DType;
use proptest::prelude::*;

fn matrix(dtype: DType, base: usize, n: usize, k: usize) -> Matrix {
    Matrix { dtype, base, n, k, row_stride: dtype.row_bytes(k) }
}

fn nodes(n: usize) -> Vec<NodeId> {
    (0..n as NodeId).collect()
}

/// The node of the byte at `at`.
fn node_at(pages: &dyn Pages, at: usize) -> Option<NodeId> {
    let mut found = None;
    pages.stretches(at..at + 1, &mut |_, node| found = node);
    found
}

/// Every element is in exactly one range of one part, shares hold each part once, and accounts are exact.
fn check(plan: &Plan, m: &Matrix, pages: &dyn Pages) {
    let step = granule(m.dtype);
    let granules = m.k.div_ceil(step);
    let mut seen = vec![0u8; m.n * granules];
    for (b, block) in plan.blocks().iter().enumerate() {
        assert!(block.rows as usize <= BLOCK_ROWS && block.rows > 0);
        let parts = &plan.parts()[block.parts.start as usize..block.parts.end as usize];
        assert!(parts.is_sorted_by(|a, b| a.node < b.node), "parts ascend by node");
        for part in parts {
            assert_eq!(part.block as usize, b);
            assert!(plan.ranges(part).is_sorted_by(|a, b| a.end < b.start), "ranges ascend and are merged");
            let (mut bytes, mut local) = (0, 0);
            for i in 0..block.rows as usize {
                let row = block.first as usize + i * plan.step();
                assert_eq!(plan.block_of(row), (block, i));
                assert_eq!(plan.shares()[part.place as usize].node, part.node);
                assert!(plan.holders()[row] >> part.place & 1 == 1, "a part's node holds some of the row");
                for r in plan.ranges(part) {
                    let (from, to) = (r.start as usize, r.end as usize);
                    assert!(from % step == 0 && (to % step == 0 || to == m.k) && from < to);
                    (from / step..to.div_ceil(step)).for_each(|g| seen[row * granules + g] += 1);
                    let at = m.base + row * m.row_stride;
                    let columns = at + m.dtype.row_bytes(from)..at + m.dtype.row_bytes(to);
                    bytes += columns.len();
                    pages.stretches(columns, &mut |r, node| {
                        local += if node == Some(part.node) { r.len() } else { 0 };
                    });
                }
            }
            assert_eq!((part.bytes as usize, plan.bytes_on(part, part.node) as usize), (bytes, local));
        }
    }
    assert!(seen.iter().all(|&n| n == 1), "an element is in no segment or in two");
    let of = |row: usize| plan.block_of(row).0.parts.len() as u32;
    assert!((0..m.n).all(|row| plan.holders()[row].count_ones() == of(row)), "and no other node does");
    let set = |row: usize| {
        let places = (0..plan.shares().len()).filter(move |place| plan.holders()[row] >> place & 1 == 1);
        places.fold(0u32, |sets, place| sets | 1 << (place % plan.sets()))
    };
    assert!((0..m.n).all(|row| set(row).count_ones() == of(row)), "two nodes of a row in one set");
    assert!(plan.holders().len() == m.n && plan.sets() <= plan.shares().len());
    let mut listed = vec![0; plan.parts().len()];
    for (place, share) in plan.shares().iter().enumerate() {
        let without = |row: u32| share.without.iter().any(|rows| rows.contains(&row));
        assert!((0..m.n as u32).all(|row| without(row) == (plan.holders()[row as usize] >> place & 1 == 0)));
        assert!(share.parts.iter().enumerate().all(|(i, &p)| plan.parts()[p as usize].leads == (i == 0)));
        share.parts.iter().for_each(|&p| listed[p as usize] += 1);
        assert!(share.parts.iter().all(|&p| plan.parts()[p as usize].node == share.node));
        let start = |&p: &u32| {
            let part = &plan.parts()[p as usize];
            let first = plan.blocks()[part.block as usize].first as usize;
            first * m.row_stride + m.dtype.row_bytes(plan.ranges(part)[0].start as usize)
        };
        let backwards = share.parts.windows(2).filter(|pair| start(&pair[0]) > start(&pair[1])).count();
        let streams = m.n.div_ceil(plan.step()).div_ceil(BLOCK_ROWS);
        assert!(plan.step() == 1 || backwards <= 2 * streams, "a node's parts go along its memory");
        let bytes: u64 = share.parts.iter().map(|&p| u64::from(plan.parts()[p as usize].bytes)).sum();
        assert_eq!(share.bytes(), bytes);
    }
    assert!(listed.iter().all(|&n| n == 1));
    assert_eq!(plan.bytes().0, (m.n * m.dtype.row_bytes(m.k)) as u64);
}

/// In an exact plan every granule is with the node of its first byte.
fn check_exact(plan: &Plan, m: &Matrix, pages: &dyn Pages) {
    for part in plan.parts() {
        let block = &plan.blocks()[part.block as usize];
        for i in 0..block.rows as usize {
            let row = m.base + (block.first as usize + i * plan.step()) * m.row_stride;
            for r in plan.ranges(part) {
                for k in r.clone().step_by(granule(m.dtype)) {
                    assert_eq!(node_at(pages, row + m.dtype.row_bytes(k as usize)), Some(part.node));
                }
            }
        }
    }
}

#[test]
fn rows_apart_as_in_the_papers_equations() {
    // n = 2, BF16, 4 KiB pages, from a page of node 0: T_x of equation 5, as often as leaves sixteen rows to a block.
    for (k, step) in [(4096, 1), (14336, 2), (2048, 2), (768, 16), (6144, 2)] {
        let m = matrix(DType::Bf16, 0x10000, 64, k);
        let pages = Placement::interleaved(m.base, m.range().len(), 4096, 4096, 2);
        let rule = Pattern::find(&pages).unwrap();
        let plan = Plan::apart(&m, &pages, &rule).unwrap();
        assert_eq!(plan.step(), step * 64usize.div_ceil(step * BLOCK_ROWS), "K = {k}");
        check(&plan, &m, &pages);
        check_exact(&plan, &m, &pages);
        assert_eq!(plan.bytes().1, 0, "K = {k}");
    }
}

#[test]
fn ranges_as_in_the_papers_example() {
    let m = matrix(DType::Bf16, 0x10000, 64, 6144);
    let rule = Pattern::interleave(4096, &nodes(2));
    let plan = Plan::apart(&m, &rule, &rule).unwrap();
    let of = |row: usize, node: NodeId| {
        let (block, _) = plan.block_of(row);
        let parts = &plan.parts()[block.parts.start as usize..block.parts.end as usize];
        plan.ranges(parts.iter().find(|p| p.node == node).unwrap()).to_vec()
    };
    assert_eq!(of(0, 0), [0..2048, 4096..6144]);
    assert_eq!(of(0, 1), [2048..4096]);
    assert_eq!(of(1, 0), [2048..4096]);
    assert_eq!(of(1, 1), [0..2048, 4096..6144]);
    assert_eq!(of(62, 0), of(0, 0));
}

#[test]
fn a_granule_belongs_to_the_page_of_its_first_byte() {
    // Granules of 68 bytes; the page edge at byte 100 of row 0 is inside the second.
    let m = matrix(DType::Q8_0, 4096 - 100, 2, 256);
    let pages = Placement::interleaved(m.base, m.range().len(), 4096, 4096, 2);
    let plan = Plan::alike(&m, &pages).unwrap();
    check(&plan, &m, &pages);
    check_exact(&plan, &m, &pages);
    let (block, _) = plan.block_of(0);
    assert_eq!(block.rows, 1);
    assert_eq!(plan.ranges(&plan.parts()[0]), [0..128]);
    assert_eq!(plan.bytes(), (2 * 8 * 34, 36));
}

/// The models of the paper's Table 3 and Qwen3-30B, as (name, n_embd, n_ff).
const MODELS: [(&str, usize, usize); 4] = [
    ("Qwen3-30B-A3B", 2048, 768),
    ("Qwen3-235B-A22B", 4096, 1536),
    ("Mixtral-8x7B", 4096, 14336),
    ("DeepSeek-V3", 7168, 2048),
];

/// Remote share of the plain split: `workers` equal stretches of rows, workers spread over the nodes in order.
fn plain_share(m: &Matrix, pages: &dyn Pages, nodes: usize, workers: usize) -> f64 {
    let (mut all, mut remote) = (0, 0);
    for w in 0..workers {
        let rows = m.n * w / workers..m.n * (w + 1) / workers;
        let at = m.base + rows.start * m.row_stride..m.base + rows.end * m.row_stride;
        pages.stretches(at, &mut |r, node| {
            all += r.len();
            remote += if node == Some((w * nodes / workers) as NodeId) { 0 } else { r.len() };
        });
    }
    remote as f64 / all as f64
}

#[test]
fn remote_shares_of_real_shapes() {
    println!("4 KiB interleave: remote share of the weights' bytes, plain split / this plan (T, products per 16 rows)");
    for (name, n_embd, n_ff) in MODELS {
        for (what, n, k) in [("gate/up", n_ff, n_embd), ("down", n_embd, n_ff)] {
            for dtype in [DType::Bf16, DType::Q8_0] {
                let mut line = format!("{name:16} {what:8} {dtype:?}:");
                for count in [2, 4, 8] {
                    // 32-byte aligned, as GGUF's tensors are, and not more.
                    let m = matrix(dtype, (1 << 32) + 4096 * 5 + 32, n, k);
                    let rule = Pattern::interleave(4096, &nodes(count));
                    let plan = Plan::new(&m, &rule, Some(&rule));
                    let (all, remote) = plan.bytes();
                    let share = remote as f64 / all as f64;
                    let plain = plain_share(&m, &rule, count, 16 * count);
                    let products: usize = plan.parts().iter().map(|p| plan.ranges(p).len()).sum();
                    let each = products as f64 * 16.0 / n as f64;
                    line += &format!("  n={count} {plain:.3} / {share:.4} (T {}, {each:.1})", plan.step());
                    // What a granule holds behind a page edge. BF16: 32 bytes of each 4096. Q8_0: about half of 68. Where T is
                    // large, a quarter of the cuts' drift in a block besides.
                    let drift = plan.step() * m.row_stride % rule.period();
                    let drift = drift.min(rule.period() - drift);
                    let most = 36 + if plan.step() > 1 { BLOCK_ROWS * drift / 4 } else { 0 };
                    assert!(share <= most as f64 / 4096.0, "{name} {what} {dtype:?} n={count}: {share}");
                    assert!(share <= 0.2 * plain, "{name} {what} {dtype:?} n={count}: {share}");
                    let expected = (count as f64 - 1.0) / count as f64;
                    assert!((plain - expected).abs() < 0.02, "{name} {what} {dtype:?} n={count}: plain {plain}");
                }
                println!("{line}");
            }
        }
    }
}

#[test]
fn remote_share_is_zero_where_the_base_allows_it() {
    for (_, n_embd, n_ff) in MODELS {
        for (n, k) in [(n_ff, n_embd), (n_embd, n_ff)] {
            for run in [4096, 65536, 1 << 21] {
                let m = matrix(DType::Bf16, (1 << 32) + 4096 * 7 + 64, n, k);
                let rule = Pattern::interleave(run, &nodes(2));
                let plan = Plan::new(&m, &rule, Some(&rule));
                // With long runs, the rows at a run's ends may be cheaper partly remote than as products of their own: half a row of each.
                let (all, remote) = plan.bytes();
                let most = if run == 4096 { 0 } else { all * DType::Bf16.row_bytes(k) as u64 / 2 / run as u64 };
                assert!(remote <= most, "n {n} k {k} run {run}: {remote} of {all}");
            }
        }
    }
}

#[test]
fn rows_nearly_alike_make_whole_blocks_where_few_are_quite_alike() {
    // 816 bytes a row: T is 512, but every ten rows the cuts drift by 32 bytes only.
    let m = matrix(DType::Q8_0, (1 << 32) + 32, 2048, 768);
    let rule = Pattern::interleave(4096, &nodes(2));
    assert_eq!(Plan::apart(&m, &rule, &rule).unwrap().step(), 512);
    let plan = Plan::new(&m, &rule, Some(&rule));
    check(&plan, &m, &rule);
    assert_eq!((plan.step(), plan.blocks().len()), (10, 10 * 13));
    let (all, remote) = plan.bytes();
    assert!(remote * 31 < all, "{remote} of {all}");
    // 2176 bytes a row: nothing below T = 64 drifts by less than 128 bytes, which is worse than blocks of 12 rows.
    let m = matrix(DType::Q8_0, (1 << 32) + 32, 768, 2048);
    assert_eq!(Plan::new(&m, &rule, Some(&rule)), Plan::apart(&m, &rule, &rule).unwrap());
}

#[test]
fn irregular_placement_goes_by_majority_and_is_exact_in_its_account() {
    let node = |at: usize| ((at / 4096).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62) as NodeId;
    let m = matrix(DType::Bf16, 1 << 30, 512, 4096);
    let pages = Placement::made_up(m.base, m.range().len(), 4096, |at| Some(node(at)));
    let plan = Plan::new(&m, &pages, Pattern::find(&pages).as_ref());
    check(&plan, &m, &pages);
    let (all, remote) = plan.bytes();
    assert!(plan.blocks().len() == 32 && (remote as f64) < 0.75 * all as f64);
}

#[test]
fn one_page_elsewhere_costs_one_page() {
    let m = matrix(DType::Bf16, 1 << 30, 768, 2048);
    let pages = Placement::made_up(m.base, m.range().len(), 4096, |at| match at / 4096 % 512 {
        40 => Some(1),
        page => Some((page % 2) as NodeId),
    });
    let rule = Pattern::find(&pages).unwrap();
    assert!(!rule.fits(&pages, m.range()));
    let plan = Plan::new(&m, &pages, Some(&rule));
    check(&plan, &m, &pages);
    // Pages 40 and 552 of 768.
    assert_eq!((plan.step(), plan.bytes().1), (768 / BLOCK_ROWS, 2 * 4096));
}

fn dtypes() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::Bf16), Just(DType::Q8_0)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_element_is_in_one_segment(
        dtype in dtypes(),
        base in 0usize..100_000,
        rows in 1usize..200,
        granules in 1usize..80,
        tail in 0usize..32,
        gap in 0usize..3,
        run in prop_oneof![Just(1usize), Just(16), Just(512), 1usize..40],
        count in prop_oneof![Just(2usize), Just(4), Just(8), 1usize..9],
    ) {
        let k = if dtype == DType::Bf16 { granules * 32 - tail } else { granules * 32 };
        let base = base / 2 * 2;
        let m = Matrix { row_stride: dtype.row_bytes(k) + 34 * gap, ..matrix(dtype, base, rows, k) };
        let pages = Placement::interleaved(m.base, m.range().len(), 4096, run * 4096, count);
        let rule = Pattern::interleave(run * 4096, &nodes(count));
        if let Some(plan) = Plan::apart(&m, &pages, &rule) {
            check(&plan, &m, &pages);
            check_exact(&plan, &m, &pages);
        }
        if let Some(plan) = Plan::nearly(&m, &pages, &rule) {
            check(&plan, &m, &pages);
        }
        if let Some(plan) = Plan::alike(&m, &pages) {
            check(&plan, &m, &pages);
            check_exact(&plan, &m, &pages);
        }
        check(&Plan::whole(&m, &pages), &m, &pages);
        check(&Plan::majority(&m, &pages), &m, &pages);
        check(&Plan::new(&m, &pages, Pattern::find(&pages).as_ref()), &m, &pages);
    }

    #[test]
    fn random_and_unknown_pages_too(
        dtype in dtypes(),
        base in 0usize..100_000,
        rows in 1usize..100,
        granules in 1usize..80,
        of in prop::collection::vec(prop::option::weighted(0.9, 0u16..8), 1..64),
    ) {
        let m = matrix(dtype, base, rows, granules * 32);
        let pages = Placement::made_up(m.base, m.range().len(), 4096, |at| of[at / 4096 % of.len()]);
        check(&Plan::new(&m, &pages, Pattern::find(&pages).as_ref()), &m, &pages);
        if let Some(plan) = Plan::alike(&m, &pages) {
            check(&plan, &m, &pages);
        }
    }
}
