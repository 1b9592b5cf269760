//! The naive oracle: plain loops in f64 over rows and tokens, for tests and for CPUs without an engine of ours.

use half::{bf16, f16};

use crate::tensor::{DType, Q8_0_BYTES, QK8_0, Rows};

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

/// The scale (rounded to f16) and quants of one block of 32 activations, as ggml's `quantize_row_q8_0` makes them.
pub fn quantize_q8_0(x: &[f32; QK8_0]) -> (f32, [i8; QK8_0]) {
    let max = x.iter().fold(0f32, |m, v| m.max(v.abs()));
    let scale = max / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    (f16::from_f32(scale).to_f32(), x.map(|v| (v * inverse).round() as i8))
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
    let x = rounded_activations(rows.dtype, x);
    let dot = |i: usize| {
        let row = rows.row(i);
        // SAFETY: `k` elements a row, by the contract of `Rows`.
        x.iter().enumerate().map(|(j, &x)| unsafe { f64::from(element(rows.dtype, row, j)) } * f64::from(x)).sum()
    };
    (0..rows.n).map(dot).collect()
}

/// Normalised mean squared error of `got` against `want`, as ggml's `test-backend-ops` has it.
pub fn nmse(got: &[f32], want: &[f64]) -> f64 {
    let err: f64 = got.iter().zip(want).map(|(&g, w)| (f64::from(g) - w).powi(2)).sum();
    let power: f64 = want.iter().map(|w| w * w).sum();
    if err == 0.0 { 0.0 } else { err / power }
}
