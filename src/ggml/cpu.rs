//! The CPU backend of the program we are loaded into: the inner backend that runs all nodes we do not claim.
//!
//! A program may load us before it loads the CPU backend, so it is looked up when needed.

use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

use super::sys;

/// The CPU device, if its backend is loaded.
pub fn device() -> Option<NonNull<sys::ggml_backend_device>> {
    // SAFETY: a registry query without pointers.
    NonNull::new(unsafe { sys::ggml_backend_dev_by_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU) })
}

/// A function of the CPU backend's registry, by name; null where this ggml has none.
pub fn proc_address(name: &CStr) -> *mut c_void {
    let Some(device) = device() else { return std::ptr::null_mut() };
    // SAFETY: a registered device has a registry; the name is NUL-terminated.
    unsafe { sys::ggml_backend_reg_get_proc_address(sys::ggml_backend_dev_backend_reg(device.as_ptr()), name.as_ptr()) }
}

/// Defines a function that looks up one of the CPU backend's own functions by its C name and type.
macro_rules! cpu_function {
    ($(#[$doc:meta])* $name:ident, $symbol:literal, fn($($arg:ty),*) $(-> $ret:ty)?) => {
        $(#[$doc])*
        pub fn $name() -> Option<unsafe extern "C" fn($($arg),*) $(-> $ret)?> {
            let address = NonNull::new(proc_address($symbol))?;
            // SAFETY: ggml hands out this name with this type (ggml-backend.h, ggml-cpu.h).
            Some(unsafe { std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(address) })
        }
    };
}

cpu_function!(
    /// `ggml_backend_cpu_set_n_threads`.
    set_n_threads, c"ggml_backend_set_n_threads", fn(sys::ggml_backend_t, i32));
cpu_function!(
    /// `ggml_backend_cpu_set_abort_callback`.
    set_abort_callback, c"ggml_backend_set_abort_callback",
    fn(sys::ggml_backend_t, sys::ggml_abort_callback, *mut c_void));
cpu_function!(
    /// `ggml_backend_cpu_set_use_ref`: the CPU backend's reference implementations.
    set_use_ref, c"ggml_backend_cpu_set_use_ref", fn(sys::ggml_backend_t, bool));
cpu_function!(
    /// `ggml_threadpool_new`.
    threadpool_new, c"ggml_threadpool_new", fn(*mut sys::ggml_threadpool_params) -> sys::ggml_threadpool_t);
cpu_function!(
    /// `ggml_threadpool_free`.
    threadpool_free, c"ggml_threadpool_free", fn(sys::ggml_threadpool_t));
cpu_function!(
    /// `ggml_backend_cpu_set_threadpool`.
    set_threadpool, c"ggml_backend_cpu_set_threadpool", fn(sys::ggml_backend_t, sys::ggml_threadpool_t));
cpu_function!(
    /// `ggml_backend_get_features` of the CPU registry.
    get_features, c"ggml_backend_get_features", fn(sys::ggml_backend_reg_t) -> *mut sys::ggml_backend_feature);

/// Whether this ggml's CPU backend runs on OpenMP's threads, which stay alive between graphs.
pub fn has_openmp() -> bool {
    let (Some(device), Some(get)) = (device(), get_features()) else { return false };
    // SAFETY: the features are an array that ends with a null name; the strings are static.
    unsafe {
        let mut feature = get(sys::ggml_backend_dev_backend_reg(device.as_ptr()));
        while !feature.is_null() && !(*feature).name.is_null() {
            if CStr::from_ptr((*feature).name) == c"OPENMP" {
                return true;
            }
            feature = feature.add(1);
        }
    }
    false
}
