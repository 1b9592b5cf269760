//! For a program that does not link the emulator.

use std::arch::asm;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Whether the CPU itself runs AMX.
pub fn native() -> bool {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpuinfo.lines().any(|l| l.starts_with("flags") && l.split_whitespace().any(|f| f == "amx_tile"))
}

/// `c = a * b` by TDPBSSD, tiles of full size.
///
/// # Safety
/// Needs AMX, or the emulator; otherwise the process ends by `SIGILL`.
pub unsafe fn product(a: &[u8; 1024], b: &[u8; 1024], c: &mut [i32; 256]) {
    let mut config = [0u8; 64];
    config[0] = 1;
    for t in 0..3 {
        (config[16 + 2 * t], config[48 + t]) = (64, 16);
    }
    // SAFETY: 16 rows of 64 bytes each.
    unsafe {
        asm!("ldtilecfg [{config}]", "tilezero tmm0", "tileloadd tmm1, [{a} + {s}*1]", "tileloadd tmm2, [{b} + {s}*1]",
            "tdpbssd tmm0, tmm1, tmm2", "tilestored [{c} + {s}*1], tmm0", "tilerelease",
            config = in(reg) config.as_ptr(), a = in(reg) a.as_ptr(), b = in(reg) b.as_ptr(), c = in(reg) c.as_mut_ptr(),
            s = in(reg) 64usize, options(nostack));
    }
}

static SEEN: AtomicU32 = AtomicU32::new(0);

extern "C" fn old_style(_: c_int) {
    SEEN.fetch_add(1, Relaxed);
}

/// Sets handlers by `signal` and `sigaction`, reads them back, and sees that sent signals arrive.
pub fn handlers_chain() {
    // SAFETY: handlers that only count; signals that this thread sends to itself.
    unsafe {
        for sig in [libc::SIGILL, libc::SIGBUS, libc::SIGUSR1] {
            libc::signal(sig, libc::SIG_DFL); // Rust's runtime may have set one
            let before = libc::signal(sig, old_style as *const () as usize);
            assert_eq!(before, libc::SIG_DFL, "the program sees its own actions, not the emulator's");
            let mut action: libc::sigaction = std::mem::zeroed();
            assert_eq!(libc::sigaction(sig, std::ptr::null(), &mut action), 0);
            assert_eq!(action.sa_sigaction, old_style as *const () as usize);
            assert_eq!(action.sa_flags & libc::SA_RESTART, libc::SA_RESTART);
            let seen = SEEN.load(Relaxed);
            libc::raise(sig);
            assert_eq!(SEEN.load(Relaxed), seen + 1);
            // One shot: SA_RESETHAND.
            action.sa_flags |= libc::SA_RESETHAND;
            assert_eq!(libc::sigaction(sig, &action, std::ptr::null_mut()), 0);
            libc::raise(sig);
            assert_eq!(SEEN.load(Relaxed), seen + 2);
            assert_eq!(libc::sigaction(sig, std::ptr::null(), &mut action), 0);
            assert_eq!(action.sa_sigaction, libc::SIG_DFL);
            // Ignored when sent.
            libc::signal(sig, libc::SIG_IGN);
            libc::raise(sig);
        }
    }
}
