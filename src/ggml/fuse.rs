//! Recognises the expert FFN that llama.cpp builds (`llm_graph_context::build_moe_ffn`) as a chain of nodes.
//!
//! ```text
//! gate = MUL_MAT_ID(W_gate, x, ids) [ADD_ID bias]     or one merged product with two VIEWs
//! up   = MUL_MAT_ID(W_up,   x, ids) [ADD_ID bias]
//! h    = GLU(gate, up)                                or MUL(SILU(gate), up)
//! y    = MUL_MAT_ID(W_down, h, ids) [ADD_ID bias]
//! [y   = MUL(y, router weights)]
//! [out = sum over slots: VIEW, ADD, ADD, ... or, for one slot, CONT]
//! ```
//!
//! A chain becomes one node only where nothing can tell: each intermediate is used inside the chain alone and is no output
//! of the graph, and no node between the chain's first and last writes over what the chain reads. A graph that is handed
//! over in pieces (an eval callback, as imatrix uses) has no whole chain, so it runs node by node.

use super::claim::{computes, engine_weights, plain_f32};
use super::sys::{self, ggml_cgraph, ggml_tensor};
use super::tensor::{in_host_layout, ne, src};
use crate::eligible;
use crate::kernels::glu::Glu;

/// One of the three products, with its bias.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// Weights.
    pub w: &'a ggml_tensor,
    /// Bias `[n][experts]` by `ADD_ID`.
    pub bias: Option<&'a ggml_tensor>,
}

/// How gate and up are computed.
#[derive(Clone, Copy, Debug)]
pub enum GateUp<'a> {
    /// By two products.
    Apart {
        /// Gate.
        gate: Product<'a>,
        /// Up.
        up: Product<'a>,
    },
    /// By one product whose rows are those of gate, then those of up.
    Merged(Product<'a>),
}

/// A chain that may become one node.
#[derive(Debug)]
pub struct Chain<'a> {
    /// Activations.
    pub x: &'a ggml_tensor,
    /// Expert ids.
    pub ids: &'a ggml_tensor,
    /// Gate and up.
    pub gate_up: GateUp<'a>,
    /// What joins them.
    pub glu: Glu,
    /// Down.
    pub down: Product<'a>,
    /// Router weights.
    pub weights: Option<&'a ggml_tensor>,
    /// Whether the slots are summed.
    pub summed: bool,
    /// The last node: what it computes is the chain's result.
    pub dst: &'a ggml_tensor,
    /// Places in the graph of all computing nodes of the chain, the last one included.
    pub members: Vec<usize>,
}

/// A graph to look for chains in.
pub struct Finder<'a> {
    graph: &'a ggml_cgraph,
    nodes: &'a [*mut ggml_tensor],
}

impl<'a> Finder<'a> {
    /// # Safety
    /// The graph's nodes and their sources are valid for `'a`.
    // SAFETY: contract above.
    pub unsafe fn new(graph: &'a ggml_cgraph) -> Self {
        // SAFETY: ggml keeps `n_nodes` valid node pointers.
        let nodes = unsafe { std::slice::from_raw_parts(graph.nodes, graph.n_nodes as usize) };
        Self { graph, nodes }
    }

    fn node(&self, at: usize) -> &'a ggml_tensor {
        // SAFETY: by the contract of `new`.
        unsafe { &*self.nodes[at] }
    }

    fn src(&self, node: &'a ggml_tensor, i: usize) -> Option<&'a ggml_tensor> {
        // SAFETY: by the contract of `new`.
        unsafe { src(node, i) }
    }

    /// The place of `t` at or before `end`: chains are short, so the search goes backwards.
    fn place(&self, t: &ggml_tensor, end: usize) -> Option<usize> {
        self.nodes[..=end].iter().rposition(|n| std::ptr::eq(n.cast_const(), t))
    }

    /// Whether the node's result is used `uses` times and is no output of the graph.
    fn inner(&self, at: usize, uses: i32) -> bool {
        let output = self.node(at).flags & sys::GGML_TENSOR_FLAG_OUTPUT as i32 != 0;
        // SAFETY: a valid graph and a place in it.
        !output && unsafe { sys::ggml_hina_use_count(self.graph, at as i32) } == uses
    }

    /// The chain whose down product is node `down_at`.
    pub fn chain(&self, down_at: usize) -> Option<Chain<'a>> {
        let down = self.node(down_at);
        if down.op != sys::GGML_OP_MUL_MAT_ID || !computes(down) {
            return None;
        }
        let ids = self.src(down, 2)?;
        let mut members = vec![down_at];
        let head = self.head(self.src(down, 1)?, ids, down_at, &mut members)?;
        let tail = self.tail(down_at, ids, &mut members);
        members.sort_unstable();
        let chain = Chain {
            x: head.x,
            ids,
            gate_up: head.gate_up,
            glu: head.glu,
            down: Product { w: self.src(down, 0)?, bias: tail.bias },
            weights: tail.weights,
            summed: tail.summed,
            dst: self.node(tail.end),
            members,
        };
        (chain.fits() && self.undisturbed(&chain)).then_some(chain)
    }

    // ---- from the down product backwards ----

    fn head(
        &self,
        h: &'a ggml_tensor,
        ids: &'a ggml_tensor,
        before: usize,
        members: &mut Vec<usize>,
    ) -> Option<Head<'a>> {
        let at = self.place(h, before)?;
        if !self.inner(at, 1) || !computes(h) {
            return None;
        }
        members.push(at);
        let (gate, up, glu) = match h.op {
            sys::GGML_OP_GLU => (self.src(h, 0)?, self.src(h, 1), glu(h)?),
            sys::GGML_OP_MUL => self.silu_times(h, at, members)?,
            _ => return None,
        };
        let Some(up) = up else {
            // A GLU of one tensor splits its rows in halves itself.
            let swapped = h.op_params[1] != 0;
            let (product, x) = self.product(gate, ids, at, 1, members)?;
            return (!swapped).then_some(Head { x, gate_up: GateUp::Merged(product), glu });
        };
        if let Some(merged) = self.halves(gate, up) {
            let (product, x) = self.product(merged, ids, at, 2, members)?;
            return Some(Head { x, gate_up: GateUp::Merged(product), glu });
        }
        let (gate, x) = self.product(gate, ids, at, 1, members)?;
        let (up, same) = self.product(up, ids, at, 1, members)?;
        std::ptr::eq(x, same).then_some(Head { x, gate_up: GateUp::Apart { gate, up }, glu })
    }

    /// The older form of SwiGLU: `MUL(SILU(gate), up)`.
    fn silu_times(
        &self,
        mul: &'a ggml_tensor,
        at: usize,
        members: &mut Vec<usize>,
    ) -> Option<(&'a ggml_tensor, Option<&'a ggml_tensor>, Glu)> {
        let (a, b) = (self.src(mul, 0)?, self.src(mul, 1)?);
        let is_silu = |t: &ggml_tensor| {
            // SAFETY: a valid unary node.
            t.op == sys::GGML_OP_UNARY && unsafe { sys::ggml_get_unary_op(t) == sys::GGML_UNARY_OP_SILU }
        };
        let (silu, up) = if is_silu(a) { (a, b) } else { (b, a) };
        let silu_at = self.place(silu, at)?;
        if !is_silu(silu) || !self.inner(silu_at, 1) || a.ne != b.ne {
            return None;
        }
        members.push(silu_at);
        Some((self.src(silu, 0)?, Some(up), Glu::SwiGlu))
    }

    /// The tensor whose first and second half of each row `gate` and `up` view.
    fn halves(&self, gate: &'a ggml_tensor, up: &'a ggml_tensor) -> Option<&'a ggml_tensor> {
        if gate.op != sys::GGML_OP_VIEW || up.op != sys::GGML_OP_VIEW {
            return None;
        }
        let whole = self.src(gate, 0)?;
        let half = gate.ne[0];
        let same = std::ptr::eq(whole, self.src(up, 0)?) && std::ptr::eq(whole, gate.view_src) && gate.ne == up.ne;
        let strides = [1, 2].iter().all(|&d| gate.nb[d] == whole.nb[d] && up.nb[d] == whole.nb[d]);
        let rows = gate.ne[1..] == whole.ne[1..] && whole.ne[0] == 2 * half;
        // SAFETY: a valid type.
        let offset = half as usize * unsafe { sys::ggml_type_size(whole.type_) };
        (same && strides && rows && gate.view_offs == 0 && up.view_offs == offset).then_some(whole)
    }

    /// `t` as an expert product with an optional bias, used `uses` times; also what it multiplies.
    fn product(
        &self,
        t: &'a ggml_tensor,
        ids: &'a ggml_tensor,
        before: usize,
        uses: i32,
        members: &mut Vec<usize>,
    ) -> Option<(Product<'a>, &'a ggml_tensor)> {
        let at = self.place(t, before)?;
        if !self.inner(at, uses) || !computes(t) {
            return None;
        }
        members.push(at);
        if t.op == sys::GGML_OP_ADD_ID {
            let bias = self.src(t, 1)?;
            let (product, x) = self.product(self.src(t, 0)?, ids, at, 1, members)?;
            let fits = std::ptr::eq(self.src(t, 2)?, ids) && product.bias.is_none();
            return fits.then_some((Product { bias: Some(bias), ..product }, x));
        }
        let ours = t.op == sys::GGML_OP_MUL_MAT_ID && std::ptr::eq(self.src(t, 2)?, ids);
        ours.then_some((Product { w: self.src(t, 0)?, bias: None }, self.src(t, 1)?))
    }

    // ---- from the down product forwards ----

    fn tail(&self, down_at: usize, ids: &'a ggml_tensor, members: &mut Vec<usize>) -> Tail<'a> {
        let mut tail = Tail { end: down_at, bias: None, weights: None, summed: false };
        if let Some((at, bias)) = self.only_user(tail.end, |t| {
            t.op == sys::GGML_OP_ADD_ID && self.src(t, 2).is_some_and(|i| std::ptr::eq(i, ids))
        }) {
            tail.bias = Some(bias);
            tail.end = at;
            members.push(at);
        }
        let per_slot = |w: &ggml_tensor, y: &ggml_tensor| w.ne[0] == 1 && w.ne[1..] == y.ne[1..];
        let y = self.node(tail.end);
        if let Some((at, w)) = self.only_user(tail.end, |t| {
            t.op == sys::GGML_OP_MUL && self.src(t, 1).is_some_and(|w| per_slot(w, y) && w.type_ == sys::GGML_TYPE_F32)
        }) {
            tail.weights = Some(w);
            tail.end = at;
            members.push(at);
        }
        if let Some(sum) = self.sum_over_slots(tail.end) {
            tail.summed = true;
            tail.end = *sum.last().expect("a sum has a node");
            members.extend(sum);
        }
        tail
    }

    /// The one user of node `at`, if it takes it as its first source and `is_it`: its place and its second source.
    fn only_user(&self, at: usize, is_it: impl Fn(&'a ggml_tensor) -> bool) -> Option<(usize, &'a ggml_tensor)> {
        if !self.inner(at, 1) {
            return None;
        }
        let user = self.next_user(at, at + 1)?;
        let node = self.node(user);
        let first = self.src(node, 0).is_some_and(|s| std::ptr::eq(s, self.node(at)));
        (first && computes(node) && is_it(node)).then(|| self.src(node, 1).map(|s| (user, s)))?
    }

    /// The first node from `from` on that has node `at` as a source; users stand close behind.
    fn next_user(&self, at: usize, from: usize) -> Option<usize> {
        let t = self.nodes[at];
        (from..self.nodes.len()).find(|&i| self.node(i).src.contains(&t))
    }

    /// The computing nodes of the sum over the slots of node `at`, in order.
    fn sum_over_slots(&self, at: usize) -> Option<Vec<usize>> {
        let y = self.node(at);
        let slots = y.ne[1];
        if !self.inner(at, slots as i32) || y.ne[3] != 1 {
            return None;
        }
        let views = self.slot_views(at, slots as usize)?;
        if slots == 1 {
            let cont = self.next_user(views[0], views[0] + 1)?;
            return (self.node(cont).op == sys::GGML_OP_CONT && self.inner(views[0], 1)).then(|| vec![cont]);
        }
        let mut sum = Vec::with_capacity(views.len() - 1);
        let mut left = views[0];
        for &view in &views[1..] {
            let add = self.next_user(left, left + 1)?;
            let node = self.node(add);
            let of_both = std::ptr::eq(node.src[0], self.nodes[left]) && std::ptr::eq(node.src[1], self.nodes[view]);
            if node.op != sys::GGML_OP_ADD || !of_both || !self.inner(left, 1) || !self.inner(view, 1) {
                return None;
            }
            sum.push(add);
            left = add;
        }
        Some(sum)
    }

    /// The views of node `at` that show one slot each, in the order of the slots.
    fn slot_views(&self, at: usize, slots: usize) -> Option<Vec<usize>> {
        let y = self.node(at);
        let mut views = Vec::with_capacity(slots);
        let mut from = at + 1;
        for slot in 0..slots {
            let view_at = self.next_user(at, from)?;
            let view = self.node(view_at);
            let shows_slot = view.op == sys::GGML_OP_VIEW
                && std::ptr::eq(view.view_src, if y.view_src.is_null() { y } else { y.view_src })
                && view.view_offs == y.view_offs + slot * y.nb[1]
                && [view.ne[0], view.ne[1], view.ne[2], view.ne[3]] == [y.ne[0], y.ne[2], 1, 1]
                && view.nb[1] == y.nb[2];
            if !shows_slot {
                return None;
            }
            views.push(view_at);
            from = view_at + 1;
        }
        Some(views)
    }

    /// Whether no other node between the chain's first and last writes over memory that the chain reads.
    fn undisturbed(&self, chain: &Chain<'a>) -> bool {
        let (first, last) = (chain.members[0], chain.members[chain.members.len() - 1]);
        let inputs = [Some(chain.x), Some(chain.ids), chain.weights];
        (first..last).filter(|at| chain.members.binary_search(at).is_err()).all(|at| {
            let other = self.node(at);
            !computes(other) || !writes(other) || inputs.iter().flatten().all(|input| !overlap(input, other))
        })
    }
}

struct Head<'a> {
    x: &'a ggml_tensor,
    gate_up: GateUp<'a>,
    glu: Glu,
}

struct Tail<'a> {
    end: usize,
    bias: Option<&'a ggml_tensor>,
    weights: Option<&'a ggml_tensor>,
    summed: bool,
}

impl Chain<'_> {
    /// Whether the kernels can read all its parts where they are.
    fn fits(&self) -> bool {
        let product = |p: &Product<'_>| {
            engine_weights(eligible::Product::Experts, p.w)
                && p.w.ne[3] == 1
                && p.bias.is_none_or(|b| bias_fits(p.w, b))
        };
        let gate_up = match &self.gate_up {
            GateUp::Apart { gate, up } => product(gate) && product(up) && gate.w.ne == up.w.ne,
            GateUp::Merged(both) => product(both) && both.w.ne[1] % 2 == 0,
        };
        let ids = self.ids.type_ == sys::GGML_TYPE_I32 && in_host_layout(self.ids);
        let weights = self.weights.is_none_or(|w| w.type_ == sys::GGML_TYPE_F32 && in_host_layout(w));
        gate_up
            && product(&self.down)
            && ids
            && weights
            && plain_f32(self.x)
            && plain_f32(self.dst)
            && self.x.ne[3] == 1
    }
}

/// A bias of one f32 for each row of each expert, rows dense.
fn bias_fits(w: &ggml_tensor, bias: &ggml_tensor) -> bool {
    plain_f32(bias) && bias.ne[0] == w.ne[1] && bias.ne[1] == w.ne[2]
}

/// The GLU of a node, if the kernels know it.
fn glu(node: &ggml_tensor) -> Option<Glu> {
    let param = |i: usize| f32::from_bits(node.op_params[i] as u32);
    // SAFETY: a valid GLU node.
    match unsafe { sys::ggml_get_glu_op(node) } {
        sys::GGML_GLU_OP_REGLU => Some(Glu::ReGlu),
        sys::GGML_GLU_OP_GEGLU => Some(Glu::GeGlu),
        sys::GGML_GLU_OP_GEGLU_ERF => Some(Glu::GeGluErf),
        sys::GGML_GLU_OP_GEGLU_QUICK => Some(Glu::GeGluQuick),
        sys::GGML_GLU_OP_SWIGLU => Some(Glu::SwiGlu),
        sys::GGML_GLU_OP_SWIGLU_OAI => Some(Glu::SwiGluOai { alpha: param(2), limit: param(3) }),
        sys::GGML_GLU_OP_SWIGLU_CLAMP => Some(Glu::SwiGluClamp { limit: param(3) }),
        _ => None,
    }
}

/// Whether computing the node writes memory: views and reshapes do not.
fn writes(node: &ggml_tensor) -> bool {
    !matches!(
        node.op,
        sys::GGML_OP_NONE | sys::GGML_OP_VIEW | sys::GGML_OP_RESHAPE | sys::GGML_OP_PERMUTE | sys::GGML_OP_TRANSPOSE
    )
}

/// Whether the memory of two tensors overlaps.
fn overlap(a: &ggml_tensor, b: &ggml_tensor) -> bool {
    // SAFETY: valid tensors.
    let end = |t: &ggml_tensor| t.data.addr() + unsafe { sys::ggml_nbytes(t) };
    !ne(a).contains(&0) && !ne(b).contains(&0) && a.data.addr() < end(b) && b.data.addr() < end(a)
}
