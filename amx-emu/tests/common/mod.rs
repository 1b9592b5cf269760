//! What the tests share: the instructions as functions, and configurations.
#![allow(dead_code)] // each test file takes its part

pub mod child;

use std::arch::asm;
use std::sync::OnceLock;

use amx_emu::Dot;

pub const DOTS: [Dot; 6] =
    [Dot::Bf16, Dot::Fp16, Dot::SignedSigned, Dot::SignedUnsigned, Dot::UnsignedSigned, Dot::UnsignedUnsigned];

/// Those that can run here. A CPU with AMX may lack FP16 (before Granite Rapids) or have it though a hypervisor hides its bit in CPUID: so it is
/// tried, once, in a child.
pub fn dots() -> &'static [Dot] {
    static ANSWER: OnceLock<Vec<Dot>> = OnceLock::new();
    ANSWER.get_or_init(|| {
        setup();
        let tried = child::end_of(&|| {
            ldtilecfg(&full());
            dot::<0, 1, 2>(Dot::Fp16);
        });
        let fp16 = tried == child::End::Exit(0);
        if !fp16 {
            println!(
                "skipped: FP16 products, which this CPU has not and which nothing can stand in for where it has AMX"
            );
        }
        DOTS.into_iter().filter(|&op| fp16 || op != Dot::Fp16).collect()
    })
}

/// Installs the emulator; on a CPU that has AMX, asks Linux for permission, and the tests hold the CPU to the
/// same model.
pub fn setup() {
    if amx_emu::install().expect("handlers can be installed") == amx_emu::Mode::Native {
        // SAFETY: no pointers.
        let ret = unsafe { libc::syscall(libc::SYS_arch_prctl, 0x1023, 18) };
        assert_eq!(ret, 0, "this CPU has AMX, but the kernel does not permit it");
    }
}

/// A configuration of palette 1 with these (rows, colsb).
pub fn config(shapes: &[(u8, u16)]) -> [u8; 64] {
    let mut config = [0; 64];
    config[0] = 1;
    for (t, &(rows, colsb)) in shapes.iter().enumerate() {
        config[16 + 2 * t..18 + 2 * t].copy_from_slice(&colsb.to_le_bytes());
        config[48 + t] = rows;
    }
    config
}

/// All eight tiles at full size.
pub fn full() -> [u8; 64] {
    config(&[(16, 64); 8])
}

pub fn ldtilecfg(config: &[u8; 64]) {
    // SAFETY: reads 64 bytes.
    unsafe { asm!("ldtilecfg [{}]", in(reg) config.as_ptr(), options(nostack, readonly)) }
}

pub fn sttilecfg() -> [u8; 64] {
    let mut config = [0xaa; 64];
    // SAFETY: writes 64 bytes.
    unsafe { asm!("sttilecfg [{}]", in(reg) config.as_mut_ptr(), options(nostack)) }
    config
}

pub fn tilerelease() {
    // SAFETY: touches tile state only.
    unsafe { asm!("tilerelease", options(nostack, nomem)) }
}

pub fn tilezero<const T: u8>() {
    // SAFETY: touches tile state only.
    unsafe { asm!("tilezero tmm{}", const T, options(nostack, nomem)) }
}

/// # Safety
/// Each row that the configuration asks for must be readable.
pub unsafe fn tileloadd<const T: u8>(base: *const u8, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe { asm!("tileloadd tmm{}, [{} + {}*1]", const T, in(reg) base, in(reg) stride, options(nostack, readonly)) }
}

/// # Safety
/// As [`tileloadd`].
pub unsafe fn tileloaddt1<const T: u8>(base: *const u8, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe { asm!("tileloaddt1 tmm{}, [{} + {}*1]", const T, in(reg) base, in(reg) stride, options(nostack, readonly)) }
}

/// # Safety
/// Each row that the configuration asks for must be writable.
pub unsafe fn tilestored<const T: u8>(base: *mut u8, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe { asm!("tilestored [{1} + {2}*1], tmm{0}", const T, in(reg) base, in(reg) stride, options(nostack)) }
}

/// `dot` with tile numbers fixed at compile time.
pub fn dot<const D: u8, const A: u8, const B: u8>(op: Dot) {
    macro_rules! insn {
        ($name:literal) => {
            // SAFETY: touches tile state only.
            unsafe {
                asm!(concat!($name, " tmm{}, tmm{}, tmm{}"), const D, const A, const B, options(nostack, nomem))
            }
        };
    }
    match op {
        Dot::Bf16 => insn!("tdpbf16ps"),
        Dot::Fp16 => insn!("tdpfp16ps"),
        Dot::SignedSigned => insn!("tdpbssd"),
        Dot::SignedUnsigned => insn!("tdpbsud"),
        Dot::UnsignedSigned => insn!("tdpbusd"),
        Dot::UnsignedUnsigned => insn!("tdpbuud"),
    }
}

/// All 1024 bytes of a tile register, whatever its shape: a store shows only the configured part, so the
/// emulated part that hardware would show after a new configuration is left to the model's own tests.
pub fn stored<const T: u8>() -> [[u8; 64]; 16] {
    let mut out = [[0xee; 64]; 16];
    // SAFETY: 16 rows of 64 bytes are the most that a tile has.
    unsafe { tilestored::<T>(out.as_mut_ptr().cast(), 64) };
    out
}
