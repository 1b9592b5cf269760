//! Each fault that the SDM lists, as Linux delivers it: `SIGILL` for #UD, `SIGSEGV` for #GP, at the instruction.

mod common;

use amx_emu::Dot;
use common::child::{Caught, catch};
use common::*;

const UD: Option<libc::c_int> = Some(libc::SIGILL);
const GP: Option<libc::c_int> = Some(libc::SIGSEGV);

fn signal_of(body: impl FnOnce()) -> Option<libc::c_int> {
    setup();
    catch(body).map(|c| c.signal)
}

#[test]
fn bad_configurations() {
    let bad = |change: &dyn Fn(&mut [u8; 64])| {
        let mut c = config(&[(16, 64), (3, 8)]);
        change(&mut c);
        signal_of(|| ldtilecfg(&c))
    };
    assert_eq!(bad(&|_| ()), None);
    for palette in [2, 3, 255] {
        assert_eq!(bad(&|c| c[0] = palette), GP, "palette {palette}");
    }
    for reserved in (2..16).chain(32..48).chain(56..64) {
        assert_eq!(bad(&|c| c[reserved] = 1), GP, "reserved byte {reserved}");
    }
    for t in 0..8 {
        assert_eq!(bad(&|c| (c[48 + t], c[16 + 2 * t]) = (17, 4)), GP, "17 rows in {t}");
        assert_eq!(bad(&|c| (c[48 + t], c[16 + 2 * t]) = (1, 65)), GP, "65 bytes in {t}");
        assert_eq!(bad(&|c| (c[48 + t], c[17 + 2 * t]) = (1, 1)), GP, "256 bytes and more in {t}");
        assert_eq!(bad(&|c| (c[48 + t], c[16 + 2 * t]) = (1, 0)), GP, "rows without bytes in {t}");
        assert_eq!(bad(&|c| (c[48 + t], c[16 + 2 * t]) = (0, 4)), GP, "bytes without rows in {t}");
        assert_eq!(bad(&|c| (c[48 + t], c[16 + 2 * t]) = (1, 63)), None, "63 bytes are a shape, in {t}");
    }
    // Palette 0 is the initial state, whatever follows.
    assert_eq!(bad(&|c| (c[0], c[5]) = (0, 1)), None);
}

#[test]
fn a_bad_configuration_changes_nothing() {
    setup();
    ldtilecfg(&full());
    let mut bad = full();
    bad[63] = 1;
    let caught = catch(|| ldtilecfg(&bad)).unwrap();
    // Linux reports #GP without an address.
    assert_eq!((caught.signal, caught.code, caught.address), (libc::SIGSEGV, 0x80, 0));
    assert!(caught.config().is_none_or(|c| c == full()));
    tilerelease();
}

#[test]
fn tiles_that_are_not_configured() {
    let mut block = [0u8; 1024];
    let p = block.as_mut_ptr();
    let some = config(&[(16, 64), (16, 64), (16, 64)]);
    for configured in [false, true] {
        let ud = |body: &dyn Fn()| {
            signal_of(|| {
                if configured {
                    ldtilecfg(&some)
                } else {
                    tilerelease()
                }
                body();
            })
        };
        assert_eq!(ud(&|| tilezero::<3>()), UD);
        // SAFETY: 16 rows of 64 bytes.
        assert_eq!(ud(&|| unsafe { tileloadd::<3>(p, 64) }), UD);
        // SAFETY: as above.
        assert_eq!(ud(&|| unsafe { tileloaddt1::<3>(p, 64) }), UD);
        // SAFETY: as above.
        assert_eq!(ud(&|| unsafe { tilestored::<3>(p, 64) }), UD);
        for &op in dots() {
            assert_eq!(ud(&|| dot::<3, 1, 2>(op)), UD);
            assert_eq!(ud(&|| dot::<0, 3, 2>(op)), UD);
            assert_eq!(ud(&|| dot::<0, 1, 3>(op)), UD);
            assert_eq!(ud(&|| dot::<0, 1, 2>(op)), if configured { None } else { UD });
        }
        assert_eq!(ud(&|| tilezero::<0>()), if configured { None } else { UD });
        assert_eq!(ud(&|| tilerelease()), None);
        assert_eq!(ud(&|| _ = sttilecfg()), None);
    }
}

/// A dot product byte by byte: the assembler refuses equal operands.
fn encoded_dot<const D: u8, const A: u8, const B: u8>(op: Dot) {
    macro_rules! insn {
        ($opcode:literal, $pp:literal) => {
            // SAFETY: touches tile state only.
            unsafe {
                std::arch::asm!(".byte 0xc4, 0xe2, {}, {}, {}", const (!B & 15) << 3 | $pp, const $opcode,
                    const 0xc0 | D << 3 | A, options(nostack, nomem))
            }
        };
    }
    match op {
        Dot::Bf16 => insn!(0x5c, 2),
        Dot::Fp16 => insn!(0x5c, 3),
        Dot::UnsignedUnsigned => insn!(0x5e, 0),
        Dot::UnsignedSigned => insn!(0x5e, 1),
        Dot::SignedUnsigned => insn!(0x5e, 2),
        Dot::SignedSigned => insn!(0x5e, 3),
    }
}

#[test]
fn operands_that_are_equal() {
    for &op in dots() {
        let ud = |body: &dyn Fn()| {
            signal_of(|| {
                ldtilecfg(&full());
                body();
            })
        };
        assert_eq!(ud(&|| encoded_dot::<0, 0, 1>(op)), UD);
        assert_eq!(ud(&|| encoded_dot::<0, 1, 0>(op)), UD);
        assert_eq!(ud(&|| encoded_dot::<0, 1, 1>(op)), UD);
        assert_eq!(ud(&|| encoded_dot::<0, 1, 2>(op)), None);
        assert_eq!(ud(&|| encoded_dot::<0, 1, 8>(op)), UD, "there is no tmm8");
        assert_eq!(ud(&|| encoded_dot::<0, 1, 15>(op)), UD);
    }
}

#[test]
fn shapes_that_do_not_match() {
    // C is m x n, A is m x k, B is k x n; in rows and bytes.
    let (c, a, b) = ((5, 12), (5, 28), (7, 12));
    let shapes = [
        ([c, a, b], None),
        ([(6, 12), a, b], UD), // rows of C, rows of A
        ([(5, 16), a, b], UD), // bytes of C, bytes of B
        ([c, (5, 24), b], UD), // k of A, rows of B
        ([c, a, (8, 12)], UD),
        ([(5, 14), a, (7, 14)], UD), // not whole groups of four
        ([c, (5, 30), b], UD),
        ([c, (5, 29), b], UD),
    ];
    for &op in dots() {
        for (shape, want) in shapes {
            let got = signal_of(|| {
                ldtilecfg(&config(&shape));
                dot::<0, 1, 2>(op);
            });
            assert_eq!(got, want, "{op:?} {shape:?}");
        }
    }
}

#[test]
fn rows_that_can_not_be_moved() {
    let mut block = [0u8; 1024];
    let p = block.as_mut_ptr();
    // SAFETY: rows of at most 64 bytes.
    let moves: [&dyn Fn(); 3] =
        unsafe { [&|| tileloadd::<0>(p, 64), &|| tileloaddt1::<0>(p, 64), &|| tilestored::<0>(p, 64)] };
    for go in moves {
        let with = |rows, colsb, start_row| {
            signal_of(|| {
                let mut c = config(&[(rows, colsb)]);
                c[1] = start_row;
                ldtilecfg(&c);
                go();
            })
        };
        assert_eq!(with(4, 64, 0), None);
        assert_eq!(with(4, 62, 0), UD, "bytes are not a multiple of 4");
        assert_eq!(with(4, 64, 3), None);
        assert_eq!(with(4, 64, 4), UD, "start_row is past the rows");
        assert_eq!(with(16, 64, 255), UD);
    }
}

#[test]
fn the_signal_names_the_instruction() {
    setup();
    tilerelease();
    let Caught { signal, code, address, rip, .. } = catch(|| dot::<0, 1, 2>(Dot::Bf16)).unwrap();
    assert_eq!((signal, address), (libc::SIGILL, rip));
    assert!(code > 0, "a fault, not a signal that someone sent: {code}");
    // SAFETY: the child ran the same code at the same address.
    let bytes = unsafe { std::slice::from_raw_parts(rip as *const u8, 4) };
    assert_eq!(bytes, [0xc4, 0xe2, 0x6a, 0x5c], "tdpbf16ps tmm0, tmm1, tmm2");
}

#[test]
fn without_a_handler_the_process_ends() {
    setup();
    let mut bad = full();
    bad[0] = 9;
    let end = |body: &dyn Fn()| child::end_of(body);
    assert_eq!(end(&|| ldtilecfg(&bad)), child::End::Signal(libc::SIGSEGV));
    assert_eq!(end(&|| tilezero::<0>()), child::End::Signal(libc::SIGILL));
    // SAFETY: meant to be illegal.
    assert_eq!(end(&|| unsafe { std::arch::asm!("ud2") }), child::End::Signal(libc::SIGILL));
    assert_eq!(end(&|| tilerelease()), child::End::Exit(0));
}

/// A fault can be neither blocked nor ignored.
#[test]
fn a_blocked_or_ignored_fault_ends_the_process() {
    setup();
    let mut bad = full();
    bad[0] = 9;
    let blocked = child::end_of(&|| {
        child::block(libc::SIGSEGV);
        ldtilecfg(&bad);
    });
    assert_eq!(blocked, child::End::Signal(libc::SIGSEGV));
    let ignored = child::end_of(&|| {
        // SAFETY: no handler.
        unsafe { libc::signal(libc::SIGSEGV, libc::SIG_IGN) };
        ldtilecfg(&bad);
    });
    assert_eq!(ignored, child::End::Signal(libc::SIGSEGV));
}
