//! A small hold on ggml for tests: contexts, graphs, backends, and the log as a list of lines.
#![allow(dead_code)]

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::{Mutex, Once};

use ggml_hina::ggml::plugin;
use ggml_hina::ggml::sys::*;

/// Loads the CPU backend and registers ours; false (with a line) where this CPU cannot run ours.
pub fn ready() -> bool {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let dir = PathBuf::from(env!("GGML_HINA_TEST_LIB"));
        let path = CString::new(dir.join("libggml-cpu.so").to_str().unwrap()).unwrap();
        // SAFETY: plain calls of ggml's public functions; the callback is a function.
        unsafe {
            ggml_log_set(Some(keep_line), null_mut());
            // A ggml with its CPU backend built in has it already.
            if ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU).is_null() {
                assert!(!ggml_backend_load(path.as_ptr()).is_null(), "no CPU backend in {}", dir.display());
            }
            ggml_backend_register(plugin::registry());
        }
    });
    let able = plugin::isa().is_some();
    if !able {
        println!("skipped: this CPU has no AVX2");
    }
    able
}

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

unsafe extern "C" fn keep_line(_level: ggml_log_level, text: *const c_char, _data: *mut c_void) {
    // SAFETY: ggml passes a NUL-terminated string.
    LINES.lock().unwrap().push(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
}

/// All lines of ggml's log so far that contain `part`.
pub fn log_lines(part: &str) -> Vec<String> {
    LINES.lock().unwrap().iter().filter(|l| l.contains(part)).cloned().collect()
}

/// A ggml context with a graph whose tensors lie in CPU memory.
pub struct Net {
    pub ctx: *mut ggml_context,
    pub graph: *mut ggml_cgraph,
    buffer: ggml_backend_buffer_t,
}

impl Net {
    /// `build` makes the tensors and returns the graph's results.
    pub fn new(build: impl FnOnce(*mut ggml_context) -> Vec<*mut ggml_tensor>) -> Self {
        // SAFETY: ggml's documented sequence: context without memory, tensors, graph, allocation.
        unsafe {
            let mem_size = ggml_tensor_overhead() * 256 + ggml_graph_overhead();
            let ctx = ggml_init(ggml_init_params { mem_size, mem_buffer: null_mut(), no_alloc: true });
            let graph = ggml_new_graph(ctx);
            for result in build(ctx) {
                ggml_build_forward_expand(graph, result);
            }
            let buffer = ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type());
            assert!(!buffer.is_null());
            Self { ctx, graph, buffer }
        }
    }

    /// The graph's nodes.
    pub fn nodes(&self) -> Vec<*mut ggml_tensor> {
        // SAFETY: a valid graph.
        unsafe { (0..ggml_graph_n_nodes(self.graph)).map(|i| ggml_graph_node(self.graph, i)).collect() }
    }

    /// The tensor of this name.
    pub fn named(&self, name: &str) -> *mut ggml_tensor {
        let name = CString::new(name).unwrap();
        // SAFETY: a valid context and name.
        let t = unsafe { ggml_get_tensor(self.ctx, name.as_ptr()) };
        assert!(!t.is_null(), "no tensor {name:?}");
        t
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // SAFETY: made in `new`, freed once.
        unsafe {
            ggml_backend_buffer_free(self.buffer);
            ggml_free(self.ctx);
        }
    }
}

/// A new tensor with a name.
pub fn tensor(ctx: *mut ggml_context, name: &str, kind: ggml_type, ne: &[i64]) -> *mut ggml_tensor {
    let name = CString::new(name).unwrap();
    // SAFETY: a valid context; `ne` has its length.
    unsafe {
        let t = ggml_new_tensor(ctx, kind, ne.len() as i32, ne.as_ptr());
        ggml_set_name(t, name.as_ptr());
        t
    }
}

/// Numbers in [-1, 1] that look random and are the same every time.
pub fn noise(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Fills a tensor from f32 values, converted or quantised as ggml does.
pub fn fill(t: *mut ggml_tensor, values: &[f32]) {
    // SAFETY: a valid, allocated tensor; ggml_quantize_chunk writes as many bytes as `out` has.
    unsafe {
        let bytes = ggml_nbytes(t);
        if (*t).type_ == GGML_TYPE_F32 {
            assert_eq!(values.len() * 4, bytes);
            return ggml_backend_tensor_set(t, values.as_ptr().cast(), 0, bytes);
        }
        let mut out = vec![0u8; bytes];
        let k = (*t).ne[0];
        let rows = values.len() as i64 / k;
        let written =
            ggml_quantize_chunk((*t).type_, values.as_ptr(), out.as_mut_ptr().cast(), 0, rows, k, std::ptr::null());
        assert_eq!(written, bytes);
        ggml_backend_tensor_set(t, out.as_ptr().cast(), 0, bytes);
    }
}

/// Fills an I32 tensor.
pub fn fill_i32(t: *mut ggml_tensor, values: &[i32]) {
    // SAFETY: a valid, allocated tensor of this size.
    unsafe {
        assert_eq!(values.len() * 4, ggml_nbytes(t));
        ggml_backend_tensor_set(t, values.as_ptr().cast(), 0, values.len() * 4);
    }
}

/// The values of an F32 tensor.
pub fn values(t: *mut ggml_tensor) -> Vec<f32> {
    // SAFETY: a valid, allocated tensor.
    unsafe {
        let mut out = vec![0f32; ggml_nelements(t) as usize];
        ggml_backend_tensor_get(t, out.as_mut_ptr().cast(), 0, out.len() * 4);
        out
    }
}

/// A running backend.
pub struct Backend(pub ggml_backend_t);

impl Backend {
    /// Ours.
    pub fn hina(threads: i32) -> Self {
        Self::of(device(), threads)
    }

    /// ggml's own CPU backend.
    pub fn cpu(threads: i32) -> Self {
        // SAFETY: a registry query.
        Self::of(unsafe { ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) }, threads)
    }

    fn of(device: ggml_backend_dev_t, threads: i32) -> Self {
        // SAFETY: a registered device; the function has the type ggml documents for this name.
        unsafe {
            let backend = ggml_backend_dev_init(device, std::ptr::null());
            assert!(!backend.is_null());
            let f = proc_address(device, c"ggml_backend_set_n_threads");
            let set: unsafe extern "C" fn(ggml_backend_t, i32) = std::mem::transmute(f);
            set(backend, threads);
            Self(backend)
        }
    }

    /// Computes the graph.
    pub fn compute(&self, net: &Net) -> ggml_status {
        // SAFETY: a valid backend and graph.
        unsafe { ggml_backend_graph_compute(self.0, net.graph) }
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        // SAFETY: made in `of`, freed once.
        unsafe { ggml_backend_free(self.0) }
    }
}

/// Our device.
pub fn device() -> ggml_backend_dev_t {
    // SAFETY: a registry query.
    unsafe { ggml_backend_dev_by_name(c"HiNa".as_ptr()) }
}

/// A function of the device's registry, by name.
pub fn proc_address(device: ggml_backend_dev_t, name: &CStr) -> *mut c_void {
    // SAFETY: a registered device.
    let f = unsafe { ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), name.as_ptr()) };
    assert!(!f.is_null(), "no {name:?}");
    f
}

/// Normalised mean squared error.
pub fn nmse(got: &[f32], want: &[f32]) -> f64 {
    let err: f64 = got.iter().zip(want).map(|(g, w)| f64::from(g - w).powi(2)).sum();
    err / want.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>()
}

/// Shape of [`mul_mat_id`]'s weights.
pub const K: i64 = 96;
pub const N: i64 = 40;
pub const EXPERTS: i64 = 6;
pub const USED: i64 = 3;

/// One MUL_MAT_ID with weights of `kind`.
pub fn mul_mat_id(kind: ggml_type, tokens: i64) -> Net {
    let net = Net::new(|ctx| {
        let w = tensor(ctx, "w", kind, &[K, N, EXPERTS]);
        let x = tensor(ctx, "x", GGML_TYPE_F32, &[K, 1, tokens]);
        let ids = tensor(ctx, "ids", GGML_TYPE_I32, &[USED, tokens]);
        // SAFETY: valid tensors.
        let y = unsafe { ggml_mul_mat_id(ctx, w, x, ids) };
        // SAFETY: as above.
        unsafe { ggml_set_name(y, c"y".as_ptr()) };
        vec![y]
    });
    fill(net.named("w"), &noise(1, (K * N * EXPERTS) as usize));
    fill(net.named("x"), &noise(2, (K * tokens) as usize));
    let ids: Vec<i32> = (0..USED * tokens).map(|i| ((i * 5 + i / USED) % EXPERTS) as i32).collect();
    fill_i32(net.named("ids"), &ids);
    net
}

/// Checks a [`mul_mat_id`]'s result against ggml's: the same within rounding, or nearer to the product of the weights as they are with the
/// activations as they are. (Q8_0 weights and many tokens on AMX: ggml quantises activations, we do not.)
pub fn check_mul_mat_id(net: &Net, got: &[f32], ggmls: &[f32], label: &str) {
    let error = nmse(got, ggmls);
    if error >= 1e-7 {
        let exact = exact_mul_mat_id(net);
        let [ours, ggmls] = [got, ggmls].map(|y| nmse(y, &exact));
        assert!(ours < ggmls && error < 1e-4, "{label}: {error:e}, from the exact product {ours:e} and ggml {ggmls:e}");
    }
}

/// What a [`mul_mat_id`] comes to in f64.
fn exact_mul_mat_id(net: &Net) -> Vec<f32> {
    use ggml_hina::kernels::reference::element;
    use ggml_hina::tensor::DType;
    let [w, x, ids] = ["w", "x", "ids"].map(|name| net.named(name));
    // SAFETY: tensors of the net, contiguous and in this process's memory, of the shapes that `mul_mat_id` gave them.
    unsafe {
        let dtype = match (*w).type_ {
            GGML_TYPE_F32 => DType::F32,
            GGML_TYPE_F16 => DType::F16,
            GGML_TYPE_BF16 => DType::Bf16,
            GGML_TYPE_Q8_0 => DType::Q8_0,
            other => panic!("type {other}"),
        };
        let tokens = (*x).ne[2] as usize;
        let x = std::slice::from_raw_parts((*x).data.cast::<f32>(), K as usize * tokens);
        let ids = std::slice::from_raw_parts((*ids).data.cast::<i32>(), USED as usize * tokens);
        let dot = |row: usize, x: &[f32]| -> f64 {
            let row = (*w).data.cast::<u8>().add(row * dtype.row_bytes(K as usize));
            x.iter().enumerate().map(|(k, &x)| f64::from(element(dtype, row, k)) * f64::from(x)).sum()
        };
        let pairs =
            ids.iter().enumerate().map(|(i, &id)| (id as usize, &x[i / USED as usize * K as usize..][..K as usize]));
        pairs.flat_map(|(id, x)| (0..N as usize).map(move |row| dot(id * N as usize + row, x) as f32)).collect()
    }
}
