//! Memory operands as they run, not only as they decode.

mod common;

use std::arch::asm;

use common::*;

/// A block whose bytes tell where they are.
fn block() -> Vec<u8> {
    (0..8192u32).map(|i| (i ^ i >> 8) as u8).collect()
}

/// What 16 rows of 64 bytes from `first` by `stride` hold.
fn want(block: &[u8], first: usize, stride: usize) -> Vec<u8> {
    (0..16).flat_map(|r| block[first + r * stride..][..64].to_vec()).collect()
}

/// One load by the given operand; all registers that it may name hold `base`, but r10 and rcx, the stride.
macro_rules! load {
    ($base:expr, $stride:expr, $insn:literal) => {{
        ldtilecfg(&full());
        // SAFETY: each case stays in its block; rbx is as before.
        unsafe {
            asm!("push rbx", "mov rbx, rax", $insn, "pop rbx", inout("rax") $base => _, inout("r13") $base => _,
                inout("r12") $base => _, inout("rcx") $stride => _, inout("r10") $stride => _);
        }
        stored::<1>().as_flattened().to_vec()
    }};
}

#[test]
fn base_index_scale_displacement() {
    setup();
    let b = block();
    let p = b.as_ptr() as usize;
    assert_eq!(load!(p, 64usize, "tileloadd tmm1, [rax + rcx*1]"), want(&b, 0, 64));
    assert_eq!(load!(p, 64usize, "tileloadd tmm1, [rbx + r10*2]"), want(&b, 0, 128));
    assert_eq!(load!(p, 64usize, "tileloadd tmm1, [r13 + r10*4]"), want(&b, 0, 256));
    assert_eq!(load!(p, 50usize, "tileloadd tmm1, [r12 + rcx*8]"), want(&b, 0, 400));
    assert_eq!(load!(p, 64usize, "tileloadd tmm1, [r12 + rcx*1 + 100]"), want(&b, 100, 64));
    assert_eq!(load!(p, 64usize, "tileloaddt1 tmm1, [r13 + rcx*1 + 1000]"), want(&b, 1000, 64));
    assert_eq!(load!(p + 500, 64usize, "tileloadd tmm1, [rax + rcx*1 - 100]"), want(&b, 400, 64));
    assert_eq!(load!(p + 500, 64usize, "tileloadd tmm1, [rax + rcx*1 - 500]"), want(&b, 0, 64));
    // No index: each row is the first. A zero in the index says the same.
    assert_eq!(load!(p + 7, 64usize, "tileloadd tmm1, [r12]"), want(&b, 7, 0));
    assert_eq!(load!(p + 7, 0usize, "tileloadd tmm1, [r12 + r10*1]"), want(&b, 7, 0));
    // The stride is signed.
    let back: Vec<u8> = (0..16).flat_map(|r| b[4096 - 64 * r..][..64].to_vec()).collect();
    assert_eq!(load!(p + 4096, -64isize, "tileloadd tmm1, [r13 + r10*1]"), back);
    tilerelease();
}

/// The stack pointer as a base is the program's, not the handler's.
#[test]
fn from_the_stack() {
    setup();
    ldtilecfg(&config(&[(1, 8)]));
    let out: u64;
    // SAFETY: a slot of the stack, and back.
    unsafe {
        asm!("push {0}", "tileloadd tmm0, [rsp]", "mov qword ptr [rsp], 0", "tilestored [rsp], tmm0", "pop {0}",
            inout(reg) 0x0123_4567_89ab_cdefu64 => out);
    }
    assert_eq!(out, 0x0123_4567_89ab_cdef);
    tilerelease();
}

#[test]
fn relative_to_rip() {
    setup();
    static CONFIG: [u8; 64] = {
        let mut c = [0; 64];
        (c[0], c[16], c[48]) = (1, 12, 3);
        c
    };
    // SAFETY: reads 64 bytes of the static.
    unsafe { asm!("ldtilecfg [rip + {}]", sym CONFIG) };
    assert_eq!(sttilecfg(), CONFIG);
    tilerelease();
}

#[test]
fn indexed_configuration() {
    setup();
    let mut b = vec![0u8; 1024];
    b[300..364].copy_from_slice(&full());
    // SAFETY: reads and writes 64 bytes of `b`.
    unsafe {
        asm!("ldtilecfg [{} + {}*4 + 100]", in(reg) b.as_ptr(), in(reg) 50usize);
        asm!("sttilecfg [{} + {}*8 - 8]", in(reg) b.as_mut_ptr(), in(reg) 65usize);
    }
    assert_eq!(b[512..576], full());
    tilerelease();
}

/// fs is the thread pointer: its first word is its own address.
#[test]
fn through_fs() {
    setup();
    ldtilecfg(&config(&[(1, 8)]));
    let (own, mut got): (u64, u64);
    // SAFETY: reads 8 bytes at fs:0.
    unsafe {
        asm!("mov {0}, fs:[0]", "tileloadd tmm0, fs:[{1}]", out(reg) own, in(reg) 0usize);
        got = 0;
        asm!("tilestored [{}], tmm0", in(reg) &raw mut got);
    }
    assert_eq!((got, own != 0), (own, true));
    tilerelease();
}

#[test]
fn through_gs() {
    setup();
    const ARCH_SET_GS: usize = 0x1001;
    const ARCH_GET_GS: usize = 0x1004;
    let b = block();
    let mut before = 0usize;
    let base = b.as_ptr() as usize + 64;
    // SAFETY: nothing else uses gs on this thread, and it is put back.
    unsafe {
        libc::syscall(libc::SYS_arch_prctl, ARCH_GET_GS, &raw mut before);
        libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, base);
    }
    let got = load!(36usize, 64usize, "tileloadd tmm1, gs:[rax + rcx*1]");
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, before) };
    assert_eq!(got, want(&b, 100, 64));
    tilerelease();
}

/// Prefix 67h cuts the address to 32 bits; memory below 4 GiB shows it.
#[test]
fn addresses_of_32_bits() {
    setup();
    // SAFETY: new memory.
    let low = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT;
        libc::mmap(std::ptr::null_mut(), 8192, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
    };
    assert_ne!(low, libc::MAP_FAILED);
    let b = block();
    // SAFETY: 8192 bytes each.
    unsafe { std::ptr::copy_nonoverlapping(b.as_ptr(), low.cast::<u8>(), 8192) };
    let base = low as usize | 0xdead_0000_0000_0000;
    assert_eq!(load!(base, 64usize, "tileloadd tmm1, [eax + ecx*1 + 3]"), want(&b, 3, 64));
    // SAFETY: mapped above.
    unsafe { libc::munmap(low, 8192) };
    tilerelease();
}
