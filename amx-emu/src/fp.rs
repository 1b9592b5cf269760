//! The products of 16-bit floats: `TDPBF16PS` and `TDPFP16PS`.
//!
//! The SDM defines both by f32 fused multiply-adds that round to nearest even with denormal inputs taken as
//! zero and denormal outputs flushed to zero (DAZ = FTZ = 1), without regard to MXCSR. Even and odd elements
//! of the pairs accumulate apart over all of k, then `C = C + (even + odd)`.
//!
//! Two ways give the same bits:
//! - [`fused_row`]: the CPU's own FMA in the default mode, with the flush done on the bits. One result is in
//!   doubt: exactly the smallest normal number. A processor flushes when the result, rounded as if exponents
//!   had no lower bound, is below it; the FMA here has by then rounded at a denormal's coarser precision, and
//!   both cases look the same. Then the row is done again by
//! - [`exact_row`]: in f64, where the product is exact and the sum rounds to f32 as the exact sum would
//!   (53 >= 2 * 24 + 2 bits), and the flush is decided before rounding to f32.
//!
//! NaN results are quiet NaNs. Which operand's payload they carry is not defined by the SDM, nor here.

#![allow(clippy::needless_range_loop)] // lanes of several vectors side by side, by number

use crate::level::{Level, multiversion};
use crate::tiles::{MAX_ROWS, Product, Tile};

/// `TDPBF16PS`.
pub(crate) fn bf16(c: &mut Tile, a: &Tile, b: &Tile, size: Product) {
    product::<true>(c, a, b, size);
}

/// `TDPFP16PS`.
pub(crate) fn fp16(c: &mut Tile, a: &Tile, b: &Tile, size: Product) {
    product::<false>(c, a, b, size);
}

/// B as f32: for each k, the 16 even and the 16 odd elements.
type Wide = [[[f32; 16]; 2]; MAX_ROWS];

fn product<const BF16: bool>(c: &mut Tile, a: &Tile, b: &Tile, size: Product) {
    let fused = Level::get() > Level::Base;
    if fused {
        multiversion!(body::<BF16>(c: &mut Tile, a: &Tile, b: &Tile, size: Product));
    } else {
        exact::<BF16>(c, a, b, size);
    }
}

/// All rows in f64.
fn exact<const BF16: bool>(c: &mut Tile, a: &Tile, b: &Tile, size: Product) {
    let mut wide = [[[0.0; 16]; 2]; MAX_ROWS];
    widen_b::<BF16>(&mut wide, b, size.k);
    for m in 0..size.m {
        let acc = exact_row::<BF16>(a, m, &wide[..size.k]);
        finish(c, m, &acc);
    }
}

/// All rows by FMA, with those in doubt done again in f64.
#[inline(always)]
fn body<const BF16: bool>(c: &mut Tile, a: &Tile, b: &Tile, size: Product) {
    let mut wide = [[[0.0; 16]; 2]; MAX_ROWS];
    widen_b::<BF16>(&mut wide, b, size.k);
    for m in 0..size.m {
        let (mut acc, doubt) = fused_row::<BF16>(a, m, &wide[..size.k]);
        if doubt {
            acc = exact_row::<BF16>(a, m, &wide[..size.k]);
        }
        finish(c, m, &acc);
    }
}

#[inline(always)]
fn widen_b<const BF16: bool>(wide: &mut Wide, b: &Tile, k: usize) {
    for (row, out) in wide.iter_mut().enumerate().take(k) {
        for n in 0..16 {
            out[0][n] = widen::<BF16>(b.u16(row, 2 * n));
            out[1][n] = widen::<BF16>(b.u16(row, 2 * n + 1));
        }
    }
}

/// Even and odd sums of row `m`, and whether any step gave exactly the smallest normal number.
#[inline(always)]
fn fused_row<const BF16: bool>(a: &Tile, m: usize, b: &[[[f32; 16]; 2]]) -> ([[f32; 16]; 2], bool) {
    let mut acc = [[0.0f32; 16]; 2];
    let mut doubt = [0u32; 16];
    for (k, row) in b.iter().enumerate() {
        for odd in 0..2 {
            let x = widen::<BF16>(a.u16(m, 2 * k + odd));
            for n in 0..16 {
                let sum = x.mul_add(row[odd][n], acc[odd][n]);
                doubt[n] |= u32::from(sum.to_bits() & !SIGN == SMALLEST_NORMAL);
                acc[odd][n] = flush(sum);
            }
        }
    }
    (acc, doubt.iter().any(|&d| d != 0))
}

/// Even and odd sums of row `m`.
#[inline(never)]
fn exact_row<const BF16: bool>(a: &Tile, m: usize, b: &[[[f32; 16]; 2]]) -> [[f32; 16]; 2] {
    // Below this a sum rounds, at f32's precision but with unbounded exponent, to less than 2^-126: the
    // midpoint of 2^-126 and its lower neighbour, which itself goes (to even) up.
    const TINY: f64 = f32::MIN_POSITIVE as f64 * (1.0 - 1.0 / (1u64 << 25) as f64);
    let mut acc = [[0.0f32; 16]; 2];
    for (k, row) in b.iter().enumerate() {
        for odd in 0..2 {
            let x = f64::from(widen::<BF16>(a.u16(m, 2 * k + odd)));
            for n in 0..16 {
                let sum = x * f64::from(row[odd][n]) + f64::from(acc[odd][n]);
                acc[odd][n] = if sum.abs() < TINY { 0.0f32.copysign(sum as f32) } else { sum as f32 };
            }
        }
    }
    acc
}

/// `C = C + (even + odd)`. The sum of two f32 that is denormal is exact, so flushing the bits is right here.
#[inline(always)]
fn finish(c: &mut Tile, m: usize, acc: &[[f32; 16]; 2]) {
    for n in 0..16 {
        let before = flush(f32::from_le_bytes(c.dword(m, n)));
        let sum = flush(acc[0][n] + acc[1][n]);
        c.set_dword(m, n, flush(before + sum).to_le_bytes());
    }
}

const SIGN: u32 = 1 << 31;
const SMALLEST_NORMAL: u32 = 0x0080_0000;

/// A denormal becomes a zero of the same sign.
#[inline(always)]
fn flush(x: f32) -> f32 {
    let bits = x.to_bits();
    f32::from_bits(if bits & !SIGN < SMALLEST_NORMAL { bits & SIGN } else { bits })
}

#[inline(always)]
fn widen<const BF16: bool>(bits: u16) -> f32 {
    if BF16 { flush(f32::from_bits(u32::from(bits) << 16)) } else { widen_fp16(bits) }
}

/// FP16 to f32, exactly, denormals too.
#[inline(always)]
fn widen_fp16(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    // Rebias 15 to 127. A denormal is an integer count of 2^-24; Inf and NaN keep the largest exponent.
    let normal = (magnitude << 13) + ((127 - 15) << 23);
    let denormal = (magnitude as f32 * (1.0 / (1u32 << 24) as f32)).to_bits();
    let special = (magnitude << 13) | 0x7f80_0000;
    let value = match magnitude {
        0..0x0400 => denormal,
        0x0400..0x7c00 => normal,
        _ => special,
    };
    f32::from_bits(sign | value)
}
