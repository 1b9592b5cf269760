//! The expert FFN as one node: each form llama.cpp builds gives the CPU backend's numbers, and a chain is left alone where
//! something outside it could tell.

mod ggml;

use std::path::PathBuf;

use ggml::*;
use ggml_hina::ggml::sys::*;

const EMBD: i64 = 96;
const FF: i64 = 64;
const EXPERTS: i64 = 5;

/// What a chain looks like.
#[derive(Clone, Copy, Debug)]
struct Form {
    kind: ggml_type,
    merged: bool,
    bias: bool,
    /// A GLU operation, or none for the older `MUL(SILU(gate), up)`.
    glu: Option<ggml_glu_op>,
    router: bool,
    summed: bool,
    used: i64,
    tokens: i64,
    /// Name of an intermediate that is made an output of the graph.
    output: Option<&'static str>,
    /// Name of an intermediate that something else uses too.
    used_twice: Option<&'static str>,
    /// Whether a node of its own stands between GLU and down.
    midway: bool,
}

const PLAIN: Form = Form {
    kind: GGML_TYPE_BF16,
    merged: false,
    bias: false,
    glu: Some(GGML_GLU_OP_SWIGLU),
    router: true,
    summed: true,
    used: 3,
    tokens: 4,
    output: None,
    used_twice: None,
    midway: false,
};

type Ctx = *mut ggml_context;
type T = *mut ggml_tensor;

fn name(t: T, name: &std::ffi::CStr) -> T {
    // SAFETY: a valid tensor and name.
    unsafe { ggml_set_name(t, name.as_ptr()) }
}

impl Form {
    fn net(self) -> Net {
        let net = Net::new(|ctx| {
            let dst = self.build(ctx);
            let mut results = vec![dst];
            if self.midway {
                // SAFETY: a valid context.
                let other = unsafe { ggml_sqr(ctx, tensor(ctx, "z", GGML_TYPE_F32, &[EMBD, 1, self.tokens])) };
                results = vec![find(ctx, "h"), name(other, c"midway"), dst];
            }
            if let Some(extra) = self.used_twice {
                // SAFETY: a valid tensor.
                results.push(unsafe { ggml_sqr(ctx, find(ctx, extra)) });
            }
            if let Some(output) = self.output {
                // SAFETY: a valid tensor.
                unsafe { ggml_set_output(find(ctx, output)) };
            }
            results
        });
        for (i, t) in inputs(&net).into_iter().enumerate() {
            // SAFETY: a valid tensor.
            let n = unsafe { ggml_nelements(t) } as usize;
            fill(t, &noise(i as u64 + 7, n));
        }
        let ids: Vec<i32> =
            (0..self.tokens).flat_map(|t| (0..self.used).map(move |s| ((t * 3 + s) % EXPERTS) as i32)).collect();
        fill_i32(net.named("ids"), &ids);
        net
    }

    /// As `llm_graph_context::build_moe_ffn` builds it.
    fn build(self, ctx: Ctx) -> T {
        let x = tensor(ctx, "x", GGML_TYPE_F32, &[EMBD, 1, self.tokens]);
        let ids = tensor(ctx, "ids", GGML_TYPE_I32, &[self.used, self.tokens]);
        // SAFETY: valid tensors throughout; ggml asserts their shapes.
        unsafe {
            let (gate, up) = if self.merged {
                let both = name(self.product(ctx, c"gate_up", x, ids, [EMBD, 2 * FF]), c"gate_up");
                let half =
                    |offset| ggml_view_3d(ctx, both, FF, self.used, self.tokens, (*both).nb[1], (*both).nb[2], offset);
                (half(0), half(FF as usize * 4))
            } else {
                let up = name(self.product(ctx, c"up", x, ids, [EMBD, FF]), c"up");
                (name(self.product(ctx, c"gate", x, ids, [EMBD, FF]), c"gate"), up)
            };
            let h = match self.glu {
                None => ggml_mul(ctx, ggml_silu(ctx, gate), up),
                Some(GGML_GLU_OP_SWIGLU_OAI) => ggml_swiglu_oai(ctx, gate, up, 1.702, 7.0),
                Some(op) => ggml_glu_split(ctx, gate, up, op),
            };
            let mut y = self.product(ctx, c"down", name(h, c"h"), ids, [FF, EMBD]);
            if self.router {
                y = ggml_mul(ctx, y, tensor(ctx, "router", GGML_TYPE_F32, &[1, self.used, self.tokens]));
            }
            name(y, c"experts");
            if self.summed { name(self.sum(ctx, y), c"dst") } else { y }
        }
    }

    /// A product, and its bias where there is one.
    unsafe fn product(self, ctx: Ctx, label: &std::ffi::CStr, x: T, ids: T, [k, n]: [i64; 2]) -> T {
        let label = label.to_str().unwrap();
        let w = tensor(ctx, &format!("w_{label}"), self.kind, &[k, n, EXPERTS]);
        // SAFETY: valid tensors.
        unsafe {
            let y = ggml_mul_mat_id(ctx, w, x, ids);
            if !self.bias {
                return y;
            }
            ggml_add_id(ctx, y, tensor(ctx, &format!("b_{label}"), GGML_TYPE_F32, &[n, EXPERTS]), ids)
        }
    }

    unsafe fn sum(self, ctx: Ctx, y: T) -> T {
        // SAFETY: valid tensors.
        unsafe {
            let view = |slot: i64| ggml_view_2d(ctx, y, EMBD, self.tokens, (*y).nb[2], slot as usize * (*y).nb[1]);
            let views: Vec<T> = (0..self.used).map(view).collect();
            if let [only] = views[..] {
                return ggml_cont(ctx, only);
            }
            views[1..].iter().fold(views[0], |sum, v| ggml_add(ctx, sum, *v))
        }
    }
}

fn find(ctx: Ctx, name: &str) -> T {
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: a valid context and name.
    unsafe { ggml_get_tensor(ctx, name.as_ptr()) }
}

/// All f32 and weight inputs of a net, in a fixed order.
fn inputs(net: &Net) -> Vec<T> {
    let names = ["x", "z", "router", "w_gate_up", "w_gate", "w_up", "w_down", "b_gate_up", "b_gate", "b_up", "b_down"];
    names.iter().map(|n| find(net.ctx, n)).filter(|t| !t.is_null()).collect()
}

fn result(net: &Net) -> Vec<f32> {
    let dst = find(net.ctx, "dst");
    values(if dst.is_null() { net.named("experts") } else { dst })
}

/// Runs a net on ggml's CPU backend and on ours; returns the error and what ours says it did.
fn compare(net: &Net, label: &str) -> (f64, String) {
    assert_eq!(Backend::cpu(2).compute(net), GGML_STATUS_SUCCESS);
    let want = result(net);
    let path = stats_path();
    let _ = std::fs::remove_file(&path);
    assert_eq!(Backend::hina(3).compute(net), GGML_STATUS_SUCCESS);
    let did = std::fs::read_to_string(&path).unwrap_or_default();
    let error = nmse(&result(net), &want);
    assert!(error < limit(net), "{label}: {error:e}");
    (error, did)
}

/// How far a result may be from ggml's. Where activations meet Q8_0 weights as BF16 (many tokens on AMX), ggml's quantised ones are the error.
fn limit(net: &Net) -> f64 {
    let experts = ["w_gate_up", "w_gate", "w_down"].map(|n| find(net.ctx, n));
    // SAFETY: tensors of the net.
    let q8_0 = experts.into_iter().any(|t| !t.is_null() && unsafe { (*t).type_ } == GGML_TYPE_Q8_0);
    if q8_0 { 3e-4 } else { 1e-5 }
}

fn stats_path() -> PathBuf {
    std::env::temp_dir().join(format!("hina-fusion-{}.json", std::process::id()))
}

/// One test, as the counts go to one file that the environment names before the backend reads it.
#[test]
fn chains() {
    // SAFETY: this program has one test, so no other thread reads the environment now.
    unsafe { std::env::set_var("GGML_HINA_STATS", stats_path()) };
    if !ready() {
        return;
    }
    every_form_is_one_node_with_the_right_numbers();
    nothing_is_fused_that_something_outside_can_tell();
    a_result_over_the_input_is_right();
    a_chain_whose_input_is_written_over_midway_is_not_fused();
    a_chain_in_pieces_runs_node_by_node();
    let _ = std::fs::remove_file(stats_path());
}

fn every_form_is_one_node_with_the_right_numbers() {
    let glus = [
        Some(GGML_GLU_OP_SWIGLU),
        Some(GGML_GLU_OP_GEGLU),
        Some(GGML_GLU_OP_REGLU),
        Some(GGML_GLU_OP_GEGLU_ERF),
        Some(GGML_GLU_OP_GEGLU_QUICK),
        Some(GGML_GLU_OP_SWIGLU_OAI),
        None,
    ];
    let mut forms: Vec<Form> = glus.iter().map(|&glu| Form { glu, ..PLAIN }).collect();
    for kind in [GGML_TYPE_BF16, GGML_TYPE_Q8_0] {
        for merged in [false, true] {
            for bias in [false, true] {
                for (router, summed) in [(false, false), (true, false), (false, true), (true, true)] {
                    forms.push(Form { kind, merged, bias, router, summed, ..PLAIN });
                }
            }
        }
        for (used, tokens) in [(1, 1), (1, 7), (2, 1), (5, 40)] {
            forms.push(Form { kind, used, tokens, ..PLAIN });
        }
    }
    for form in forms {
        let (_, did) = compare(&form.net(), &format!("{form:?}"));
        assert!(did.contains("\"moe_ffn\":{\"calls\":1,") && !did.contains("mul_mat_id"), "{form:?}: {did}");
    }
}

fn nothing_is_fused_that_something_outside_can_tell() {
    for inner in ["gate", "up", "h", "experts"] {
        for form in [Form { output: Some(inner), ..PLAIN }, Form { used_twice: Some(inner), ..PLAIN }] {
            let (_, did) = compare(&form.net(), &format!("{form:?}"));
            let whole = did.contains("moe_ffn") && !did.contains("mul_mat_id");
            // With the experts' weighted results used elsewhere the chain may end there, and the sum run by itself.
            assert!(inner == "experts" || !whole, "{form:?}: {did}");
            assert!(did.contains("mul_mat_id") || inner == "experts", "{form:?}: {did}");
        }
    }
}

/// ggml's allocator may lay a chain's result over its input, which is dead by then.
fn a_result_over_the_input_is_right() {
    for tokens in [1, 4, 33] {
        for kind in [GGML_TYPE_BF16, GGML_TYPE_Q8_0] {
            let net = Form { tokens, kind, ..PLAIN }.net();
            assert_eq!(Backend::cpu(1).compute(&net), GGML_STATUS_SUCCESS);
            let want = result(&net);
            // SAFETY: valid tensors; the activations are as large as the result.
            unsafe { (*net.named("dst")).data = (*net.named("x")).data };
            assert_eq!(Backend::hina(3).compute(&net), GGML_STATUS_SUCCESS);
            let error = nmse(&result(&net), &want);
            assert!(error < limit(&net), "{tokens} tokens: {error:e}");
        }
    }
}

/// A node in the middle of the chain may take over the memory of the activations, which are dead after gate and up.
fn a_chain_whose_input_is_written_over_midway_is_not_fused() {
    let net = Form { midway: true, ..PLAIN }.net();
    // SAFETY: valid tensors of one shape.
    unsafe { (*net.named("midway")).data = (*net.named("x")).data };
    let x = values(net.named("x"));
    assert_eq!(Backend::cpu(1).compute(&net), GGML_STATUS_SUCCESS);
    let want = result(&net);
    fill(net.named("x"), &x);
    let path = stats_path();
    let _ = std::fs::remove_file(&path);
    assert_eq!(Backend::hina(3).compute(&net), GGML_STATUS_SUCCESS);
    let did = std::fs::read_to_string(&path).unwrap();
    assert!(did.contains("\"mul_mat_id\":{\"calls\":3,"), "{did}");
    let error = nmse(&result(&net), &want);
    assert!(error < 1e-5, "{error:e}");
}

/// As an eval callback hands a graph over.
fn a_chain_in_pieces_runs_node_by_node() {
    let net = PLAIN.net();
    assert_eq!(Backend::cpu(1).compute(&net), GGML_STATUS_SUCCESS);
    let want = result(&net);
    let path = stats_path();
    let _ = std::fs::remove_file(&path);
    let backend = Backend::hina(2);
    for i in 0..net.nodes().len() as i32 {
        // SAFETY: a piece of a valid graph, as the scheduler makes it.
        unsafe {
            let mut piece = ggml_graph_view(net.graph, i, i + 1);
            assert_eq!(ggml_backend_graph_compute(backend.0, &mut piece), GGML_STATUS_SUCCESS);
        }
    }
    drop(backend);
    let did = std::fs::read_to_string(&path).unwrap();
    assert!(did.contains("\"mul_mat_id\":{\"calls\":3,") && !did.contains("moe_ffn"), "{did}");
    assert!(nmse(&result(&net), &want) < 1e-5);
}
