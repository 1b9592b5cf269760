//! A `SIGILL` handler that was there before the emulator gets the illegal instructions that are not AMX. Alone
//! in its file: no other test may have installed the emulator.

mod common;

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use common::*;

static FOREIGN: AtomicU32 = AtomicU32::new(0);

extern "C" fn step_over(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    FOREIGN.fetch_add(1, Relaxed);
    // SAFETY: the kernel's frame; ud2 has two bytes.
    unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] += 2 };
}

#[test]
fn a_foreign_instruction_goes_on() {
    assert!(!amx_emu::active());
    child::set_handler(libc::SIGILL, step_over, libc::SA_SIGINFO);
    setup();
    setup(); // again is harmless: the emulator is not its own predecessor
    // SAFETY: meant to be illegal; the handler steps over it.
    unsafe { std::arch::asm!("ud2") };
    assert_eq!(FOREIGN.load(Relaxed), 1);
    ldtilecfg(&full());
    assert_eq!((sttilecfg(), FOREIGN.load(Relaxed)), (full(), 1), "and AMX runs");
    tilerelease();
}
