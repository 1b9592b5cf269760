//! Where a program enters: `ggml_backend_init` and `ggml_backend_score` for a plugin file, `ggml_hina_reg` for a build flag.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Once, OnceLock};

use super::sys;
use super::{backend, cpu, device, log};
use crate::config::{Config, IsaChoice};
use crate::isa::{Amx, AmxRefused, Avx2, Avx512, Bf16Form, Isa, Q8Tokens};
use crate::kernels::amx::trial::with_fp16_if_it_works;
use crate::numa::tensors::Numa;
use crate::numa::topology::Topology;
use crate::team::panic_message;

/// Name of the registry and of the device.
pub const NAME: &CStr = c"HiNa";

/// The settings, read from the environment once; unknown values are warned of once.
pub fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| Config::read(|name| std::env::var(name).ok(), |text| log::warn(&text)))
}

/// The engine that runs, chosen once from the settings and the CPU; none means that this backend offers nothing.
pub fn isa() -> Option<Isa> {
    static ISA: OnceLock<Option<Isa>> = OnceLock::new();
    *ISA.get_or_init(|| {
        if let Some(reading) = config().reading {
            // Nobody has asked before: rows are read for an engine.
            reading.prefer();
        }
        if config().int8 {
            Q8Tokens::Int8.prefer();
        }
        choose(config().isa)
    })
}

/// The line of `GGML_HINA_VERBOSE`: once, before the first graph, when the number of threads is known.
pub(super) fn announce(isa: Isa, threads: usize) {
    static ONCE: Once = Once::new();
    if config().verbose {
        ONCE.call_once(|| {
            let nodes = Topology::of_this_machine().nodes().len();
            let (ns, ts) = (if nodes == 1 { "" } else { "s" }, if threads == 1 { "" } else { "s" });
            log::info(&format!("{isa}, {nodes} node{ns}, {threads} thread{ts}"));
        });
    }
}

/// The machine's NUMA nodes, looked at once; none where the normal path is right.
pub fn numa() -> Option<&'static Numa> {
    static NUMA: OnceLock<Option<Numa>> = OnceLock::new();
    NUMA.get_or_init(|| Numa::new(config().numa, config().numa_sim)).as_ref()
}

fn choose(choice: IsaChoice) -> Option<Isa> {
    let refused = |name: &str, why: &dyn std::fmt::Display| {
        log::error(&format!("GGML_HINA_ISA={name}, but {why}: the backend is not used"));
        None
    };
    match choice {
        IsaChoice::Avx2 => Avx2::detect().map(Isa::Avx2).or_else(|| refused("avx2", &"this CPU has no AVX2")),
        IsaChoice::Avx512 => {
            let why = "this CPU has no AVX-512 with VNNI";
            Avx512::detect().map(Isa::Avx512).or_else(|| refused("avx512", &why))
        }
        IsaChoice::Amx => Amx::detect().map_or_else(|why| refused("amx", &why), |amx| Some(Isa::Amx(amx))),
        IsaChoice::AmxFp16 => {
            let amx = Amx::detect().map(with_fp16_if_it_works);
            if amx.is_ok_and(|amx| amx.fp16().is_none()) {
                log::warn("GGML_HINA_ISA=amx-fp16, but F16 products do not work here: AMX is used without them");
            }
            amx.map_or_else(|why| refused("amx-fp16", &why), |amx| Some(Isa::Amx(amx)))
        }
        IsaChoice::Auto => {
            let isa = Isa::best();
            if let (Some(isa @ (Isa::Avx512(_) | Isa::Avx2(_))), Err(why)) = (isa, Amx::detect())
                && why != AmxRefused::NotInCpu
            {
                log::info(&format!("{why}: {isa} is used instead of AMX"));
            }
            isa
        }
    }
}

/// Runs `f`; a panic becomes `fallback` and a line in the log, because nothing may unwind into C.
pub fn guard<T>(fallback: T, f: impl FnOnce() -> T) -> T {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).unwrap_or_else(|payload| {
        log::error(&format!("internal error: {}", panic_message(payload.as_ref())));
        fallback
    })
}

/// A struct of C that holds only pointers and numbers which are never changed after it is made.
pub(super) struct Fixed<T>(pub T);
// SAFETY: read-only after construction; the pointers in it are to functions and statics.
unsafe impl<T> Send for Fixed<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Fixed<T> {}

/// The registry: one for the process.
pub fn registry() -> sys::ggml_backend_reg_t {
    static REG: OnceLock<Fixed<sys::ggml_backend_reg>> = OnceLock::new();
    let reg = REG.get_or_init(|| {
        Fixed(sys::ggml_backend_reg {
            api_version: sys::GGML_BACKEND_API_VERSION as c_int,
            iface: sys::ggml_backend_reg_i {
                get_name: Some(reg_name),
                get_device_count: Some(reg_device_count),
                get_device: Some(reg_device),
                get_proc_address: Some(reg_proc_address),
            },
            context: null_mut(),
        })
    });
    (&raw const reg.0).cast_mut()
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn reg_name(_reg: sys::ggml_backend_reg_t) -> *const c_char {
    NAME.as_ptr()
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn reg_device_count(_reg: sys::ggml_backend_reg_t) -> usize {
    guard(0, || usize::from(!config().disable))
}

// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn reg_device(_reg: sys::ggml_backend_reg_t, index: usize) -> sys::ggml_backend_dev_t {
    guard(null_mut(), || if index == 0 && !config().disable { device::device() } else { null_mut() })
}

/// What a program may ask a CPU-like backend for; each acts on the inner CPU backend (ggml-cpu's `get_proc_address`).
// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn reg_proc_address(_reg: sys::ggml_backend_reg_t, name: *const c_char) -> *mut c_void {
    if name.is_null() {
        return null_mut();
    }
    // SAFETY: ggml passes a NUL-terminated name.
    let name = unsafe { CStr::from_ptr(name) };
    guard(null_mut(), || match name.to_bytes() {
        b"ggml_backend_set_n_threads" => backend::set_n_threads as *mut c_void,
        b"ggml_backend_set_abort_callback" => backend::set_abort_callback as *mut c_void,
        b"ggml_backend_cpu_set_use_ref" => backend::set_use_ref as *mut c_void,
        b"ggml_backend_cpu_set_threadpool" => backend::set_threadpool as *mut c_void,
        b"ggml_backend_get_features" => get_features as *mut c_void,
        b"ggml_threadpool_new"
        | b"ggml_threadpool_free"
        | b"ggml_backend_cpu_numa_init"
        | b"ggml_backend_cpu_is_numa" => cpu::proc_address(name),
        _ => null_mut(),
    })
}

/// What llama.cpp's system-info line shows: the engine.
// SAFETY: ggml calls it with what its interface promises: valid handles, and pointers it may write through.
unsafe extern "C" fn get_features(_reg: sys::ggml_backend_reg_t) -> *mut sys::ggml_backend_feature {
    static LIST: OnceLock<Fixed<Vec<sys::ggml_backend_feature>>> = OnceLock::new();
    guard(null_mut(), || {
        let list = LIST.get_or_init(|| {
            let names: &[&CStr] = match isa() {
                Some(Isa::Amx(amx)) if amx.fp16().is_some() => {
                    &[c"AMX_BF16", c"AMX_INT8", c"AMX_FP16", c"AVX512_BF16", c"AVX512_VNNI"]
                }
                Some(Isa::Amx(_)) => &[c"AMX_BF16", c"AMX_INT8", c"AVX512_BF16", c"AVX512_VNNI"],
                Some(Isa::Avx512(_)) if Bf16Form::Pairs.runs() => &[c"AVX512_BF16", c"AVX512_VNNI"],
                Some(Isa::Avx512(_)) => &[c"AVX512_VNNI"],
                Some(Isa::Avx2(avx2)) if avx2.vnni().is_some() => &[c"AVX2", c"FMA", c"AVX_VNNI"],
                Some(Isa::Avx2(_)) => &[c"AVX2", c"FMA"],
                None => &[],
            };
            let feature = |name: *const c_char, value| sys::ggml_backend_feature { name, value };
            let mut list: Vec<_> = names.iter().map(|n| feature(n.as_ptr(), c"1".as_ptr())).collect();
            list.push(feature(null(), null()));
            Fixed(list)
        });
        list.0.as_ptr().cast_mut()
    })
}

/// Entry of a plugin file (`ggml_backend_init_t`).
///
/// Returns null where the backend is linked into the program already: two would do the same work twice.
// SAFETY: the name is ggml's, for the one plugin that a file holds.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> sys::ggml_backend_reg_t {
    guard(null_mut(), || {
        // SAFETY: the name is NUL-terminated; the registry is there, as it is what loads us.
        let other = unsafe { sys::ggml_backend_reg_by_name(NAME.as_ptr()) };
        if !other.is_null() && other != registry() {
            log::warn("this program has HiNa built in; the plugin file is not used");
            return null_mut();
        }
        registry()
    })
}

/// How well this CPU suits (`ggml_backend_score_t`): 0 on a CPU without AVX2, and where the user wants no HiNa,
/// so that no program lists it.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_score() -> c_int {
    ggml_hina_score()
}

/// [`ggml_backend_score`] under a name that no other backend linked into the same program has.
// SAFETY: nothing else has a name that begins with ours.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_hina_score() -> c_int {
    guard(0, || {
        if config().disable {
            log::info("off, by GGML_HINA_DISABLE=1");
            return 0;
        }
        match isa() {
            Some(Isa::Amx(_)) => 200,
            Some(Isa::Avx512(_)) => 100,
            Some(Isa::Avx2(_)) => 50,
            None => 0,
        }
    })
}

/// The registry, for the glue that registers a linked-in backend.
// SAFETY: nothing else has a name that begins with ours.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_hina_reg() -> sys::ggml_backend_reg_t {
    guard(null_mut(), registry)
}
