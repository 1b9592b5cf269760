//! The assembler is the reference: each form is assembled, and its bytes decoded.

use std::arch::naked_asm;

use super::*;

/// The bytes of one instruction, with a `ret` after it.
macro_rules! bytes {
    ($($asm:literal),+) => {{
        #[unsafe(naked)]
        extern "C" fn code() {
            naked_asm!($($asm),+, "ret")
        }
        // SAFETY: the longest form here is 15 bytes; functions lie in a section that is longer.
        unsafe { std::slice::from_raw_parts(code as *const () as *const u8, 16) }
    }};
}

fn of(bytes: &[u8]) -> Option<Insn> {
    let insn = decode(|i| bytes.get(i).copied());
    if let Some(insn) = insn {
        let len = usize::from(insn.len);
        // Not a byte more is asked for, and not one less will do.
        assert_eq!(decode(|i| bytes[..len].get(i).copied()), Some(insn));
        assert_eq!(decode(|i| bytes[..len - 1].get(i).copied()), None);
    }
    insn
}

/// Decodes an assembled instruction; its length is where the `ret` is.
fn assembled(bytes: &[u8]) -> (Op, Operands) {
    let insn = of(bytes).unwrap_or_else(|| panic!("{bytes:02x?}"));
    assert_eq!(bytes[usize::from(insn.len)], 0xc3, "length of {bytes:02x?}");
    (insn.op, insn.operands)
}

fn at(base: Base, index: Option<u8>, scale: u8, disp: i32) -> Address {
    Address { base, index, scale, disp, segment: Segment::Flat, short: false }
}

use Base::{None as NoBase, Reg, Rip};

#[test]
fn without_memory() {
    assert_eq!(assembled(bytes!("tilerelease")), (Op::Tilerelease, Operands::None));
    assert_eq!(assembled(bytes!("tilezero tmm0")), (Op::Tilezero, Operands::Tile(0)));
    assert_eq!(assembled(bytes!("tilezero tmm7")), (Op::Tilezero, Operands::Tile(7)));
    let dot = |dst, a, b| Operands::Dot { dst, a, b };
    assert_eq!(assembled(bytes!("tdpbf16ps tmm1, tmm2, tmm3")), (Op::Tdpbf16ps, dot(1, 2, 3)));
    assert_eq!(assembled(bytes!("tdpfp16ps tmm7, tmm0, tmm5")), (Op::Tdpfp16ps, dot(7, 0, 5)));
    assert_eq!(assembled(bytes!("tdpbssd tmm0, tmm1, tmm7")), (Op::Tdpbssd, dot(0, 1, 7)));
    assert_eq!(assembled(bytes!("tdpbsud tmm4, tmm6, tmm2")), (Op::Tdpbsud, dot(4, 6, 2)));
    assert_eq!(assembled(bytes!("tdpbusd tmm2, tmm3, tmm1")), (Op::Tdpbusd, dot(2, 3, 1)));
    assert_eq!(assembled(bytes!("tdpbuud tmm5, tmm4, tmm0")), (Op::Tdpbuud, dot(5, 4, 0)));
}

#[test]
fn rows_in_memory() {
    let rows = |tile, at| Operands::Rows { tile, at };
    let load = |code: &[u8]| {
        let (op, operands) = assembled(code);
        assert_eq!(op, Op::Tileloadd);
        operands
    };
    assert_eq!(load(bytes!("tileloadd tmm1, [rax + rcx*1]")), rows(1, at(Reg(0), Some(1), 0, 0)));
    assert_eq!(load(bytes!("tileloadd tmm2, [rsp + rbp*2]")), rows(2, at(Reg(4), Some(5), 1, 0)));
    assert_eq!(load(bytes!("tileloadd tmm3, [r12 + r13*4 - 128]")), rows(3, at(Reg(12), Some(13), 2, -128)));
    assert_eq!(load(bytes!("tileloadd tmm4, [rbp + r12*8 + 127]")), rows(4, at(Reg(5), Some(12), 3, 127)));
    assert_eq!(load(bytes!("tileloadd tmm5, [r13 + rdi*1 + 128]")), rows(5, at(Reg(13), Some(7), 0, 128)));
    assert_eq!(
        load(bytes!("tileloadd tmm6, [r15 + rsi*1 - 0x7fffffff]")),
        rows(6, at(Reg(15), Some(6), 0, -0x7fff_ffff))
    );
    // No index: the stride is zero. No base: a displacement of 32 bits.
    assert_eq!(load(bytes!("tileloadd tmm7, [rbx]")), rows(7, at(Reg(3), None, 0, 0)));
    assert_eq!(load(bytes!("tileloadd tmm0, [r8 + 64]")), rows(0, at(Reg(8), None, 0, 64)));
    assert_eq!(load(bytes!("tileloadd tmm0, [r9*8 + 0x1234567]")), rows(0, at(NoBase, Some(9), 3, 0x0123_4567)));
    let short = Address { short: true, ..at(Reg(0), Some(10), 1, 0) };
    assert_eq!(load(bytes!("tileloadd tmm0, [eax + r10d*2]")), rows(0, short));
    let fs = Address { segment: Segment::Fs, ..at(Reg(2), Some(11), 0, 8) };
    assert_eq!(load(bytes!("tileloadd tmm0, fs:[rdx + r11*1 + 8]")), rows(0, fs));

    let gs = Address { segment: Segment::Gs, ..at(Reg(1), Some(14), 0, 0) };
    assert_eq!(assembled(bytes!("tileloaddt1 tmm3, gs:[rcx + r14*1]")), (Op::Tileloaddt1, rows(3, gs)));
    let store = bytes!("tilestored [r14 + r15*1 + 0x100], tmm6");
    assert_eq!(assembled(store), (Op::Tilestored, rows(6, at(Reg(14), Some(15), 0, 256))));
}

#[test]
fn configurations_in_memory() {
    let config = Operands::Config;
    let cases: [(&[u8], Op, Address); 7] = [
        (bytes!("ldtilecfg [rax]"), Op::Ldtilecfg, at(Reg(0), None, 0, 0)),
        (bytes!("ldtilecfg [r13]"), Op::Ldtilecfg, at(Reg(13), None, 0, 0)),
        (bytes!("ldtilecfg [rsp - 64]"), Op::Ldtilecfg, at(Reg(4), None, 0, -64)),
        (bytes!("sttilecfg [r12 + rax*4 + 0x400]"), Op::Sttilecfg, at(Reg(12), Some(0), 2, 0x400)),
        (bytes!("sttilecfg [rip + 0x20]"), Op::Sttilecfg, at(Rip, None, 0, 0x20)),
        (bytes!("ldtilecfg [eip - 1]"), Op::Ldtilecfg, Address { short: true, ..at(Rip, None, 0, -1) }),
        (bytes!("ldtilecfg fs:[0x10]"), Op::Ldtilecfg, Address { segment: Segment::Fs, ..at(NoBase, None, 0, 0x10) }),
    ];
    for (code, op, at) in cases {
        assert_eq!(assembled(code), (op, config(at)), "{code:02x?}");
    }
}

#[test]
fn prefixes() {
    let base = [0xc4, 0xe2, 0x6a, 0x5c, 0xcb]; // tdpbf16ps tmm1, tmm3, tmm2
    let with = |prefix: &[u8]| of(&[prefix, &base].concat());
    assert!(with(&[]).is_some());
    for ignored in [0x26, 0x2e, 0x36, 0x3e, 0x64, 0x65, 0x67] {
        assert_eq!(with(&[ignored]).unwrap().len, 6);
    }
    for illegal in [0x66, 0xf2, 0xf3, 0xf0, 0x40, 0x48, 0x4f] {
        assert_eq!(with(&[illegal]), None, "{illegal:x} before VEX is #UD");
    }
    assert_eq!(with(&[0x3e; 10]).unwrap().len, 15);
    assert_eq!(with(&[0x3e; 11]), None, "more than 15 bytes");
    // The last of fs and gs counts.
    let load = [0xc4, 0xe2, 0x7b, 0x4b, 0x04, 0x08];
    let insn = of(&[&[0x64, 0x65, 0x2e][..], &load].concat()).unwrap();
    assert!(matches!(insn.operands, Operands::Rows { at: Address { segment: Segment::Gs, .. }, .. }));
}

#[test]
fn forms_that_are_not_defined() {
    let cases: [(&str, &[u8]); 16] = [
        ("ud2", &[0x0f, 0x0b]),
        ("C5, which has no map 0F38", &[0xc5, 0xfb, 0x4b, 0x04, 0x08]),
        ("EVEX", &[0x62, 0xf2, 0x7d, 0x48, 0x49, 0x00]),
        ("map 0F3A", &[0xc4, 0xe3, 0x6a, 0x5c, 0xcb]),
        ("W1", &[0xc4, 0xe2, 0xea, 0x5c, 0xcb]),
        ("L1", &[0xc4, 0xe2, 0x6e, 0x5c, 0xcb]),
        ("5C without F3 or F2", &[0xc4, 0xe2, 0x68, 0x5c, 0xcb]),
        ("a dot product from memory", &[0xc4, 0xe2, 0x6a, 0x5c, 0x08]),
        ("4B without a SIB byte", &[0xc4, 0xe2, 0x7b, 0x4b, 0x00]),
        ("4B relative to rip", &[0xc4, 0xe2, 0x7b, 0x4b, 0x05, 0, 0, 0, 0]),
        ("4B of registers", &[0xc4, 0xe2, 0x7b, 0x4b, 0xc4]),
        ("4B without a mandatory prefix", &[0xc4, 0xe2, 0x78, 0x4b, 0x04, 0x08]),
        ("4B with vvvv", &[0xc4, 0xe2, 0x73, 0x4b, 0x04, 0x08]),
        ("ldtilecfg with reg 1", &[0xc4, 0xe2, 0x78, 0x49, 0x08]),
        ("tilerelease with rm 1", &[0xc4, 0xe2, 0x78, 0x49, 0xc1]),
        ("tilezero with rm 1", &[0xc4, 0xe2, 0x7b, 0x49, 0xc1]),
    ];
    for (what, code) in cases {
        let padded = [code, &[0; 8]].concat();
        assert_eq!(of(&padded), None, "{what}");
    }
}

/// Tile numbers from 8 on can be encoded: they decode, and the executor refuses them.
#[test]
fn tiles_above_7() {
    let dot = |code: &[u8]| of(code).unwrap().operands;
    assert_eq!(dot(&[0xc4, 0x62, 0x6a, 0x5c, 0xcb]), Operands::Dot { dst: 9, a: 3, b: 2 });
    assert_eq!(dot(&[0xc4, 0xc2, 0x6a, 0x5c, 0xcb]), Operands::Dot { dst: 1, a: 11, b: 2 });
    assert_eq!(dot(&[0xc4, 0xe2, 0x2a, 0x5c, 0xcb]), Operands::Dot { dst: 1, a: 3, b: 10 });
    assert_eq!(dot(&[0xc4, 0x62, 0x7b, 0x49, 0xc0]), Operands::Tile(8));
}
