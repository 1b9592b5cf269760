//! The two products against f64, on the CPU's AMX or the emulator's. Operands end where memory ends.

use super::*;
use crate::kernels::attention::pack;
use crate::kernels::reference::element;
use crate::testing::{Aligned, Guarded, Random, amx_kinds};
use form::Form;
use half::{bf16, f16};

/// `n` rows of `d` random values of a type, in memory that ends with them.
fn cache(dtype: DType, n: usize, d: usize, random: &mut Random) -> Guarded {
    let half = |bits: &mut dyn FnMut() -> u16| (0..n * d).flat_map(|_| bits().to_le_bytes()).collect::<Vec<_>>();
    Guarded::new(&match dtype {
        DType::F16 => half(&mut || f16::from_f32(random.f32()).to_bits()),
        DType::Bf16 => half(&mut || bf16::from_f32(random.f32()).to_bits()),
        _ => random.weights(dtype, n * d),
    })
}

fn source(dtype: DType, data: &[u8], n: usize, d: usize, closed: u64) -> Source {
    Source { dtype, data: data.as_ptr(), stride: dtype.row_bytes(d), rows: n, d, closed }
}

/// Element `i` of row `row`.
fn value(s: Source, row: usize, i: usize) -> f64 {
    // SAFETY: inside the cache.
    f64::from(unsafe { element(s.dtype, s.data.add(row * s.stride), i) })
}

fn room(d: usize, dv: usize) -> Room {
    Room { lanes: LANES, queries: LANES, d, dv }
}

const TYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::Q8_0];

/// Positions, elements, and which positions are closed.
const SHAPES: [(usize, usize, u64); 6] =
    [(64, 128, 0), (64, 64, 0x8000_0001_0000_0002), (1, 32, 0), (33, 96, 1 << 32), (17, 40, 0), (50, 65, 0xffff)];

/// Kinds of AMX and lanes of a panel.
fn ways() -> Vec<(Amx, usize)> {
    amx_kinds().into_iter().flat_map(|amx| [TWIN, LANES].map(|lanes| (amx, lanes))).collect()
}

#[test]
fn scores_are_f32s() {
    for (amx, lanes) in ways() {
        let random = &mut Random(11);
        for (dtype, (n, d, closed)) in TYPES.into_iter().flat_map(|t| SHAPES.map(|s| (t, s))) {
            check_scores(amx, lanes, dtype, [n, d.next_multiple_of(dtype.block())], closed, random);
        }
    }
}

fn check_scores(amx: Amx, lanes: usize, dtype: DType, [n, d]: [usize; 2], closed: u64, random: &mut Random) {
    let (k, mut q) = (cache(dtype, n, d, random), random.vec(lanes * d));
    // Queries of any size, and one of zeros.
    for (row, q) in q.chunks_mut(d).enumerate() {
        q.iter_mut().for_each(|x| *x *= [1.0, 1e-20, 3e6, 0.0][row % 4]);
    }
    let k = source(dtype, &k, n, d, closed);
    let panel = Aligned::new(LANES * d.next_multiple_of(LANES) * 4);
    let scratch = Aligned::new(4 * TileAttention::scratch_len(room(d, d)));
    let s = Aligned::new(BLOCK * LANES * 4);
    // SAFETY: every area has the size that its layout asks for.
    let finite = unsafe {
        pack(q.chunks(d).map(<[f32]>::as_ptr), LANES, d, 0.5, panel.ptr().cast());
        let mut tiles = TileAttention::new(amx, [dtype; 2], false, room(d, d), scratch.ptr().cast());
        tiles.pack(0, lanes, panel.ptr().cast());
        tiles.block(k);
        tiles.scores(0, lanes, s.ptr().cast(), &mut { Ahead::NOTHING });
        tiles.settle_scores(0, lanes, s.ptr().cast())
    };
    assert!(finite);
    let bits = if matches!(Form::of(amx, dtype), Form::F16(_)) { 20 } else { 16 };
    for (p, row) in (0..n).flat_map(|p| (0..lanes).map(move |row| (p, row))) {
        let products: Vec<f64> = (0..d).map(|i| f64::from(0.5 * q[row * d + i]) * value(k, p, i)).collect();
        let want: f64 = if closed >> p & 1 == 1 { 0.0 } else { products.iter().sum() };
        let most = products.iter().map(|x| x.abs()).sum::<f64>() / f64::from(1 << bits);
        let got = f64::from(s.f32()[p * lanes + row]);
        assert!(
            (got - want).abs() <= most,
            "{amx:?} {lanes} {dtype:?} {n} x {d}, position {p} row {row}: {got} {want}"
        );
    }
}

/// Sums of rows over V, of which a shared one comes through K's split rows.
fn check_values(way: (Amx, usize), dtype: DType, [n, d, dv]: [usize; 3], closed: u64, random: &mut Random) {
    let (amx, lanes) = way;
    let bits = if matches!(Form::of(amx, dtype), Form::F16(_)) { 20 } else { 16 };
    let shared = d > 0;
    let width = if shared { d } else { dv };
    let bytes = cache(dtype, n, width, random);
    let k = source(dtype, &bytes, n, width, closed);
    let v = Source { d: dv, ..k };
    let (rows, tiles) = (lanes - 3, dv.div_ceil(LANES));
    let scratch = Aligned::new(4 * TileAttention::scratch_len(room(width, dv)));
    let (p, o) = (Aligned::new(BLOCK * LANES * 4), Aligned::new(LANES * tiles * LANES * 4));
    let weights: Vec<f32> = random.vec(n * lanes).into_iter().map(f32::abs).collect();
    let factors: Vec<f32> = (0..lanes).map(|row| if row % 3 == 0 { 1.0 } else { random.f32() }).collect();
    let rescale: Vec<f32> = (0..LANES).map(|i| factors[i % lanes]).collect();
    // SAFETY: every area has the size that its layout asks for.
    unsafe {
        p.ptr().cast::<f32>().copy_from_nonoverlapping(weights.as_ptr(), weights.len());
        let mut attention = TileAttention::new(amx, [dtype; 2], shared, room(width, dv), scratch.ptr().cast());
        if shared {
            attention.block(k);
        }
        let (p, o) = (p.ptr().cast(), o.ptr().cast());
        attention.weigh(0, lanes, p, n);
        let w = Weights { p, lanes, rows: LANES, n, rescale: rescale.as_ptr(), o, tiles };
        // Twice, so that the second has sums to rescale; once all at once, once in parts.
        attention.take_values(v, 0, tiles, &mut { Ahead::NOTHING });
        attention.values(0, w, 0, tiles);
        for first in (0..tiles).step_by(WIDTH) {
            attention.take_values(v, first, WIDTH.min(tiles - first), &mut { Ahead::NOTHING });
            attention.values(0, w, first, WIDTH.min(tiles - first));
        }
        attention.settle(lanes, o, tiles);
    }
    for (row, i) in (0..rows).flat_map(|row| (0..dv).map(move |i| (row, i))) {
        let open = (0..n).filter(|p| closed >> p & 1 == 0);
        let products: Vec<f64> = open.map(|p| f64::from(weights[p * lanes + row]) * value(v, p, i)).collect();
        let at = row * tiles * LANES + i;
        let want = products.iter().sum::<f64>() * (1.0 + f64::from(factors[row]));
        let most = (2.0 * products.iter().map(|x| x.abs()).sum::<f64>() + 1.0) / f64::from(1 << bits);
        let got = f64::from(o.f32()[at]);
        assert!((got - want).abs() <= most, "{way:?} {dtype:?} {n} x {dv}, row {row} element {i}: {got} {want}");
    }
}

#[test]
fn sums_are_f32s() {
    for way in ways() {
        let random = &mut Random(12);
        for (dtype, (n, dv, closed)) in TYPES.into_iter().flat_map(|t| SHAPES.map(|s| (t, s))) {
            check_values(way, dtype, [n, 0, dv.next_multiple_of(dtype.block())], closed, random);
        }
    }
}

#[test]
fn sums_of_a_v_inside_k_are_f32s() {
    for way in ways() {
        let random = &mut Random(13);
        for (dtype, (n, dv, closed)) in TYPES.into_iter().flat_map(|t| SHAPES.map(|s| (t, s))) {
            let dv = dv.next_multiple_of(dtype.block());
            check_values(way, dtype, [n, (dv + 20).next_multiple_of(dtype.block()), dv], closed, random);
        }
    }
}

#[test]
fn a_score_that_is_not_finite_is_told() {
    let (n, d) = (64, 64);
    let types = [(DType::F16, [0x00, 0x7c]), (DType::Bf16, [0x80, 0x7f])];
    for ((amx, lanes), (dtype, infinity)) in ways().into_iter().flat_map(|way| types.map(|t| (way, t))) {
        let mut bytes = cache(dtype, n, d, &mut Random(16)).to_vec();
        bytes[(20 * d + 5) * 2..][..2].copy_from_slice(&infinity);
        let k = source(dtype, &bytes, n, d, 0);
        let (panel, s) = (Aligned::new(LANES * d * 4), Aligned::new(BLOCK * LANES * 4));
        let scratch = Aligned::new(4 * TileAttention::scratch_len(room(d, d)));
        // SAFETY: every area has the size that its layout asks for.
        unsafe {
            let mut tiles = TileAttention::new(amx, [dtype; 2], false, room(d, d), scratch.ptr().cast());
            tiles.pack(0, lanes, panel.ptr().cast());
            tiles.block(k);
            tiles.scores(0, lanes, s.ptr().cast(), &mut { Ahead::NOTHING });
            assert!(!tiles.settle_scores(0, lanes, s.ptr().cast()), "{lanes} {dtype:?}");
        }
    }
}
