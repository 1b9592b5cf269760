//! The device: an `ACCEL` device that can do all the CPU device can, with the CPU's own buffer type.
//!
//! So weights stay where llama.cpp puts them, and the scheduler gives us every node that would run on the CPU.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

use super::plugin::{Fixed, NAME, config, guard, registry};
use super::{backend, cpu, probe, sys};
use crate::config::Prefill;

const DESCRIPTION: &CStr = c"HiNa-MoE: expert products and decode attention on CPU matrix engines";

/// The device: one for the process.
pub fn device() -> sys::ggml_backend_dev_t {
    static DEVICE: OnceLock<Fixed<sys::ggml_backend_device>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        // SAFETY: a struct of optional function pointers; all absent is a valid value, and later ggml versions may add some.
        let mut iface: sys::ggml_backend_device_i = unsafe { std::mem::zeroed() };
        iface.get_name = Some(name);
        iface.get_description = Some(description);
        iface.get_memory = Some(memory);
        iface.get_type = Some(kind);
        iface.get_props = Some(props);
        iface.init_backend = Some(init_backend);
        iface.get_buffer_type = Some(buffer_type);
        iface.buffer_from_host_ptr = Some(buffer_from_host_ptr);
        iface.supports_op = Some(supports_op);
        iface.supports_buft = Some(supports_buft);
        Fixed(sys::ggml_backend_device { iface, reg: registry(), context: null_mut() })
    });
    (&raw const device.0).cast_mut()
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn name(_dev: sys::ggml_backend_dev_t) -> *const c_char {
    NAME.as_ptr()
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn description(_dev: sys::ggml_backend_dev_t) -> *const c_char {
    DESCRIPTION.as_ptr()
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn kind(_dev: sys::ggml_backend_dev_t) -> sys::ggml_backend_dev_type {
    sys::GGML_BACKEND_DEVICE_TYPE_ACCEL
}

/// The CPU's memory: an RPC server that offers this device tells its clients how much they may place here.
// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn memory(_dev: sys::ggml_backend_dev_t, free: *mut usize, total: *mut usize) {
    guard((), || {
        // SAFETY: ggml passes two valid pointers; the CPU device takes the same question.
        unsafe {
            *free = 0;
            *total = 0;
            if let Some(cpu) = cpu::device() {
                sys::ggml_backend_dev_memory(cpu.as_ptr(), free, total);
            }
        }
    });
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn props(dev: sys::ggml_backend_dev_t, props: *mut sys::ggml_backend_dev_props) {
    guard((), || {
        // SAFETY: ggml passes a valid struct; zero is valid for its strings, numbers and flags.
        unsafe {
            props.write(std::mem::zeroed());
            let props = &mut *props;
            props.name = NAME.as_ptr();
            props.description = DESCRIPTION.as_ptr();
            props.type_ = kind(dev);
            if let Some(cpu) = cpu::device() {
                let mut of_cpu: sys::ggml_backend_dev_props = std::mem::zeroed();
                sys::ggml_backend_dev_get_props(cpu.as_ptr(), &mut of_cpu);
                props.memory_free = of_cpu.memory_free;
                props.memory_total = of_cpu.memory_total;
                props.caps = of_cpu.caps;
            }
        }
    });
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn init_backend(dev: sys::ggml_backend_dev_t, _params: *const c_char) -> sys::ggml_backend_t {
    guard(null_mut(), || backend::new(dev))
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn buffer_type(_dev: sys::ggml_backend_dev_t) -> sys::ggml_backend_buffer_type_t {
    // SAFETY: no arguments; the CPU buffer type is a static of ggml-base.
    unsafe { sys::ggml_backend_cpu_buffer_type() }
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn buffer_from_host_ptr(
    _dev: sys::ggml_backend_dev_t,
    ptr: *mut c_void,
    size: usize,
    _max_tensor_size: usize,
) -> sys::ggml_backend_buffer_t {
    // SAFETY: ggml's own call, passed on.
    unsafe { sys::ggml_backend_cpu_buffer_from_ptr(ptr, size) }
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn supports_buft(_dev: sys::ggml_backend_dev_t, buft: sys::ggml_backend_buffer_type_t) -> bool {
    // SAFETY: ggml's own question, passed on to the CPU device.
    guard(false, || cpu::device().is_some_and(|cpu| unsafe { sys::ggml_backend_dev_supports_buft(cpu.as_ptr(), buft) }))
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn supports_op(_dev: sys::ggml_backend_dev_t, op: *const sys::ggml_tensor) -> bool {
    guard(false, || {
        // SAFETY: ggml passes a valid tensor whose sources are valid.
        if unsafe { probe::leaves_to_cpu(&*op) } {
            return false;
        }
        // SAFETY: ggml passes a valid tensor whose sources are valid.
        let for_gpu = config().prefill == Prefill::Gpu && unsafe { weight_in_host_memory(&*op) } && gpu_wants(op);
        // SAFETY: ggml's own question, passed on to the CPU device.
        !for_gpu && cpu::device().is_some_and(|cpu| unsafe { sys::ggml_backend_dev_supports_op(cpu.as_ptr(), op) })
    })
}

/// Whether a source of `op` is a weight that lies in host memory: what llama.cpp may copy to a GPU for a large batch.
///
/// # Safety
/// The tensor and its sources are valid.
// SAFETY: contract above.
unsafe fn weight_in_host_memory(op: &sys::ggml_tensor) -> bool {
    op.src.iter().filter_map(|s| NonNull::new(*s)).any(|src| {
        // SAFETY: a source is a valid tensor; a buffer, where there is one, too.
        unsafe {
            let buffer = src.as_ref().buffer;
            !buffer.is_null()
                && (*buffer).usage == sys::GGML_BACKEND_BUFFER_USAGE_WEIGHTS
                && sys::ggml_backend_buffer_is_host(buffer)
        }
    })
}

/// Whether a registered GPU would take `op` over from the CPU backend.
///
/// llama.cpp offers that only for nodes of the CPU backend itself (`ggml_backend_sched_backend_id_from_cur`), so a node that a
/// GPU wants must not be ours. The GPU knows its own threshold (`offload_op`).
fn gpu_wants(op: *const sys::ggml_tensor) -> bool {
    // SAFETY: indices below the count are valid; devices live as long as the process.
    (0..unsafe { sys::ggml_backend_dev_count() }).any(|i| unsafe {
        let dev = sys::ggml_backend_dev_get(i);
        let kind = sys::ggml_backend_dev_type(dev);
        (kind == sys::GGML_BACKEND_DEVICE_TYPE_GPU || kind == sys::GGML_BACKEND_DEVICE_TYPE_IGPU)
            && sys::ggml_backend_dev_supports_op(dev, op)
            && sys::ggml_backend_dev_offload_op(dev, op)
    })
}
