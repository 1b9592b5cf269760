//! Memory faults of tile loads and stores, as a program sees them.

mod common;

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use common::child::{End, catch, end_of, set_handler};
use common::*;
use libc::{PROT_NONE, PROT_READ, PROT_WRITE, SIGBUS, SIGSEGV};

const PAGE: usize = 4096;

/// Two pages; the second with `prot`. Never unmapped: the tests are short.
fn two_pages(prot: c_int) -> *mut u8 {
    // SAFETY: new memory.
    unsafe {
        let p =
            libc::mmap(null_mut(), 2 * PAGE, PROT_READ | PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0);
        assert_ne!(p, libc::MAP_FAILED);
        assert_eq!(libc::mprotect(p.add(PAGE), PAGE, prot), 0);
        p.cast()
    }
}

#[test]
fn a_load_past_the_end_faults_there() {
    setup();
    let p = two_pages(PROT_NONE);
    let end = p as usize + PAGE;
    // Rows 0 to 11 and half of row 12 lie before the end.
    // SAFETY: the fault is what is tested.
    let caught = catch(|| unsafe {
        ldtilecfg(&full());
        tileloadd::<2>((end - 12 * 64 - 32) as *const u8, 64);
    })
    .unwrap();
    assert_eq!((caught.signal, caught.code, caught.address), (SIGSEGV, 2, end)); // SEGV_ACCERR
    assert!(caught.stopped_at(12));
    // SAFETY: the child ran the same code.
    assert_eq!(unsafe { std::slice::from_raw_parts(caught.rip as *const u8, 2) }, [0xc4, 0xe2]);
    // Up to the very end it is fine.
    // SAFETY: 16 rows before the end.
    let fine = catch(|| unsafe {
        ldtilecfg(&full());
        tileloadd::<2>((end - 1024) as *const u8, 64);
    });
    assert!(fine.is_none());
}

#[test]
fn a_narrow_tile_reads_only_its_bytes() {
    setup();
    let p = two_pages(PROT_NONE);
    // SAFETY: 16 rows of 12 bytes at a stride of 64 end where the page ends.
    let fine = catch(|| unsafe {
        ldtilecfg(&config(&[(16, 12)]));
        tileloadd::<0>(p.add(PAGE - 15 * 64 - 12), 64);
        tilestored::<0>(p.add(PAGE - 15 * 64 - 12), 64);
    });
    assert!(fine.is_none());
}

#[test]
fn a_store_to_read_only_memory_faults() {
    setup();
    let p = two_pages(PROT_READ);
    // SAFETY: the fault is what is tested.
    let caught = catch(|| unsafe {
        ldtilecfg(&full());
        tilestored::<0>(p.add(PAGE - 64), 64);
    })
    .unwrap();
    assert_eq!((caught.signal, caught.address), (SIGSEGV, p as usize + PAGE));
    assert!(caught.stopped_at(1));
}

#[test]
fn configurations_fault_too() {
    setup();
    let p = two_pages(PROT_NONE);
    let at = p as usize + PAGE - 8;
    // SAFETY: the fault is what is tested.
    unsafe {
        let load = catch(|| ldtilecfg(&*(at as *const [u8; 64]))).unwrap();
        assert_eq!((load.signal, load.address), (SIGSEGV, at + 8));
        let store = catch(|| std::arch::asm!("sttilecfg [{}]", in(reg) at)).unwrap();
        assert_eq!((store.signal, store.address), (SIGSEGV, at + 8));
    }
}

#[test]
fn an_address_that_is_not_canonical() {
    setup();
    // SAFETY: the fault is what is tested.
    let caught = catch(|| unsafe {
        ldtilecfg(&full());
        tileloadd::<0>((1usize << 62) as *const u8, 64);
    })
    .unwrap();
    assert_eq!((caught.signal, caught.code, caught.address), (SIGSEGV, 0x80, 0));
}

/// A mapped file that is shorter than the mapping: SIGBUS.
#[test]
fn past_the_end_of_a_file() {
    setup();
    // SAFETY: new memory of a new file.
    let p = unsafe {
        let fd = libc::memfd_create(c"short".as_ptr(), 0);
        assert_eq!(libc::ftruncate(fd, PAGE as i64), 0);
        libc::mmap(null_mut(), 2 * PAGE, PROT_READ, libc::MAP_SHARED, fd, 0)
    };
    assert_ne!(p, libc::MAP_FAILED);
    // SAFETY: the fault is what is tested.
    let caught = catch(|| unsafe {
        ldtilecfg(&full());
        tileloadd::<0>(p.cast::<u8>().add(PAGE - 128), 64);
    })
    .unwrap();
    assert_eq!((caught.signal, caught.address), (SIGBUS, p as usize + PAGE));
    assert!(caught.stopped_at(2));
}

static GUARD: AtomicUsize = AtomicUsize::new(0);

extern "C" fn open_the_page(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    // SAFETY: the test's own page.
    unsafe {
        let guard = GUARD.load(Relaxed);
        if (*info).si_addr() as usize != guard {
            libc::_exit(3);
        }
        libc::mprotect(guard as *mut c_void, PAGE, PROT_READ | PROT_WRITE);
    }
}

/// A handler that mends the page and returns: the instruction goes on at the row where it stopped.
#[test]
fn loads_go_on_after_the_page_is_there() {
    setup();
    let p = two_pages(PROT_READ | PROT_WRITE);
    // SAFETY: the test's own pages.
    unsafe {
        for i in 0..2 * PAGE {
            *p.add(i) = (i * 7) as u8;
        }
        GUARD.store(p as usize + PAGE, Relaxed);
        libc::mprotect(p.add(PAGE).cast(), PAGE, PROT_NONE);
    }
    let end = end_of(&|| {
        set_handler(SIGSEGV, open_the_page, libc::SA_SIGINFO);
        // SAFETY: the handler makes the rows readable.
        let loaded = unsafe {
            ldtilecfg(&full());
            let from = p.add(PAGE - 300);
            tileloadd::<5>(from, 64);
            let want = std::slice::from_raw_parts(from, 1024);
            stored::<5>().as_flattened() == want && sttilecfg() == full()
        };
        if !loaded {
            // SAFETY: the child's way out.
            unsafe { libc::_exit(4) }
        }
    });
    assert_eq!(end, End::Exit(0));
}

/// `start_row` from the configuration: rows below it stay, those from it on are read.
#[test]
fn start_row_of_the_configuration() {
    setup();
    let block: Vec<u8> = (0..1024u32).map(|i| (i % 251) as u8 + 1).collect();
    let mut c = config(&[(8, 64)]);
    c[1] = 5;
    ldtilecfg(&c);
    assert_eq!(sttilecfg(), c);
    // SAFETY: rows of `block`.
    unsafe { tileloadd::<0>(block.as_ptr(), 64) };
    assert_eq!(sttilecfg()[1], 0, "done: the next instruction starts at row 0");
    let got = stored::<0>();
    for (row, bytes) in got.iter().enumerate() {
        let want = match row {
            0..5 => vec![0; 64], // LDTILECFG zeroed it
            5..8 => block[64 * row..][..64].to_vec(),
            _ => vec![0xee; 64], // not stored
        };
        assert_eq!(bytes[..], want, "row {row}");
    }
    // A store with a start_row writes the rest only.
    let mut c = config(&[(8, 64)]);
    c[1] = 6;
    ldtilecfg(&c);
    let got = stored::<0>();
    assert!(got[..6].as_flattened().iter().all(|&b| b == 0xee));
    assert!(got[6..8].as_flattened().iter().all(|&b| b == 0));
    tilerelease();
}

#[test]
fn without_a_handler_the_process_ends_by_segv() {
    setup();
    // SAFETY: the fault is what is tested.
    let end = end_of(&|| unsafe {
        ldtilecfg(&full());
        tileloadd::<0>(64 as *const u8, 64);
    });
    assert_eq!(end, End::Signal(SIGSEGV));
}

/// Instructions in a row run in one trap. The last of them ends a page with nothing behind it, so that a look
/// at what follows would fault; and one in the middle that faults does so as if alone.
#[test]
fn code_at_the_end_of_a_page() {
    setup();
    const LOAD: [u8; 6] = [0xc4, 0xe2, 0x7b, 0x4b, 0x04, 0x37]; // tileloadd tmm0, [rdi + rsi*1]
    const ZERO: [u8; 5] = [0xc4, 0xe2, 0x7b, 0x49, 0xc8]; // tilezero tmm1
    const STORE: [u8; 6] = [0xc4, 0xe2, 0x7a, 0x4b, 0x04, 0x32]; // tilestored [rdx + rsi*1], tmm0
    const RET: [u8; 1] = [0xc3];
    let code = [&ZERO[..], &LOAD, &ZERO, &STORE, &RET].concat();
    let p = two_pages(PROT_NONE);
    // SAFETY: the test's own page; its code keeps to the calling convention.
    let run: extern "C" fn(*const u8, usize, *mut u8) = unsafe {
        let start = p.add(PAGE - code.len());
        start.copy_from(code.as_ptr(), code.len());
        libc::mprotect(p.cast(), PAGE, PROT_READ | libc::PROT_EXEC);
        std::mem::transmute(start)
    };
    let (from, mut to) = ([7u8; 1024], [0u8; 1024]);
    ldtilecfg(&full());
    run(from.as_ptr(), 64, to.as_mut_ptr());
    assert_eq!(to, from);
    tilerelease();

    let caught = catch(|| {
        ldtilecfg(&full());
        run(16 as *const u8, 64, null_mut());
    })
    .unwrap();
    let load = run as usize + ZERO.len();
    assert_eq!((caught.signal, caught.address, caught.rip), (SIGSEGV, 16, load));
    let caught = catch(|| {
        ldtilecfg(&config(&[(0, 0), (1, 4)]));
        run(from.as_ptr(), 64, null_mut());
    })
    .unwrap();
    assert_eq!((caught.signal, caught.address, caught.rip), (libc::SIGILL, load, load));
}

/// The first byte of what may be an instruction ends the page: the fault is the program's, at the fetch.
#[test]
fn half_an_instruction_at_the_end_of_a_page() {
    setup();
    const ZERO: [u8; 5] = [0xc4, 0xe2, 0x7b, 0x49, 0xc8]; // tilezero tmm1
    let code = [&ZERO[..], &[0xc4]].concat();
    let p = two_pages(PROT_NONE);
    // SAFETY: the test's own page.
    let run: extern "C" fn() = unsafe {
        let start = p.add(PAGE - code.len());
        start.copy_from(code.as_ptr(), code.len());
        libc::mprotect(p.cast(), PAGE, PROT_READ | libc::PROT_EXEC);
        std::mem::transmute(start)
    };
    let caught = catch(|| {
        ldtilecfg(&full());
        run();
    })
    .unwrap();
    let end = p as usize + PAGE;
    assert_eq!((caught.signal, caught.address, caught.rip), (SIGSEGV, end, end - 1));
}
