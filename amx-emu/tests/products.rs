//! Every dot product against plain loops over random shapes and bits: through the instruction, and in
//! [`Tiles`] alone.

#![allow(clippy::needless_range_loop)] // rows and columns of several matrices, by number

mod common;

use std::arch::asm;

use amx_emu::{Dot, Tiles};
use common::*;
use proptest::collection::vec;
use proptest::prelude::*;

type Bytes = [[u8; 64]; 16];

/// The SDM defines the float products by f32 operations with DAZ = FTZ = 1. This CPU has those: an operation
/// with that mode in MXCSR is the reference.
macro_rules! with_flush {
    ($insn:literal, $acc:expr, $($x:expr),*) => {{
        let (mode, mut saved, mut acc): (u32, u32, f32) = (0x9fc0, 0, $acc);
        // SAFETY: MXCSR is as before at the end, and all its exceptions are masked in between.
        unsafe {
            asm!("stmxcsr [{saved}]", "ldmxcsr [{mode}]", $insn, "ldmxcsr [{saved}]",
                $(in(xmm_reg) $x,)* acc = inout(xmm_reg) acc,
                saved = in(reg) &raw mut saved, mode = in(reg) &raw const mode, options(nostack));
        }
        acc
    }};
}

fn add(x: f32, y: f32) -> f32 {
    with_flush!("addss {acc}, {0}", x, y)
}

fn fma(x: f32, y: f32, z: f32) -> f32 {
    with_flush!("vfmadd231ss {acc}, {0}, {1}", z, x, y)
}

/// FP16 to f32 by its definition.
fn fp16(bits: u16) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
    let magnitude = match exponent {
        0 => mantissa * 2f64.powi(-24),
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        e => (1024.0 + mantissa) * 2f64.powi(e - 25),
    };
    (if bits >> 15 == 1 { -magnitude } else { magnitude }) as f32
}

fn bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The SDM's loops.
fn model(op: Dot, c: &Bytes, a: &Bytes, b: &Bytes, [m, n, k]: [usize; 3]) -> Bytes {
    let dword = |t: &Bytes, r: usize, i: usize| -> [u8; 4] { t[r][4 * i..4 * i + 4].try_into().unwrap() };
    let half = |t: &Bytes, r: usize, i: usize| u16::from_le_bytes(t[r][2 * i..2 * i + 2].try_into().unwrap());
    let mut out = *c;
    for r in 0..m {
        for j in 0..n {
            let before = dword(c, r, j);
            let result = match op {
                Dot::Bf16 | Dot::Fp16 => {
                    let widen = if op == Dot::Bf16 { bf16 } else { fp16 };
                    let mut sum = [0.0f32; 2];
                    for i in 0..k {
                        for (odd, s) in sum.iter_mut().enumerate() {
                            *s = fma(widen(half(a, r, 2 * i + odd)), widen(half(b, i, 2 * j + odd)), *s);
                        }
                    }
                    add(f32::from_le_bytes(before), add(sum[0], sum[1])).to_le_bytes()
                }
                _ => {
                    let signed_a = matches!(op, Dot::SignedSigned | Dot::SignedUnsigned);
                    let signed_b = matches!(op, Dot::SignedSigned | Dot::UnsignedSigned);
                    let wide = |x: u8, signed| if signed { i64::from(x as i8) } else { i64::from(x) };
                    let mut sum = i64::from(i32::from_le_bytes(before));
                    for i in 0..k {
                        let (x, y) = (dword(a, r, i), dword(b, i, j));
                        sum += (0..4).map(|q| wide(x[q], signed_a) * wide(y[q], signed_b)).sum::<i64>();
                    }
                    (sum as i32).to_le_bytes()
                }
            };
            out[r][4 * j..4 * j + 4].copy_from_slice(&result);
        }
    }
    out
}

/// The product by the instruction. Untouched bytes stay 0xee.
fn by_instruction(op: Dot, c: &Bytes, a: &Bytes, b: &Bytes, [m, n, k]: [usize; 3]) -> Bytes {
    let mut shapes = [(0, 0); 8];
    (shapes[6], shapes[1], shapes[3]) = ((m as u8, 4 * n as u16), (m as u8, 4 * k as u16), (k as u8, 4 * n as u16));
    ldtilecfg(&config(&shapes));
    // SAFETY: each block is as large as a tile can be.
    unsafe {
        tileloadd::<6>(c.as_ptr().cast(), 64);
        tileloaddt1::<1>(a.as_ptr().cast(), 64);
        tileloadd::<3>(b.as_ptr().cast(), 64);
    }
    dot::<6, 1, 3>(op);
    let out = stored::<6>();
    tilerelease();
    out
}

/// The product by the model alone: the whole register.
fn by_model(op: Dot, c: &Bytes, a: &Bytes, b: &Bytes, [m, n, k]: [usize; 3]) -> Bytes {
    let mut tiles = Tiles::new();
    tiles.load_config(&config(&[(m as u8, 4 * n as u16), (m as u8, 4 * k as u16), (k as u8, 4 * n as u16)])).unwrap();
    for (t, from) in [c, a, b].into_iter().enumerate() {
        tiles.load(t as u8, |row, out| out.copy_from_slice(&from[row][..out.len()])).unwrap();
    }
    tiles.dot(op, 0, 1, 2).unwrap();
    *tiles.tile(0)
}

/// Equal bits, or two quiet NaNs: the SDM does not say whose payload wins.
fn same(op: Dot, x: [u8; 4], y: [u8; 4]) -> bool {
    let quiet_nan = |v: [u8; 4]| f32::from_le_bytes(v).is_nan() && v[2] & 0x40 != 0;
    x == y || matches!(op, Dot::Bf16 | Dot::Fp16) && quiet_nan(x) && quiet_nan(y)
}

fn check(op: Dot, c: &Bytes, a: &Bytes, b: &Bytes, size: [usize; 3]) -> Result<(), TestCaseError> {
    if matches!(op, Dot::Bf16 | Dot::Fp16) && !is_x86_feature_detected!("fma") {
        println!("skipped {op:?}: no FMA on this CPU to check it with");
        return Ok(());
    }
    let want = model(op, c, a, b, size);
    let mut results = vec![("model", by_model(op, c, a, b, size), 0)];
    if dots().contains(&op) {
        results.push(("instruction", by_instruction(op, c, a, b, size), 0xee));
    }
    for (who, got, outside) in results {
        for row in 0..16 {
            for i in 0..16 {
                let at = 4 * i..4 * i + 4;
                let (w, g): ([u8; 4], [u8; 4]) =
                    (want[row][at.clone()].try_into().unwrap(), got[row][at].try_into().unwrap());
                if row < size[0] && i < size[1] {
                    prop_assert!(same(op, w, g), "{op:?} by {who} at {row},{i}: {g:x?}, not {w:x?}");
                } else {
                    prop_assert_eq!(g, [outside; 4], "{:?} by {} outside the tile at {},{}", op, who, row, i);
                }
            }
        }
    }
    Ok(())
}

fn tile(bits: Vec<u16>) -> Bytes {
    std::array::from_fn(|r| std::array::from_fn(|i| bits[r * 32 + i / 2].to_le_bytes()[i % 2]))
}

/// Tiles of random bits: bytes and floats of all kinds, with many NaN and Inf.
fn any_tile() -> impl Strategy<Value = Bytes> {
    vec(any::<u16>(), 512).prop_map(tile)
}

/// Floats of one exponent range, so that sums neither drown nor overflow, now and then a special one.
/// `exponents` in the format with `bits` bits of mantissa.
fn floats(exponents: std::ops::Range<u16>, bits: u16) -> impl Strategy<Value = Bytes> {
    let plain =
        (any::<bool>(), exponents, 0u16..1 << bits).prop_map(move |(s, e, m)| u16::from(s) << 15 | e << bits | m);
    let special = prop_oneof![Just(0), Just(0x8000), 0u16..1 << bits, Just(0x7fff & !((1 << bits) - 1))];
    vec(prop_oneof![99 => plain, 1 => special], 512).prop_map(tile)
}

/// f32 for C: normal ones near 1, denormals, and those around the smallest normal number.
fn singles() -> impl Strategy<Value = Bytes> {
    let value = prop_oneof![0x3f00_0000u32..0x4100_0000, 0u32..0x0100_0000, 0x8000_0000u32..0x8100_0000, any::<u32>()];
    vec(value, 256)
        .prop_map(|v| std::array::from_fn(|r| std::array::from_fn(|i| v[r * 16 + i / 4].to_le_bytes()[i % 4])))
}

fn size() -> impl Strategy<Value = [usize; 3]> {
    [1usize..=16, 1usize..=16, 1usize..=16]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_bits(c in any_tile(), a in any_tile(), b in any_tile(), size in size()) {
        setup();
        for op in DOTS {
            check(op, &c, &a, &b, size)?;
        }
    }

    #[test]
    fn bf16_of_one_scale(c in singles(), a in floats(120..134, 7), b in floats(120..134, 7), size in size()) {
        setup();
        check(Dot::Bf16, &c, &a, &b, size)?;
    }

    /// Products and sums around 2^-126, where denormals begin.
    #[test]
    fn bf16_at_the_edge_of_denormals(c in singles(), a in floats(50..66, 7), b in floats(55..67, 7), size in size()) {
        setup();
        check(Dot::Bf16, &c, &a, &b, size)?;
    }

    #[test]
    fn fp16_of_one_scale(c in singles(), a in floats(10..20, 10), b in floats(10..20, 10), size in size()) {
        setup();
        check(Dot::Fp16, &c, &a, &b, size)?;
    }

    #[test]
    fn fp16_denormals(c in singles(), a in floats(0..3, 10), b in floats(0..3, 10), size in size()) {
        setup();
        check(Dot::Fp16, &c, &a, &b, size)?;
    }
}

/// 2^-126 less 2^-150 rounds up to 2^-126 at a denormal's precision, but is below it at f32's: it is flushed.
/// Less 2^-152 it rounds up at both, and stays.
#[test]
fn the_one_result_in_doubt() {
    setup();
    for (small, survives) in [(127 - 75, false), (127 - 76, true)] {
        let (mut a, mut b): (Bytes, Bytes) = ([[0; 64]; 16], [[0; 64]; 16]);
        let pair = |x: u16| -> [u8; 4] { [0, 0, x.to_le_bytes()[0], x.to_le_bytes()[1]] };
        for r in 0..16 {
            a[r][..4].copy_from_slice(&pair((127 - 63) << 7));
            a[r][4..8].copy_from_slice(&pair(0x8000 | small << 7));
        }
        for j in 0..16 {
            b[0][4 * j..4 * j + 4].copy_from_slice(&pair((127 - 63) << 7));
            b[1][4 * j..4 * j + 4].copy_from_slice(&pair(small << 7));
        }
        let c = [[0; 64]; 16];
        check(Dot::Bf16, &c, &a, &b, [16, 16, 2]).unwrap();
        let got = by_instruction(Dot::Bf16, &c, &a, &b, [16, 16, 2]);
        assert_eq!(got[0][..4] != [0; 4], survives);
    }
}

/// Even and odd products accumulate apart: with one accumulator 2^24 + 1 + 1 would lose both ones.
#[test]
fn even_and_odd_apart() {
    setup();
    let one = 0x3f80u16.to_le_bytes();
    let large = 0x4b80u16.to_le_bytes(); // 2^24
    let mut a = [[0; 64]; 16];
    let b: Bytes = std::array::from_fn(|_| std::array::from_fn(|i| one[i % 2]));
    a[0][0..2].copy_from_slice(&large); // even
    for k in 0..2 {
        a[0][4 * k + 2..4 * k + 4].copy_from_slice(&one); // odd
    }
    let got = by_instruction(Dot::Bf16, &[[0; 64]; 16], &a, &b, [1, 16, 16]);
    assert_eq!(f32::from_le_bytes(got[0][..4].try_into().unwrap()), 16_777_218.0);
}
