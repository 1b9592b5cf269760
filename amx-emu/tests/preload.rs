//! `libamx_emu.so` before a program that knows nothing of it: this test's own executable, started again. It
//! does not link the crate.

mod common {
    pub mod plain;
}

use std::ffi::{c_int, c_long};
use std::process::{Command, Output};

use common::plain::*;

/// Runs one of the `#[ignore]`d functions below with the library preloaded.
fn child(name: &str, stats: bool) -> Output {
    let exe = std::env::current_exe().unwrap();
    let library = exe.with_file_name("libamx_emu.so");
    assert!(library.exists(), "{library:?} is built with the tests");
    let mut command = Command::new(&exe);
    command.args([name, "--exact", "--ignored", "--nocapture", "--test-threads=1"]).env("LD_PRELOAD", library);
    if stats {
        command.env("AMX_EMU_STATS", "1");
    }
    command.output().unwrap()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[test]
fn permission_products_and_counts() {
    let output = child("asks_and_multiplies", true);
    assert!(output.status.success(), "{}", text(&output));
    if native() {
        println!("skipped: the CPU runs AMX itself, and nothing counts");
        return;
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = stderr.lines().filter(|l| l.starts_with("amx-emu: ")).collect();
    assert_eq!(
        lines,
        [
            "amx-emu: ldtilecfg 1",
            "amx-emu: tilerelease 1",
            "amx-emu: tilezero 1",
            "amx-emu: tileloadd 2",
            "amx-emu: tilestored 1",
            "amx-emu: tdpbssd 1"
        ]
    );
}

#[test]
fn silent_unless_asked() {
    let output = child("asks_and_multiplies", false);
    assert!(output.status.success() && !text(&output).contains("amx-emu"), "{}", text(&output));
}

#[test]
fn tile_data_needs_permission() {
    use std::os::unix::process::ExitStatusExt;
    let output = child("forgets_to_ask", false);
    assert_eq!(output.status.signal(), Some(libc::SIGILL), "{}", text(&output));
}

#[test]
fn handlers_of_the_program_stay_behind() {
    let output = child("sets_its_own_handlers", false);
    assert!(output.status.success(), "{}", text(&output));
}

const GET_SUPP: c_int = 0x1021;
const GET_PERM: c_int = 0x1022;
const REQ_PERM: c_int = 0x1023;

/// By libc's variadic `syscall`, as programs do.
fn arch_prctl(code: c_int, arg: u64) -> c_long {
    // SAFETY: each caller passes what its code wants.
    unsafe { libc::syscall(libc::SYS_arch_prctl, code, arg) }
}

fn mask(code: c_int) -> u64 {
    let mut mask = 0u64;
    assert_eq!(arch_prctl(code, &raw mut mask as u64), 0);
    mask
}

/// A function of the library, as a program that knows it only by name finds it.
fn symbol(name: &std::ffi::CStr) -> *mut std::ffi::c_void {
    // SAFETY: a C string.
    let symbol = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    assert!(!symbol.is_null(), "{name:?}");
    symbol
}

#[test]
#[ignore = "run by the others, with the library preloaded"]
fn asks_and_multiplies() {
    if !native() {
        // SAFETY: the contract of the symbol.
        let active: extern "C" fn() -> c_int = unsafe { std::mem::transmute(symbol(c"amx_emu_active")) };
        assert_eq!(active(), 1);
    }
    assert_eq!(mask(GET_SUPP) >> 17 & 3, 3);
    assert_eq!(mask(GET_PERM) >> 17 & 3, 1, "not yet asked for");
    assert_eq!(arch_prctl(GET_PERM, 8), -1);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
    assert_eq!(arch_prctl(REQ_PERM, 63), -1, "there is no such component");
    assert_eq!(arch_prctl(REQ_PERM, 18), 0);
    assert_eq!(mask(GET_PERM) >> 17 & 3, 3);
    // A call of six arguments goes through whole: a private mapping, at offset 0 of no file.
    // SAFETY: new memory.
    let page =
        unsafe { libc::syscall(libc::SYS_mmap, 0usize, 4096usize, 3usize, 0x22usize, usize::MAX, 0usize) as *mut u8 };
    assert_ne!(page as isize, -1);
    // SAFETY: the new page.
    unsafe { page.write(7) };

    let (a, b) = ([2u8; 1024], [3u8; 1024]);
    let mut c = [0i32; 256];
    // SAFETY: blocks of 16 rows of 64 bytes.
    unsafe { product(&a, &b, &mut c) };
    assert_eq!(c, [16 * 4 * 6; 256]);
    if !native() {
        // SAFETY: the contract of the symbol.
        let stats: extern "C" fn(*mut u64, usize) -> usize = unsafe { std::mem::transmute(symbol(c"amx_emu_stats")) };
        let mut counts = [99; 13];
        assert_eq!(stats(counts.as_mut_ptr(), 10), 13);
        assert_eq!(counts, [1, 0, 1, 1, 2, 0, 1, 0, 0, 1, 99, 99, 99]);
    }
}

#[test]
#[ignore = "run by the others, with the library preloaded"]
fn forgets_to_ask() {
    // SAFETY: no conditions.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    let mut c = [0i32; 256];
    // SAFETY: blocks of 16 rows of 64 bytes.
    unsafe { product(&[0; 1024], &[0; 1024], &mut c) };
}

#[test]
#[ignore = "run by the others, with the library preloaded"]
fn sets_its_own_handlers() {
    assert_eq!(arch_prctl(REQ_PERM, 18), 0);
    handlers_chain();
    let mut c = [0i32; 256];
    // SAFETY: blocks of 16 rows of 64 bytes.
    unsafe { product(&[1; 1024], &[1; 1024], &mut c) };
    assert_eq!(c, [64; 256]);
}
