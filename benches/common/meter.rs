//! The ceilings of this machine, measured: read bandwidth, and the peaks of the instructions that the kernels are made of.

use std::arch::x86_64::*;
use std::hint::black_box;
use std::time::Instant;

use ggml_hina::isa::Avx512;
use ggml_hina::team::{self, Worker};

/// What the threads of a pool reach together.
#[derive(Clone, Copy, Debug)]
pub struct Ceilings {
    /// Bytes a second that are read, each thread in one sequential stream.
    pub read: f64,
    /// BF16 operations a second by `vdpbf16ps` (two for a multiplication and its addition).
    pub dpbf16: f64,
    /// f32 operations a second by fused multiply-add.
    pub fma: f64,
    /// INT8 operations a second by `vpdpbusd`.
    pub dpbusd: f64,
    /// INT8 operations a second where every eight `vpdpbusd` (32 k) end in a conversion, a product and an addition in f32.
    pub scaled: f64,
}

impl Ceilings {
    /// Measures on the threads of `pool`, the best of `passes`; `memory` should be several times the last level cache.
    pub fn measure(isa: Avx512, pool: &rayon::ThreadPool, memory: &[u8], passes: usize) -> Self {
        let best = |amount: f64, work: &(dyn Fn(&Worker<'_>) + Sync)| {
            let pass = |_| {
                let start = Instant::now();
                team::run_on(pool, &|w| work(&w));
                amount / start.elapsed().as_secs_f64()
            };
            (0..passes).map(pass).fold(0.0, f64::max)
        };
        let threads = pool.current_num_threads() as f64;
        let read = best(memory.len() as f64, &|w| {
            let share = w.share(memory.len() / 4096);
            // SAFETY: the token proves the features.
            black_box(unsafe { sum(isa, &memory[share.start * 4096..share.end * 4096]) });
        });
        // SAFETY: the token proves the features.
        let peak = |per: f64, f: unsafe fn(Avx512)| best(threads * per * LOOPS as f64, &|_| unsafe { f(isa) });
        Self {
            read,
            dpbf16: peak(22.0 * 64.0, dpbf16),
            fma: peak(22.0 * 32.0, fma),
            dpbusd: peak(22.0 * 128.0, dpbusd),
            scaled: peak(16.0 * 128.0, scaled),
        }
    }

    /// The higher of the two ways to multiply BF16.
    pub fn bf16(&self) -> f64 {
        self.dpbf16.max(self.fma)
    }
}

/// Loops of a peak: a millisecond or two.
const LOOPS: usize = 250_000;

#[target_feature(enable = "avx512f")]
fn sum(_: Avx512, bytes: &[u8]) -> i32 {
    let mut acc = [_mm512_setzero_si512(); 8];
    for b in bytes.as_chunks::<512>().0 {
        for (i, a) in acc.iter_mut().enumerate() {
            // SAFETY: inside the block.
            *a = _mm512_add_epi32(*a, unsafe { _mm512_loadu_si512(b.as_ptr().add(i * 64).cast()) });
        }
    }
    _mm512_reduce_add_epi32(acc.into_iter().fold(_mm512_setzero_si512(), |a, b| _mm512_add_epi32(a, b)))
}

/// A loop of instructions on registers, in assembly so that nothing is optimised away.
macro_rules! peak {
    ($name:ident, $($line:literal)*) => {
        #[target_feature(enable = "avx512f")]
        fn $name(_: Avx512) {
            // SAFETY: registers only.
            unsafe {
                std::arch::asm!(
                    "vpxord zmm30, zmm30, zmm30",
                    "2:", $($line,)* "dec {n}", "jnz 2b",
                    n = inout(reg) LOOPS => _,
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                    out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                    out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _,
                    out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm30") _,
                    options(nostack, nomem),
                );
            }
        }
    };
}

peak!(
    dpbf16,
    "vdpbf16ps zmm0, zmm30, zmm30"
    "vdpbf16ps zmm1, zmm30, zmm30"
    "vdpbf16ps zmm2, zmm30, zmm30"
    "vdpbf16ps zmm3, zmm30, zmm30"
    "vdpbf16ps zmm4, zmm30, zmm30"
    "vdpbf16ps zmm5, zmm30, zmm30"
    "vdpbf16ps zmm6, zmm30, zmm30"
    "vdpbf16ps zmm7, zmm30, zmm30"
    "vdpbf16ps zmm8, zmm30, zmm30"
    "vdpbf16ps zmm9, zmm30, zmm30"
    "vdpbf16ps zmm10, zmm30, zmm30"
    "vdpbf16ps zmm11, zmm30, zmm30"
    "vdpbf16ps zmm12, zmm30, zmm30"
    "vdpbf16ps zmm13, zmm30, zmm30"
    "vdpbf16ps zmm14, zmm30, zmm30"
    "vdpbf16ps zmm15, zmm30, zmm30"
    "vdpbf16ps zmm16, zmm30, zmm30"
    "vdpbf16ps zmm17, zmm30, zmm30"
    "vdpbf16ps zmm18, zmm30, zmm30"
    "vdpbf16ps zmm19, zmm30, zmm30"
    "vdpbf16ps zmm20, zmm30, zmm30"
    "vdpbf16ps zmm21, zmm30, zmm30"
);
peak!(
    fma,
    "vfmadd231ps zmm0, zmm30, zmm30"
    "vfmadd231ps zmm1, zmm30, zmm30"
    "vfmadd231ps zmm2, zmm30, zmm30"
    "vfmadd231ps zmm3, zmm30, zmm30"
    "vfmadd231ps zmm4, zmm30, zmm30"
    "vfmadd231ps zmm5, zmm30, zmm30"
    "vfmadd231ps zmm6, zmm30, zmm30"
    "vfmadd231ps zmm7, zmm30, zmm30"
    "vfmadd231ps zmm8, zmm30, zmm30"
    "vfmadd231ps zmm9, zmm30, zmm30"
    "vfmadd231ps zmm10, zmm30, zmm30"
    "vfmadd231ps zmm11, zmm30, zmm30"
    "vfmadd231ps zmm12, zmm30, zmm30"
    "vfmadd231ps zmm13, zmm30, zmm30"
    "vfmadd231ps zmm14, zmm30, zmm30"
    "vfmadd231ps zmm15, zmm30, zmm30"
    "vfmadd231ps zmm16, zmm30, zmm30"
    "vfmadd231ps zmm17, zmm30, zmm30"
    "vfmadd231ps zmm18, zmm30, zmm30"
    "vfmadd231ps zmm19, zmm30, zmm30"
    "vfmadd231ps zmm20, zmm30, zmm30"
    "vfmadd231ps zmm21, zmm30, zmm30"
);
peak!(
    dpbusd,
    "vpdpbusd zmm0, zmm30, zmm30"
    "vpdpbusd zmm1, zmm30, zmm30"
    "vpdpbusd zmm2, zmm30, zmm30"
    "vpdpbusd zmm3, zmm30, zmm30"
    "vpdpbusd zmm4, zmm30, zmm30"
    "vpdpbusd zmm5, zmm30, zmm30"
    "vpdpbusd zmm6, zmm30, zmm30"
    "vpdpbusd zmm7, zmm30, zmm30"
    "vpdpbusd zmm8, zmm30, zmm30"
    "vpdpbusd zmm9, zmm30, zmm30"
    "vpdpbusd zmm10, zmm30, zmm30"
    "vpdpbusd zmm11, zmm30, zmm30"
    "vpdpbusd zmm12, zmm30, zmm30"
    "vpdpbusd zmm13, zmm30, zmm30"
    "vpdpbusd zmm14, zmm30, zmm30"
    "vpdpbusd zmm15, zmm30, zmm30"
    "vpdpbusd zmm16, zmm30, zmm30"
    "vpdpbusd zmm17, zmm30, zmm30"
    "vpdpbusd zmm18, zmm30, zmm30"
    "vpdpbusd zmm19, zmm30, zmm30"
    "vpdpbusd zmm20, zmm30, zmm30"
    "vpdpbusd zmm21, zmm30, zmm30"
);
peak!(
    scaled,
    "vpdpbusd zmm0, zmm30, zmm30"
    "vpdpbusd zmm8, zmm30, zmm30"
    "vpdpbusd zmm1, zmm30, zmm30"
    "vpdpbusd zmm9, zmm30, zmm30"
    "vpdpbusd zmm2, zmm30, zmm30"
    "vpdpbusd zmm10, zmm30, zmm30"
    "vpdpbusd zmm3, zmm30, zmm30"
    "vpdpbusd zmm11, zmm30, zmm30"
    "vpdpbusd zmm4, zmm30, zmm30"
    "vpdpbusd zmm12, zmm30, zmm30"
    "vpdpbusd zmm5, zmm30, zmm30"
    "vpdpbusd zmm13, zmm30, zmm30"
    "vpdpbusd zmm6, zmm30, zmm30"
    "vpdpbusd zmm14, zmm30, zmm30"
    "vpdpbusd zmm7, zmm30, zmm30"
    "vpdpbusd zmm15, zmm30, zmm30"
    "vcvtdq2ps zmm16, zmm0"
    "vmulps zmm18, zmm30, zmm30"
    "vfmadd231ps zmm20, zmm30, zmm30"
    "vcvtdq2ps zmm17, zmm1"
    "vmulps zmm19, zmm30, zmm30"
    "vfmadd231ps zmm21, zmm30, zmm30"
);
