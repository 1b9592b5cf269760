#![doc = include_str!("../README.md")]
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

mod decode;
mod exec;
mod fp;
mod int8;
mod level;
#[cfg(feature = "preload")]
mod permission;
#[cfg(feature = "preload")]
mod preload;
mod signal;
mod stats;
mod sys;
mod tiles;

use std::sync::atomic::{AtomicBool, Ordering};

pub use stats::{Op, Stats, reset_stats, stats};
pub use tiles::{Dot, Fault, MAX_COLSB, MAX_ROWS, TILES, Tiles};

static ACTIVE: AtomicBool = AtomicBool::new(false);

/// Who runs AMX instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The emulator.
    Emulated,
    /// The CPU: it has AMX, so its instructions do not trap, and nothing was installed.
    Native,
}

/// Makes AMX instructions run in this process, on all threads, those that exist and those to come. Again is
/// harmless.
///
/// On a CPU with AMX nothing is installed, but Linux is asked for permission; the mode is [`Mode::Native`].
///
/// # Errors
/// When the kernel refuses a signal handler or, on a CPU with AMX, permission (a seccomp filter).
pub fn install() -> std::io::Result<Mode> {
    if native() {
        sys::request_tile_data()?;
        return Ok(Mode::Native);
    }
    signal::install()?;
    #[cfg(feature = "preload")]
    preload::link();
    ACTIVE.store(true, Ordering::Release);
    Ok(Mode::Emulated)
}

/// Whether the emulator runs AMX instructions in this process.
pub fn active() -> bool {
    ACTIVE.load(Ordering::Acquire)
}

/// [`active`] for C, 1 or 0. Programs look it up by `dlsym` to learn of AMX that CPUID does not show.
#[unsafe(no_mangle)]
pub extern "C" fn amx_emu_active() -> std::ffi::c_int {
    active().into()
}

/// [`stats`] for C: writes at most `len` counts, in the order of [`Op::ALL`], and returns how many there are.
///
/// # Safety
/// `counts` must point to `len` writable values, or be null with `len` 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn amx_emu_stats(counts: *mut u64, len: usize) -> usize {
    for (i, (_, count)) in stats().iter().enumerate().take(len) {
        // SAFETY: `i` is below `len`.
        unsafe { counts.add(i).write(count) };
    }
    Op::ALL.len()
}

/// [`reset_stats`] for C.
#[unsafe(no_mangle)]
pub extern "C" fn amx_emu_reset_stats() {
    reset_stats();
}

/// Whether the CPU has AMX and the operating system has turned it on.
fn native() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const OSXSAVE: u32 = 1 << 27;
    const AMX_TILE: u32 = 1 << 24;
    const TILE_STATE: u32 = 3 << 17;
    if __cpuid(0).eax < 7 || __cpuid(1).ecx & OSXSAVE == 0 || __cpuid_count(7, 0).edx & AMX_TILE == 0 {
        return false;
    }
    let xcr0: u32;
    // SAFETY: OSXSAVE says that xgetbv may run.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") xcr0, out("edx") _, options(nomem, nostack));
    }
    xcr0 & TILE_STATE == TILE_STATE
}
