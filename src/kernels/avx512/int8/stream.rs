//! One panel: a pass over the weights as they come from memory.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, panel and token")]

use std::arch::x86_64::*;
use std::sync::atomic::{Ordering, compiler_fence};

use crate::kernels::passes::{Group, Sweep, groups};
use crate::pack::{PANEL, Q8_PANEL_BLOCK};
use crate::tensor::{Q8_0_BYTES, QK8_0, Rows};

/// One panel: reading the weights takes as long as the arithmetic. Rows go by in the order of memory, each group over all k with
/// its sums in registers. While one block of `R` rows is multiplied, the next is loaded and made ready, so that memory does not
/// wait for the arithmetic.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
// SAFETY: as `panels`.
pub unsafe fn streamed<const R: usize>(rows: Rows<'_>, x: *const u8, c: *mut f32, add: bool) {
    for group in groups(&rows, [R, 4, 1]) {
        // SAFETY: the group's rows are below n.
        unsafe {
            match group.n {
                4 => stream::<4>(rows, group, x, c, add),
                1 => stream::<1>(rows, group, x, c, add),
                _ => stream::<R>(rows, group, x, c, add),
            }
        }
    }
}

/// One block of up to 8 rows made ready: `w + 128`, and the scales as they are and as f32.
#[repr(C, align(64))]
struct ReadyBlock {
    w: [[u8; QK8_0]; 8],
    scales: [f32; 8],
    halves: [u16; 8],
}

/// A group of `R` rows of `streamed`; R is at most 8.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
// SAFETY: as `panels`.
unsafe fn stream<const R: usize>(rows: Rows<'_>, group: Group, x: *const u8, c: *mut f32, add: bool) {
    let blocks = rows.k / QK8_0;
    let w: [*const u8; R] = std::array::from_fn(|r| rows.row(group.row(r)));
    let mut ready = [const { ReadyBlock { w: [[0; QK8_0]; 8], scales: [0.0; 8], halves: [0; 8] } }; 2];
    // Known to nobody, so that the fences below keep the compiler from loading all of a block at once and spilling it.
    let ready: *mut ReadyBlock = std::hint::black_box(ready.as_mut_ptr());
    // SAFETY: block b of row r; one of the two.
    let prepare = |to: *mut ReadyBlock, r: usize, b: usize| unsafe {
        let block = w[r].add(b * Q8_0_BYTES);
        (*to).halves[r] = block.cast::<u16>().read_unaligned();
        let quants = _mm256_loadu_si256(block.add(2).cast());
        let ready = _mm256_xor_si256(quants, _mm256_set1_epi8(-128));
        _mm256_store_si256((&raw mut (*to).w[r]).cast(), ready);
    };
    let mut acc = [_mm512_setzero_ps(); R];
    if add {
        for r in 0..R {
            // SAFETY: C row of the group.
            acc[r] = unsafe { _mm512_load_ps(c.add(group.row(r) * PANEL)) };
        }
    }
    let mut ahead = Sweep::new(&rows, group, Q8_0_BYTES);
    (0..R).filter(|_| blocks > 0).for_each(|r| prepare(ready, r, 0));
    for b in 0..blocks {
        let (now, next) = (ready.wrapping_add(b % 2), ready.wrapping_add((b + 1) % 2));
        // SAFETY: block b of the panel; the arrays have room for whole vectors.
        unsafe {
            let x = x.add(b * Q8_PANEL_BLOCK);
            // The halves were stored a block ago: long enough for a load of all of them at once.
            let scales = _mm256_cvtph_ps(_mm_load_si128((&raw const (*now).halves).cast()));
            _mm256_store_ps((&raw mut (*now).scales).cast(), scales);
            let mut sum = [_mm512_load_si512(x.add(9 * 64).cast()); R];
            for g in 0..8 {
                compiler_fence(Ordering::SeqCst);
                ahead.line(g);
                if b + 1 < blocks {
                    (g * R / 8..(g + 1) * R / 8).for_each(|r| prepare(next, r, b + 1));
                }
                let v = _mm512_load_si512(x.add(g * 64).cast());
                for r in 0..R {
                    let w = (&raw const (*now).w[r]).cast::<i32>().add(g).read();
                    sum[r] = _mm512_dpbusd_epi32(sum[r], _mm512_set1_epi32(w), v);
                }
            }
            ahead.advance();
            let scale = _mm512_load_ps(x.add(8 * 64).cast());
            for r in 0..R {
                let both = _mm512_mul_ps(scale, _mm512_set1_ps((*now).scales[r]));
                acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), both, acc[r]);
            }
        }
    }
    for r in 0..R {
        // SAFETY: C row of the group.
        unsafe { _mm512_store_ps(c.add(group.row(r) * PANEL), acc[r]) };
    }
}
