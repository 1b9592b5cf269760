//! oneDNN 3, loaded at run time through its C API (`oneapi/dnnl/dnnl.h`): the products of one expert after the other.

use std::ffi::{CStr, CString, c_int, c_void};
use std::path::Path;
use std::ptr::null_mut;

use half::bf16;

use crate::common::layer::{Shape, weight_bytes};
use ggml_hina::tensor::DType;

/// Any of oneDNN's objects; each is freed with the process, as a bench makes a handful.
type Object = *mut c_void;

const CPU: c_int = 1;
const IN_ORDER: u32 = 1;
const BF16: c_int = 2;
const F32: c_int = 3;
const ANY_LAYOUT: c_int = 1;
const SWISH: c_int = 0x2c;
const BINARY_MUL: c_int = 0x1fff1;
const QUERY_WEIGHTS: c_int = 131;
const ARG_SRC: c_int = 1;
const ARG_DST: c_int = 17;
const ARG_WEIGHTS: c_int = 33;
/// Second operand of post-operation 1: `DNNL_ARG_ATTR_MULTIPLE_POST_OP(1) | DNNL_ARG_SRC_1`.
const ARG_FACTOR: c_int = (32768 * 2) | 2;
/// `DNNL_MEMORY_ALLOCATE`.
const ALLOCATE: *mut c_void = usize::MAX as *mut c_void;

#[repr(C)]
struct Arg {
    arg: c_int,
    memory: Object,
}

macro_rules! functions {
    ($($name:ident($($arg:ty),*);)*) => {
        #[derive(Clone, Copy)]
        struct Functions { $($name: unsafe extern "C" fn($($arg),*) -> c_int,)* }

        impl Functions {
            /// # Safety
            /// `lib` is an open library; these are its functions' types.
            // SAFETY: contract above.
            unsafe fn load(lib: *mut c_void) -> Result<Self, String> {
                let find = |name: &str| {
                    let c = CString::new(name).unwrap();
                    // SAFETY: an open library and a NUL-terminated name.
                    let at = unsafe { libc::dlsym(lib, c.as_ptr()) };
                    if at.is_null() { Err(format!("it has no {name}: is it oneDNN 3?")) } else { Ok(at) }
                };
                $(
                    // SAFETY: by the contract.
                    let $name = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> c_int>(
                        find(concat!("dnnl_", stringify!($name)))?,
                    ) };
                )*
                Ok(Self { $($name,)* })
            }
        }
    };
}

functions! {
    engine_create(*mut Object, c_int, usize);
    stream_create(*mut Object, Object, u32);
    stream_wait(Object);
    memory_desc_create_with_strides(*mut Object, c_int, *const i64, c_int, *const i64);
    memory_desc_create_with_tag(*mut Object, c_int, *const i64, c_int, c_int);
    memory_create(*mut Object, Object, Object, *mut c_void);
    post_ops_create(*mut Object);
    post_ops_append_eltwise(Object, c_int, f32, f32);
    post_ops_append_binary(Object, c_int, Object);
    primitive_attr_create(*mut Object);
    primitive_attr_set_post_ops(Object, Object);
    matmul_primitive_desc_create(*mut Object, Object, Object, Object, Object, Object, Object);
    reorder_primitive_desc_create(*mut Object, Object, Object, Object, Object, Object);
    primitive_create(*mut Object, Object);
    primitive_execute(Object, Object, c_int, *const Arg);
}

/// The library with a CPU engine.
pub struct OneDnn {
    f: Functions,
    query_md: unsafe extern "C" fn(Object, c_int, c_int) -> Object,
    engine: Object,
    stream: Object,
    /// `3.2.0`.
    pub version: String,
}

fn check(what: &str, status: c_int) {
    assert_eq!(status, 0, "oneDNN: {what} failed");
}

fn made(what: &str, make: impl FnOnce(*mut Object) -> c_int) -> Object {
    let mut object = null_mut();
    check(what, make(&mut object));
    object
}

impl OneDnn {
    /// Loads `libdnnl.so`. It uses OpenMP's threads: `OMP_NUM_THREADS` counts.
    ///
    /// # Errors
    /// What is missing.
    pub fn open(path: &Path) -> Result<Self, String> {
        let name = CString::new(path.to_str().unwrap_or_default()).map_err(|e| e.to_string())?;
        // SAFETY: loading runs the library's initialisers, which is what is wanted.
        let lib = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if lib.is_null() {
            // SAFETY: dlerror gives a string after a failure.
            return Err(unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy().into_owned());
        }
        // SAFETY: oneDNN's functions have these types (dnnl.h, versions 3.x).
        unsafe {
            let f = Functions::load(lib)?;
            let query_md = libc::dlsym(lib, c"dnnl_primitive_desc_query_md".as_ptr());
            let version = libc::dlsym(lib, c"dnnl_version".as_ptr());
            assert!(!query_md.is_null() && !version.is_null());
            let version: unsafe extern "C" fn() -> *const [c_int; 3] = std::mem::transmute(version);
            let engine = made("engine", |e| (f.engine_create)(e, CPU, 0));
            Ok(Self {
                f,
                query_md: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Object, c_int, c_int) -> Object>(
                    query_md,
                ),
                engine,
                stream: made("stream", |s| (f.stream_create)(s, engine, IN_ORDER)),
                version: (*version()).map(|n| n.to_string()).join("."),
            })
        }
    }

    /// Row-major, or with `transposed` the transpose of a row-major matrix.
    fn matrix(&self, [rows, columns]: [usize; 2], kind: c_int, transposed: bool) -> Object {
        let dims = [rows as i64, columns as i64];
        let strides = if transposed { [1, rows as i64] } else { [columns as i64, 1] };
        // SAFETY: two dimensions each.
        made("matrix", |m| unsafe {
            (self.f.memory_desc_create_with_strides)(m, 2, dims.as_ptr(), kind, strides.as_ptr())
        })
    }

    fn memory(&self, desc: Object, at: *mut c_void) -> Object {
        // SAFETY: `at` has the bytes of `desc`, or asks for an allocation.
        made("memory", |m| unsafe { (self.f.memory_create)(m, desc, self.engine, at) })
    }

    /// A product whose weights lie as GGUF has them, or (`packed`) as oneDNN likes them best. Returns it with the layout of
    /// its weights.
    fn product(&self, [m, k, n]: [usize; 3], to: c_int, gated: bool, packed: bool) -> (Object, Object) {
        let (src, dst) = (self.matrix([m, k], BF16, false), self.matrix([m, n], to, false));
        let in_place = self.matrix([k, n], BF16, true);
        // SAFETY: objects of this library, in the roles that its functions name.
        unsafe {
            let weights = match packed {
                false => in_place,
                true => made("weights", |w| {
                    (self.f.memory_desc_create_with_tag)(w, 2, [k as i64, n as i64].as_ptr(), BF16, ANY_LAYOUT)
                }),
            };
            let mut attr = null_mut();
            if gated {
                let ops = made("post-ops", |o| (self.f.post_ops_create)(o));
                check("swish", (self.f.post_ops_append_eltwise)(ops, SWISH, 1.0, 0.0));
                check("times up", (self.f.post_ops_append_binary)(ops, BINARY_MUL, dst));
                attr = made("attributes", |a| (self.f.primitive_attr_create)(a));
                check("post-ops", (self.f.primitive_attr_set_post_ops)(attr, ops));
            }
            let create = |p| (self.f.matmul_primitive_desc_create)(p, self.engine, src, weights, null_mut(), dst, attr);
            let desc = made("product", create);
            let primitive = made("product", |p| (self.f.primitive_create)(p, desc));
            (primitive, (self.query_md)(desc, QUERY_WEIGHTS, 0))
        }
    }

    fn execute(&self, primitive: Object, args: &[(c_int, Object)]) {
        let args: Vec<Arg> = args.iter().map(|&(arg, memory)| Arg { arg, memory }).collect();
        // SAFETY: memories of the layouts that the primitive was made for.
        let status = unsafe { (self.f.primitive_execute)(primitive, self.stream, args.len() as c_int, args.as_ptr()) };
        check("execution", status);
    }

    fn wait(&self) {
        // SAFETY: our stream.
        check("stream", unsafe { (self.f.stream_wait)(self.stream) });
    }
}

/// The experts of one layer, `m` tokens each.
pub struct Experts<'a> {
    lib: &'a OneDnn,
    /// Up, gate, down.
    products: [Object; 3],
    /// By expert: weights of up, gate, down.
    weights: Vec<[Object; 3]>,
    x: Object,
    up: Object,
    hidden: Object,
    out: Object,
    _x: Vec<bf16>,
    /// f32 `[m][n_embd]`, of the expert that ran last.
    result: Box<[f32]>,
}

impl<'a> Experts<'a> {
    /// `memory`: gate, up and down of all experts, as GGUF has them. `x`: f32 `[m][n_embd]`, the tokens of every expert.
    pub fn new(lib: &'a OneDnn, shape: Shape, m: usize, memory: &'a [u8], x: &[f32], packed: bool) -> Self {
        let Shape { n_embd, n_ff, experts, .. } = shape;
        let third = weight_bytes(shape, DType::Bf16) / 3;
        let up = lib.product([m, n_embd, n_ff], BF16, false, packed);
        let gate = lib.product([m, n_embd, n_ff], BF16, true, packed);
        let down = lib.product([m, n_ff, n_embd], F32, false, packed);
        let of = |(part, e): (usize, usize), k, n, layout| {
            let at = memory[part * third + e * (third / experts)..].as_ptr().cast_mut().cast();
            let in_place = lib.matrix([k, n], BF16, true);
            let memory = lib.memory(in_place, at);
            if packed { repacked(lib, in_place, memory, layout) } else { memory }
        };
        let expert =
            |e| [of((1, e), n_embd, n_ff, up.1), of((0, e), n_embd, n_ff, gate.1), of((2, e), n_ff, n_embd, down.1)];
        let mut tokens: Vec<bf16> = x[..m * n_embd].iter().map(|&v| bf16::from_f32(v)).collect();
        let mut result = vec![0f32; m * n_embd].into_boxed_slice();
        let inner = lib.matrix([m, n_ff], BF16, false);
        Self {
            lib,
            products: [up.0, gate.0, down.0],
            weights: (0..experts).map(expert).collect(),
            x: lib.memory(lib.matrix([m, n_embd], BF16, false), tokens.as_mut_ptr().cast()),
            up: lib.memory(inner, ALLOCATE),
            hidden: lib.memory(inner, ALLOCATE),
            out: lib.memory(lib.matrix([m, n_embd], F32, false), result.as_mut_ptr().cast()),
            _x: tokens,
            result,
        }
    }

    fn run_one(&self, [up, gate, down]: [Object; 3]) {
        let [p_up, p_gate, p_down] = self.products;
        self.lib.execute(p_up, &[(ARG_SRC, self.x), (ARG_WEIGHTS, up), (ARG_DST, self.up)]);
        let gated = [(ARG_SRC, self.x), (ARG_WEIGHTS, gate), (ARG_DST, self.hidden), (ARG_FACTOR, self.up)];
        self.lib.execute(p_gate, &gated);
        self.lib.execute(p_down, &[(ARG_SRC, self.hidden), (ARG_WEIGHTS, down), (ARG_DST, self.out)]);
    }

    /// All experts once. Gathering tokens and summing their results are left out, in oneDNN's favour.
    pub fn run(&self) {
        self.weights.iter().for_each(|w| self.run_one(*w));
        self.lib.wait();
    }

    /// The result of one expert.
    pub fn expert(&self, e: usize) -> &[f32] {
        self.run_one(self.weights[e]);
        self.lib.wait();
        &self.result
    }
}

/// A copy in the layout that a product likes.
fn repacked(lib: &OneDnn, from: Object, memory: Object, to: Object) -> Object {
    let copy = lib.memory(to, ALLOCATE);
    // SAFETY: objects of this library, in the roles that its functions name.
    let reorder = unsafe {
        let create = |p| (lib.f.reorder_primitive_desc_create)(p, from, lib.engine, to, lib.engine, null_mut());
        let desc = made("reorder", create);
        made("reorder", |p| (lib.f.primitive_create)(p, desc))
    };
    lib.execute(reorder, &[(ARG_SRC, memory), (ARG_DST, copy)]);
    lib.wait();
    copy
}
