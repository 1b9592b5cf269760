//! The panel form: some rows and columns made ready, then times all panels.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::Form;
use crate::kernels::avx2::part::LANES;
use crate::kernels::avx2::pieces::{Piece, ROWS, for_rows, pieces};
use crate::kernels::avx2::sums::settle;
use crate::kernels::passes::{Group, Sweep};
use crate::pack::{PANEL, Panels, Q8_PANEL_BLOCK};
use crate::tensor::{Q8_0_BYTES, QK8_0, Rows};

/// Blocks of a piece: of a panel they are 10 KiB, and of the rows that are made ready 7 (by VNNI 4).
const K_BLOCKS: usize = 16;

/// A block's eight groups of four k go by in so many steps where one half of the tokens is there, else in twice as many.
const STEPS: usize = 4;

/// A block of up to [`ROWS`] rows, made ready: the weights, scales as f32 and as they are.
#[repr(C, align(64))]
struct Block<W> {
    w: [W; ROWS],
    scales: [f32; 8],
    halves: [u16; 8],
}

/// The panel form (see [`Engine::product`](crate::kernels::Engine::product)).
///
/// # Safety
/// As `Engine::product`, on a CPU with the features.
// SAFETY: contract above.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn panels<F: Form>(form: F, rows: Rows<'_>, panels: Panels<'_>, c: *mut f32, add: bool) {
    // One more than there are blocks: what is made ready last is not used.
    let mut ready = MaybeUninit::<[Block<F::Ready>; K_BLOCKS + 1]>::uninit();
    let ready: *mut Block<F::Ready> = ready.as_mut_ptr().cast();
    // The halves of rows that a piece does not have are converted, too: any bits will do, but not none.
    // SAFETY: a block of `ready`.
    (0..=K_BLOCKS).for_each(|b| unsafe { (*ready.add(b)).halves = [0; 8] });
    for piece in pieces(rows, panels, K_BLOCKS * QK8_0) {
        // SAFETY: `ready` has room for a piece; the C rows from row i on are the caller's.
        unsafe { for_rows!(piece.n, |R| all_panels::<F, R>(form, &piece, ready, c.add(piece.i * PANEL), add)) }
    }
}

/// A piece times all panels. Its rows are made ready while they are multiplied with the first one.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: as `panels`; the piece has `R` rows, `ready` is room for it, `c` is that of its first row.
unsafe fn all_panels<F: Form, const R: usize>(
    form: F,
    piece: &Piece<'_>,
    ready: *mut Block<F::Ready>,
    c: *mut f32,
    add: bool,
) {
    let (rows, add) = (&piece.rows, add || piece.more);
    let size = (rows.k / QK8_0, add);
    let mut source = Source::<F, R> {
        form,
        rows: std::array::from_fn(|r| rows.row(piece.i + r)),
        ahead: Sweep::new(rows, Group::neighbours(piece.i, R, rows.n), Q8_0_BYTES),
    };
    // SAFETY: the first panel leaves all blocks ready; each panel has its own C block.
    unsafe {
        for p in 0..piece.panels.count() {
            let (x, c) = (piece.panels.panel(p), c.add(p * rows.n * PANEL));
            match (p, piece.panels.lanes(p) <= LANES) {
                (0, false) => multiply::<F, R, true, 2>(&mut source, ready, x, size, c),
                (0, true) => multiply::<F, R, true, 1>(&mut source, ready, x, size, c),
                (_, false) => multiply::<F, R, false, 2>(&mut source, ready, x, size, c),
                (_, true) => multiply::<F, R, false, 1>(&mut source, ready, x, size, c),
            }
        }
    }
}

/// Rows that are made ready block by block.
struct Source<F, const R: usize> {
    form: F,
    rows: [*const u8; R],
    ahead: Sweep,
}

impl<F: Form, const R: usize> Source<F, R> {
    /// Makes block `b` of row `r` ready, but for the scale.
    #[inline]
    #[target_feature(enable = "avx2")]
    // SAFETY: the row has block `b`.
    unsafe fn prepare(&self, r: usize, b: usize, to: *mut Block<F::Ready>) {
        // SAFETY: the scale and 32 quants; row r of `to`.
        unsafe {
            let block = self.rows[r].add(b * Q8_0_BYTES);
            (*to).halves[r] = block.cast::<u16>().read_unaligned();
            self.form.prepare(_mm256_loadu_si256(block.add(2).cast()), &raw mut (*to).w[r]);
        }
    }
}

/// `R` rows times a panel, of which only the first `HALVES` have tokens: a block's integer sums in registers, those of f32 in
/// the C block. With `PREPARE`, while a block is multiplied the next one is loaded and made ready, so that memory does not wait
/// for the arithmetic; without it, all are `ready`. (With one half there are two sums for each row and lane, since one would
/// wait for itself.)
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: the rows are readable or ready for `blocks` blocks; the panel has them; `c` is that of the first row.
unsafe fn multiply<F: Form, const R: usize, const PREPARE: bool, const HALVES: usize>(
    source: &mut Source<F, R>,
    ready: *mut Block<F::Ready>,
    x: *const u8,
    (blocks, add): (usize, bool),
    c: *mut f32,
) {
    let form = source.form;
    // SAFETY: C row r.
    let c = |r: usize, h: usize| unsafe { c.add(r * PANEL + h * 8) };
    // SAFETY: blocks below `blocks`, and in `ready` one more; rows and C rows below R.
    unsafe {
        if !add {
            (0..2 * R).for_each(|i| _mm256_store_ps(c(i / 2, i % 2), _mm256_setzero_ps()));
        }
        if PREPARE && blocks > 0 {
            (0..R).for_each(|r| source.prepare(r, 0, ready));
        }
        for b in 0..blocks {
            let (now, next) = (ready.add(b), ready.add(b + 1));
            let x = x.add(b * Q8_PANEL_BLOCK);
            if PREPARE {
                source.ahead.step();
                // The halves were stored a block ago: long enough for a load of all of them at once.
                let scales = _mm256_cvtph_ps(_mm_load_si128((&raw const (*now).halves).cast()));
                _mm256_store_ps((&raw mut (*now).scales).cast(), scales);
            }
            let start = |h: usize| form.start(x.add(QK8_0 * PANEL + 64 + h * 32));
            let mut sum = [[start(0), if HALVES == 2 { start(1) } else { _mm256_setzero_si256() }]; R];
            for step in 0..STEPS * HALVES {
                if PREPARE {
                    let rows = (step..R).step_by(STEPS * HALVES);
                    rows.for_each(|r| source.prepare(r, (b + 1).min(blocks - 1), next));
                }
                // A group of four k for both halves' sums, or one for each of a half's two sums.
                let group = |i: usize| if HALVES == 2 { step } else { step + i * STEPS };
                for part in 0..F::PARTS {
                    let load = |i: usize| _mm256_load_si256(x.add(group(i) * 64 + i % HALVES * 32).cast());
                    let x = [0, 1].map(|i| form.quants(part, load(i)));
                    for r in 0..R {
                        let w = (&raw const (*now).w[r]).cast::<i32>().add(part * 8);
                        let w = [0, 1].map(|i| _mm256_set1_epi32(w.add(group(i)).read()));
                        sum[r] = [0, 1].map(|i| form.multiply(sum[r][i], w[i], x[i]));
                        settle!(sum[r]);
                    }
                }
            }
            let scale: [__m256; HALVES] = std::array::from_fn(|h| _mm256_load_ps(x.add(QK8_0 * PANEL + h * 32).cast()));
            for r in 0..R {
                let w = _mm256_set1_ps((*now).scales[r]);
                if HALVES == 1 {
                    sum[r][0] = _mm256_add_epi32(sum[r][0], sum[r][1]);
                }
                for h in 0..HALVES {
                    let (sum, both) = (_mm256_cvtepi32_ps(sum[r][h]), _mm256_mul_ps(scale[h], w));
                    _mm256_store_ps(c(r, h), _mm256_fmadd_ps(sum, both, _mm256_load_ps(c(r, h))));
                }
            }
        }
    }
}
