//! Faults, seen from outside: the code runs in a forked child.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{SIGBUS, SIGILL, SIGSEGV};

/// What a signal handler saw.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Caught {
    pub signal: c_int,
    pub code: c_int,
    pub address: usize,
    pub rip: usize,
    config: [u8; 64],
}

impl Caught {
    /// The configuration as the fault left it. Hardware shows a handler the initial state instead and keeps the
    /// program's in the frame: `None`.
    pub fn config(&self) -> Option<[u8; 64]> {
        amx_emu::active().then_some(self.config)
    }

    /// The row at which a load or store stopped.
    pub fn stopped_at(&self, row: u8) -> bool {
        self.config().is_none_or(|c| c[1] == row)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Exit(c_int),
    Signal(c_int),
}

static REPORT: AtomicPtr<Caught> = AtomicPtr::new(std::ptr::null_mut());

/// The first SIGILL, SIGSEGV or SIGBUS that `body` raises, by a handler that the program itself sets after
/// the emulator is there.
pub fn catch(body: impl FnOnce()) -> Option<Caught> {
    let size = size_of::<Caught>();
    // SAFETY: new memory, shared with the child.
    let page = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    assert_ne!(page, libc::MAP_FAILED);
    let report = page.cast::<Caught>();
    let end = fork(|| {
        REPORT.store(report, Ordering::Relaxed);
        for sig in [SIGILL, SIGSEGV, SIGBUS] {
            set_handler(sig, on_signal, libc::SA_SIGINFO);
        }
        body();
    });
    // SAFETY: the child is gone; all bits are a valid `Caught`.
    let caught = unsafe { report.read() };
    // SAFETY: mapped above.
    unsafe { libc::munmap(page, size) };
    match end {
        End::Exit(0) => None,
        End::Exit(CAUGHT) => Some(caught),
        other => panic!("the child ended by {other:?}"),
    }
}

const CAUGHT: c_int = 77;

extern "C" fn on_signal(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel's arguments, and the page of `catch`.
    unsafe {
        let context = &*context.cast::<libc::ucontext_t>();
        let mut caught = Caught {
            signal,
            code: (*info).si_code,
            address: (*info).si_addr() as usize,
            rip: context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize,
            config: [0; 64],
        };
        if signal != SIGILL {
            caught.config = super::sttilecfg(); // SIGILL is blocked in its own handler
        }
        REPORT.load(Ordering::Relaxed).write(caught);
        libc::_exit(CAUGHT);
    }
}

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);

pub fn set_handler(sig: c_int, handler: Handler, flags: c_int) {
    // SAFETY: a valid action.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = flags;
        assert_eq!(libc::sigaction(sig, &action, std::ptr::null_mut()), 0);
    }
}

pub fn block(sig: c_int) {
    // SAFETY: a valid set.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&mut set, sig);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
    }
}

/// How a child ends that runs `body` with default actions.
pub fn end_of(body: &dyn Fn()) -> End {
    fork(|| {
        for sig in [SIGILL, SIGSEGV, SIGBUS] {
            // SAFETY: no handler.
            unsafe { libc::signal(sig, libc::SIG_DFL) };
        }
        body();
    })
}

/// Runs `body` in a child, which exits with 0 after it.
fn fork(body: impl FnOnce()) -> End {
    // SAFETY: the child calls nothing that takes a lock: instructions, signal calls, _exit.
    unsafe {
        let pid = libc::fork();
        assert!(pid >= 0);
        if pid == 0 {
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            libc::alarm(20);
            body();
            libc::_exit(0);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(pid, &mut status, 0), pid);
        if libc::WIFSIGNALED(status) {
            End::Signal(libc::WTERMSIG(status))
        } else {
            End::Exit(libc::WEXITSTATUS(status))
        }
    }
}
