//! Segments against the plain product and the oracle, over made-up machines.

use proptest::prelude::*;

use super::*;
use crate::isa::{Avx2, Avx512};
use crate::kernels::Vectors;
use crate::kernels::amx::AmxEngine;
use crate::kernels::reference::{self, Reference, magnitudes, matvec, nmse_against, pack_panel};
use crate::numa::placement::Placement;
use crate::numa::tensors::TensorPlan;
use crate::numa::threads::{Nearness, Seats};
use crate::numa::topology::Topology;
use crate::pack::{panel_bytes, token_row_bytes};
use crate::team;
use crate::tensor::DType;
use crate::testing::{self, Aligned, Random};

/// Weights of some experts at an odd base, and tokens, packed.
struct Case {
    dtype: DType,
    shape: [usize; 3],
    bytes: Aligned,
    offset: usize,
    x: Vec<Vec<f32>>,
    /// How many of the tokens, the last ones, are rows.
    rows: usize,
    packed: Aligned,
}

impl Case {
    fn new(dtype: DType, shape @ [k, n, experts]: [usize; 3], (lanes, rows): (usize, usize), seed: u64) -> Self {
        let mut random = Random(seed);
        let values = random.weights(dtype, k * n * experts);
        let offset = random.below(64) * 32;
        let bytes = Aligned::new(offset + values.len());
        // SAFETY: room for the offset and the values.
        unsafe { bytes.ptr().add(offset).copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        let x: Vec<Vec<f32>> = (0..lanes + rows).map(|_| random.vec(k)).collect();
        let packed = Aligned::new(lanes.div_ceil(PANEL) * panel_bytes(dtype, k));
        // SAFETY: all of the memory, for now only here.
        let area =
            unsafe { std::slice::from_raw_parts_mut(packed.ptr(), lanes.div_ceil(PANEL) * panel_bytes(dtype, k)) };
        for (panel, x) in area.chunks_mut(panel_bytes(dtype, k)).zip(x[..lanes].chunks(PANEL)) {
            pack_panel(dtype, k, &x.iter().map(Vec::as_slice).collect::<Vec<_>>(), panel);
        }
        Self { dtype, shape, bytes, offset, x, rows, packed }
    }

    fn weights(&self) -> Weights<'_> {
        let [k, n, _] = self.shape;
        let row = self.dtype.row_bytes(k);
        // SAFETY: written by `new`.
        unsafe { Weights::from_raw(self.dtype, self.bytes.ptr().add(self.offset), self.shape, [row, n * row]) }
    }

    fn lanes(&self) -> usize {
        self.x.len() - self.rows
    }

    /// The tokens that are rows, packed.
    fn packed_rows(&self, v: impl Vectors) -> Aligned {
        let k = self.shape[0];
        let packed = Aligned::new(self.rows * token_row_bytes(self.dtype, k));
        for (j, x) in self.x[self.lanes()..].iter().enumerate() {
            // SAFETY: k values, and room for each token's row.
            unsafe {
                let row = packed.ptr().add(j * token_row_bytes(self.dtype, k));
                v.token_row(self.dtype, k, x.as_ptr(), 0, k, row);
            }
        }
        packed
    }

    fn tokens<'a>(&'a self, v: impl Vectors, rows: &'a Aligned) -> Tokens<'a> {
        let (k, form) = (self.shape[0], (self.dtype, v.bf16_form()));
        // SAFETY: packed by `new` and `packed_rows`.
        unsafe {
            let panels = |lanes| Panels::from_raw(self.dtype, self.packed.ptr(), k, lanes);
            Tokens {
                panels: (self.lanes() > 0).then(|| panels(self.lanes())),
                rows: (self.rows > 0).then(|| TokenRows::from_raw(form, rows.ptr(), k, self.rows)),
            }
        }
    }

    /// Every expert's product by segments with a team whose worker `i` is at place `places[i]`: `[expert][token][n]`.
    fn by_segments<E: Engine>(
        &self,
        engine: E,
        plan: &TensorPlan,
        machine: &Topology,
        places: &[usize],
    ) -> Vec<Vec<f32>> {
        let (w, near) = (self.weights(), Nearness::new(machine).unwrap());
        let ids: Vec<NodeId> = machine.nodes().iter().map(|node| node.id).collect();
        let seats = Seats::new(places.len());
        let panels = self.lanes().div_ceil(PANEL);
        let [lanes, rows] = [plan.sets() * w.n * panels * PANEL, plan.nodes() * w.n * self.rows];
        let of = |i: usize| Use {
            plan: plan.expert(i),
            expert: i,
            panels,
            rows: self.rows,
            lanes_at: i * lanes,
            rows_at: w.experts * lanes + i * rows,
        };
        let uses = Uses { count: w.experts, of };
        let partial = Aligned::new(w.experts * (lanes + rows) * 4);
        let packed = self.packed_rows(engine.vectors());
        let tokens = |_| self.tokens(engine.vectors(), &packed);
        team::run(places.len(), |worker| {
            seats.take(worker.ith(), places[worker.ith()]);
            worker.barrier();
            let duty = Duty::new(&uses.bytes(&ids), &seats, &near, (worker.ith(), worker.nth()));
            let node = ids[places[worker.ith()]];
            let c = Aligned::new(ROOM * 4);
            let to = Sums { partial: partial.ptr().cast(), c: c.ptr().cast() };
            // SAFETY: the buffer has room for all uses; all workers have the same seats.
            unsafe { products(engine, &w, &uses, (&ids, node, &duty), tokens, to) };
        });
        uses.iter().map(|u| self.sums(&u, partial.ptr().cast())).collect()
    }

    /// `[token][n]` of one use, added a few rows at a time.
    fn sums(&self, u: &Use<'_>, partial: *const f32) -> Vec<f32> {
        let n = self.shape[1];
        let mut y = vec![f32::NAN; self.x.len() * n];
        for first in (0..n).step_by(13) {
            let len = 13.min(n - first);
            let c = Aligned::new(u.panels * len * PANEL * 4);
            // SAFETY: the team has ended, so the sums are there; c and y have the room.
            unsafe {
                sum_lanes(u, partial, 0..u.panels, (first, len), c.ptr().cast());
                if self.rows > 0 {
                    sum_rows(u, partial, (first, len), y.as_mut_ptr().add(self.lanes() * n + first), n);
                }
            }
            for t in 0..self.lanes() {
                for i in 0..len {
                    y[t * n + first + i] = c.f32()[(t / PANEL * len + i) * PANEL + t % PANEL];
                }
            }
        }
        y
    }

    /// The plain product of an expert: `[token][n]`.
    fn plain<E: Engine>(&self, engine: E, expert: usize) -> Vec<f32> {
        let n = self.shape[1];
        let packed = self.packed_rows(engine.vectors());
        let (rows, tokens) = (self.weights().rows(expert, 0, n), self.tokens(engine.vectors(), &packed));
        let mut y = vec![f32::NAN; self.x.len() * n];
        // SAFETY: the C block and y have the room.
        unsafe {
            if let Some(panels) = tokens.panels {
                let c = Aligned::new(panels.count() * n * PANEL * 4);
                engine.product(&mut engine.begin(), rows, panels, c.ptr().cast(), false);
                for (at, y) in y[..self.lanes() * n].iter_mut().enumerate() {
                    *y = c.f32()[(at / n / PANEL * n + at % n) * PANEL + at / n % PANEL];
                }
            }
            if let Some(xs) = tokens.rows {
                engine.vectors().dots(rows, xs, y.as_mut_ptr().add(self.lanes() * n), n);
            }
        }
        y
    }

    /// Segments give what the plain product gives, on any placement and with any workers, and always the same bits.
    fn check<E: Engine>(
        &self,
        engine: E,
        placement: &Placement,
        nodes: usize,
        places: &[usize],
    ) -> Result<(), TestCaseError> {
        let w = self.weights();
        let machine = Topology::made_up(nodes, 1);
        let plan = TensorPlan::new(&w, placement);
        prop_assert_eq!(plan.bytes().0, (w.experts * w.expert_bytes()) as u64);
        let got = self.by_segments(engine, &plan, &machine, places);
        for (expert, got) in got.iter().enumerate() {
            let plain: Vec<f64> = self.plain(engine, expert).into_iter().map(f64::from).collect();
            let rows = w.rows(expert, 0, w.n);
            let norm: Vec<f64> = self.x.iter().flat_map(|x| magnitudes(rows, x)).collect();
            let error = nmse_against(got, &plain, &norm);
            prop_assert!(error < 1e-12, "expert {}: NMSE {} against the plain product", expert, error);
            let oracle: Vec<f64> = self.x.iter().flat_map(|x| matvec(rows, x)).collect();
            let error = nmse_against(got, &oracle, &norm);
            prop_assert!(error < 1e-10, "expert {}: NMSE {} against the oracle", expert, error);
        }
        let alone = self.by_segments(engine, &plan, &machine, &[nodes - 1]);
        prop_assert!(alone == got, "the bits depend on the workers");
        Ok(())
    }
}

/// The engines that this CPU has, or that can be emulated, through one check.
fn check_all(
    case: &Case,
    placement: &Placement,
    nodes: usize,
    places: &[usize],
    amx: bool,
) -> Result<(), TestCaseError> {
    case.check(Reference, placement, nodes, places)?;
    if let Some(isa) = Avx512::detect() {
        case.check(isa, placement, nodes, places)?;
    } else {
        println!("skipped: this CPU has no AVX-512 with VNNI");
    }
    if let Some(isa) = Avx2::detect() {
        case.check(isa, placement, nodes, places)?;
    } else {
        println!("skipped: this CPU has no AVX2");
    }
    if amx
        && case.rows == 0
        && let Some(amx) = testing::amx()
    {
        case.check(AmxEngine::new(amx), placement, nodes, places)?;
    }
    Ok(())
}

/// The machine's pages by one of the rules that real ones show.
fn placement(case: &Case, rule: usize, run: usize, nodes: usize) -> Placement {
    let w = case.weights();
    let (start, len) = (w.data.addr(), w.experts * w.expert_bytes());
    let random = move |at: usize| Random((at / (run * 4096)) as u64).below(nodes) as NodeId;
    match rule {
        0 => Placement::interleaved(start, len, 4096, run * 4096, nodes),
        1 => Placement::made_up(start, len, 4096, move |at| Some(random(at))),
        2 => Placement::made_up(start, len, 4096, move |at| (at / 4096 % 7 != 0).then(|| random(at))),
        // Weighted: the first node takes three runs.
        _ => Placement::made_up(start, len, 4096, move |at| {
            Some((at / (run * 4096) % (nodes + 2)).saturating_sub(2) as NodeId)
        }),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..Default::default() })]

    #[test]
    fn segments_give_the_plain_product(
        q8 in any::<bool>(),
        [granules, n, experts] in [1usize..40, 1usize..90, 1usize..3],
        tail in 0usize..32,
        lanes in 0usize..33,
        rows in 0usize..8,
        (rule, run) in (0usize..4, prop_oneof![Just(1usize), Just(2), Just(16)]),
        nodes in prop_oneof![Just(2usize), Just(4), Just(8), Just(3)],
        places in prop::collection::vec(0usize..8, 1..5),
        seed in any::<u64>(),
    ) {
        let dtype = if q8 { DType::Q8_0 } else { DType::Bf16 };
        let k = granules * 32 - if q8 { 0 } else { tail };
        let case = Case::new(dtype, [k, n, experts], (lanes.max(usize::from(rows == 0)), rows), seed);
        let places: Vec<usize> = places.iter().map(|p| p % nodes).collect();
        check_all(&case, &placement(&case, rule, run, nodes), nodes, &places, seed % 8 == 0)?;
    }
}

#[test]
fn real_rows_on_two_nodes() {
    for dtype in [DType::Bf16, DType::Q8_0] {
        for k in [768, 2048, 4096] {
            let case = Case::new(dtype, [k, 40, 2], (3, 0), 5);
            let placement = placement(&case, 0, 1, 2);
            check_all(&case, &placement, 2, &[0, 1, 0, 1], true).unwrap();
        }
    }
}

#[test]
fn the_packing_oracle_is_what_the_reference_reads() {
    let mut random = Random(3);
    for dtype in [DType::Bf16, DType::Q8_0] {
        let x: Vec<Vec<f32>> = (0..5).map(|_| random.vec(64)).collect();
        let mut panel = vec![0u8; panel_bytes(dtype, 64)];
        pack_panel(dtype, 64, &x.iter().map(Vec::as_slice).collect::<Vec<_>>(), &mut panel);
        for (lane, x) in x.iter().enumerate() {
            for (k, want) in reference::rounded_activations(dtype, x).into_iter().enumerate() {
                // SAFETY: a panel of 64 columns.
                assert_eq!(unsafe { reference::panel_element(dtype, panel.as_ptr(), k, lane) }, want);
            }
        }
    }
}
