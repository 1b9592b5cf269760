//! The kernel's permission for tile data: `arch_prctl(ARCH_REQ_XCOMP_PERM, 18)`.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use crate::stats::Op;
use crate::sys::{self, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA};

/// `arch_prctl`: which state components a process may ask for.
const ARCH_GET_XCOMP_SUPP: usize = 0x1021;
/// `arch_prctl`: which state components this process may use.
const ARCH_GET_XCOMP_PERM: usize = 0x1022;
/// State component 17: the tile configuration.
const XFEATURE_XTILECFG: usize = 17;

/// Nothing stands between the program and the kernel, so nothing is asked of it: `install()` in process.
const NOT_NEEDED: u8 = 0;
/// The program's requests come to us, and none has come yet.
const WANTED: u8 = 1;
const GRANTED: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(NOT_NEEDED);

/// From now on instructions that touch tile data are `SIGILL` until permission is asked for, as under Linux.
pub(crate) fn enforce() {
    STATE.store(WANTED, Relaxed);
}

/// Whether `op` may run. The configuration needs no permission, the registers do.
pub(crate) fn allows(op: Op) -> bool {
    STATE.load(Relaxed) != WANTED || matches!(op, Op::Ldtilecfg | Op::Sttilecfg | Op::Tilerelease)
}

/// `arch_prctl` with AMX there. Gives the kernel's kind of value, `-errno` on failure.
///
/// # Safety
/// As `arch_prctl`: `addr` is what `code` says.
pub(crate) unsafe fn arch_prctl(code: usize, addr: usize) -> isize {
    // SAFETY: the caller's promise.
    let kernel = |addr| unsafe { sys::syscall(libc::SYS_arch_prctl, [code, addr, 0, 0]) };
    match code {
        ARCH_REQ_XCOMP_PERM if addr == XFEATURE_XTILEDATA => {
            STATE.store(GRANTED, Relaxed);
            0
        }
        ARCH_GET_XCOMP_SUPP | ARCH_GET_XCOMP_PERM => {
            let mut mask = 0u64;
            if kernel(&raw mut mask as usize) < 0 {
                mask = 0; // a kernel from before AMX
            }
            mask |= 1 << XFEATURE_XTILECFG;
            if code == ARCH_GET_XCOMP_SUPP || STATE.load(Relaxed) != WANTED {
                mask |= 1 << XFEATURE_XTILEDATA;
            }
            // SAFETY: a bad address is caught by the copy, and is the program's.
            let failed = unsafe { sys::copy(addr as *mut u8, (&raw const mask).cast(), 0, 8) };
            if failed != 0 { -libc::EFAULT as isize } else { 0 }
        }
        _ => kernel(addr),
    }
}
