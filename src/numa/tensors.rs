//! The plans of a model's weight tensors: asked for when a tensor is first used, made once, shared where they are alike.

use std::collections::HashMap;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use super::NodeId;
use super::period::Pattern;
use super::placement::{Placement, page_size};
use super::plan::{Matrix, Plan};
use super::threads::{MAX_NODES, Mode, Nearness, Pinned, node_of_this_thread, spread_node};
use super::topology::Topology;
use crate::tensor::{DType, Weights};

/// Tokens of an expert, on average over those in use, up to which the weights' way from memory decides, so that segments may pay (paper
/// section 5; measured, see docs/NUMA.md).
pub const MAX_TOKENS: usize = 16;

/// The same for weights of a type, with rows of so many bytes, on so many nodes. Segments must cost less than remote bytes do, and these 1.5
/// times the time of plain reads on two nodes, at half the bandwidth, but 1.75 on four. Rows of Q8_0 are short, so their parts are, too:
/// on AMX they cost 1.24, 1.38 and 1.5 at 1, 4 and 16 tokens with rows of 2176 bytes, 1.32 and 1.58 at 1 and 4 with rows of 816.
pub fn most_tokens(dtype: DType, row_bytes: usize, nodes: usize) -> usize {
    match dtype {
        DType::Q8_0 if nodes <= 2 && row_bytes < SHORT_ROW => 2,
        DType::Q8_0 if nodes <= 2 => MAX_TOKENS / 2,
        _ => MAX_TOKENS,
    }
}

/// Bytes of a row of which a page has parts of three and more.
const SHORT_ROW: usize = 1366;
/// Weights whose placement must be known before the user is told that one node has them all.
const HINT_BYTES: usize = 256 << 20;
/// Calls after which a tensor's unknown pages are asked for again, at most; the first times follow sooner.
const ASK_AGAIN: u64 = 4096;

/// A made-up machine for tests, the value of `GGML_HINA_NUMA_SIM`: `nodes:run_bytes`. Pages are taken to lie on the nodes in
/// turn, `run_bytes` on each, by address; workers are taken to be spread over the nodes in order. It makes nothing faster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sim {
    /// Nodes, 2 to [`MAX_NODES`].
    pub nodes: usize,
    /// Bytes in a row on one node, a multiple of 4096.
    pub run: usize,
}

impl FromStr for Sim {
    type Err = ();

    fn from_str(s: &str) -> Result<Self, ()> {
        let (nodes, run) = s.split_once(':').ok_or(())?;
        let sim = Self { nodes: nodes.parse().map_err(|_| ())?, run: run.parse().map_err(|_| ())? };
        let good = (2..=MAX_NODES).contains(&sim.nodes) && sim.run > 0 && sim.run.is_multiple_of(4096);
        if good { Ok(sim) } else { Err(()) }
    }
}

/// The plans of one tensor's experts.
#[derive(Debug)]
pub struct TensorPlan {
    plans: Vec<Arc<Plan>>,
    sets: usize,
    nodes: usize,
    most_tokens: usize,
}

impl TensorPlan {
    /// Plans for weights that are placed so.
    pub fn new(w: &Weights<'_>, placement: &Placement) -> Self {
        Self::shared(w, placement, &mut HashMap::new())
    }

    fn shared(w: &Weights<'_>, placement: &Placement, known: &mut Shared) -> Self {
        let rule = Pattern::find(placement);
        let plan = |expert: usize| {
            let m = Matrix {
                dtype: w.dtype,
                base: w.data.addr() + expert * w.expert_stride,
                n: w.n,
                k: w.k,
                row_stride: w.row_stride,
            };
            match &rule {
                Some(rule) if rule.fits(placement, m.range()) => {
                    let alike = Matrix { base: m.base % rule.period(), ..m };
                    let make = || Arc::new(Plan::new(&alike, rule, Some(rule)));
                    Arc::clone(known.entry((alike, rule.clone())).or_insert_with(make))
                }
                rule => Arc::new(Plan::new(&m, placement, rule.as_ref())),
            }
        };
        let plans: Vec<_> = (0..w.experts).map(plan).collect();
        let sets = plans.iter().map(|p| p.sets()).max().unwrap_or(0);
        let nodes = plans.iter().map(|p| p.shares().len()).max().unwrap_or(0);
        Self { plans, sets, nodes, most_tokens: most_tokens(w.dtype, w.dtype.row_bytes(w.k), nodes) }
    }

    /// The plan of an expert.
    pub fn expert(&self, expert: usize) -> &Plan {
        &self.plans[expert]
    }

    /// The most sets of panels' partial sums of any expert (see [`Plan::sets`]), each of all rows.
    pub fn sets(&self) -> usize {
        self.sets
    }

    /// The most nodes of any expert.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Tokens of an expert, on average over those in use, up to which segments pay.
    pub fn most_tokens(&self) -> usize {
        self.most_tokens
    }

    /// Bytes of weights, and those that are not on the node of their part.
    pub fn bytes(&self) -> (u64, u64) {
        self.plans.iter().map(|p| p.bytes()).fold((0, 0), |sum, b| (sum.0 + b.0, sum.1 + b.1))
    }
}

type Shared = HashMap<(Matrix, Pattern), Arc<Plan>>;

/// What a tensor is known by: address, type, shape, strides.
type Key = (usize, DType, [usize; 3], [usize; 2]);

/// What is known of a tensor.
#[derive(Debug, Default)]
struct Tensor {
    calls: u64,
    ask_at: u64,
    /// Kept while pages are unknown.
    placement: Option<Placement>,
    unknown: usize,
    counted: bool,
    /// The one in use is the last; those before it may still be in someone's hands.
    #[expect(clippy::vec_box, reason = "their addresses stay when the list grows")]
    plans: Vec<Box<TensorPlan>>,
    /// Whether the last one's pages are on several nodes.
    spread: bool,
}

/// The machine's nodes and the plans of the tensors seen so far.
#[derive(Debug)]
pub struct Numa {
    topology: Topology,
    ids: Vec<NodeId>,
    near: Nearness,
    mode: Mode,
    sim: Option<Sim>,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    tensors: HashMap<Key, Tensor>,
    shared: Shared,
    hint: Hint,
}

/// What the user should be told, once.
#[derive(Debug, Default)]
struct Hint {
    due: Option<String>,
    told: bool,
    /// Of the tensors seen so far.
    held: Held,
}

/// Bytes by node, ascending by node.
type Held = Vec<(NodeId, usize)>;

impl Numa {
    /// None where the normal path is right: [`Mode::Off`], fewer than two nodes with memory, or more than [`MAX_NODES`].
    pub fn new(mode: Mode, sim: Option<Sim>) -> Option<Self> {
        let topology = sim.map_or_else(Topology::of_this_machine, |sim| Topology::made_up(sim.nodes, 1));
        Self::on(topology, mode, sim)
    }

    fn on(topology: Topology, mode: Mode, sim: Option<Sim>) -> Option<Self> {
        let near = Nearness::new(&topology)?;
        if mode == Mode::Off || !topology.is_numa() {
            return None;
        }
        let ids = topology.nodes().iter().map(|node| node.id).collect();
        Some(Self { topology, ids, near, mode, sim, seen: Mutex::default() })
    }

    /// The nodes.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The nodes' numbers, ascending: places in this list are what seats and duties count by.
    pub fn ids(&self) -> &[NodeId] {
        &self.ids
    }

    /// The nodes by distance.
    pub fn near(&self) -> &Nearness {
        &self.near
    }

    /// The place of the node that this thread, worker `ith` of `nth`, is on.
    pub fn place(&self, ith: usize, nth: usize) -> usize {
        let node = match self.sim {
            Some(_) => spread_node(&self.topology, ith, nth),
            None => Some(node_of_this_thread(&self.topology)),
        };
        node.and_then(|node| self.topology.index(node)).unwrap_or(0)
    }

    /// With [`Mode::Pin`], keeps this thread on its node until the value is dropped.
    pub fn pin(&self, ith: usize, nth: usize) -> Option<Pinned> {
        (self.mode == Mode::Pin && self.sim.is_none()).then(|| Pinned::spread(&self.topology, ith, nth)).flatten()
    }

    /// The plans of a tensor whose pages lie on several nodes, to be asked for once in each call that uses it, by one thread.
    /// None for the normal path: its pages are on one node, or most are not known yet (they are asked for again in later
    /// calls), or the kernel does not tell.
    pub fn tensor(&self, w: &Weights<'_>) -> Option<&TensorPlan> {
        self.known(w).filter(|(_, spread)| *spread).map(|(plan, _)| plan)
    }

    /// As [`Numa::tensor`], also where the pages are on one node; whether they are on several comes with it.
    pub fn known(&self, w: &Weights<'_>) -> Option<(&TensorPlan, bool)> {
        let key = (w.data.addr(), w.dtype, [w.k, w.n, w.experts], [w.row_stride, w.expert_stride]);
        let seen = &mut *self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let tensor = seen.tensors.entry(key).or_default();
        tensor.calls += 1;
        if tensor.calls > tensor.ask_at {
            tensor.ask_at = (2 * tensor.calls).min(tensor.calls + ASK_AGAIN);
            match ask(w, tensor.placement.take(), self.sim) {
                Ok(placement) => {
                    let held = tensor.learn(w, placement, &mut seen.shared);
                    seen.hint.learn(&held, self.ids.len());
                }
                Err(e) => {
                    tensor.ask_at = u64::MAX;
                    seen.hint
                        .say(format!("the kernel does not tell where pages are (move_pages: {e}); NUMA is not used"));
                }
            }
        }
        let plan: Option<*const TensorPlan> = tensor.plans.last().map(|plan| &raw const **plan);
        // SAFETY: boxes are added and never taken away or changed while `self` lives.
        plan.map(|plan| (unsafe { &*plan }, tensor.spread))
    }

    /// What the user should be told, if it was not asked for before: weights all on one node, or no answer by the kernel.
    pub fn take_hint(&self) -> Option<String> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).hint.take()
    }
}

impl Tensor {
    /// Makes the plan for a placement, if that says more than the one before. Returns what the nodes hold, the first time.
    fn learn(&mut self, w: &Weights<'_>, placement: Placement, shared: &mut Shared) -> Held {
        let about = About::of(&placement);
        self.spread = about.spread;
        if about.enough && (self.plans.is_empty() || about.unknown != self.unknown) {
            self.plans.push(Box::new(TensorPlan::shared(w, &placement, shared)));
        }
        self.unknown = about.unknown;
        match about.unknown {
            0 => self.ask_at = u64::MAX,
            _ => self.placement = Some(placement),
        }
        if std::mem::replace(&mut self.counted, about.enough) { Held::new() } else { about.held }
    }
}

impl Hint {
    fn take(&mut self) -> Option<String> {
        self.due.take()
    }

    fn say(&mut self, text: String) {
        if !std::mem::replace(&mut self.told, true) {
            self.due = Some(text);
        }
    }

    /// One more tensor is known. A small one may well be on one node; the sum should not be.
    fn learn(&mut self, held: &Held, nodes: usize) {
        for &(node, bytes) in held {
            match self.held.iter_mut().find(|h| h.0 == node) {
                Some(h) => h.1 += bytes,
                None => self.held.push((node, bytes)),
            }
        }
        let all: usize = self.held.iter().map(|h| h.1).sum();
        let Some(&(node, most)) = self.held.iter().max_by_key(|h| h.1) else { return };
        if all >= HINT_BYTES && most >= all - all / 16 {
            self.say(format!(
                "this machine has {nodes} NUMA nodes but the weights are on node {node}, so only its memory is used: start \
                 with `numactl --interleave=all`, and either add `--no-mmap` or drop the page cache first \
                 (`sync; echo 1 | sudo tee /proc/sys/vm/drop_caches`)"
            ));
        }
    }
}

/// What a placement looks like from afar.
struct About {
    /// At least half is known.
    enough: bool,
    /// And no node holds 15 of 16 bytes of it.
    spread: bool,
    held: Held,
    unknown: usize,
}

impl About {
    fn of(placement: &Placement) -> Self {
        let (held, unknown) = placement.bytes(placement.range());
        let known: usize = held.iter().map(|h| h.1).sum();
        let most = held.iter().map(|h| h.1).max().unwrap_or(0);
        let enough = known > 0 && known >= unknown;
        Self { enough, spread: enough && most < known - known / 16, held, unknown }
    }
}

/// Asks for a tensor's placement, or for the rest of it.
fn ask(w: &Weights<'_>, so_far: Option<Placement>, sim: Option<Sim>) -> std::io::Result<Placement> {
    let last = w.experts.saturating_sub(1) * w.expert_stride + w.n.saturating_sub(1) * w.row_stride;
    let (start, len) = (w.data.addr(), last + w.dtype.row_bytes(w.k));
    match (sim, so_far) {
        (Some(sim), _) => Ok(Placement::interleaved(start, len, page_size(), sim.run, sim.nodes)),
        (None, Some(mut placement)) => placement.refresh().map(|()| placement),
        (None, None) => Placement::query(start, len),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(bytes: &[u8]) -> Weights<'_> {
        Weights::contiguous(DType::Bf16, bytes, [2048, 64, 4])
    }

    #[test]
    fn short_rows_pay_for_fewer_tokens_on_two_nodes() {
        let most = |dtype, k, nodes| most_tokens(dtype, DType::row_bytes(dtype, k), nodes);
        assert_eq!([768, 2048].map(|k| most(DType::Q8_0, k, 2)), [2, 8]);
        assert_eq!([768, 2048].map(|k| most(DType::Q8_0, k, 4)), [16, 16]);
        assert_eq!([768, 2048].map(|k| most(DType::Bf16, k, 2)), [16, 16]);
    }

    #[test]
    fn settings_are_what_the_variables_say() {
        assert_eq!("2:4096".parse(), Ok(Sim { nodes: 2, run: 4096 }));
        for bad in ["", "2", "1:4096", "2:100", "33:4096", "2:0", "a:b"] {
            assert_eq!(bad.parse::<Sim>(), Err(()), "{bad}");
        }
    }

    #[test]
    fn one_node_or_off_is_the_normal_path() {
        assert!(Numa::on(Topology::made_up(1, 4), Mode::Auto, None).is_none());
        assert!(Numa::on(Topology::made_up(2, 4), Mode::Off, None).is_none());
        assert!(Numa::on(Topology::made_up(33, 4), Mode::Auto, None).is_none());
    }

    #[test]
    fn a_simulated_machine_has_a_plan_and_shares_it() {
        let bytes = vec![0u8; 64 * 4 * 4096];
        let numa = Numa::new(Mode::Auto, Some(Sim { nodes: 2, run: 4096 })).unwrap();
        assert_eq!((0..4).map(|i| numa.place(i, 4)).collect::<Vec<_>>(), [0, 0, 1, 1]);
        let plan = numa.tensor(&weights(&bytes)).unwrap();
        assert!(std::ptr::eq(plan.expert(0), plan.expert(3)), "64 rows of 4096 bytes are a multiple of the period");
        assert_eq!(plan.bytes().0, bytes.len() as u64);
        assert!(std::ptr::eq(plan, numa.tensor(&weights(&bytes)).unwrap()), "made once");
        assert_eq!(numa.take_hint(), None);
    }

    #[test]
    fn weights_on_one_node_are_the_normal_path() {
        let bytes = vec![1u8; 64 * 4 * 4096];
        let numa = Numa::on(Topology::made_up(2, 1), Mode::Auto, None).unwrap();
        if Placement::query(bytes.as_ptr().addr(), bytes.len()).is_err() {
            println!("skipped: move_pages is refused here");
            return;
        }
        assert!(numa.tensor(&weights(&bytes)).is_none());
        assert_eq!(numa.take_hint(), None, "too small to say");
    }

    #[test]
    fn many_weights_on_one_node_of_two_are_told_once() {
        let mut hint = Hint::default();
        hint.learn(&vec![(1, HINT_BYTES / 2), (0, HINT_BYTES / 64)], 2);
        assert_eq!(hint.take(), None);
        hint.learn(&vec![(1, HINT_BYTES / 2)], 2);
        let text = hint.take().unwrap();
        assert!(text.contains("numactl --interleave=all") && text.contains("on node 1"), "{text}");
        hint.learn(&vec![(1, HINT_BYTES)], 2);
        assert_eq!(hint.take(), None);

        let mut spread = Hint::default();
        spread.learn(&vec![(0, HINT_BYTES), (1, HINT_BYTES)], 2);
        assert_eq!(spread.take(), None);
    }

    #[test]
    fn half_unknown_waits_and_most_on_one_node_is_not_spread() {
        let of = |rule: &dyn Fn(usize) -> Option<NodeId>| {
            let about = About::of(&Placement::made_up(0, 64 * 4096, 4096, |at| rule(at / 4096)));
            (about.spread, about.enough, about.unknown / 4096)
        };
        assert_eq!(of(&|p| (p < 20).then_some((p % 2) as NodeId)), (false, false, 44));
        assert_eq!(of(&|p| (p < 40).then_some((p % 2) as NodeId)), (true, true, 24));
        assert_eq!(of(&|p| Some(NodeId::from(p < 3))), (false, true, 0));
    }
}
