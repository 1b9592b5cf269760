//! The naive oracle: plain loops in f64 over rows and tokens, for tests and for CPUs without an engine of ours.

mod vectors;

use half::{bf16, f16};

use super::Engine;
use crate::pack::{PANEL, Panels, Q8_PANEL_BLOCK, panel_bytes};
use crate::tensor::{DType, Q8_0_BYTES, QK8_0, Rows};

/// An engine of plain loops: each sum in f64, then rounded to f32. It runs on any x86-64 CPU and is far too slow for use.
#[derive(Clone, Copy, Debug)]
pub struct Reference;

impl Engine for Reference {
    type Session = ();
    type Vectors = Self;

    fn vectors(self) -> Self {
        self
    }

    fn begin(self) {}

    // SAFETY: contract of `Engine::product`.
    unsafe fn product(self, (): &mut (), rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
        for p in 0..panels.count() {
            for i in 0..rows.n {
                for lane in 0..PANEL {
                    let term = |k| {
                        // SAFETY: row, panel and k lie inside the views.
                        let (w, x) = unsafe {
                            (element(rows.dtype, rows.row(i), k), panel_element(panels.dtype, panels.panel(p), k, lane))
                        };
                        f64::from(w) * f64::from(x)
                    };
                    let sum: f64 = (0..rows.k).map(term).sum();
                    // SAFETY: the caller's C block.
                    let c = unsafe { &mut *c.add((p * rows.n + i) * PANEL + lane) };
                    *c = if add { (f64::from(*c) + sum) as f32 } else { sum as f32 };
                }
            }
        }
    }
}

/// Packs one panel, plainly: the oracle of [`crate::pack`]'s panels. `xs` are up to 16 tokens of `k` values.
///
/// # Panics
/// If there are too many tokens, or `panel` is shorter than [`crate::pack::panel_bytes`].
pub fn pack_panel(dtype: DType, k: usize, xs: &[&[f32]], panel: &mut [u8]) {
    assert!(xs.len() <= PANEL);
    panel[..panel_bytes(dtype, k)].fill(0);
    for (lane, x) in xs.iter().enumerate() {
        if dtype != DType::Q8_0 {
            for (i, &v) in x[..k].iter().enumerate() {
                let at = i / 2 * 64 + lane * 4 + i % 2 * 2;
                panel[at..at + 2].copy_from_slice(&bf16::from_f32(v).to_le_bytes());
            }
            continue;
        }
        for (block, x) in panel.chunks_mut(Q8_PANEL_BLOCK).zip(x[..k].as_chunks().0) {
            let (scale, quants) = quantize_q8_0(x);
            let (values, rest) = block.split_at_mut(QK8_0 * PANEL);
            quants.iter().enumerate().for_each(|(i, &q)| values[i / 4 * 64 + lane * 4 + i % 4] = q as u8);
            let sum: i32 = quants.iter().map(|&q| i32::from(q)).sum();
            rest[lane * 4..][..4].copy_from_slice(&scale.to_le_bytes());
            rest[64 + lane * 4..][..4].copy_from_slice(&(-128 * sum).to_le_bytes());
        }
    }
}

/// Element `k` of token `lane` of a panel for weights of `dtype` (see [`crate::pack`]).
///
/// # Safety
/// `panel` is a readable panel of more than `k` columns; `lane` is below [`PANEL`].
// SAFETY: contract above.
pub unsafe fn panel_element(dtype: DType, panel: *const u8, k: usize, lane: usize) -> f32 {
    // SAFETY: inside the panel, by the contract.
    unsafe {
        match dtype {
            DType::Q8_0 => {
                let block = panel.add(k / QK8_0 * Q8_PANEL_BLOCK);
                let scale = block.add(QK8_0 * PANEL + lane * 4).cast::<f32>().read();
                scale * f32::from(block.add(k % QK8_0 / 4 * 64 + lane * 4 + k % 4).cast::<i8>().read())
            }
            _ => panel.add(k / 2 * 64 + lane * 4 + k % 2 * 2).cast::<bf16>().read().to_f32(),
        }
    }
}

/// Element `i` of a row of `dtype` at `row`, exactly.
///
/// # Safety
/// The row has more than `i` elements and is readable.
// SAFETY: contract above.
pub unsafe fn element(dtype: DType, row: *const u8, i: usize) -> f32 {
    // SAFETY: element `i` of a row is inside it; reads are unaligned.
    unsafe {
        match dtype {
            DType::F32 => row.cast::<f32>().add(i).read_unaligned(),
            DType::F16 => row.cast::<f16>().add(i).read_unaligned().to_f32(),
            DType::Bf16 => row.cast::<bf16>().add(i).read_unaligned().to_f32(),
            DType::Q8_0 => {
                let block = row.add(i / QK8_0 * Q8_0_BYTES);
                let scale = block.cast::<f16>().read_unaligned().to_f32();
                scale * f32::from(block.add(2 + i % QK8_0).cast::<i8>().read())
            }
        }
    }
}

/// The scale (rounded to f16) and quants of one block of 32 activations, as ggml's `quantize_row_q8_0` makes them on
/// x86.
///
/// Quants are within 127, and 0 where ggml's conversion to an integer overflows: of NaN, in a block with Inf, and where
/// `127 / max` is too large for f32, but then the scale is 0.
pub fn quantize_q8_0(x: &[f32; QK8_0]) -> (f32, [i8; QK8_0]) {
    let max = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let inverse = if (127.0 / max).is_finite() { 127.0 / max } else { 0.0 };
    (f16::from_f32(max / 127.0).to_f32(), x.map(|v| (v * inverse).round_ties_even() as i8))
}

/// An activation row as the products see it: rounded to BF16, or quantised per 32 and scaled back.
pub fn rounded_activations(dtype: DType, x: &[f32]) -> Vec<f32> {
    match dtype {
        DType::Q8_0 => {
            let blocks = x.as_chunks::<QK8_0>().0;
            blocks.iter().map(quantize_q8_0).flat_map(|(s, q)| q.map(|q| s * f32::from(q))).collect()
        }
        _ => x.iter().map(|&v| bf16::from_f32(v).to_f32()).collect(),
    }
}

/// `y[row] = w[row] . x` in f64, with `x` rounded as the engines round it: what a product must come close to.
pub fn matvec(rows: Rows<'_>, x: &[f32]) -> Vec<f64> {
    matvec_by(rows.dtype, rows, x)
}

/// The same where tokens are packed as `panels`: BF16 for Q8_0 weights makes those BF16 too.
pub fn matvec_by(panels: DType, rows: Rows<'_>, x: &[f32]) -> Vec<f64> {
    let x = rounded_activations(panels, x);
    let dot = |i: usize| {
        let weight = |k: usize| {
            // SAFETY: `k` elements a row, by the contract of `Rows`.
            unsafe {
                match (rows.dtype, panels) {
                    (DType::Q8_0, DType::Bf16) => {
                        let block = rows.row(i).add(k / QK8_0 * Q8_0_BYTES);
                        let scale = block.cast::<f16>().read_unaligned().to_f32();
                        widened(scale, block.add(2 + k % QK8_0).cast::<i8>().read())
                    }
                    _ => element(rows.dtype, rows.row(i), k),
                }
            }
        };
        x.iter().enumerate().map(|(k, &x)| f64::from(weight(k)) * f64::from(x)).sum()
    };
    (0..rows.n).map(dot).collect()
}

/// A Q8_0 weight as BF16: the upper half of the f32 that is 0.72 / 256 larger, which is on average what that half lacks. The scale that
/// makes it so has 15 bits.
pub fn widened(scale: f32, quant: i8) -> f32 {
    let upper = |v: f32, bits: u32| f32::from_bits(v.to_bits() & (!0 << bits));
    upper(upper(scale * (1.0 + 0.72 / 256.0), 9) * f32::from(quant), 16)
}

/// `sum over k of |w[row][k]| * |x[k]|`: what the rounding errors of a product are measured against.
pub fn magnitudes(rows: Rows<'_>, x: &[f32]) -> Vec<f64> {
    let x = rounded_activations(rows.dtype, x);
    let sum = |i: usize| {
        let row = rows.row(i);
        // SAFETY: `k` elements a row, by the contract of `Rows`.
        x.iter().enumerate().map(|(j, &x)| unsafe { f64::from(element(rows.dtype, row, j)) * f64::from(x) }.abs()).sum()
    };
    (0..rows.n).map(sum).collect()
}

/// Normalised mean squared error of `got` against `want`, as ggml's `test-backend-ops` has it.
pub fn nmse(got: &[f32], want: &[f64]) -> f64 {
    nmse_against(got, want, want)
}

/// As [`nmse`], normalised by other numbers: the [`magnitudes`], where the terms of a few sums may cancel.
pub fn nmse_against(got: &[f32], want: &[f64], norm: &[f64]) -> f64 {
    let err: f64 = got.iter().zip(want).map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
    let power: f64 = norm.iter().map(|w| w * w).sum();
    if err == 0.0 { 0.0 } else { err / power }
}
