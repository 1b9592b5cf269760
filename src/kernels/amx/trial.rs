//! AMX-FP16 found out by trying, for those who ask for it: hypervisors show AMX but hide that bit.

use std::arch::asm;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::tile::{Config, Session};
use crate::isa::Amx;

/// Bytes of the instruction that is tried.
const LEN: i64 = 5;
/// Where it is, and whether it was refused.
static TRIED: AtomicUsize = AtomicUsize::new(0);
static REFUSED: AtomicBool = AtomicBool::new(false);

/// AMX with F16 products where CPUID shows them or a trial, made once in a process, shows that they work.
///
/// The trial executes one `tdpfp16ps` under a handler for SIGILL that steps over it, and then puts the old handler back. To be
/// called before other threads set handlers of their own.
pub fn with_fp16_if_it_works(amx: Amx) -> Amx {
    static WORKS: OnceLock<bool> = OnceLock::new();
    if amx.fp16().is_some() {
        return amx;
    }
    // SAFETY: the instruction was executed and not refused.
    if *WORKS.get_or_init(|| works(amx)) { unsafe { amx.with_fp16() } } else { amx }
}

fn works(amx: Amx) -> bool {
    // SAFETY: an all-zero sigaction is a valid value, and both are overwritten before they count.
    let [mut ours, mut before]: [libc::sigaction; 2] = unsafe { std::mem::zeroed() };
    ours.sa_sigaction = on_sigill as *const () as usize;
    ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: both structs are ours; the handler is async-signal-safe.
    if unsafe { libc::sigaction(libc::SIGILL, &raw const ours, &raw mut before) } != 0 {
        return false;
    }
    let mut session = Session::begin(amx);
    let tiles = session.configure(&Config::new([[16, 64]; 8]));
    // SAFETY: the instruction changes tile 0 or, where there is no such thing, is stepped over by the handler; the address it
    // stores is that of a static.
    unsafe {
        asm!(
            "lea {at}, [rip + 2f]",
            "mov qword ptr [{to}], {at}",
            "2: tdpfp16ps tmm0, tmm1, tmm2",
            at = out(reg) _, to = in(reg) TRIED.as_ptr(), options(nostack, preserves_flags)
        );
    }
    let _ = tiles;
    drop(session);
    // SAFETY: as before; what was there is put back.
    unsafe { libc::sigaction(libc::SIGILL, &raw const before, std::ptr::null_mut()) };
    !REFUSED.load(Ordering::SeqCst)
}

/// Steps over the instruction that is tried. Anything else is not ours: it meets the default action when it is executed again.
extern "C" fn on_sigill(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: with SA_SIGINFO the kernel hands over a ucontext that the handler may change.
    let rip = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] };
    if *rip as usize == TRIED.load(Ordering::SeqCst) {
        REFUSED.store(true, Ordering::SeqCst);
        *rip += LEN;
    } else {
        // SAFETY: `signal` is async-signal-safe.
        unsafe { libc::signal(libc::SIGILL, libc::SIG_DFL) };
    }
}
