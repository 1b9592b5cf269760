//! Weights as they lie: four of a row are made ready and spread over the lanes by one instruction, for all panels of a pass.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, panel and token")]

use std::arch::x86_64::*;
use std::sync::atomic::{Ordering, compiler_fence};

use crate::kernels::passes::{PanelPass, Sweep, panels_by_passes};
use crate::pack::Q8_PANEL_BLOCK;
use crate::tensor::{Q8_0_BYTES, QK8_0};

panels_by_passes!(
    /// The panel form (see [`super::super::super::Engine::product`]).
    in_place, "avx512f,avx512bw,avx512vl,avx512vnni,f16c", 8, [8], 6, 2, [1 2]
);

/// The scales of a block of up to 8 rows, as they are and as f32.
#[derive(Clone, Copy)]
#[repr(C, align(32))]
struct Scales {
    f32: [f32; 8],
    f16: [u16; 8],
}

/// A group of `R` rows (at most 8) times `P` panels: R x P sums in registers, of integers within a block and of f32 over all.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
// SAFETY: as `in_place`.
unsafe fn pass<const R: usize, const P: usize>(pass: PanelPass<'_>) {
    let PanelPass { ref rows, group, x, x_stride, add, .. } = pass;
    let (blocks, w): (usize, [*const u8; R]) = (rows.k / QK8_0, pass.rows());
    let mut scales = [Scales { f32: [0.0; 8], f16: [0; 8] }; 2];
    // Known to nobody, so that the fences below keep the compiler from loading all of a block at once and spilling it.
    let scales: *mut Scales = std::hint::black_box(scales.as_mut_ptr());
    // SAFETY: block b of row r; one of the two.
    let note = |to: *mut Scales, r: usize, b: usize| unsafe {
        (*to).f16[r] = w[r].add(b * Q8_0_BYTES).cast::<u16>().read_unaligned();
    };
    let mut acc = [[_mm512_setzero_ps(); P]; R];
    if add {
        for r in 0..R {
            for p in 0..P {
                // SAFETY: sums of the pass.
                acc[r][p] = unsafe { _mm512_load_ps(pass.c(r, p)) };
            }
        }
    }
    let mut ahead = Sweep::new(rows, group, Q8_0_BYTES);
    (0..R).filter(|_| blocks > 0).for_each(|r| note(scales, r, 0));
    for b in 0..blocks {
        let (now, next) = (scales.wrapping_add(b % 2), scales.wrapping_add((b + 1) % 2));
        // SAFETY: block b of the panels and rows.
        unsafe {
            let x: [*const u8; P] = std::array::from_fn(|p| x.add(p * x_stride + b * Q8_PANEL_BLOCK));
            // The halves were stored a block ago: long enough for a load of all of them at once.
            let f32s = _mm256_cvtph_ps(_mm_load_si128((&raw const (*now).f16).cast()));
            _mm256_store_ps((&raw mut (*now).f32).cast(), f32s);
            let start: [__m512i; P] = std::array::from_fn(|p| _mm512_load_si512(x[p].add(9 * 64).cast()));
            let mut sum = [start; R];
            for g in 0..8 {
                compiler_fence(Ordering::SeqCst);
                ahead.line(g);
                if b + 1 < blocks {
                    (g * R / 8..(g + 1) * R / 8).for_each(|r| note(next, r, b + 1));
                }
                let v: [__m512i; P] = std::array::from_fn(|p| _mm512_load_si512(x[p].add(g * 64).cast()));
                for r in 0..R {
                    let four = w[r].add(b * Q8_0_BYTES + 2 + g * 4).cast::<i32>().read_unaligned();
                    let w = _mm512_xor_si512(_mm512_set1_epi8(-128), _mm512_set1_epi32(four));
                    for p in 0..P {
                        sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], w, v[p]);
                    }
                }
            }
            ahead.advance();
            let scale: [__m512; P] = std::array::from_fn(|p| _mm512_load_ps(x[p].add(8 * 64).cast()));
            for r in 0..R {
                let w = _mm512_set1_ps((*now).f32[r]);
                for p in 0..P {
                    acc[r][p] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][p]), _mm512_mul_ps(scale[p], w), acc[r][p]);
                }
            }
        }
    }
    for r in 0..R {
        for p in 0..P {
            // SAFETY: as above.
            unsafe { _mm512_store_ps(pass.c(r, p), acc[r][p]) };
        }
    }
}
