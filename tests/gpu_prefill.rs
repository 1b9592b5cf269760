//! With a GPU in the program, large batches over weights in host memory stay the GPU's. A test program of its own, because
//! the made-up GPU is registered for the whole process.

mod ggml;

use std::ffi::c_char;
use std::ptr::null_mut;

use ggml::*;
use ggml_hina::ggml::sys::*;

/// A GPU that exists only in this test: it can run all, and wants products of 32 tokens and more.
mod made_up_gpu {
    use super::*;

    pub unsafe extern "C" fn name(_d: ggml_backend_dev_t) -> *const c_char {
        c"MadeUpGPU".as_ptr()
    }
    pub unsafe extern "C" fn kind(_d: ggml_backend_dev_t) -> ggml_backend_dev_type {
        GGML_BACKEND_DEVICE_TYPE_GPU
    }
    pub unsafe extern "C" fn supports(_d: ggml_backend_dev_t, _op: *const ggml_tensor) -> bool {
        true
    }
    pub unsafe extern "C" fn offload(_d: ggml_backend_dev_t, op: *const ggml_tensor) -> bool {
        // SAFETY: ggml's caller passes a valid node. MUL_MAT_ID has its tokens in dimension 2.
        let op = unsafe { &*op };
        op.ne[if op.op == GGML_OP_MUL_MAT_ID { 2 } else { 1 }] >= 32
    }
}

#[test]
fn a_gpu_keeps_its_prefill() {
    if !ready() {
        return;
    }
    // SAFETY: zero is a valid value of these structs; they are leaked, so they live as long as the registry.
    unsafe {
        let mut iface: ggml_backend_device_i = std::mem::zeroed();
        iface.get_name = Some(made_up_gpu::name);
        iface.get_description = Some(made_up_gpu::name);
        iface.get_type = Some(made_up_gpu::kind);
        iface.supports_op = Some(made_up_gpu::supports);
        iface.offload_op = Some(made_up_gpu::offload);
        let gpu = Box::leak(Box::new(ggml_backend_device { iface, reg: null_mut(), context: null_mut() }));
        ggml_backend_device_register(gpu);
    }
    for (tokens, ours) in [(1, true), (31, true), (32, false), (512, false)] {
        let net = mul_mat_id(GGML_TYPE_BF16, tokens);
        let supported = |usage| {
            // SAFETY: valid tensors; the weight's buffer is marked as llama.cpp marks its weights.
            unsafe {
                ggml_backend_buffer_set_usage((*net.named("w")).buffer, usage);
                ggml_backend_dev_supports_op(device(), net.named("y"))
            }
        };
        assert_eq!(supported(GGML_BACKEND_BUFFER_USAGE_WEIGHTS), ours, "{tokens} tokens");
        assert!(supported(GGML_BACKEND_BUFFER_USAGE_COMPUTE), "no weight, no prefill: {tokens} tokens");
    }
}
