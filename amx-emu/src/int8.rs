//! The products of bytes: `TDPBSSD`, `TDPBSUD`, `TDPBUSD`, `TDPBUUD`.

#![allow(clippy::needless_range_loop)] // lanes of several vectors side by side, by number

use crate::level::multiversion;
use crate::tiles::{MAX_ROWS, Product, Tile};

/// `C[m][n] += sum over 4 of A[m][k][4] * B[k][n][4]`, wrapping at 32 bits. `SA`, `SB`: the bytes are signed.
pub(crate) fn dot<const SA: bool, const SB: bool>(c: &mut Tile, a: &Tile, b: &Tile, size: Product) {
    multiversion!(body::<SA, SB>(c: &mut Tile, a: &Tile, b: &Tile, size: Product), base: body::<SA, SB>(c, a, b, size));
}

#[inline(always)]
fn body<const SA: bool, const SB: bool>(c: &mut Tile, a: &Tile, b: &Tile, size: Product) {
    // The same byte of 16 groups side by side, so that the loop over n is one vector.
    let mut planes = [[[0i16; 16]; 4]; MAX_ROWS];
    for (k, plane) in planes.iter_mut().enumerate().take(size.k) {
        for n in 0..16 {
            let group = b.dword(k, n);
            for i in 0..4 {
                plane[i][n] = widen::<SB>(group[i]) as i16;
            }
        }
    }
    for m in 0..size.m {
        let mut acc = [0i32; 16];
        for (n, lane) in acc.iter_mut().enumerate() {
            *lane = i32::from_le_bytes(c.dword(m, n));
        }
        for (k, plane) in planes.iter().enumerate().take(size.k) {
            let group = a.dword(m, k).map(widen::<SA>);
            for n in 0..16 {
                let sum = group[0] * i32::from(plane[0][n])
                    + group[1] * i32::from(plane[1][n])
                    + group[2] * i32::from(plane[2][n])
                    + group[3] * i32::from(plane[3][n]);
                acc[n] = acc[n].wrapping_add(sum);
            }
        }
        for (n, lane) in acc.iter().enumerate() {
            c.set_dword(m, n, lane.to_le_bytes());
        }
    }
}

#[inline(always)]
fn widen<const SIGNED: bool>(byte: u8) -> i32 {
    if SIGNED { i32::from(byte as i8) } else { i32::from(byte) }
}
