//! Operations that llama.cpp keeps only if they land on the device of their layer, which is the CPU's and never ours.
//!
//! Under `-fa auto`, its default, `llama_context::resolve_fused_ops` schedules one graph to see which device each flash
//! attention node gets. An accelerator is no layer's device, so if we took the node llama.cpp would do without flash attention,
//! and be slower with us than without. The fused operations of some architectures are probed the same way.
//!
//! So flash attention is left to the CPU backend in the first graph that is scheduled after a backend is made, and taken from
//! then on. The end of that graph's scheduling shows in `graph_optimize`, which the scheduler calls for each part of it that is
//! ours once all of its nodes have their backends. The other operations, which we never compute ourselves, are always left.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};

use super::sys;

/// A backend was made and no graph has been scheduled since. Two contexts at once can only make a graph run its attention on
/// the CPU backend.
static PROBING: AtomicBool = AtomicBool::new(false);

/// A backend was made: the next graph may be a probe.
pub fn begin() {
    PROBING.store(true, Ordering::Release);
}

/// `graph_optimize` of the backend: a graph has been scheduled.
// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
pub unsafe extern "C" fn end(
    _backend: sys::ggml_backend_t,
    _graph: *mut sys::ggml_cgraph,
    _params: *mut sys::ggml_backend_graph_optimize_params,
) {
    PROBING.store(false, Ordering::Release);
}

/// Whether this node must go to the CPU backend now.
///
/// # Safety
/// The tensor and its sources are valid.
// SAFETY: contract above.
pub unsafe fn leaves_to_cpu(node: &sys::ggml_tensor) -> bool {
    match node.op {
        // SAFETY: by the contract.
        sys::GGML_OP_FLASH_ATTN_EXT => PROBING.load(Ordering::Acquire) && unsafe { has_cache(node) },
        sys::GGML_OP_GATED_DELTA_NET
        | sys::GGML_OP_LIGHTNING_INDEXER
        | sys::GGML_OP_DSV4_HC_COMB
        | sys::GGML_OP_DSV4_HC_PRE
        | sys::GGML_OP_DSV4_HC_POST => true,
        _ => false,
    }
}

/// Whether the keys lie in a buffer already, as those of a KV cache do. A program that asks about a lone node
/// (test-backend-ops) has allocated nothing yet, and means the node itself.
///
/// # Safety
/// The tensor and its sources are valid.
// SAFETY: contract above.
unsafe fn has_cache(node: &sys::ggml_tensor) -> bool {
    let Some(keys) = NonNull::new(node.src[1]) else { return false };
    // SAFETY: by the contract; a view's source is valid as long as the view.
    unsafe {
        let root = NonNull::new(keys.as_ref().view_src).unwrap_or(keys);
        !root.as_ref().buffer.is_null()
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;

    use super::*;

    fn node(op: sys::ggml_op, keys: &mut sys::ggml_tensor) -> sys::ggml_tensor {
        // SAFETY: zero is a valid tensor of plain C data.
        let mut node: sys::ggml_tensor = unsafe { std::mem::zeroed() };
        node.op = op;
        node.src[1] = keys;
        node
    }

    #[test]
    fn flash_attention_on_a_cache_is_left_in_the_first_graph_only() {
        // SAFETY: zero is a valid tensor of plain C data.
        let mut cached: sys::ggml_tensor = unsafe { std::mem::zeroed() };
        cached.buffer = NonNull::dangling().as_ptr();
        // SAFETY: as above.
        let mut loose: sys::ggml_tensor = unsafe { std::mem::zeroed() };
        let attention = node(sys::GGML_OP_FLASH_ATTN_EXT, &mut cached);
        let lone = node(sys::GGML_OP_FLASH_ATTN_EXT, &mut loose);
        let experts = node(sys::GGML_OP_MUL_MAT_ID, &mut loose);
        let delta = node(sys::GGML_OP_GATED_DELTA_NET, &mut loose);
        // SAFETY: the nodes and their sources live; the buffer is only compared with null.
        let left = || unsafe { [&attention, &lone, &experts, &delta].map(|n| leaves_to_cpu(n)) };

        begin();
        assert_eq!(left(), [true, false, false, true]);
        // SAFETY: the function looks at none of its arguments.
        unsafe { end(null_mut(), null_mut(), null_mut()) };
        assert_eq!(left(), [false, false, false, true]);
    }
}
