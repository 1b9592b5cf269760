//! ggml's own MUL_MAT_ID chain on its CPU backend, from shared libraries that are there already: what the FFN is compared with.
//!
//! Only functions that take and give pointers and numbers are used, so no header is needed; ggml 0.25 and later have them.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use ggml_hina::tensor::{DType, Weights};

use super::layer::Shape;

type Ptr = *mut c_void;

#[repr(C)]
struct InitParams {
    mem_size: usize,
    mem_buffer: Ptr,
    no_alloc: bool,
}

/// The libraries, loaded.
pub struct Ggml {
    base: Ptr,
    backend: Ptr,
}

macro_rules! call {
    ($self:ident, $name:literal, fn($($ty:ty),*) $(-> $ret:ty)?, $($arg:expr),*) => {{
        let f = $self.symbol($name);
        // SAFETY: the function's signature in ggml.h, ggml-alloc.h or ggml-backend.h.
        let f: unsafe extern "C" fn($($ty),*) $(-> $ret)? = unsafe { std::mem::transmute(f) };
        // SAFETY: arguments as the function wants them.
        unsafe { f($($arg),*) }
    }};
}

fn open(path: &Path) -> Option<Ptr> {
    let path = CString::new(path.to_str()?).ok()?;
    // SAFETY: a NUL-terminated path; the library's constructors are ggml's.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    (!handle.is_null()).then_some(handle)
}

impl Ggml {
    /// Loads from `folder` (a llama.cpp build's `bin`) and starts a CPU backend with `threads` threads.
    pub fn load(folder: &Path, threads: usize) -> Option<Self> {
        open(&folder.join("libggml-base.so"))?;
        let base = open(&folder.join("libggml.so"))?;
        let mut ggml = Self { base, backend: std::ptr::null_mut() };
        let path = CString::new(folder.to_str()?).ok()?;
        call!(ggml, c"ggml_backend_load_all_from_path", fn(*const c_char), path.as_ptr());
        ggml.backend = call!(ggml, c"ggml_backend_init_by_type", fn(c_int, Ptr) -> Ptr, 0, std::ptr::null_mut());
        if ggml.backend.is_null() {
            return None;
        }
        let device = call!(ggml, c"ggml_backend_get_device", fn(Ptr) -> Ptr, ggml.backend);
        let reg = call!(ggml, c"ggml_backend_dev_backend_reg", fn(Ptr) -> Ptr, device);
        let name = c"ggml_backend_set_n_threads".as_ptr();
        let set = call!(ggml, c"ggml_backend_reg_get_proc_address", fn(Ptr, *const c_char) -> Ptr, reg, name);
        // SAFETY: the type `ggml_backend_set_n_threads_t`.
        let set: unsafe extern "C" fn(Ptr, c_int) = unsafe { std::mem::transmute(set) };
        // SAFETY: a live backend.
        unsafe { set(ggml.backend, threads as c_int) };
        Some(ggml)
    }

    fn symbol(&self, name: &CStr) -> Ptr {
        // SAFETY: a live handle and a NUL-terminated name.
        let symbol = unsafe { libc::dlsym(self.base, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?} is not in this ggml");
        symbol
    }

    /// The chain that llama.cpp builds for an MoE FFN: up, gate, SwiGLU, down, router weights, sum over the slots.
    pub fn layer(
        &self,
        shape: Shape,
        weights: [Weights<'_>; 3],
        x: &[f32],
        ids: &[i32],
        router: &[f32],
    ) -> GgmlLayer<'_> {
        let [f32_type, i32_type] = [0, 26];
        let (n_used, tokens) = (shape.n_used, ids.len() / shape.n_used);
        let params = InitParams { mem_size: 1 << 22, mem_buffer: std::ptr::null_mut(), no_alloc: true };
        let ctx = call!(self, c"ggml_init", fn(InitParams) -> Ptr, params);
        let tensor = |kind: c_int, ne: [usize; 3]| {
            let [a, b, c] = ne.map(|n| n as i64);
            call!(self, c"ggml_new_tensor_3d", fn(Ptr, c_int, i64, i64, i64) -> Ptr, ctx, kind, a, b, c)
        };
        let mut buffers = vec![];
        let [gate, up, down] = weights.map(|w| {
            let t = tensor(if w.dtype == DType::Q8_0 { 8 } else { 30 }, [w.k, w.n, w.experts]);
            let (data, bytes) = (w.data.cast_mut().cast(), w.expert_bytes() * w.experts);
            let buffer = call!(self, c"ggml_backend_cpu_buffer_from_ptr", fn(Ptr, usize) -> Ptr, data, bytes);
            call!(self, c"ggml_backend_tensor_alloc", fn(Ptr, Ptr, Ptr) -> c_int, buffer, t, data);
            buffers.push(buffer);
            t
        });
        let xs = tensor(f32_type, [shape.n_embd, 1, tokens]);
        let id = tensor(i32_type, [n_used, tokens, 1]);
        let ws = tensor(f32_type, [1, n_used, tokens]);
        let mul_mat_id = |w, x| call!(self, c"ggml_mul_mat_id", fn(Ptr, Ptr, Ptr, Ptr) -> Ptr, ctx, w, x, id);
        let (u, g) = (mul_mat_id(up, xs), mul_mat_id(gate, xs));
        let h = call!(self, c"ggml_swiglu_split", fn(Ptr, Ptr, Ptr) -> Ptr, ctx, g, u);
        let y = mul_mat_id(down, h);
        let y = call!(self, c"ggml_mul", fn(Ptr, Ptr, Ptr) -> Ptr, ctx, y, ws);
        let slot = |i: usize| {
            let (row, ne) = (shape.n_embd * 4, [shape.n_embd as i64, tokens as i64]);
            let stride = row * n_used;
            call!(
                self,
                c"ggml_view_2d",
                fn(Ptr, Ptr, i64, i64, usize, usize) -> Ptr,
                ctx,
                y,
                ne[0],
                ne[1],
                stride,
                row * i
            )
        };
        let add = |a, b| call!(self, c"ggml_add", fn(Ptr, Ptr, Ptr) -> Ptr, ctx, a, b);
        let sum = (1..n_used).fold(slot(0), |sum, i| add(sum, slot(i)));
        let graph = call!(self, c"ggml_new_graph", fn(Ptr) -> Ptr, ctx);
        call!(self, c"ggml_build_forward_expand", fn(Ptr, Ptr), graph, sum);
        buffers.push(call!(self, c"ggml_backend_alloc_ctx_tensors", fn(Ptr, Ptr) -> Ptr, ctx, self.backend));
        let set = |t, data: *const c_void, bytes| {
            call!(self, c"ggml_backend_tensor_set", fn(Ptr, *const c_void, usize, usize), t, data, 0, bytes)
        };
        set(xs, x.as_ptr().cast(), size_of_val(x));
        set(id, ids.as_ptr().cast(), size_of_val(ids));
        set(ws, router.as_ptr().cast(), size_of_val(router));
        GgmlLayer { ggml: self, ctx, graph, buffers, sum, len: shape.n_embd * tokens }
    }
}

impl Drop for Ggml {
    fn drop(&mut self) {
        call!(self, c"ggml_backend_free", fn(Ptr), self.backend);
    }
}

/// A graph, ready to run any number of times.
pub struct GgmlLayer<'a> {
    ggml: &'a Ggml,
    ctx: Ptr,
    graph: Ptr,
    buffers: Vec<Ptr>,
    sum: Ptr,
    len: usize,
}

impl GgmlLayer<'_> {
    /// Runs it once.
    pub fn run(&self) {
        let ggml = self.ggml;
        let status = call!(ggml, c"ggml_backend_graph_compute", fn(Ptr, Ptr) -> c_int, ggml.backend, self.graph);
        assert_eq!(status, 0, "ggml failed");
    }

    /// The result of the last run.
    pub fn result(&self) -> Vec<f32> {
        let (ggml, mut out) = (self.ggml, vec![0f32; self.len]);
        let (to, bytes) = (out.as_mut_ptr().cast(), self.len * 4);
        call!(ggml, c"ggml_backend_tensor_get", fn(Ptr, Ptr, usize, usize), self.sum, to, 0, bytes);
        out
    }
}

impl Drop for GgmlLayer<'_> {
    fn drop(&mut self) {
        let ggml = self.ggml;
        for &buffer in &self.buffers {
            call!(ggml, c"ggml_backend_buffer_free", fn(Ptr), buffer);
        }
        call!(ggml, c"ggml_free", fn(Ptr), self.ctx);
    }
}
