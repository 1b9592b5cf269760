//! What surrounds the products, plainly: the oracle of the vector instruction sets.

use half::bf16;

use super::{Reference, element, pack_panel, quantize_q8_0};
use crate::isa::Bf16Form;
use crate::kernels::glu::Glu;
use crate::kernels::vectors::{Finish, Vectors};
use crate::pack::{PANEL, Q8_PANEL_BLOCK, Q8_ROW_BLOCK, TokenRows, panel_bytes};
use crate::tensor::{DType, QK8_0, Rows};

impl Vectors for Reference {
    fn bf16_form(self) -> Bf16Form {
        Bf16Form::Fma
    }

    // SAFETY: contract of `Vectors::panel`.
    unsafe fn panel(self, dtype: DType, k: usize, tokens: &[*const f32], panel: *mut u8) {
        // SAFETY: the caller's promise.
        unsafe {
            let xs: Vec<_> = tokens.iter().map(|&x| floats(x, k)).collect();
            let xs: Vec<_> = xs.iter().map(Vec::as_slice).collect();
            pack_panel(dtype, k, &xs, std::slice::from_raw_parts_mut(panel, panel_bytes(dtype, k)));
        }
    }

    // SAFETY: contract of `Vectors::token_row`.
    unsafe fn token_row(self, dtype: DType, k: usize, x: *const f32, first: usize, n: usize, row: *mut u8) {
        let last = first + n == k;
        let unit = if dtype == DType::Q8_0 { 64 } else { 32 };
        // SAFETY: the caller's promise; zeros after the last element fill its unit.
        unsafe {
            let mut x = floats(x, n);
            x.resize(if last { k.next_multiple_of(unit) - first } else { n }, 0.0);
            for (i, x) in x.as_chunks::<QK8_0>().0.iter().enumerate() {
                let at = first + i * QK8_0;
                if dtype != DType::Q8_0 {
                    for (j, v) in x.iter().enumerate() {
                        let to = row.add((at + j / 2 + j % 2 * 16) * 4);
                        to.cast::<f32>().write(bf16::from_f32(*v).to_f32());
                    }
                    continue;
                }
                let (scale, quants) = quantize_q8_0(x);
                let half = row.add(at / 64 * Q8_ROW_BLOCK + at % 64);
                half.cast::<[i8; QK8_0]>().write(quants);
                let starts: [i32; 8] =
                    std::array::from_fn(|j| -128 * quants[j * 4..][..4].iter().map(|&q| i32::from(q)).sum::<i32>());
                half.add(64).cast::<[i32; 8]>().write(starts);
                half.add(128).cast::<[f32; 8]>().write([scale; 8]);
            }
        }
    }

    // SAFETY: contract of `Vectors::dots`.
    unsafe fn dots(self, rows: Rows<'_>, xs: TokenRows<'_>, y: *mut f32, ld: usize) {
        for t in 0..xs.tokens {
            let x = xs.row(t);
            for i in 0..rows.n {
                // SAFETY: element k of the row and of the token; the caller's y.
                unsafe {
                    let term = |k| {
                        f64::from(element(rows.dtype, rows.row(i), k))
                            * f64::from(row_element(rows.dtype, x, xs.skip + k))
                    };
                    *y.add(t * ld + i) = (0..rows.k).map(term).sum::<f64>() as f32;
                }
            }
        }
    }

    // SAFETY: contract of `Vectors::lanes_to_panel`.
    unsafe fn lanes_to_panel(self, dtype: DType, h: *const f32, n: usize, panel: *mut u8, first: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let lane = |l: usize| (0..n).map(|i| *h.add(i * PANEL + l)).collect::<Vec<_>>();
            let xs: Vec<_> = (0..PANEL).map(lane).collect();
            let xs: Vec<_> = xs.iter().map(Vec::as_slice).collect();
            let at = if dtype == DType::Q8_0 { first / QK8_0 * Q8_PANEL_BLOCK } else { first * 2 * PANEL };
            pack_panel(dtype, n, &xs, std::slice::from_raw_parts_mut(panel.add(at), panel_bytes(dtype, n)));
        }
    }

    // SAFETY: contract of `Vectors::finish_lanes`.
    unsafe fn finish_lanes(self, finish: Finish, c: *const f32, n: usize, rows: &[*mut f32], weights: &[f32; PANEL]) {
        for (t, (&row, &weight)) in rows.iter().zip(weights).enumerate() {
            // SAFETY: lane t of n vectors; the caller's promise.
            unsafe {
                let lane: Vec<f32> = (0..n).map(|i| *c.add(i * PANEL + t)).collect();
                self.finish_row(finish, lane.as_ptr(), n, row, weight);
            }
        }
    }

    // SAFETY: contract of `Vectors::finish_row`.
    unsafe fn finish_row(self, finish: Finish, c: *const f32, n: usize, row: *mut f32, weight: f32) {
        for i in 0..n {
            // SAFETY: element i of each.
            unsafe {
                // -0.0, because 0.0 added to -0.0 makes another zero of it.
                let bias = if finish.bias.is_null() { -0.0 } else { finish.bias.add(i).read_unaligned() };
                let (v, to) = (c.add(i).read_unaligned() + bias, row.add(i));
                to.write_unaligned(if finish.add { weight.mul_add(v, to.read_unaligned()) } else { weight * v });
            }
        }
    }

    // SAFETY: contract of `Vectors::glu_lanes`.
    unsafe fn glu_lanes(self, glu: Glu, gate: *mut f32, up: *const f32, n: usize, bias: [*const f32; 2]) {
        for i in 0..n * PANEL {
            // SAFETY: value i of the block, row i / 16's biases.
            unsafe { unit(glu, gate.add(i), up.add(i), bias, i / PANEL) };
        }
    }

    // SAFETY: contract of `Vectors::glu_row`.
    unsafe fn glu_row(self, glu: Glu, gate: *mut f32, up: *const f32, n: usize, bias: [*const f32; 2]) {
        for i in 0..n {
            // SAFETY: value i of the row.
            unsafe { unit(glu, gate.add(i), up.add(i), bias, i) };
        }
    }
}

/// One gated unit, with the biases of `row`.
// SAFETY: contract: the addresses are readable, the gate's writable.
unsafe fn unit(glu: Glu, gate: *mut f32, up: *const f32, bias: [*const f32; 2], row: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let [g, u] = bias.map(|b| if b.is_null() { 0.0 } else { b.add(row).read_unaligned() });
        gate.write_unaligned(glu.of(gate.read_unaligned() + g, up.read_unaligned() + u) as f32);
    }
}

/// `n` f32 at any alignment.
// SAFETY: contract: they are readable.
unsafe fn floats(x: *const f32, n: usize) -> Vec<f32> {
    // SAFETY: the caller's promise.
    (0..n).map(|i| unsafe { x.add(i).read_unaligned() }).collect()
}

/// Element `k` of a token row that [`Reference`] packed.
// SAFETY: contract: it is inside the row.
unsafe fn row_element(dtype: DType, row: *const u8, k: usize) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        if dtype == DType::Q8_0 {
            let half = row.add(k / 64 * Q8_ROW_BLOCK + k % 64 / QK8_0 * QK8_0);
            return half.add(128).cast::<f32>().read() * f32::from(half.add(k % QK8_0).cast::<i8>().read());
        }
        row.add((k / 32 * 32 + k % 32 / 2 + k % 2 * 16) * 4).cast::<f32>().read()
    }
}
