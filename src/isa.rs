//! What this CPU may run, as values.
//!
//! A token of this module is a proof: a function that takes [`Avx512`] or [`Amx`] may use those instructions without
//! asking again, because the only ways to make one check CPUID, XCR0 and (for AMX) the kernel's permission.

use std::fmt;
use std::sync::OnceLock;

/// Proof that AVX-512 F, BW, DQ, VL and VNNI run here (Xeons from Cascade Lake on, Ice Lake and later; Zen 4 and later).
///
/// BF16 needs no instructions of its own: see [`Bf16Form`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512(());

impl Avx512 {
    /// Looks at CPUID and XCR0 (through the standard library's detection, which caches).
    pub fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        all.then_some(Self(()))
    }
}

/// Proof that AVX2, FMA and F16C run here (Haswell and later; all Zen).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2 {
    vnni: Option<AvxVnni>,
}

/// Proof that AVX-VNNI runs here, the `vpdpbusd` of CPUs that have no AVX-512 for it (Alder Lake to Arrow Lake, Sierra Forest).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvxVnni(());

impl Avx2 {
    /// Looks at CPUID and XCR0 (through the standard library's detection, which caches).
    pub fn detect() -> Option<Self> {
        let all =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        all.then(|| Self { vnni: is_x86_feature_detected!("avxvnni").then_some(AvxVnni(())) })
    }

    /// AVX-VNNI, where it is there too.
    pub fn vnni(self) -> Option<AvxVnni> {
        self.vnni
    }

    /// The same without AVX-VNNI, as most CPUs have it.
    pub fn without_vnni(self) -> Self {
        Self { vnni: None }
    }
}

impl AvxVnni {
    /// The token in a function that has the feature.
    ///
    /// # Safety
    /// AVX-VNNI runs here.
    // SAFETY: contract above.
    pub const unsafe fn assume() -> Self {
        Self(())
    }
}

/// Proof that AMX tiles with BF16 and INT8 products run here, on every thread of the process, and AVX-512 too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amx {
    avx512: Avx512,
    fp16: Option<AmxFp16>,
}

/// Proof that tiles multiply F16 here too (`tdpfp16ps`: Granite Rapids and later).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AmxFp16(());

/// Why AMX is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AmxRefused {
    /// CPUID leaf 7 shows no amx-tile, amx-bf16 or amx-int8.
    NotInCpu,
    /// XCR0 bits 17 and 18 are not set: the operating system or hypervisor does not save tile state.
    NotInXcr0,
    /// `arch_prctl(ARCH_REQ_XCOMP_PERM)` failed with this `errno`.
    NoPermission(i32),
    /// AMX works, but the AVX-512 parts the kernels also need do not.
    NoAvx512,
}

impl fmt::Display for AmxRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotInCpu => write!(f, "this CPU has no AMX-BF16 and AMX-INT8"),
            Self::NotInXcr0 => write!(f, "the operating system or hypervisor does not enable AMX tile state"),
            Self::NoPermission(e) => write!(f, "the kernel refuses AMX permission (errno {e})"),
            Self::NoAvx512 => write!(f, "AMX is there but AVX-512 VNNI and VBMI are not"),
        }
    }
}

impl Amx {
    /// CPUID, XCR0, then one request for permission in this process; the answer is kept.
    ///
    /// An AMX emulator that was preloaded into this process (symbol `amx_emu_active`, crate `amx-emu`) stands in for CPUID
    /// and XCR0, which cannot be trapped, and answers the request.
    pub fn detect() -> Result<Self, AmxRefused> {
        static ANSWER: OnceLock<Result<Amx, AmxRefused>> = OnceLock::new();
        *ANSWER.get_or_init(Self::ask)
    }

    fn ask() -> Result<Self, AmxRefused> {
        if !emulated() {
            if !in_cpuid() {
                return Err(AmxRefused::NotInCpu);
            }
            if !in_xcr0() {
                return Err(AmxRefused::NotInXcr0);
            }
        }
        request_permission()?;
        let avx512 = avx512_of_amx().ok_or(AmxRefused::NoAvx512)?;
        Ok(Self { avx512, fp16: (emulated() || fp16_in_cpuid()).then_some(AmxFp16(())) })
    }

    /// The token where an AMX emulator that is linked into this program has been installed. [`Amx::detect`] does not find
    /// such a one, because a program exports no symbols. For tests.
    ///
    /// # Safety
    /// From now on, AMX instructions work on every thread of this process.
    // SAFETY: contract above.
    #[doc(hidden)]
    pub unsafe fn assume_emulated() -> Result<Self, AmxRefused> {
        let avx512 = avx512_of_amx().ok_or(AmxRefused::NoAvx512)?;
        Ok(Self { avx512, fp16: Some(AmxFp16(())) })
    }

    /// The AVX-512 this CPU also has.
    pub fn avx512(self) -> Avx512 {
        self.avx512
    }

    /// AMX-FP16, where CPUID shows it or somebody has shown that it works.
    pub fn fp16(self) -> Option<AmxFp16> {
        self.fp16
    }

    /// The same without AMX-FP16, as Sapphire Rapids and Emerald Rapids have it.
    pub fn without_fp16(self) -> Self {
        Self { fp16: None, ..self }
    }

    /// The same with AMX-FP16, whatever CPUID says: hypervisors hide the bit.
    ///
    /// # Safety
    /// `tdpfp16ps` works on every thread of this process.
    // SAFETY: contract above.
    pub unsafe fn with_fp16(self) -> Self {
        Self { fp16: Some(AmxFp16(())), ..self }
    }
}

/// The AVX-512 that goes with tiles, VBMI among it (each CPU with AMX has that, not each that emulates it).
fn avx512_of_amx() -> Option<Avx512> {
    Avx512::detect().filter(|_| is_x86_feature_detected!("avx512vbmi"))
}

/// Whether an AMX emulator in this process says that it answers for AMX (see crate `amx-emu`).
pub fn emulated() -> bool {
    // SAFETY: dlsym with a NUL-terminated name only looks the symbol up.
    let f = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"amx_emu_active".as_ptr()) };
    if f.is_null() {
        return false;
    }
    // SAFETY: the emulator's contract: `int amx_emu_active(void)`.
    let f: extern "C" fn() -> libc::c_int = unsafe { std::mem::transmute(f) };
    f() != 0
}

/// CPUID leaf 7, EDX: bit 22 amx-bf16, bit 24 amx-tile, bit 25 amx-int8 (SDM vol. 2A, CPUID).
fn in_cpuid() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    if __cpuid(0).eax < 7 {
        return false;
    }
    let edx = __cpuid_count(7, 0).edx;
    let want = (1 << 22) | (1 << 24) | (1 << 25);
    edx & want == want
}

/// CPUID leaf 7, subleaf 1, EAX bit 21: amx-fp16 (SDM vol. 2A, CPUID).
fn fp16_in_cpuid() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).eax >= 1 && __cpuid_count(7, 1).eax & (1 << 21) != 0
}

/// XCR0 bits 17 (XTILECFG) and 18 (XTILEDATA).
fn in_xcr0() -> bool {
    use std::arch::x86_64::__cpuid;
    let osxsave = __cpuid(1).ecx & (1 << 27) != 0;
    if !osxsave {
        return false;
    }
    let (lo, _hi): (u32, u32);
    // SAFETY: OSXSAVE is set, so XGETBV is available; it only reads.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") lo, out("edx") _hi, options(nomem, nostack, preserves_flags));
    }
    lo & (0b11 << 17) == 0b11 << 17
}

/// Linux hands out tile state only on request: `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)`, once a process.
fn request_permission() -> Result<(), AmxRefused> {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call has no pointers; a kernel that does not know it returns EINVAL.
    let rc = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    if rc == 0 {
        return Ok(());
    }
    Err(AmxRefused::NoPermission(std::io::Error::last_os_error().raw_os_error().unwrap_or(0)))
}

/// How BF16 is multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bf16Form {
    /// `vdpbf16ps`, two k at a time: twice the rate of f32 on AMD's cores (Zen 4: one a cycle; Zen 5: two).
    Pairs,
    /// Values widened to f32 by a shift, then fused multiply-adds: where there is no `vdpbf16ps`, and on Intel's cores, on
    /// which it has half the rate of f32 (one every two cycles, measured on Emerald Rapids; two FMAs a cycle).
    Fma,
}

impl Bf16Form {
    /// Bytes of an element of a packed token row.
    pub const fn element_bytes(self) -> usize {
        match self {
            Self::Pairs => 2,
            Self::Fma => 4,
        }
    }

    /// Whether an AVX-512 CPU can do it.
    pub fn runs(self) -> bool {
        self == Self::Fma || is_x86_feature_detected!("avx512bf16")
    }

    /// The faster one of an AVX-512 CPU, by its vendor.
    pub fn best() -> Self {
        static BEST: OnceLock<Bf16Form> = OnceLock::new();
        *BEST.get_or_init(|| if by_intel() || !Self::Pairs.runs() { Self::Fma } else { Self::Pairs })
    }
}

/// How AVX-512 multiplies panels with Q8_0 weights, of which `vpdpbusd` wants `w + 128`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Int8Form {
    /// Weights are made ready some rows and columns at a time, stored, and loaded from L1 by fours.
    ReadyFirst,
    /// Each four is made ready as it is loaded, by a `vpxord`. AMD's cores have other units for that than for products: on a Zen 4, 97 % of
    /// the peak with two panels and more, from memory, where making ready first reaches 77 %. On Intel's cores it shares their ports: on a
    /// Sapphire Rapids, 57 to 66 %, from L2, where `ReadyFirst` reaches 87 %.
    InPlace,
}

impl Int8Form {
    /// The faster one of an AVX-512 CPU, by its vendor.
    pub fn best() -> Self {
        static BEST: OnceLock<Int8Form> = OnceLock::new();
        *BEST.get_or_init(|| if by_intel() { Self::ReadyFirst } else { Self::InPlace })
    }
}

/// Ways of an AMD core's L1 data cache: 8 up to Zen 4, 12 from Zen 5 on (AMD's CPUID leaf 8000_001D, EBX bits 22 to 31).
pub fn l1_ways() -> usize {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const LEAF: u32 = 0x8000_001D;
    static WAYS: OnceLock<usize> = OnceLock::new();
    *WAYS.get_or_init(|| {
        if __cpuid(0x8000_0000).eax < LEAF {
            return 8;
        }
        (__cpuid_count(LEAF, 0).ebx >> 22) as usize + 1
    })
}

/// Whether this is AMD's first core with AVX-512.
fn zen_4() -> bool {
    Bf16Form::Pairs.runs() && !by_intel() && l1_ways() == 8
}

fn by_intel() -> bool {
    let id = std::arch::x86_64::__cpuid(0);
    [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel"
}

/// In which order a block of weight rows is read, of which each is wanted once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// As one stretch: some neighbouring rows at a time, and every line of what follows is prefetched well ahead.
    Stretch,
    /// As several streams through the block, each of them many neighbouring rows, side by side. The CPU sees what follows by itself;
    /// only what is near is prefetched.
    Streams,
}

impl Reading {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Stretch, Self::Streams];

    /// The faster one, by the CPU's vendor. Measured on a Xeon 6, two threads, `vfmadd` on BF16 rows of 2048 and 768, where plain reads
    /// come at 32 GB/s: 32 GB/s of each by streams; 20 and 18 as a stretch. On a Zen 4, where they come at 36: 35 by streams, 30 as a
    /// stretch. On a Zen 3 a stretch reads 97 % of what plain reads do. Not measured on a Zen 5.
    pub fn best() -> Self {
        *READING.get_or_init(|| if by_intel() || zen_4() { Self::Streams } else { Self::Stretch })
    }

    /// Makes [`Reading::best`] say `self`, to measure it, if nobody has asked yet.
    pub fn prefer(self) {
        READING.get_or_init(|| self);
    }
}

static READING: OnceLock<Reading> = OnceLock::new();

/// What tokens that meet Q8_0 weights become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Q8Tokens {
    /// Quantised, as ggml does it: the numbers are ggml's but for the order of sums.
    Int8,
    /// BF16 where that is faster, as the weights are then too: nearer to the product that both stand for.
    Faster,
}

impl Q8Tokens {
    /// What they become here: [`Q8Tokens::Faster`] unless somebody preferred otherwise.
    pub fn here() -> Self {
        *Q8_TOKENS.get_or_init(|| Self::Faster)
    }

    /// Makes [`Q8Tokens::here`] say `self`, if nobody has asked yet.
    pub fn prefer(self) {
        Q8_TOKENS.get_or_init(|| self);
    }
}

static Q8_TOKENS: OnceLock<Q8Tokens> = OnceLock::new();

/// The engine to use: what the kernels are picked by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AMX tiles, with AVX-512 around them.
    Amx(Amx),
    /// AVX-512 with VNNI.
    Avx512(Avx512),
    /// AVX2 with FMA.
    Avx2(Avx2),
}

impl Isa {
    /// The engines that this CPU has, the best first.
    pub fn all() -> Vec<Self> {
        let [amx, avx512, avx2] =
            [Amx::detect().ok().map(Self::Amx), Avx512::detect().map(Self::Avx512), Avx2::detect().map(Self::Avx2)];
        [amx, avx512, avx2].into_iter().flatten().collect()
    }

    /// What `GGML_HINA_ISA` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Amx(_) => "amx",
            Self::Avx512(_) => "avx512",
            Self::Avx2(_) => "avx2",
        }
    }

    /// The best engine of this CPU, or none if even AVX2 is missing.
    pub fn best() -> Option<Self> {
        Self::all().first().copied()
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Amx(amx) if amx.fp16.is_some() => "AMX-BF16 AMX-INT8 AMX-FP16",
            Self::Amx(_) => "AMX-BF16 AMX-INT8",
            Self::Avx512(_) if Bf16Form::Pairs.runs() => "AVX512-BF16 AVX512-VNNI",
            Self::Avx512(_) => "AVX512-VNNI",
            Self::Avx2(avx2) if avx2.vnni.is_some() => "AVX2 FMA AVX-VNNI",
            Self::Avx2(_) => "AVX2 FMA",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amx_needs_its_avx512() {
        if let Ok(amx) = Amx::detect() {
            assert_eq!(Some(amx.avx512()), Avx512::detect());
        }
        if Isa::best().is_none() {
            assert_eq!((Avx512::detect(), Avx2::detect()), (None, None));
        }
    }

    #[test]
    fn refusals_say_why() {
        assert!(AmxRefused::NoPermission(38).to_string().contains("38"));
        assert!(AmxRefused::NotInXcr0.to_string().contains("tile state"));
    }
}
