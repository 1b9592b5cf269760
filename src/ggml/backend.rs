//! The backend: an inner CPU backend that runs a private copy of each graph, with our nodes in it.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{c_char, c_int, c_void};
use std::ptr::{NonNull, null_mut};

use super::graph::{Graph, Rules};
use super::op::Run;
use super::plugin::{Fixed, NAME, config, guard, isa, numa};
use super::{cpu, log, plugin, probe, sys};
use crate::numa::tensors::Numa;

/// Threads of a backend that nobody told a number: ggml's own default (`GGML_DEFAULT_N_THREADS`).
const DEFAULT_THREADS: usize = sys::GGML_DEFAULT_N_THREADS as usize;

/// Names this kind of backend (`ggml_backend.guid`); a random number.
static GUID: Fixed<sys::ggml_guid> =
    Fixed([0x8f, 0x1d, 0x5a, 0x33, 0x90, 0x2e, 0x4c, 0x6b, 0xa4, 0x71, 0x0d, 0x62, 0xe8, 0x5c, 0x1b, 0xf7]);

/// What a backend of ours keeps (`ggml_backend.context`).
struct Context {
    /// The CPU backend that runs the private graph; owned.
    inner: NonNull<sys::ggml_backend>,
    /// Threads the inner backend uses.
    threads: usize,
    /// Where the CPU backend has no threads of its own between graphs (no OpenMP): a pool we made, and its size.
    pool: Option<(NonNull<sys::ggml_threadpool>, usize)>,
    /// Somebody gave the inner backend a pool, so we make none.
    foreign_pool: bool,
    /// The user wants the CPU backend's reference implementations: nothing is claimed.
    use_ref: bool,
    /// What the workers of a custom node share; owned. Not a `Box`, as the abort callback reads it during a graph.
    run: NonNull<Run>,
    graph: Graph,
    scratch: Scratch,
}

/// A 64-byte aligned block of memory that only grows.
struct Scratch {
    data: *mut u8,
    bytes: usize,
}

impl Scratch {
    const ALIGN: usize = 4096;

    /// Makes room for `bytes`; false where memory is short. The content is not kept.
    fn reserve(&mut self, bytes: usize) -> bool {
        if bytes <= self.bytes {
            return true;
        }
        self.release();
        let Ok(layout) = Layout::from_size_align(bytes, Self::ALIGN) else { return false };
        // SAFETY: the size is above zero.
        self.data = unsafe { alloc(layout) };
        self.bytes = if self.data.is_null() { 0 } else { bytes };
        !self.data.is_null()
    }

    fn release(&mut self) {
        if !self.data.is_null() {
            // SAFETY: allocated with this size and alignment in `reserve`.
            unsafe { dealloc(self.data, Layout::from_size_align_unchecked(self.bytes, Self::ALIGN)) };
        }
        (self.data, self.bytes) = (null_mut(), 0);
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.release();
    }
}

/// A new backend on `device`, or null (with a line in the log) where the CPU backend is missing.
pub fn new(device: sys::ggml_backend_dev_t) -> sys::ggml_backend_t {
    let (Some(cpu), Some(isa)) = (cpu::device(), isa()) else {
        log::error("no CPU backend is loaded: it runs what HiNa does not claim");
        return null_mut();
    };
    // SAFETY: a registered device; no parameters.
    let inner = unsafe { sys::ggml_backend_dev_init(cpu.as_ptr(), std::ptr::null()) };
    let Some(inner) = NonNull::new(inner) else {
        log::error("the CPU backend did not start");
        return null_mut();
    };
    let run = NonNull::from(Box::leak(Box::new(Run::new(isa, DEFAULT_THREADS))));
    if let Some(set) = cpu::set_abort_callback() {
        // SAFETY: the run lives longer than the inner backend: `free` ends that first.
        unsafe { set(inner.as_ptr(), Some(should_abort), run.as_ptr().cast()) };
    }
    let context = Box::into_raw(Box::new(Context {
        inner,
        threads: DEFAULT_THREADS,
        pool: None,
        foreign_pool: false,
        use_ref: false,
        run,
        graph: Graph::default(),
        scratch: Scratch { data: null_mut(), bytes: 0 },
    }));
    probe::begin();
    Box::into_raw(Box::new(sys::ggml_backend {
        guid: (&raw const GUID.0).cast_mut(),
        iface: interface(),
        device,
        context: context.cast(),
    }))
}

fn interface() -> sys::ggml_backend_i {
    // SAFETY: a struct of optional function pointers; all absent is a valid value, and later ggml versions may add some.
    let mut iface: sys::ggml_backend_i = unsafe { std::mem::zeroed() };
    iface.get_name = Some(name);
    iface.free = Some(free);
    iface.graph_compute = Some(graph_compute);
    iface.graph_optimize = Some(probe::end);
    iface
}

/// The context of a backend that is ours; none for any other.
///
/// # Safety
/// `backend` is null or a valid backend that nobody else uses during `'a`.
// SAFETY: contract above.
unsafe fn context<'a>(backend: sys::ggml_backend_t) -> Option<&'a mut Context> {
    // SAFETY: a valid backend; only ours has this guid, and its context is a `Context`.
    unsafe {
        let backend = backend.as_ref()?;
        (!backend.guid.is_null() && *backend.guid == GUID.0).then(|| &mut *backend.context.cast::<Context>())
    }
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn name(_backend: sys::ggml_backend_t) -> *const c_char {
    NAME.as_ptr()
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn free(backend: sys::ggml_backend_t) {
    guard((), || {
        // SAFETY: ggml frees a backend once; both boxes were made in `new`.
        unsafe {
            let mut context = Box::from_raw((*backend).context.cast::<Context>());
            context.graph.forget();
            sys::ggml_backend_free(context.inner.as_ptr());
            if let (Some((pool, _)), Some(free)) = (context.pool, cpu::threadpool_free()) {
                free(pool.as_ptr());
            }
            let run = Box::from_raw(context.run.as_ptr());
            run.stats.report(&config().stats);
            drop(Box::from_raw(backend));
        }
    });
}

/// Asked by the inner backend after each node: stop after a failed node of ours, or when the user says so.
// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn should_abort(data: *mut c_void) -> bool {
    // SAFETY: set in `new` with a run that outlives the inner backend; it is not changed while a graph runs.
    unsafe { (*data.cast::<Run>()).should_abort() }
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn graph_compute(backend: sys::ggml_backend_t, graph: *mut sys::ggml_cgraph) -> sys::ggml_status {
    guard(sys::GGML_STATUS_FAILED, || {
        // SAFETY: ggml calls this with a backend of ours and a valid graph, from one thread at a time.
        let (context, graph) = unsafe {
            let Some(context) = context(backend) else { return sys::GGML_STATUS_FAILED };
            (context, &mut *graph)
        };
        context.compute(graph)
    })
}

impl Context {
    fn compute(&mut self, graph: &mut sys::ggml_cgraph) -> sys::ggml_status {
        self.graph.forget();
        // SAFETY: owned by this context; no graph of this backend runs now and the last one is forgotten, so nobody reads it.
        unsafe { self.run.as_mut() }.prepare(self.threads);
        // SAFETY: not changed again before the graph made from it is forgotten, here or in `free`.
        let run: &'static Run = unsafe { self.run.as_ref() };
        plugin::announce(run.isa, self.threads);
        let rules = Rules { threads: self.threads, fuse: config().fuse, claim: !self.use_ref };
        // SAFETY: ggml's promise for a graph it computes: all nodes and their sources are valid and allocated.
        let scratch = unsafe { self.graph.rewrite(graph, run, rules) };
        if let Some(hint) = numa().and_then(Numa::take_hint) {
            log::info(&hint);
        }
        if !self.scratch.reserve(scratch) {
            log::error(&format!("out of memory: {scratch} bytes of scratch"));
            return sys::GGML_STATUS_ALLOC_FAILED;
        }
        run.set_scratch(self.scratch.data);
        self.ensure_pool();
        let compute = self.graph.as_ggml(graph);
        // SAFETY: the private graph is valid for the call: its nodes are the caller's or our copies of them.
        let status = unsafe { sys::ggml_backend_graph_compute(self.inner.as_ptr(), compute) };
        if run.failed() { sys::GGML_STATUS_FAILED } else { status }
    }

    /// Without OpenMP the CPU backend would start its threads anew for each graph.
    fn ensure_pool(&mut self) {
        let enough = self.pool.is_some_and(|(_, n)| n >= self.threads);
        if enough || self.foreign_pool || self.threads < 2 || cpu::has_openmp() {
            return;
        }
        let (Some(new), Some(free), Some(set)) = (cpu::threadpool_new(), cpu::threadpool_free(), cpu::set_threadpool())
        else {
            return;
        };
        // SAFETY: ggml's own functions with the types it documents; the old pool is out of use once the new one is set.
        unsafe {
            let mut params: sys::ggml_threadpool_params = std::mem::zeroed();
            sys::ggml_threadpool_params_init(&mut params, self.threads as c_int);
            let Some(pool) = NonNull::new(new(&mut params)) else { return };
            set(self.inner.as_ptr(), pool.as_ptr());
            if let Some((old, _)) = self.pool.replace((pool, self.threads)) {
                free(old.as_ptr());
            }
        }
    }
}

/// `ggml_backend_set_n_threads`.
// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
pub(super) unsafe extern "C" fn set_n_threads(backend: sys::ggml_backend_t, n: c_int) {
    guard((), || {
        // SAFETY: a valid backend, by the caller of this ggml function.
        let Some(context) = (unsafe { context(backend) }) else { return };
        context.threads = usize::try_from(n).unwrap_or(1).max(1);
        if let Some(set) = cpu::set_n_threads() {
            // SAFETY: the inner backend is a CPU backend.
            unsafe { set(context.inner.as_ptr(), context.threads as c_int) };
        }
    });
}

/// `ggml_backend_set_abort_callback`.
// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
pub(super) unsafe extern "C" fn set_abort_callback(
    backend: sys::ggml_backend_t,
    callback: sys::ggml_abort_callback,
    data: *mut c_void,
) {
    guard((), || {
        // SAFETY: a valid backend, by the caller of this ggml function.
        if let Some(context) = unsafe { context(backend) } {
            // SAFETY: owned by the context; no graph of this backend runs while its settings are changed.
            unsafe { context.run.as_mut() }.set_abort(callback, data);
        }
    });
}

/// `ggml_backend_cpu_set_use_ref`.
// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
pub(super) unsafe extern "C" fn set_use_ref(backend: sys::ggml_backend_t, use_ref: bool) {
    guard((), || {
        // SAFETY: a valid backend, by the caller of this ggml function.
        let Some(context) = (unsafe { context(backend) }) else { return };
        context.use_ref = use_ref;
        if let Some(set) = cpu::set_use_ref() {
            // SAFETY: the inner backend is a CPU backend.
            unsafe { set(context.inner.as_ptr(), use_ref) };
        }
    });
}

/// `ggml_backend_cpu_set_threadpool`.
// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
pub(super) unsafe extern "C" fn set_threadpool(backend: sys::ggml_backend_t, pool: sys::ggml_threadpool_t) {
    guard((), || {
        // SAFETY: a valid backend, by the caller of this ggml function.
        let Some(context) = (unsafe { context(backend) }) else { return };
        context.foreign_pool = !pool.is_null();
        if let Some(set) = cpu::set_threadpool() {
            // SAFETY: the inner backend is a CPU backend; the pool is the caller's.
            unsafe { set(context.inner.as_ptr(), pool) };
        }
    });
}
