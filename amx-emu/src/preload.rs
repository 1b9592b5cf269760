//! What makes `libamx_emu.so` work by `LD_PRELOAD`: a constructor, and the libc functions it stands before.

use std::arch::naked_asm;
use std::ffi::{CStr, c_int, c_long, c_void};
use std::io::Write;
use std::mem::transmute;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use libc::{SA_RESTART, SIG_ERR, sighandler_t};

use crate::sys::KernelAction;
use crate::{active, install, native, permission, signal, stats};

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

extern "C" fn constructor() {
    // The same code is in the rlib: there `install()` is the program's own choice.
    // On a CPU with AMX nothing changes, and the program asks for permission itself.
    if in_main_program() || native() || install().is_err() {
        return;
    }
    permission::enforce();
    // SAFETY: a C string, and a function that lives as long as the library.
    unsafe {
        let wanted = libc::getenv(c"AMX_EMU_STATS".as_ptr());
        if !wanted.is_null() && CStr::from_ptr(wanted) == c"1" {
            libc::atexit(print_stats);
        }
    }
}

/// Makes the linker take this module, with its libc functions, into whatever calls `install()`.
pub(crate) fn link() {
    std::hint::black_box([syscall as *const (), arch_prctl as _, sigaction as _, signal as _]);
}

/// Whether this code was linked into the executable.
fn in_main_program() -> bool {
    unsafe extern "C" {
        /// The ELF header of the module that we are in; the linker defines it.
        static __ehdr_start: libc::Elf64_Ehdr;
    }
    // SAFETY: the header is mapped with the module, and getauxval has no conditions.
    unsafe {
        let phdr = (&raw const __ehdr_start) as u64 + __ehdr_start.e_phoff;
        phdr == libc::getauxval(libc::AT_PHDR)
    }
}

extern "C" fn print_stats() {
    let mut out = std::io::stderr().lock();
    for (op, count) in stats::stats().iter().filter(|&(_, count)| count != 0) {
        let _ = writeln!(out, "amx-emu: {} {count}", op.name());
    }
}

/// libc's `syscall`, with `arch_prctl` taken out. Without a frame, as libc's own: calls that return twice, or
/// on another stack, must find the caller's stack as it was.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn syscall() {
    naked_asm!(
        "cmp rdi, {nr}",
        "je 2f",
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov r10, r8",
        "mov r8, r9",
        "mov r9, [rsp + 8]",
        "syscall",
        "cmp rax, -4095",
        "jae 3f",
        "ret",
        "2:",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "jmp {arch_prctl}",
        "3:",
        "mov rdi, rax",
        "jmp {result}",
        nr = const libc::SYS_arch_prctl,
        arch_prctl = sym arch_prctl,
        result = sym result,
    )
}

/// libc's `arch_prctl`, with AMX there.
#[unsafe(no_mangle)]
unsafe extern "C" fn arch_prctl(code: c_int, addr: usize) -> c_long {
    let code = code as u32 as usize;
    // SAFETY: the caller's promise is that of arch_prctl.
    result(unsafe {
        if active() {
            permission::arch_prctl(code, addr)
        } else {
            crate::sys::syscall(libc::SYS_arch_prctl, [code, addr, 0, 0])
        }
    })
}

/// From the kernel's convention to libc's.
extern "C" fn result(ret: isize) -> c_long {
    if !(-4095..0).contains(&ret) {
        return ret as c_long;
    }
    // SAFETY: errno is the thread's.
    unsafe { *libc::__errno_location() = -ret as c_int };
    -1
}

/// The next definition of a libc function after ours.
///
/// # Safety
/// `F` must be the function's type, behind an `Option`.
unsafe fn next<F>(cache: &AtomicPtr<c_void>, name: &CStr) -> F {
    let mut at = cache.load(Relaxed);
    if at.is_null() {
        // SAFETY: a C string.
        at = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        cache.store(at, Relaxed);
    }
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: the caller's promise; null is `None`.
    unsafe { std::mem::transmute_copy(&at) }
}

/// libc's `sigaction`. For the signals that the emulator handles, the program's action is kept beside it: it
/// gets every signal of that kind that is not the emulator's own.
#[unsafe(no_mangle)]
unsafe extern "C" fn sigaction(sig: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    // SAFETY: pointers are null or valid, by sigaction's own rule.
    let wanted = unsafe { new.as_ref() }.map(to_kernel);
    match signal::swap_action(sig, wanted.as_ref()) {
        Some(Ok(before)) => {
            // SAFETY: as above.
            if let Some(old) = unsafe { old.as_mut() } {
                from_kernel(&before, old);
            }
            0
        }
        Some(Err(errno)) => result(-errno as isize) as c_int,
        None => {
            static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            type F = Option<unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int>;
            // SAFETY: this is sigaction's type, and the arguments are the caller's.
            match unsafe { next::<F>(&NEXT, c"sigaction") } {
                // SAFETY: as above.
                Some(real) => unsafe { real(sig, new, old) },
                None => result(-libc::ENOSYS as isize) as c_int,
            }
        }
    }
}

/// libc's `signal`, as [`sigaction`].
#[unsafe(no_mangle)]
unsafe extern "C" fn signal(sig: c_int, handler: sighandler_t) -> sighandler_t {
    let mask = if (1..=64).contains(&sig) { 1 << (sig - 1) } else { 0 };
    let wanted = KernelAction { handler, flags: SA_RESTART as u64, restorer: 0, mask };
    match signal::swap_action(sig, Some(&wanted)) {
        Some(Ok(before)) => before.handler,
        Some(Err(errno)) => {
            result(-errno as isize);
            SIG_ERR
        }
        None => {
            static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            type F = Option<unsafe extern "C" fn(c_int, sighandler_t) -> sighandler_t>;
            // SAFETY: this is signal's type, and the arguments are the caller's.
            match unsafe { next::<F>(&NEXT, c"signal") } {
                // SAFETY: as above.
                Some(real) => unsafe { real(sig, handler) },
                None => SIG_ERR,
            }
        }
    }
}

fn to_kernel(action: &libc::sigaction) -> KernelAction {
    // SAFETY: the first 8 bytes of a sigset_t are the kernel's 64 signals.
    let mask = unsafe { transmute::<libc::sigset_t, [u64; 16]>(action.sa_mask) }[0];
    KernelAction { handler: action.sa_sigaction, flags: action.sa_flags as u32 as u64, restorer: 0, mask }
}

fn from_kernel(action: &KernelAction, out: &mut libc::sigaction) {
    let mut mask = [0u64; 16];
    mask[0] = action.mask;
    out.sa_sigaction = action.handler;
    out.sa_flags = (action.flags & !crate::sys::SA_RESTORER) as u32 as c_int;
    // SAFETY: a sigset_t is these 128 bytes.
    out.sa_mask = unsafe { transmute::<[u64; 16], libc::sigset_t>(mask) };
    out.sa_restorer = None;
}
