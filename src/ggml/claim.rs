//! Which nodes are ours: those where our kernels beat ggml's CPU backend on this CPU, and that they compute rightly.

use std::ffi::CStr;

use super::fuse::{Chain, GateUp, Product};
use super::graph::Rules;
use super::op::Work;
use super::sys;
use super::tensor::{dense_rows, dtype, half_rows, ids, in_host_layout, ne, src, view, view_mut, weights};
use crate::attention::{FlashAttn, Params};
use crate::eligible;
use crate::moe::{Bias, Ffn, FfnParts, MulMat, MulMatId, Output};

/// The work that stands for `node`, if it is ours.
///
/// # Safety
/// The node and its sources are valid and allocated, and stay so while the work is used.
// SAFETY: contract above.
pub unsafe fn node(node: &sys::ggml_tensor, _rules: &Rules) -> Option<Work> {
    if !computes(node) {
        return None;
    }
    // SAFETY: by the contract.
    unsafe {
        match node.op {
            sys::GGML_OP_MUL_MAT_ID => mul_mat_id(node),
            sys::GGML_OP_MUL_MAT => mul_mat(node),
            sys::GGML_OP_FLASH_ATTN_EXT => flash_attn(node),
            _ => None,
        }
    }
}

/// The work that stands for a chain, if the kernels know its types.
///
/// # Safety
/// As [`node`], for all tensors of the chain.
// SAFETY: contract above.
pub unsafe fn chain(chain: &Chain<'_>) -> Option<Work> {
    // SAFETY: by the contract.
    unsafe {
        let bias = |p: &Product<'_>| p.bias.and_then(|b| view(b)).map(Bias);
        let (gate, up, gate_bias, up_bias) = match &chain.gate_up {
            GateUp::Apart { gate, up } => (weights(gate.w)?, weights(up.w)?, bias(gate), bias(up)),
            GateUp::Merged(both) => {
                let w = weights(both.w)?;
                let [gate, up] = w.split(w.n / 2);
                let half = |i| both.bias.and_then(|b| half_rows(b, i)).map(Bias);
                (gate, up, half(0), half(1))
            }
        };
        if gate.dtype != up.dtype {
            return None;
        }
        let dst = view_mut(chain.dst);
        Some(Work::Ffn(Ffn::new(FfnParts {
            x: view(chain.x)?,
            ids: ids(chain.ids),
            gate,
            up,
            gate_bias,
            up_bias,
            glu: chain.glu,
            down: weights(chain.down.w)?,
            down_bias: bias(&chain.down),
            router: chain.weights.and_then(|w| view(w)),
            output: if chain.summed { Output::Sum(dst) } else { Output::Slots(dst) },
        })))
    }
}

/// ggml's name of an operation that was left to the CPU backend, and why where it might have been ours; none where nothing is
/// computed.
///
/// # Safety
/// As [`node`].
// SAFETY: contract above.
pub unsafe fn left(node: &sys::ggml_tensor) -> Option<(&'static str, Option<&'static str>)> {
    const MOVES_NOTHING: [sys::ggml_op; 5] =
        [sys::GGML_OP_NONE, sys::GGML_OP_RESHAPE, sys::GGML_OP_VIEW, sys::GGML_OP_PERMUTE, sys::GGML_OP_TRANSPOSE];
    if !computes(node) || MOVES_NOTHING.contains(&node.op) {
        return None;
    }
    // SAFETY: ggml's names are static strings; sources by the contract.
    let (name, weights) = unsafe { (CStr::from_ptr(sys::ggml_op_desc(node)), src(node, 0)) };
    let product = match node.op {
        sys::GGML_OP_MUL_MAT_ID => Some(eligible::Product::Experts),
        sys::GGML_OP_MUL_MAT => Some(eligible::Product::Plain),
        _ => None,
    };
    let why = product.zip(weights).map(|(product, w)| match eligible::product(product, dtype(w)) {
        Err(why) => why.text(),
        Ok(()) => "its shape or its place in memory",
    });
    let attention = (node.op == sys::GGML_OP_FLASH_ATTN_EXT).then_some("its shape, types or number of tokens");
    Some((name.to_str().unwrap_or("?"), why.or(attention)))
}

/// Whether ggml would compute the node: it is marked so and has elements.
pub fn computes(node: &sys::ggml_tensor) -> bool {
    node.flags & sys::GGML_TENSOR_FLAG_COMPUTE as i32 != 0 && !ne(node).contains(&0)
}

/// Weights the engines multiply in place: of a type that is ours in this product, rows dense, in host memory.
pub fn engine_weights(product: eligible::Product, t: &sys::ggml_tensor) -> bool {
    eligible::product(product, dtype(t)).is_ok() && dense_rows(t) && in_host_layout(t)
}

/// F32 with dense rows, at an address: activations and results.
pub fn plain_f32(t: &sys::ggml_tensor) -> bool {
    t.type_ == sys::GGML_TYPE_F32 && dense_rows(t) && in_host_layout(t)
}

/// `MUL_MAT_ID`: `dst[:, slot, token] = w[ids[slot, token]] x src1[:, slot % ne11, token]`.
// SAFETY: contract of `node`.
unsafe fn mul_mat_id(node: &sys::ggml_tensor) -> Option<Work> {
    // SAFETY: by the contract of `node`.
    unsafe {
        let (w, x, id) = (src(node, 0)?, src(node, 1)?, src(node, 2)?);
        let fits = engine_weights(eligible::Product::Experts, w)
            && plain_f32(x)
            && plain_f32(node)
            && id.type_ == sys::GGML_TYPE_I32;
        if !fits || w.ne[3] != 1 || x.ne[3] != 1 || !in_host_layout(id) {
            return None;
        }
        Some(Work::MulMatId(MulMatId::new(weights(w)?, view(x)?, ids(id), view_mut(node))))
    }
}

/// `MUL_MAT` with one matrix of weights: projections, shared experts, the output head.
// SAFETY: contract of `node`.
unsafe fn mul_mat(node: &sys::ggml_tensor) -> Option<Work> {
    // SAFETY: by the contract of `node`.
    unsafe {
        let (w, x) = (src(node, 0)?, src(node, 1)?);
        let fits =
            engine_weights(eligible::Product::Plain, w) && plain_f32(x) && plain_f32(node) && w.ne[2..] == [1, 1];
        fits.then(|| Some(Work::MulMat(MulMat::new(weights(w)?, 1, view(x)?, view_mut(node)))))?
    }
}

/// Whether a mask of `n_kv` positions a row of which at most `n_kv_max` are open (`ggml_flash_attn_ext_set_n_kv_max`; 0: unknown) is
/// so sparse that ggml's kernel, which goes over the open ones alone, is ahead: ours reads whole blocks. Measured on a Xeon 6 with 16
/// heads of MLA: 512 of 4096 take 0.9 ms there and 1.5 here, all of 49 152 take 110 there and 20 here, so they meet at about a fifth.
fn is_sparse(n_kv_max: i32, n_kv: i64) -> bool {
    n_kv_max > 0 && n_kv / 4 >= i64::from(n_kv_max)
}

/// `FLASH_ATTN_EXT`, where the attention kernels take its shapes and types.
// SAFETY: contract of `node`.
unsafe fn flash_attn(node: &sys::ggml_tensor) -> Option<Work> {
    let param = |i: usize| f32::from_bits(node.op_params[i] as u32);
    // SAFETY: by the contract of `node`.
    unsafe {
        let (q, k, v) = (src(node, 0)?, src(node, 1)?, src(node, 2)?);
        let (mask, sinks) = (src(node, 3), src(node, 4));
        let all = [Some(q), Some(k), Some(v), mask, sinks];
        if !plain_f32(q) || !plain_f32(node) || !all.iter().flatten().all(|t| in_host_layout(t)) {
            return None;
        }
        if is_sparse(node.op_params[4], k.ne[1]) {
            return None;
        }
        // A mask or sinks of a type that is unknown here must not look like none.
        let optional = |t: Option<&sys::ggml_tensor>| match t {
            None => Some(None),
            Some(t) => view(t).map(Some),
        };
        let attention = FlashAttn::new(Params {
            q: view(q)?,
            k: view(k)?,
            v: view(v)?,
            mask: optional(mask)?,
            sinks: optional(sinks)?,
            scale: param(0),
            max_bias: param(1),
            logit_softcap: param(2),
            dst: view_mut(node),
        })?;
        Some(Work::FlashAttn(attention))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_of_few_open_positions_are_left_to_ggml() {
        assert!(!is_sparse(0, 1 << 20), "not said");
        assert!(is_sparse(512, 2048) && is_sparse(512, 49_152));
        assert!(!is_sparse(512, 2047) && !is_sparse(4096, 4096));
    }
}
