//! The two products against f64, on the CPU's AMX or the emulator's. Operands end where memory ends.

use super::*;
use crate::kernels::attention::pack;
use crate::kernels::reference::element;
use crate::testing::{Aligned, Guarded, Random, amx};
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

const TYPES: [DType; 3] = [DType::F16, DType::Bf16, DType::Q8_0];

/// Positions, elements, and which positions are closed.
const SHAPES: [(usize, usize, u64); 6] =
    [(64, 128, 0), (64, 64, 0x8000_0001_0000_0002), (1, 32, 0), (33, 96, 1 << 32), (17, 40, 0), (50, 65, 0xffff)];

#[test]
fn scores_are_f32s() {
    let Some(amx) = amx() else { return };
    let random = &mut Random(11);
    for (dtype, (n, d, closed)) in TYPES.into_iter().flat_map(|t| SHAPES.map(|s| (t, s))) {
        let d = d.next_multiple_of(dtype.block());
        let (k, q) = (cache(dtype, n, d, random), random.vec(LANES * d));
        let k = source(dtype, &k, n, d, closed);
        let panel = Aligned::new(LANES * d.next_multiple_of(LANES) * 4);
        let scratch = Aligned::new(4 * TileAttention::scratch_len(LANES, d));
        let s = Aligned::new(BLOCK * LANES * 4);
        // SAFETY: every area has the size that its layout asks for.
        let lost = unsafe {
            pack(q.chunks(d).map(<[f32]>::as_ptr), LANES, d, 0.5, panel.ptr().cast());
            let mut tiles = TileAttention::new(amx, dtype, d, false, LANES, scratch.ptr().cast());
            tiles.pack(0, panel.ptr().cast());
            tiles.block(k);
            tiles.scores(0, s.ptr().cast(), &mut { Ahead::NOTHING })
        };
        assert_eq!(lost, 0);
        for (p, row) in (0..n).flat_map(|p| (0..LANES).map(move |row| (p, row))) {
            let products: Vec<f64> = (0..d).map(|i| f64::from(0.5 * q[row * d + i]) * value(k, p, i)).collect();
            let want: f64 = if closed >> p & 1 == 1 { 0.0 } else { products.iter().sum() };
            let most = products.iter().map(|x| x.abs()).sum::<f64>() / f64::from(1 << 16);
            let got = f64::from(s.f32()[p * LANES + row]);
            assert!((got - want).abs() <= most, "{dtype:?} {n} x {d}, position {p} row {row}: {got} {want}");
        }
    }
}

/// Sums of `rows` rows over V, of which a shared one comes through K's split rows.
fn check_values(dtype: DType, [n, d, dv]: [usize; 3], closed: u64, infinite: bool, random: &mut Random) {
    let Some(amx) = amx() else { return };
    let shared = d > 0;
    let width = if shared { d } else { dv };
    let mut bytes = cache(dtype, n, width, random).to_vec();
    if infinite {
        bytes[..2].copy_from_slice(&if dtype == DType::F16 { [0x00, 0x7c] } else { [0x80, 0x7f] });
    }
    let bytes = Guarded::new(&bytes);
    let k = source(dtype, &bytes, n, width, closed);
    let v = Source { d: dv, ..k };
    let (rows, tiles) = (13, dv.div_ceil(LANES));
    let scratch = Aligned::new(4 * TileAttention::scratch_len(LANES, width));
    let (p, o) = (Aligned::new(BLOCK * LANES * 4), Aligned::new(LANES * tiles * LANES * 4));
    let (weights, before) = (random.vec(n * LANES), random.vec(LANES * tiles * LANES));
    let rescale: Vec<f32> = (0..LANES).map(|row| if row % 3 == 0 { 1.0 } else { random.f32() }).collect();
    // SAFETY: every area has the size that its layout asks for.
    unsafe {
        p.ptr().cast::<f32>().copy_from_nonoverlapping(weights.as_ptr(), weights.len());
        o.ptr().cast::<f32>().copy_from_nonoverlapping(before.as_ptr(), before.len());
        let mut attention = TileAttention::new(amx, dtype, width, shared, LANES, scratch.ptr().cast());
        if shared {
            attention.block(k);
        }
        attention.weigh(0, p.ptr().cast(), n);
        let (p, o) = (p.ptr().cast(), o.ptr().cast());
        let w = Weights { p, lanes: LANES, rows, n, rescale: rescale.as_ptr(), o, tiles };
        attention.values(v, std::iter::once((0, w)), &mut { Ahead::NOTHING });
    }
    for (row, i) in (0..rows).flat_map(|row| (0..dv).map(move |i| (row, i))) {
        let open = (0..n).filter(|p| closed >> p & 1 == 0);
        let products: Vec<f64> = open.map(|p| f64::from(weights[p * LANES + row]) * value(v, p, i)).collect();
        let at = row * tiles * LANES + i;
        let want = f64::from(before[at] * rescale[row]) + products.iter().sum::<f64>();
        let most = (products.iter().map(|x| x.abs()).sum::<f64>() + 1.0) / f64::from(1 << 16);
        let got = f64::from(o.f32()[at]);
        assert!(got == want || (got - want).abs() <= most, "{dtype:?} {n} x {dv}, row {row} element {i}: {got} {want}");
        assert_eq!(got.is_infinite(), infinite && i == 0);
    }
}

#[test]
fn sums_are_f32s() {
    let random = &mut Random(12);
    for (dtype, (n, dv, closed)) in TYPES.into_iter().flat_map(|t| SHAPES.map(|s| (t, s))) {
        check_values(dtype, [n, 0, dv.next_multiple_of(dtype.block())], closed, false, random);
    }
}

#[test]
fn sums_of_a_v_inside_k_are_f32s() {
    let random = &mut Random(13);
    for (dtype, (n, dv, closed)) in TYPES.into_iter().flat_map(|t| SHAPES.map(|s| (t, s))) {
        let dv = dv.next_multiple_of(dtype.block());
        check_values(dtype, [n, (dv + 20).next_multiple_of(dtype.block()), dv], closed, false, random);
    }
}

#[test]
fn an_infinity_in_v_is_weighed_as_in_f32() {
    for dtype in [DType::F16, DType::Bf16] {
        check_values(dtype, [40, 0, 80], 0, true, &mut Random(14));
        check_values(dtype, [40, 96, 80], 0, true, &mut Random(15));
    }
}

#[test]
fn a_score_that_is_not_finite_is_told() {
    let Some(amx) = amx() else { return };
    let (n, d) = (64, 64);
    for (dtype, infinity) in [(DType::F16, [0x00, 0x7c]), (DType::Bf16, [0x80, 0x7f])] {
        let mut bytes = cache(dtype, n, d, &mut Random(16)).to_vec();
        bytes[(20 * d + 5) * 2..][..2].copy_from_slice(&infinity);
        let k = source(dtype, &bytes, n, d, 0);
        let (panel, s) = (Aligned::new(LANES * d * 4), Aligned::new(BLOCK * LANES * 4));
        let scratch = Aligned::new(4 * TileAttention::scratch_len(LANES, d));
        // SAFETY: every area has the size that its layout asks for.
        unsafe {
            let mut tiles = TileAttention::new(amx, dtype, d, false, LANES, scratch.ptr().cast());
            tiles.pack(0, panel.ptr().cast());
            tiles.block(k);
            assert_eq!(tiles.scores(0, s.ptr().cast(), &mut { Ahead::NOTHING }), 0b10, "{dtype:?}");
        }
    }
}
