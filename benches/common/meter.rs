//! The ceilings of this machine, measured: read bandwidth, and the peaks of the instructions that the kernels are made of.

use std::arch::x86_64::*;
use std::hint::black_box;
use std::time::Instant;

use ggml_hina::isa::{Amx, Isa};
use ggml_hina::kernels::amx::tile::{Config, Session, Tiles};
use ggml_hina::team::{self, Worker};

/// What the threads of a pool reach together.
#[derive(Clone, Copy, Debug)]
pub struct Ceilings {
    /// Bytes a second that are read, each thread in one sequential stream.
    pub read: f64,
    /// Operations a second on BF16 weights (two for a multiplication and its addition), by the fastest instructions there are.
    pub bf16: Peak,
    /// The same for Q8_0 weights: INT8 products, of which every 32 k end in a conversion, a product and an addition in f32, or BF16 ones.
    pub int8: Peak,
}

/// The rate of a loop of instructions on registers.
#[derive(Clone, Copy, Debug)]
pub struct Peak {
    /// The instructions.
    pub by: &'static str,
    /// Operations a second.
    pub rate: f64,
}

impl Ceilings {
    /// Measures on the threads of `pool`, the best of `passes`; `memory` should be several times the last level cache.
    pub fn measure(isa: Isa, pool: &rayon::ThreadPool, memory: &[u8], passes: usize) -> Self {
        let least = |times: &[f64]| times.iter().copied().fold(f64::MAX, f64::min);
        Self::by(isa, pool, memory, [passes; 2], least)
    }

    /// The same on average over about as long as reading `memory` takes, for what is compared with an average.
    pub fn on_average(isa: Isa, pool: &rayon::ThreadPool, memory: &[u8]) -> Self {
        Self::by(isa, pool, memory, [1, 10], |times| times.iter().sum::<f64>() / times.len() as f64)
    }

    /// By the time that `of` makes of those of some passes of reading and some of arithmetic.
    fn by(
        isa: Isa,
        pool: &rayon::ThreadPool,
        memory: &[u8],
        [reads, loops]: [usize; 2],
        of: impl Fn(&[f64]) -> f64,
    ) -> Self {
        let rate = |passes: usize, amount: f64, work: &(dyn Fn(&Worker<'_>) + Sync)| {
            let pass = |_| {
                let start = Instant::now();
                team::run_on(pool, &|w| work(&w));
                start.elapsed().as_secs_f64()
            };
            amount / of(&(0..passes).map(pass).collect::<Vec<_>>())
        };
        let threads = pool.current_num_threads() as f64;
        let read = rate(reads, memory.len() as f64, &|w| {
            // SAFETY: every engine's CPU has AVX2, and all but one AVX-512.
            black_box(unsafe { sum(!matches!(isa, Isa::Avx2(_)), &memory[w.share(memory.len())]) });
        });
        let peak = |by, per: f64, f: unsafe fn()| {
            // SAFETY: called only with what `isa` has.
            let rate = rate(loops, threads * per * LOOPS as f64, &|_| unsafe { f() });
            Peak { by, rate }
        };
        let on_tiles = |by, per: f64, amx: Amx, f: fn(&Tiles<'_>)| {
            let rate = rate(loops, threads * per * LOOPS as f64, &|_| {
                let mut session = Session::begin(amx);
                f(&session.configure(&Config::new([[16, 64]; 8])));
            });
            Peak { by, rate }
        };
        let (bf16, int8) = match isa {
            Isa::Amx(amx) => {
                let bf16 = on_tiles("tdpbf16ps", 4.0 * 2.0 * 16.0 * 16.0 * 32.0, amx, tiles_bf16);
                // Faster than `tdpbssd`, whose sums need scaling: Q8_0 weights become BF16 where there are many tokens.
                (bf16, bf16)
            }
            Isa::Avx512(_) => {
                let [pairs, fma] = [peak("vdpbf16ps", 16.0 * 64.0, dpbf16), peak("vfmadd231ps", 16.0 * 32.0, fma512)];
                let bf16 = if pairs.rate > fma.rate { pairs } else { fma };
                (bf16, peak("vpdpbusd and scales", 16.0 * 128.0, scaled512))
            }
            Isa::Avx2(avx2) => {
                let int8 = match avx2.vnni() {
                    Some(_) => peak("vpdpbusd and scales", 32.0 * 64.0, scaled_vnni256),
                    None => peak("vpmaddwd, vpaddd and scales", 32.0 * 32.0, scaled256),
                };
                (peak("vfmadd231ps", 12.0 * 16.0, fma256), int8)
            }
        };
        Self { read, bf16, int8 }
    }
}

/// Loops of a peak: a millisecond or two.
const LOOPS: usize = 250_000;

/// Streams that [`sum`] reads side by side, and bytes of each.
const STREAMS: usize = 8;
const STREAM: usize = 48 << 10;

/// Makes a function that sums whole groups of streams from a page's start on, `$step` bytes a load: of all orders of plain loads that
/// were tried none was faster.
macro_rules! sum {
    ($name:ident, $features:literal, $zero:ident, $load:ident, $add:ident, $vector:ty) => {
        #[target_feature(enable = $features)]
        fn $name(bytes: &[u8]) -> i32 {
            const STEP: usize = size_of::<$vector>();
            let bytes = &bytes[bytes.as_ptr().align_offset(4096).min(bytes.len())..];
            let mut acc = [$zero(); STREAMS];
            for group in bytes.as_chunks::<{ STREAMS * STREAM }>().0 {
                for line in (0..STREAM).step_by(64) {
                    for (stream, acc) in acc.iter_mut().enumerate() {
                        for at in (line..line + 64).step_by(STEP) {
                            // SAFETY: a line of the group.
                            *acc = $add(*acc, unsafe { $load(group.as_ptr().add(stream * STREAM + at).cast()) });
                        }
                    }
                }
            }
            acc.into_iter().fold(0, |sum, acc| {
                // SAFETY: any bits are integers.
                let lanes: [i32; STEP / 4] = unsafe { std::mem::transmute(acc) };
                lanes.into_iter().fold(sum, i32::wrapping_add)
            })
        }
    };
}

sum!(sum256, "avx2", _mm256_setzero_si256, _mm256_loadu_si256, _mm256_add_epi32, __m256i);
sum!(sum512, "avx512f", _mm512_setzero_si512, _mm512_loadu_si512, _mm512_add_epi32, __m512i);

/// Reads all but less than a megabyte.
///
/// # Safety
/// The CPU has AVX2; if `wide`, AVX-512.
// SAFETY: contract above.
pub unsafe fn sum(wide: bool, bytes: &[u8]) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { if wide { sum512(bytes) } else { sum256(bytes) } }
}

/// A loop of instructions on registers, in assembly so that nothing is optimised away.
macro_rules! peak {
    ($name:ident, $features:literal, [$($zero:literal),*], $($line:literal),* $(,)?) => {
        #[target_feature(enable = $features)]
        fn $name() {
            // SAFETY: registers only.
            unsafe {
                std::arch::asm!(
                    // All of them: what another kernel leaves may be denormal, which a CPU takes long for.
                    "vzeroall", $($zero,)*
                    "2:", $($line,)* "dec {n}", "jnz 2b",
                    n = inout(reg) LOOPS => _,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _, out("xmm4") _, out("xmm5") _,
                    out("xmm6") _, out("xmm7") _, out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                    out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _, out("xmm16") _, out("xmm17") _,
                    out("xmm18") _, out("xmm19") _, out("xmm20") _, out("xmm21") _,
                    options(nostack, nomem),
                );
            }
        }
    };
}

/// The same with AVX-512, whose further registers are to be zero, too.
macro_rules! peak512 {
    ($name:ident, $($line:literal),* $(,)?) => {
        peak!($name, "avx512f", [".irp i,16,17,20,21", "vpxord zmm\\i, zmm\\i, zmm\\i", ".endr"], $($line),*);
    };
}

peak512!(dpbf16, ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,16,17", "vdpbf16ps zmm\\i, zmm15, zmm15", ".endr");
peak512!(fma512, ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,16,17", "vfmadd231ps zmm\\i, zmm15, zmm15", ".endr");
// Two tiles of eight sums, and their scaling.
peak512!(
    scaled512,
    ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,16,17",
    "vpdpbusd zmm\\i, zmm15, zmm15",
    ".endr",
    ".irp i,0,1",
    "vcvtdq2ps zmm18, zmm\\i",
    "vmulps zmm19, zmm15, zmm15",
    "vfmadd231ps zmm2\\i, zmm15, zmm15",
    ".endr",
);

/// Products of tiles into four sums.
fn tiles_bf16(tiles: &Tiles<'_>) {
    for _ in 0..LOOPS {
        tiles.dp_bf16::<0, 4, 6>();
        tiles.dp_bf16::<1, 4, 7>();
        tiles.dp_bf16::<2, 5, 6>();
        tiles.dp_bf16::<3, 5, 7>();
    }
}

peak!(fma256, "avx2,fma", [], ".irp i,0,1,2,3,4,5,6,7,8,9,10,11", "vfmadd231ps ymm\\i, ymm15, ymm15", ".endr",);
// Four vectors of sums over 32 k, eight fours of k each, and their scaling. In ten registers, so that none waits for itself.
peak!(
    scaled_vnni256,
    "avx2,fma,avxvnni",
    [],
    ".rept 3",
    ".irp i,0,1,2,3,4,5,6,7,12,13",
    "{{vex}} vpdpbusd ymm\\i, ymm15, ymm15",
    ".endr",
    ".endr",
    ".irp i,0,1",
    "{{vex}} vpdpbusd ymm\\i, ymm15, ymm15",
    ".endr",
    ".irp i,0,1,0,1",
    "vcvtdq2ps ymm8, ymm\\i",
    "vmulps ymm9, ymm15, ymm15",
    "vfmadd231ps ymm1\\i, ymm15, ymm15",
    ".endr",
);
// Two vectors of sums over 32 k, sixteen pairs of k each, and their scaling.
peak!(
    scaled256,
    "avx2,fma",
    [],
    ".rept 4",
    ".irp i,0,1,2,3,4,5,6,7",
    "vpmaddwd ymm14, ymm15, ymm15",
    "vpaddd ymm\\i, ymm\\i, ymm14",
    ".endr",
    ".endr",
    ".irp i,0,1",
    "vcvtdq2ps ymm8, ymm\\i",
    "vmulps ymm9, ymm15, ymm15",
    "vfmadd231ps ymm1\\i, ymm15, ymm15",
    ".endr",
);
