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

use crate::level::multiversion;
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
    multiversion!(fused::<BF16>(c: &mut Tile, a: &Tile, b: &Tile, size: Product), base: exact::<BF16>(c, a, b, size));
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
fn fused<const BF16: bool>(c: &mut Tile, a: &Tile, b: &Tile, size: Product) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn tile(dwords: Vec<u32>) -> Tile {
        let mut t = Tile([[0; 64]; 16]);
        for (i, d) in dwords.iter().enumerate() {
            t.set_dword(i / 16, i % 16, d.to_le_bytes());
        }
        t
    }

    /// Two halves whose exponents lie so that products and sums fall around 2^-126, or any bits.
    fn halves() -> impl Strategy<Value = u32> {
        let edge =
            (any::<u32>(), 50u32..68, 50u32..68).prop_map(|(bits, e, o)| (bits & 0x807f_807f) | e << 7 | o << 23);
        prop_oneof![9 => edge, 1 => any::<u32>()]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]

        /// The way by FMA and the way by f64 give the same bits.
        #[test]
        fn both_ways_agree(
            c in vec(any::<u32>(), 256), a in vec(halves(), 256), b in vec(halves(), 256),
            m in 1usize..=16, k in 1usize..=16,
        ) {
            let (c, a, b, size) = (tile(c), tile(a), tile(b), Product { m, n: 16, k });
            type Way = fn(&mut Tile, &Tile, &Tile, Product);
            let ways: [(Way, Way); 2] = [(bf16, exact::<true>), (fp16, exact::<false>)];
            for (fast, slow) in ways {
                let (mut by_level, mut by_f64) = (c, c);
                fast(&mut by_level, &a, &b, size);
                slow(&mut by_f64, &a, &b, size);
                for r in 0..16 {
                    for i in 0..16 {
                        let [x, y] = [by_level.dword(r, i), by_f64.dword(r, i)].map(f32::from_le_bytes);
                        prop_assert!(x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan(), "{x} {y} at {r},{i}");
                    }
                }
            }
        }
    }
}
