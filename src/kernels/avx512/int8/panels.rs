//! A group of rows times some panels, all k, sums in registers: weights as they lie, or made ready a block at a time for half a panel.

#![expect(clippy::needless_range_loop, reason = "register blocks are indexed by row, panel and token")]

use std::arch::x86_64::*;
use std::sync::atomic::{Ordering, compiler_fence};

use super::{fold, make_ready};
use crate::kernels::passes::{PanelPass, Sweep, panels_by_passes};
use crate::pack::Q8_PANEL_BLOCK;
use crate::tensor::{Q8_0_BYTES, QK8_0};

pub use halves::in_place as half_in_place;
pub use ready_halves::by_blocks as half_by_blocks;
pub use wholes::in_place;

/// Makes a panel form of [`product`], with weights made ready first or not, and so many neighbouring lanes for a token.
macro_rules! form {
    ($(#[$doc:meta])* $name:ident, $ready:literal, $fold:literal, $($passes:tt)*) => {
        use super::*;

        panels_by_passes!($(#[$doc])* $name, "avx512f,avx512bw,avx512vl,avx512vnni,f16c", $($passes)*);

        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
        // SAFETY: as `product`.
        unsafe fn pass<const R: usize, const P: usize>(pass: PanelPass<'_>) {
            // SAFETY: the caller's promise.
            unsafe { product::<R, P, $ready, $fold>(pass) };
        }
    };
}

mod wholes {
    form!(
        /// Weights as they lie (see [`Int8Form::InPlace`](crate::isa::Int8Form::InPlace)).
        in_place, false, 1, 8, [8], 6, 2, [1 2]
    );
}

mod halves {
    form!(
        /// The same for up to 8 tokens.
        in_place, false, 2, 8, [], 8, 1, [1]
    );
}

mod ready_halves {
    form!(
        /// Weights made ready first (see [`Int8Form::ReadyFirst`](crate::isa::Int8Form::ReadyFirst)), a block of 32 k at a time, for up to 8
        /// tokens.
        by_blocks, true, 2, 8, [], 8, 1, [1]
    );
}

/// One block of up to 8 rows: `w + 128` where weights are made ready first, and the scales as they are and as f32.
#[repr(C, align(64))]
struct Block {
    w: [[u8; QK8_0]; 8],
    f32: [f32; 8],
    f16: [u16; 8],
}

/// A group of `R` rows (at most 8) times `P` panels: R x P sums in registers, of integers within a block and of f32 over all. While one block
/// of the rows is multiplied, the next is loaded, and made ready, so that memory does not wait for the arithmetic. `F` is that of [`fold`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
// SAFETY: as `in_place`, of the pass's rows and panels.
unsafe fn product<const R: usize, const P: usize, const READY: bool, const F: usize>(pass: PanelPass<'_>) {
    let PanelPass { ref rows, group, x, x_stride, add, .. } = pass;
    let (blocks, w): (usize, [*const u8; R]) = (rows.k / QK8_0, pass.rows());
    let mut two = [const { Block { w: [[0; QK8_0]; 8], f32: [0.0; 8], f16: [0; 8] } }; 2];
    // Known to nobody, so that the fences below keep the compiler from loading all of a block at once and spilling it.
    let two: *mut Block = std::hint::black_box(two.as_mut_ptr());
    // SAFETY: block b of row r; one of the two.
    let prepare = |to: *mut Block, r: usize, b: usize| unsafe {
        let block = w[r].add(b * Q8_0_BYTES);
        (*to).f16[r] = block.cast::<u16>().read_unaligned();
        if READY {
            make_ready(block, (&raw mut (*to).w[r]).cast());
        }
    };
    let mut acc = [[_mm512_setzero_ps(); P]; R];
    if add {
        for r in 0..R {
            for p in 0..P {
                // SAFETY: sums of the pass.
                acc[r][p] = _mm512_castsi512_ps(unsafe { fold::once::<F>(pass.c(r, p).cast()) });
            }
        }
    }
    let mut ahead = Sweep::new(rows, group, Q8_0_BYTES);
    (0..R).filter(|_| blocks > 0).for_each(|r| prepare(two, r, 0));
    for b in 0..blocks {
        let (now, next) = (two.wrapping_add(b % 2), two.wrapping_add((b + 1) % 2));
        // Again the last one: a branch around it here, and the compiler spills what the blocks have in registers.
        let then = (b + 1).min(blocks - 1);
        ahead.step();
        // SAFETY: block b of the panels and rows; the arrays have room for whole vectors.
        unsafe {
            let x: [*const u8; P] = std::array::from_fn(|p| x.add(p * x_stride + b * Q8_PANEL_BLOCK));
            // The halves were stored a block ago: long enough for a load of all of them at once.
            let f32s = _mm256_cvtph_ps(_mm_load_si128((&raw const (*now).f16).cast()));
            _mm256_store_ps((&raw mut (*now).f32).cast(), f32s);
            let start: [__m512i; P] = std::array::from_fn(|p| fold::once::<F>(x[p].add(9 * 64)));
            let mut sum = [start; R];
            for g in 0..8 / F {
                compiler_fence(Ordering::SeqCst);
                (g * F..(g + 1) * F).filter(|&r| r < R).for_each(|r| prepare(next, r, then));
                let v: [__m512i; P] = std::array::from_fn(|p| fold::fours::<F>(x[p], g));
                for r in 0..R {
                    let w = if READY {
                        fold::broadcast::<F>((&raw const (*now).w[r]).cast(), g)
                    } else {
                        let w = fold::broadcast::<F>(w[r].add(b * Q8_0_BYTES + 2), g);
                        _mm512_xor_si512(_mm512_set1_epi8(-128), w)
                    };
                    for p in 0..P {
                        sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], w, v[p]);
                    }
                }
            }
            let scale: [__m512; P] = std::array::from_fn(|p| fold::all::<F>(x[p].add(8 * 64)));
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
            unsafe { _mm512_store_ps(pass.c(r, p), fold::unfolded::<F>(acc[r][p])) };
        }
    }
}
