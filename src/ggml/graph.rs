//! The private graph: the caller's nodes, with a custom node in the place of each node or chain that is ours.
//!
//! The caller's graph is never changed. The private one keeps the caller's hash set and use counts, so that the inner
//! backend's own fusions (RMS_NORM + MUL, ...) still find their nodes.

use super::fuse::Finder;
use super::op::{Claimed, Run, Work, call};
use super::{claim, sys};

/// What decides which nodes are claimed.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Threads that will run the graph, at the most.
    pub threads: usize,
    /// Whether chains may become one node.
    pub fuse: bool,
    /// Whether to claim at all.
    pub claim: bool,
}

/// The private graph of a backend; its memory is used again for the next one.
#[derive(Default)]
pub struct Graph {
    claims: Vec<Claim>,
    claimed: Vec<Claimed>,
    copies: Vec<sys::ggml_tensor>,
    nodes: Vec<*mut sys::ggml_tensor>,
    /// By node: it is ours.
    taken: Vec<bool>,
    /// By node: it is ours, and another node of its chain stands for it.
    absorbed: Vec<bool>,
    graph: Option<sys::ggml_cgraph>,
}

/// Node `at` becomes `work`, which stands for `nodes` nodes.
struct Claim {
    at: usize,
    work: Work,
    nodes: usize,
}

impl Graph {
    /// Drops what points to the last graph and its run.
    pub fn forget(&mut self) {
        self.claims.clear();
        self.claimed.clear();
        self.taken.clear();
        self.absorbed.clear();
        self.graph = None;
    }

    /// Makes the private graph of `graph`; returns the bytes of scratch that its nodes need.
    ///
    /// # Safety
    /// All nodes of the graph and their sources are valid and allocated, and stay so until it is computed; `run` too.
    // SAFETY: contract above.
    pub unsafe fn rewrite(&mut self, graph: &sys::ggml_cgraph, run: &'static Run, rules: Rules) -> usize {
        self.forget();
        // SAFETY: ggml keeps `n_nodes` valid node pointers.
        let nodes = unsafe { std::slice::from_raw_parts(graph.nodes, graph.n_nodes as usize) };
        if rules.claim {
            // SAFETY: by the contract.
            unsafe { self.find(graph, nodes, &rules) };
        }
        if run.stats.on() {
            // SAFETY: valid nodes.
            let computing = nodes.iter().filter(|n| unsafe { claim::computes(&***n) }).count();
            let left = (0..nodes.len()).filter(|&at| !self.taken.get(at).is_some_and(|t| *t));
            // SAFETY: valid nodes.
            let left = left.filter_map(|at| unsafe { claim::left(&*nodes[at]) });
            run.stats.add_graph(computing, self.claims.iter().map(|c| c.nodes).sum(), left);
        }
        for claim in &mut self.claims {
            claim.work = claim.work.on_nodes(run);
        }
        let scratch = self.claims.iter().map(|c| c.work.scratch_bytes(rules.threads)).max().unwrap_or(0);
        if !self.claims.is_empty() {
            // SAFETY: by the contract.
            unsafe { self.replace(graph, nodes, run) };
        }
        scratch
    }

    /// Chains first, then single nodes of what is left.
    ///
    /// # Safety
    /// As [`Graph::rewrite`].
    // SAFETY: contract above.
    unsafe fn find(&mut self, graph: &sys::ggml_cgraph, nodes: &[*mut sys::ggml_tensor], rules: &Rules) {
        self.absorbed.resize(nodes.len(), false);
        self.taken.resize(nodes.len(), false);
        // SAFETY: by the contract.
        let finder = unsafe { Finder::new(graph) };
        for at in (0..nodes.len()).filter(|_| rules.fuse) {
            let Some(chain) = finder.chain(at) else { continue };
            // SAFETY: the chain's tensors are the graph's.
            let Some(work) = (unsafe { claim::chain(&chain) }) else { continue };
            let (&end, inner) = chain.members.split_last().expect("a chain has nodes");
            inner.iter().for_each(|&i| self.absorbed[i] = true);
            chain.members.iter().for_each(|&i| self.taken[i] = true);
            self.claims.push(Claim { at: end, work, nodes: chain.members.len() });
        }
        for (at, &node) in nodes.iter().enumerate() {
            if self.taken[at] {
                continue;
            }
            // SAFETY: a valid node of the caller's graph.
            if let Some(work) = unsafe { claim::node(&*node, rules) } {
                self.taken[at] = true;
                self.claims.push(Claim { at, work, nodes: 1 });
            }
        }
        self.claims.sort_unstable_by_key(|c| c.at);
    }

    // SAFETY: as `rewrite`, with the claims found.
    unsafe fn replace(&mut self, graph: &sys::ggml_cgraph, nodes: &[*mut sys::ggml_tensor], run: &Run) {
        self.nodes.clear();
        self.nodes.extend(nodes.iter().zip(&self.absorbed).filter(|(_, gone)| !**gone).map(|(n, _)| *n));
        // First all that custom nodes point to, so that no address changes afterwards.
        let places: Vec<usize> = self.claims.iter().map(|c| c.at).collect();
        let claimed = self.claims.drain(..).map(|c| Claimed { work: c.work, run, node: nodes[c.at] });
        self.claimed.extend(claimed);
        self.copies.clear();
        self.copies.extend(self.claimed.iter().map(custom_node));
        let mut kept = 0;
        let mut next = places.iter().zip(&mut self.copies).peekable();
        for at in 0..nodes.len() {
            if let Some((_, copy)) = next.next_if(|(place, _)| **place == at) {
                self.nodes[kept] = copy;
            }
            kept += usize::from(!self.absorbed[at]);
        }
        self.graph = Some(sys::ggml_cgraph { nodes: self.nodes.as_mut_ptr(), n_nodes: kept as i32, uid: 0, ..*graph });
    }

    /// The graph to compute: the private one, or the caller's where nothing of it is ours.
    pub fn as_ggml(&mut self, callers: &mut sys::ggml_cgraph) -> *mut sys::ggml_cgraph {
        self.graph.as_mut().map_or(callers, |g| &raw mut *g)
    }
}

/// A copy of the claimed node that calls us.
fn custom_node(claimed: &Claimed) -> sys::ggml_tensor {
    let params = sys::ggml_custom_op_params {
        fun: Some(call),
        n_tasks: sys::GGML_N_TASKS_MAX,
        userdata: (&raw const *claimed).cast_mut().cast(),
    };
    // SAFETY: the node is valid; a ggml tensor is plain data. ggml reads the parameters back with memcpy (`ggml_custom_4d`).
    unsafe {
        let mut copy = std::ptr::read(claimed.node);
        copy.op = sys::GGML_OP_CUSTOM;
        copy.op_params = [0; 16];
        copy.op_params.as_mut_ptr().cast::<sys::ggml_custom_op_params>().write_unaligned(params);
        copy
    }
}
