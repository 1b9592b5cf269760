//! Living with the program's other signals.

mod common;

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use amx_emu::Dot;
use common::child::{End, end_of, set_handler};
use common::*;

/// 16 x 16 sums of 64 products of `value` and 2.
fn multiply(value: u8) -> bool {
    let (a, b) = ([value; 1024], [2u8; 1024]);
    ldtilecfg(&full());
    tilezero::<0>();
    // SAFETY: 16 rows of 64 bytes.
    unsafe {
        tileloadd::<1>(a.as_ptr(), 64);
        tileloadd::<2>(b.as_ptr(), 64);
    }
    dot::<0, 1, 2>(Dot::UnsignedUnsigned);
    let want = (64 * 2 * u32::from(value)).to_le_bytes();
    let right = stored::<0>().as_flattened().chunks(4).all(|c| c == want);
    tilerelease();
    right
}

static TICKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn tick(_: c_int, _: *mut libc::siginfo_t, _: *mut c_void) {
    TICKS.fetch_add(1, Relaxed);
}

/// Timer signals at a high rate come between instructions, never into one.
#[test]
fn a_storm_of_timer_signals() {
    setup();
    let end = end_of(&|| {
        set_handler(libc::SIGALRM, tick, libc::SA_SIGINFO | libc::SA_RESTART);
        let every = libc::timeval { tv_sec: 0, tv_usec: 100 };
        // SAFETY: a valid timer.
        unsafe {
            libc::setitimer(libc::ITIMER_REAL, &libc::itimerval { it_interval: every, it_value: every }, null_mut())
        };
        let mut right = true;
        // At least 300 times, and on a CPU whose own AMX is done before the timer rings, until it has.
        let mut i = 0u32;
        let start = Instant::now();
        while i < 300 || (TICKS.load(Relaxed) <= 10 && start.elapsed().as_secs() < 10) {
            right &= multiply(i as u8);
            i += 1;
        }
        // SAFETY: the child's way out.
        unsafe { libc::_exit(if right && TICKS.load(Relaxed) > 10 { 0 } else { 1 }) }
    });
    assert_eq!(end, End::Exit(0));
}

/// A child has the emulator, and its own copy of the tiles.
#[test]
fn after_fork() {
    setup();
    ldtilecfg(&config(&[(3, 12)]));
    let end = end_of(&|| {
        let inherited = sttilecfg() == config(&[(3, 12)]);
        // SAFETY: the child's way out.
        unsafe { libc::_exit(if inherited && multiply(9) { 0 } else { 1 }) }
    });
    assert_eq!(end, End::Exit(0));
    assert_eq!(sttilecfg(), config(&[(3, 12)]));
    tilerelease();
}

static FOREIGN_STACK: AtomicUsize = AtomicUsize::new(0);

extern "C" fn step_over(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    let here = 0u8;
    FOREIGN_STACK.store(&raw const here as usize, Relaxed);
    // SAFETY: the kernel's frame; ud2 has two bytes.
    unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs[libc::REG_RIP as usize] += 2 };
}

/// A program whose own SIGILL handler wants the alternate stack gets it there, and the emulator runs on it
/// too: 12 KiB above what the kernel needs are enough, even without optimisation.
#[test]
fn on_an_alternate_stack() {
    let dots = dots();
    // SAFETY: no conditions.
    let frame = unsafe { libc::getauxval(libc::AT_MINSIGSTKSZ) } as usize;
    let mut stack = vec![0xa5u8; frame + 2 * 12 * 1024];
    let end = end_of(&|| {
        // The lower half is a fence: it must stay as it is.
        let fence = stack.as_ptr();
        let base = fence as usize + 12 * 1024;
        let size = frame + 12 * 1024;
        let alternate = libc::stack_t { ss_sp: base as *mut c_void, ss_flags: 0, ss_size: size };
        // SAFETY: the stack is the test's own; the child ends with it.
        unsafe {
            assert_eq!(libc::sigaltstack(&alternate, null_mut()), 0);
            set_handler(libc::SIGILL, step_over, libc::SA_SIGINFO | libc::SA_ONSTACK);
            std::arch::asm!("ud2");
            let there = (base..base + size).contains(&FOREIGN_STACK.load(Relaxed));
            let right = multiply(200)
                && dots.iter().all(|&op| {
                    ldtilecfg(&full());
                    dot::<0, 1, 2>(op);
                    true
                });
            let intact = std::slice::from_raw_parts(fence, 12 * 1024).iter().all(|&b| b == 0xa5);
            libc::_exit(if !there {
                2
            } else if !right {
                3
            } else if !intact {
                4
            } else {
                0
            })
        }
    });
    stack.clear();
    assert_eq!(end, End::Exit(0));
}
