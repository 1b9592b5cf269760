//! System calls without libc, and the one copy that may fault.
//!
//! libc's own functions are not used: in `libamx_emu.so` some of their names are ours.

use std::arch::{asm, naked_asm};
use std::ffi::{c_int, c_long, c_void};

/// A signal's action as `rt_sigaction` takes it (not as libc's `sigaction` does).
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct KernelAction {
    pub handler: usize,
    pub flags: u64,
    pub restorer: usize,
    pub mask: u64,
}

/// The kernel returns from a handler through this; x86-64 asks for it.
pub(crate) const SA_RESTORER: u64 = 0x0400_0000;

/// A system call. Gives the kernel's value: `-errno` on failure.
///
/// # Safety
/// As the call that `nr` names.
pub(crate) unsafe fn syscall(nr: c_long, a: [usize; 4]) -> isize {
    let ret: isize;
    // SAFETY: the caller vouches for the call; rcx and r11 are what the instruction itself clobbers.
    unsafe {
        asm!("syscall", inlateout("rax") nr as isize => ret, in("rdi") a[0], in("rsi") a[1], in("rdx") a[2],
            in("r10") a[3], lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    ret
}

/// `arch_prctl`: asks for a state component.
pub(crate) const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
/// State component 18: the tile registers.
pub(crate) const XFEATURE_XTILEDATA: usize = 18;

/// Asks the kernel for the tile registers of a CPU that has AMX.
///
/// # Errors
/// When it refuses: a sandbox, or a kernel from before AMX.
pub(crate) fn request_tile_data() -> std::io::Result<()> {
    // SAFETY: this request takes no address.
    let answer = unsafe { syscall(libc::SYS_arch_prctl, [ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA, 0, 0]) };
    if answer < 0 { Err(std::io::Error::from_raw_os_error(-answer as i32)) } else { Ok(()) }
}

/// Replaces (`new`) and reads (`old`) the action of a signal.
///
/// # Safety
/// A handler in `new` must be fit to run at any instruction.
pub(crate) unsafe fn rt_sigaction(
    sig: c_int,
    new: Option<&KernelAction>,
    old: Option<&mut KernelAction>,
) -> Result<(), i32> {
    let new =
        new.map(|n| KernelAction { flags: n.flags | SA_RESTORER, restorer: restorer as *const () as usize, ..*n });
    let new = new.as_ref().map_or(0, |n| std::ptr::from_ref(n) as usize);
    let old = old.map_or(0, |o| std::ptr::from_mut(o) as usize);
    // SAFETY: both pointers are null or to a struct of the kernel's layout that lives through the call.
    let ret = unsafe { syscall(libc::SYS_rt_sigaction, [sig as usize, new, old, 8]) };
    if ret < 0 { Err(-ret as i32) } else { Ok(()) }
}

/// Sets the thread's signal mask (`how`: `SIG_BLOCK` or `SIG_SETMASK`).
pub(crate) fn rt_sigprocmask(how: c_int, set: u64) {
    // SAFETY: the kernel reads 8 bytes of `set`.
    unsafe { syscall(libc::SYS_rt_sigprocmask, [how as usize, &raw const set as usize, 0, 8]) };
}

/// Sends a signal with all its details to this very thread; the kernel lets a process say anything to itself.
///
/// # Safety
/// `info` must point to a `siginfo_t`.
pub(crate) unsafe fn queue_to_self(sig: c_int, info: *const c_void) {
    // SAFETY: no pointers but `info`, which the caller vouches for.
    unsafe {
        let pid = syscall(libc::SYS_getpid, [0; 4]) as usize;
        let tid = syscall(libc::SYS_gettid, [0; 4]) as usize;
        syscall(libc::SYS_rt_tgsigqueueinfo, [pid, tid, sig as usize, info as usize]);
    }
}

/// Base of the fs (`ARCH_GET_FS`, 1003h) or gs (`ARCH_GET_GS`, 1004h) segment.
pub(crate) fn segment_base(code: usize) -> u64 {
    let mut base = 0u64;
    // SAFETY: the kernel writes 8 bytes to `base`.
    unsafe { syscall(libc::SYS_arch_prctl, [code, &raw mut base as usize, 0, 0]) };
    base
}

/// Ends a signal handler.
#[unsafe(naked)]
unsafe extern "C" fn restorer() {
    naked_asm!("mov rax, 15", "syscall") // rt_sigreturn; debuggers know frames by these very bytes
}

/// Copies `len` bytes and gives 0. A fault can only be at this function's first instruction; the handler of
/// `SIGSEGV` and `SIGBUS` then goes on at [`copy_failed`], so that the caller sees 1.
///
/// # Safety
/// The side that is not the emulated program's must be valid. `_unused` puts `len` in rcx, where `rep` wants it.
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn copy(dst: *mut u8, src: *const u8, _unused: usize, len: usize) -> usize {
    naked_asm!("rep movsb", "xor eax, eax", "ret")
}

/// See [`copy`].
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn copy_failed() {
    naked_asm!("mov eax, 1", "ret")
}
