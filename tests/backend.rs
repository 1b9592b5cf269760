//! The backend inside a real ggml: what it computes, what it refuses, and that it leaves the caller's graph alone.

mod ggml;

use std::ffi::c_void;
use std::ptr::null_mut;

use ggml::*;
use ggml_hina::ggml::sys::*;

#[test]
fn expert_products_are_ggmls_and_the_graph_is_untouched() {
    if !ready() {
        return;
    }
    for kind in [GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_F16, GGML_TYPE_F32] {
        for tokens in [1, 2, 33] {
            let net = mul_mat_id(kind, tokens);
            assert_eq!(Backend::cpu(2).compute(&net), GGML_STATUS_SUCCESS);
            let want = values(net.named("y"));
            fill(net.named("y"), &vec![f32::NAN; want.len()]);
            let before = net.nodes();
            assert_eq!(Backend::hina(3).compute(&net), GGML_STATUS_SUCCESS);
            check_mul_mat_id(&net, &values(net.named("y")), &want, &format!("type {kind}, {tokens} tokens"));
            assert_eq!(net.nodes(), before);
            // SAFETY: a valid node.
            assert!(before.iter().all(|n| unsafe { (**n).op } == GGML_OP_MUL_MAT_ID));
        }
    }
}

#[test]
fn an_expert_id_out_of_range_is_an_error_that_names_node_and_id() {
    if !ready() {
        return;
    }
    for (bad, tokens) in [(EXPERTS as i32, 1), (-7, 1), (i32::MAX, 40), (i32::MIN, 2)] {
        let net = mul_mat_id(GGML_TYPE_BF16, tokens);
        let backend = Backend::hina(4);
        let mut ids = vec![0; (USED * tokens) as usize];
        ids[USED as usize * tokens as usize - 1] = bad;
        fill_i32(net.named("ids"), &ids);
        let mark = vec![42.0; (N * USED * tokens) as usize];
        fill(net.named("y"), &mark);
        assert_eq!(backend.compute(&net), GGML_STATUS_FAILED);
        assert_eq!(values(net.named("y")), mark, "nothing is written");
        let line = log_lines(&format!("expert id {bad} "));
        assert!(line.iter().any(|l| l.contains("'y'")), "{line:?}");
        // The backend works on afterwards.
        fill_i32(net.named("ids"), &vec![1; ids.len()]);
        assert_eq!(backend.compute(&net), GGML_STATUS_SUCCESS);
        assert!(values(net.named("y")).iter().all(|v| *v != 42.0));
    }
}

#[test]
fn the_users_abort_callback_ends_the_graph() {
    unsafe extern "C" fn yes(_data: *mut c_void) -> bool {
        true
    }
    if !ready() {
        return;
    }
    let net = Net::new(|ctx| {
        let x = tensor(ctx, "x", GGML_TYPE_F32, &[8]);
        // SAFETY: valid tensors.
        unsafe { vec![ggml_sqr(ctx, ggml_sqr(ctx, x))] }
    });
    fill(net.named("x"), &[1.0; 8]);
    let backend = Backend::hina(1);
    assert_eq!(backend.compute(&net), GGML_STATUS_SUCCESS);
    let set = proc_address(device(), c"ggml_backend_set_abort_callback");
    // SAFETY: ggml documents this type for this name.
    unsafe {
        let set: unsafe extern "C" fn(ggml_backend_t, ggml_abort_callback, *mut c_void) = std::mem::transmute(set);
        set(backend.0, Some(yes), null_mut());
    }
    assert_eq!(backend.compute(&net), GGML_STATUS_ABORTED);
}

#[test]
fn every_forwarded_function_is_there() {
    if !ready() {
        return;
    }
    for name in [
        c"ggml_backend_set_n_threads",
        c"ggml_backend_set_abort_callback",
        c"ggml_backend_cpu_set_use_ref",
        c"ggml_backend_cpu_set_threadpool",
        c"ggml_backend_get_features",
        c"ggml_threadpool_new",
        c"ggml_threadpool_free",
    ] {
        proc_address(device(), name);
    }
}

#[test]
fn the_device_is_an_accelerator_with_the_cpus_capabilities() {
    if !ready() {
        return;
    }
    // SAFETY: registered devices; zero is a valid value of the struct.
    unsafe {
        let cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        let (mut ours, mut theirs): (ggml_backend_dev_props, ggml_backend_dev_props) = std::mem::zeroed();
        ggml_backend_dev_get_props(device(), &mut ours);
        ggml_backend_dev_get_props(cpu, &mut theirs);
        assert_eq!(ours.type_, GGML_BACKEND_DEVICE_TYPE_ACCEL);
        assert_eq!(format!("{:?}", ours.caps), format!("{:?}", theirs.caps));
        assert!(ours.caps.mmap_support, "a model file stays mapped");
        assert!(ggml_backend_dev_supports_buft(device(), ggml_backend_cpu_buffer_type()));
    }
}
