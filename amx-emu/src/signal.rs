//! The signal handlers: `SIGILL` runs instructions, `SIGSEGV` and `SIGBUS` learn of their memory faults.
//!
//! Everything a handler does is a few loads and stores, arithmetic, and on the rare paths raw system calls:
//! no lock, no allocation. `SIGILL` here is synchronous, and all signals but the memory faults wait until the
//! instruction is done, so it is atomic to the program's own handlers as on hardware.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};

use libc::{SA_NODEFER, SA_ONSTACK, SA_RESETHAND, SA_RESTART, SA_SIGINFO, SIG_BLOCK, SIG_DFL, SIG_IGN, SIG_SETMASK};
use libc::{SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGTRAP, ucontext_t};

use crate::decode::{MAX_LEN, decode};
use crate::exec::{Registers, Trap, execute};
#[cfg(feature = "preload")]
use crate::permission;
use crate::stats;
use crate::sys::{self, KernelAction};
use crate::tiles::{Fault, Tiles};

/// A `siginfo_t` as bytes.
type SigInfo = [u64; 16];

// `const` and without a destructor, so that access never registers or allocates: in an executable it is an
// offset from the thread pointer, in the library a call of `__tls_get_addr`, which finds the block of a library
// that was there at program start in the static TLS.
thread_local! {
    static STATE: UnsafeCell<Tiles> = const { UnsafeCell::new(Tiles::new()) };
    /// How the last guarded copy of this thread failed.
    static MEMORY_FAULT: Cell<(c_int, SigInfo)> = const { Cell::new((0, [0; 16])) };
}

/// What the program wants done with one of our signals.
struct Slot {
    sig: c_int,
    handler: AtomicUsize,
    flags: AtomicU64,
    mask: AtomicU64,
}

impl Slot {
    const fn new(sig: c_int) -> Slot {
        Slot { sig, handler: AtomicUsize::new(SIG_DFL), flags: AtomicU64::new(0), mask: AtomicU64::new(0) }
    }

    fn get(&self) -> KernelAction {
        KernelAction {
            handler: self.handler.load(Relaxed),
            flags: self.flags.load(Relaxed),
            restorer: 0,
            mask: self.mask.load(Relaxed),
        }
    }

    fn set(&self, action: &KernelAction) {
        self.mask.store(action.mask, Relaxed);
        self.flags.store(action.flags, Relaxed);
        self.handler.store(action.handler, Relaxed);
    }
}

static SLOTS: [Slot; 3] = [Slot::new(SIGILL), Slot::new(SIGSEGV), Slot::new(SIGBUS)];

/// Our handlers are in place.
static INSTALLED: AtomicBool = AtomicBool::new(false);

fn slot(sig: c_int) -> Option<&'static Slot> {
    SLOTS.iter().find(|s| s.sig == sig)
}

const fn bit(sig: c_int) -> u64 {
    1 << (sig - 1)
}

/// Puts the handlers in place, before those that are there. Again is harmless.
pub(crate) fn install() -> std::io::Result<()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    if INSTALLED.load(Relaxed) {
        return Ok(());
    }
    crate::level::Level::get(); // detects now, so that no handler has to
    // The memory faults first: once SIGILL is ours, its copies rely on them.
    for slot in SLOTS.iter().rev() {
        let mut before = KernelAction::default();
        // SAFETY: reads only.
        unsafe { sys::rt_sigaction(slot.sig, None, Some(&mut before)) }.map_err(std::io::Error::from_raw_os_error)?;
        slot.set(&before);
        register(slot).map_err(std::io::Error::from_raw_os_error)?;
    }
    INSTALLED.store(true, Relaxed);
    Ok(())
}

/// Registers our handler for a slot, with the flags that the program's own handler relies on.
fn register(slot: &Slot) -> Result<(), i32> {
    let wanted = (SA_ONSTACK | SA_RESTART) as u64;
    let sigill = slot.sig == SIGILL;
    let action = KernelAction {
        handler: if sigill { on_illegal as *const () as usize } else { on_memory_fault as *const () as usize },
        flags: SA_SIGINFO as u64 | (slot.flags.load(Relaxed) & wanted),
        restorer: 0,
        mask: if sigill { !(bit(SIGSEGV) | bit(SIGBUS) | bit(SIGFPE) | bit(SIGTRAP)) } else { 0 },
    };
    // SAFETY: both handlers are fit to run anywhere: see the module's page.
    unsafe { sys::rt_sigaction(slot.sig, Some(&action), None) }
}

/// `sigaction` for the program, once installed: what it sets is what our handler passes signals on to.
/// `None`: not one of our signals, or not installed. Takes no lock: `sigaction` may be called in a handler.
#[cfg(feature = "preload")]
pub(crate) fn swap_action(sig: c_int, new: Option<&KernelAction>) -> Option<Result<KernelAction, i32>> {
    let slot = slot(sig).filter(|_| INSTALLED.load(Relaxed))?;
    let before = slot.get();
    if let Some(new) = new {
        slot.set(new);
        if let Err(e) = register(slot) {
            return Some(Err(e));
        }
    }
    Some(Ok(before))
}

/// The registers in a signal frame.
struct Frame<'a>(&'a ucontext_t);

impl Registers for Frame<'_> {
    fn get(&self, number: u8) -> u64 {
        use libc::*;
        const ORDER: [c_int; 16] = [
            REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8, REG_R9, REG_R10, REG_R11,
            REG_R12, REG_R13, REG_R14, REG_R15,
        ];
        self.0.uc_mcontext.gregs[ORDER[usize::from(number & 15)] as usize] as u64
    }

    fn rip(&self) -> u64 {
        self.0.uc_mcontext.gregs[libc::REG_RIP as usize] as u64
    }
}

/// `SIGILL`.
extern "C" fn on_illegal(sig: c_int, info: *mut c_void, context: *mut c_void) {
    // SAFETY: the kernel hands a valid frame, ours until we return.
    let context = unsafe { &mut *context.cast::<ucontext_t>() };
    // SAFETY: `info` is the kernel's.
    if unsafe { was_sent(info) } {
        // SAFETY: as above.
        return unsafe { pass_on(sig, info, context) };
    }
    match step(context) {
        // A trap is dear, and tile instructions come in rows: go on while the next is one too. One that does
        // not complete traps again, and is the first then.
        Ok(()) => while next_is_at_hand(context) && step(context).is_ok() {},
        // SAFETY: `info` and `context` are the kernel's.
        Err(Trap::Fault(Fault::InvalidOpcode)) => unsafe { pass_on(sig, info, context) },
        Err(Trap::Fault(Fault::GeneralProtection)) => raise(SIGSEGV, &general_protection(), context),
        Err(Trap::Memory) => {
            let (sig, info) = MEMORY_FAULT.get();
            raise(sig, &info, context);
        }
    }
}

/// Runs the instruction that the program stands at and steps over it. One that is not AMX is an invalid opcode.
fn step(context: &mut ucontext_t) -> Result<(), Trap> {
    let rip = Frame(context).rip();
    // SAFETY: the processor has fetched these bytes, or `next_is_at_hand` has looked; the decoder asks for no
    // byte after the instruction.
    let insn = decode(|i| Some(unsafe { *(rip as *const u8).add(i) }));
    #[cfg(feature = "preload")]
    let insn = insn.filter(|insn| permission::allows(insn.op));
    let insn = insn.ok_or(Trap::Fault(Fault::InvalidOpcode))?;
    STATE.with(|state| {
        // SAFETY: only this handler uses the state, and on one thread it does not nest: SIGILL is blocked in
        // it. The memory is what the program's own instruction names.
        unsafe { execute(&mut *state.get(), &insn, &Frame(context)) }
    })?;
    stats::count(insn.op);
    context.uc_mcontext.gregs[libc::REG_RIP as usize] += i64::from(insn.len);
    Ok(())
}

/// Whether the bytes at the new rip can be read without a fault, as they lie in the page of the instruction
/// before them, and the program is not being stepped through.
fn next_is_at_hand(context: &ucontext_t) -> bool {
    const TRAP_FLAG: i64 = 1 << 8;
    let offset = Frame(context).rip() % 4096;
    let stepping = context.uc_mcontext.gregs[libc::REG_EFL as usize] & TRAP_FLAG != 0;
    offset != 0 && offset <= 4096 - u64::from(MAX_LEN) && !stepping
}

/// `SIGSEGV` and `SIGBUS`.
extern "C" fn on_memory_fault(sig: c_int, info: *mut c_void, context: *mut c_void) {
    // SAFETY: the kernel hands a valid frame, ours until we return.
    let context = unsafe { &mut *context.cast::<ucontext_t>() };
    if Frame(context).rip() == sys::copy as *const () as u64 {
        // SAFETY: the kernel hands a siginfo_t, 128 bytes.
        MEMORY_FAULT.set((sig, unsafe { info.cast::<SigInfo>().read() }));
        context.uc_mcontext.gregs[libc::REG_RIP as usize] = sys::copy_failed as *const () as i64;
    } else {
        // SAFETY: `info` and `context` are the kernel's.
        unsafe { pass_on(sig, info, context) }
    }
}

/// What Linux reports for `#GP`: no address.
fn general_protection() -> SigInfo {
    const SI_KERNEL: u64 = 0x80;
    let mut info = [0; 16];
    info[0] = SIGSEGV as u64; // si_signo, si_errno = 0
    info[1] = SI_KERNEL; // si_code
    info
}

/// Makes the emulated instruction itself fault: the signal waits until our handler has returned, and then
/// finds the program at the instruction, with the program's own mask.
fn raise(sig: c_int, info: &SigInfo, context: &mut ucontext_t) {
    let blocked = signal_mask(context) & bit(sig) != 0;
    if let Some(slot) = slot(sig)
        && (blocked || slot.handler.load(Relaxed) == SIG_IGN)
    {
        // A fault can be neither blocked nor ignored: the kernel ends the process.
        slot.handler.store(SIG_DFL, Relaxed);
        set_signal_mask(context, signal_mask(context) & !bit(sig));
    }
    sys::rt_sigprocmask(SIG_BLOCK, bit(sig));
    // SAFETY: `info` is a siginfo_t by layout.
    unsafe { sys::queue_to_self(sig, std::ptr::from_ref(info).cast()) };
}

/// Hands a signal that is not for us to the program's own handler, or does what the default does.
///
/// # Safety
/// `info` and `context` must be those of the signal in hand.
unsafe fn pass_on(sig: c_int, info: *mut c_void, context: &mut ucontext_t) {
    let Some(slot) = slot(sig) else { return };
    let action = slot.get();
    if action.handler == SIG_DFL || action.handler == SIG_IGN {
        // SAFETY: as this function.
        return unsafe { default_action(sig, info, action.handler) };
    }
    if action.flags & SA_RESETHAND as u32 as u64 != 0 {
        slot.handler.store(SIG_DFL, Relaxed);
    }
    let own = if action.flags & SA_NODEFER as u64 != 0 { 0 } else { bit(sig) };
    sys::rt_sigprocmask(SIG_SETMASK, signal_mask(context) | action.mask | own);
    // SAFETY: the program set this address as a handler. One without SA_SIGINFO ignores two arguments.
    unsafe {
        let handler: extern "C" fn(c_int, *mut c_void, *mut c_void) = std::mem::transmute(action.handler);
        handler(sig, info, std::ptr::from_mut(context).cast());
    }
}

/// The default action, where the program stands: the signal comes again on return, with no handler.
///
/// # Safety
/// `info` must be that of the signal in hand.
unsafe fn default_action(sig: c_int, info: *mut c_void, handler: usize) {
    // SAFETY: as this function. A signal that was sent can be ignored, a fault can not.
    if unsafe { was_sent(info) } && handler == SIG_IGN {
        return;
    }
    // SAFETY: no handler. `info` is the caller's. The signal is blocked until our handler returns.
    unsafe {
        let _ = sys::rt_sigaction(sig, Some(&KernelAction { handler: SIG_DFL, ..Default::default() }), None);
        sys::queue_to_self(sig, info);
    }
}

/// Whether a signal came by `kill` and its kin and is no fault of the instruction it stands at.
///
/// # Safety
/// `info` must point to a `siginfo_t`.
unsafe fn was_sent(info: *mut c_void) -> bool {
    // SAFETY: a siginfo_t begins with signo, errno, code.
    unsafe { info.cast::<c_int>().add(2).read() <= 0 }
}

/// The kernel's part (64 signals) of the mask that the frame restores.
fn signal_mask(context: &ucontext_t) -> u64 {
    // SAFETY: a sigset_t is 128 bytes, aligned to 8.
    unsafe { (&raw const context.uc_sigmask).cast::<u64>().read() }
}

fn set_signal_mask(context: &mut ucontext_t, mask: u64) {
    // SAFETY: as above.
    unsafe { (&raw mut context.uc_sigmask).cast::<u64>().write(mask) }
}
