//! Scores on tiles: 16 positions of K are the left operand, 16 query rows the right one.
//!
//! | tiles | hold |
//! |---|---|
//! | 0 to 3 | scores of up to four groups of 16 positions x 16 rows |
//! | 4, 5 | K (hi and lo), 16 positions x 32 elements |
//! | 6, 7 | Q, hi and lo, 32 elements x 16 rows; of a twin panel tile 6 alone, hi and lo of 8 rows |

use std::arch::x86_64::*;

use super::form::{Form, Product, twin, with_product, with_tiles};
use super::split::{SPECIAL, Split};
use super::{PART, STEP, TWIN};
use crate::kernels::amx::each;
use crate::kernels::amx::tile::Tiles;
use crate::kernels::attention::{Ahead, LANES, Source, TILE};
use crate::kernels::avx512::attention::widen::Load;

/// Most groups of 16 positions of a block.
pub const GROUPS: usize = 4;
/// Most times 32 elements of a row for which a twin panel's queries stay in L1.
const FEW_STEPS: usize = 8;
/// Where the largest value of an F16 query is brought to.
const QUERIES: f32 = 8192.0;

/// Where 16 positions of K are: tiles of 16 rows, `step` bytes from 32 elements to the next.
#[derive(Clone, Copy, Debug)]
pub struct Keys {
    pub data: *const u8,
    pub stride: usize,
    pub step: usize,
}

/// Packs a panel of 16 query rows (`[element][row]`, `d` elements rounded up to 16) as the right operand:
/// `[32 elements][hi, lo][pair][row]`, or of a twin panel `[32 elements][pair][hi, lo][row]`. `unscale` gets what to multiply
/// each row's scores by, once for each lane of a panel of `lanes`.
///
/// # Safety
/// `to` is 64-byte aligned and writable for two KiB for each 32 elements, `unscale` for 16 f32; AVX-512 F, BW, DQ and VL are
/// there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn pack_queries(form: Form, lanes: usize, panel: *const f32, d: usize, to: *mut u8, unscale: *mut f32) {
    let padded = d.next_multiple_of(LANES);
    let mut scale = _mm512_set1_ps(1.0);
    if let Form::F16(_) = form {
        let mut largest = _mm512_setzero_ps();
        for e in 0..padded {
            // SAFETY: an element in front of the panel's end.
            largest = _mm512_max_ps(largest, _mm512_abs_ps(unsafe { _mm512_loadu_ps(panel.add(e * LANES)) }));
        }
        scale = power_to(QUERIES, largest);
    }
    let inverse = _mm512_div_ps(_mm512_set1_ps(1.0), scale);
    let inverse = if lanes == TWIN { _mm512_shuffle_f32x4::<0x44>(inverse, inverse) } else { inverse };
    // SAFETY: 16 f32.
    unsafe { _mm512_storeu_ps(unscale, inverse) };
    for pair in 0..d.div_ceil(STEP) * LANES {
        let (step, j) = (pair / LANES, pair % LANES);
        // Pairs of split keys are one shift from vectors of 16; others are as they lie in memory.
        let (a, b) = if form.is_split() { (j, j + LANES) } else { (2 * j, 2 * j + 1) };
        // SAFETY: elements of the panel; pair `j` of this step, of both parts.
        unsafe {
            let a = _mm512_mul_ps(element(panel, padded, step * STEP + a), scale);
            let b = _mm512_mul_ps(element(panel, padded, step * STEP + b), scale);
            let both = form.parts(a, b);
            if lanes == TWIN {
                _mm512_store_si512(to.add(step * PART + j * 64).cast(), twin(both));
            } else {
                let to = to.add(step * 2 * PART + j * 64);
                _mm512_store_si512(to.cast(), both.hi);
                _mm512_store_si512(to.add(PART).cast(), both.lo);
            }
        }
    }
}

/// Element `e` of a panel's 16 rows, zeros from `d` on.
// SAFETY: the panel has `d` elements.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn element(panel: *const f32, d: usize, e: usize) -> __m512 {
    // SAFETY: an element in front of the panel's end.
    if e < d { unsafe { _mm512_loadu_ps(panel.add(e * LANES)) } } else { _mm512_setzero_ps() }
}

/// The powers of two that bring each lane's value near `to`; 1 for 0.
#[inline]
#[target_feature(enable = "avx512f")]
fn power_to(to: f32, value: __m512) -> __m512 {
    let exponent = _mm512_sub_ps(_mm512_getexp_ps(_mm512_set1_ps(to)), _mm512_getexp_ps(value));
    // Larger ones would not be finite; what they would be for is far below what a score shows.
    let exponent = _mm512_min_ps(exponent, _mm512_set1_ps(100.0));
    let some = _mm512_cmpneq_ps_mask(value, _mm512_setzero_ps());
    _mm512_mask_scalef_ps(_mm512_set1_ps(1.0), some, _mm512_set1_ps(1.0), exponent)
}

/// Splits up to 16 rows of K: `[32 elements][hi, lo][position]`, pair `j` of elements `j` and `j + 16`. Rows
/// that are closed or not there are zeros.
///
/// # Safety
/// The rows that are not closed are readable; `to` is 64-byte aligned and writable for two KiB for each 32 elements;
/// AVX-512 F, BW, DQ and VL are there.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub unsafe fn split_rows<T: Split>(from: Source, to: *mut u8) -> Keys {
    for p in 0..LANES {
        let row = row(&from, p);
        for step in 0..from.d.div_ceil(STEP) {
            // SAFETY: an open row is readable; row `p` of both parts of this step.
            unsafe {
                let both =
                    T::split(elements::<T>(row, from.d, step * STEP), elements::<T>(row, from.d, step * STEP + LANES));
                let to = to.add(step * 2 * PART + p * 64);
                _mm512_store_si512(to.cast(), both.hi);
                _mm512_store_si512(to.add(PART).cast(), both.lo);
            }
        }
    }
    Keys { data: to, stride: 64, step: 2 * PART }
}

/// Copies up to 16 rows of K, BF16 or F16: `[32 elements][position]`, as they are. Rows that are closed or not there are
/// zeros, and so is what is missing of the last 32 elements.
///
/// # Safety
/// As [`split_rows`], with one KiB for each 32 elements.
// SAFETY: contract above.
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn copy_rows(from: Source, to: *mut u8) -> Keys {
    for p in 0..LANES {
        let row = row(&from, p);
        for step in 0..from.d.div_ceil(STEP) {
            let some = if row.is_null() { 0 } else { u32::MAX >> (STEP - (from.d - step * STEP).min(STEP)) };
            let row = row.wrapping_add(step * STEP * 2);
            // SAFETY: masked lanes are not read; row `p` of this step.
            unsafe {
                _mm512_store_si512(to.add(step * PART + p * 64).cast(), _mm512_maskz_loadu_epi16(some, row.cast()))
            };
        }
    }
    Keys { data: to, stride: 64, step: PART }
}

/// Row `p` of a block, null where it is closed or not there.
pub fn row(from: &Source, p: usize) -> *const u8 {
    let open = p < from.rows && from.closed >> p & 1 == 0;
    if open { from.data.wrapping_add(p * from.stride) } else { std::ptr::null() }
}

/// 16 elements from `at` (a multiple of 16) of a row of `d`, zeros behind its end; all zeros of a null row.
///
/// # Safety
/// A row that is not null is readable; the features of [`Load`] are there.
// SAFETY: contract above.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn elements<T: Load>(row: *const u8, d: usize, at: usize) -> __m512 {
    if row.is_null() || at >= d {
        return _mm512_setzero_ps();
    }
    // SAFETY: the elements are inside the row; masked ones are not read.
    unsafe {
        match d - at {
            LANES.. => T::full(row, at / LANES),
            left => T::part(row, at / LANES, (1 << left) - 1),
        }
    }
}

/// A panel's packed queries: what [`pack_queries`] makes, for `lanes` lanes and `steps` times 32 elements.
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    pub lanes: usize,
    pub data: *const u8,
    pub unscale: *const f32,
    pub steps: usize,
}

/// Scores of one panel with a block's (1 to 4) groups, before [`settle`] and as 16 lanes whatever the panel has.
///
/// # Safety
/// All tiles are 16 rows x 64 bytes. `keys` and `q` hold `q.steps` steps in this form; `s` has 16 x 16 f32 for each group, 64-byte
/// aligned.
// SAFETY: contract above.
pub unsafe fn scores(tiles: &Tiles<'_>, form: Form, keys: &[Keys], q: Queries, s: *mut f32, ahead: &mut Ahead) {
    // SAFETY: the caller's contract.
    unsafe {
        if q.lanes == TWIN && !form.is_split() && q.steps <= FEW_STEPS {
            with_product!(form, p => twin_by_groups(tiles, p, keys, q, s, ahead));
        } else {
            with_product!(form, p => with_tiles!(keys.len(), q.lanes == TWIN, products(tiles, p, keys, q, s, ahead)));
        }
    }
}

/// `hi hi + hi lo + lo hi`; what is left out, `lo lo`, is below 2^-16 of a product. Twin panels have it.
// SAFETY: contract of `scores`.
unsafe fn products<const G: usize, const TWIN: bool, P: Product>(
    tiles: &Tiles<'_>,
    p: P,
    keys: &[Keys],
    q: Queries,
    s: *mut f32,
    ahead: &mut Ahead,
) {
    let mut k: [*const u8; GROUPS] = std::array::from_fn(|g| keys[g % G].data);
    let mut at = q.data;
    // SAFETY: the caller's contract: every address is inside its operand.
    unsafe {
        each!(G, I => tiles.zero::<I>());
        for _ in 0..q.steps {
            tiles.load::<6>(at, 64);
            if !TWIN {
                tiles.load::<7>(at.add(PART), 64);
            }
            each!(G, I => {
                let (keys, at) = (&keys[I as usize], k[I as usize]);
                ahead.step();
                tiles.load::<4>(at, keys.stride);
                p.dp::<I, 4, 6>(tiles);
                if !TWIN {
                    p.dp::<I, 4, 7>(tiles);
                }
                if P::SPLIT {
                    tiles.load::<5>(at.add(PART), keys.stride);
                    p.dp::<I, 5, 6>(tiles);
                }
                k[I as usize] = at.wrapping_add(keys.step);
            });
            at = at.wrapping_add(if TWIN { PART } else { 2 * PART });
        }
        each!(G, I => tiles.store::<I>(s.add(I as usize * TILE).cast(), 64));
    }
}

/// The same for K where it lies, 16 of its rows after the other: few pages at a time, and each row's lines one after the other.
/// The queries come from L1 for each group.
// SAFETY: contract of `scores`, of a twin panel.
unsafe fn twin_by_groups<P: Product>(
    tiles: &Tiles<'_>,
    p: P,
    keys: &[Keys],
    q: Queries,
    s: *mut f32,
    ahead: &mut Ahead,
) {
    // SAFETY: the caller's contract: every address is inside its operand.
    unsafe {
        each!(GROUPS, I => if let Some(&Keys { data, stride, step }) = keys.get(I as usize) {
            tiles.zero::<I>();
            for i in (0..q.steps).step_by(2) {
                ahead.step();
                tiles.load::<6>(q.data.add(i * PART), 64);
                tiles.load::<4>(data.add(i * step), stride);
                p.dp::<I, 4, 6>(tiles);
                if i + 1 < q.steps {
                    ahead.step();
                    tiles.load::<7>(q.data.add((i + 1) * PART), 64);
                    tiles.load::<5>(data.add((i + 1) * step), stride);
                    p.dp::<I, 5, 7>(tiles);
                }
            }
        });
        each!(GROUPS, I => if (I as usize) < keys.len() {
            tiles.store::<I>(s.add(I as usize * TILE).cast(), 64);
        });
    }
}

/// Makes the tiles' sums scores `s[position * lanes + row]` of `groups` groups: multiplies them by what their rows want, and adds a
/// twin's hi and lo parts. Gives back whether all are finite.
///
/// # Safety
/// `s` has 16 x 16 f32 for each group, 64-byte aligned; AVX-512 F and DQ are there.
// SAFETY: contract above.
pub unsafe fn settle(q: Queries, s: *mut f32, groups: usize) -> bool {
    // SAFETY: the caller's contract.
    unsafe { if q.lanes == TWIN { settle_twin(s, groups, q.unscale) } else { settle_wide(s, groups, q.unscale) } }
}

/// A panel of 16 rows.
// SAFETY: contract of `settle`.
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn settle_wide(s: *mut f32, groups: usize, unscale: *const f32) -> bool {
    // SAFETY: `groups` times 16 vectors, 64-byte aligned; 16 factors.
    unsafe {
        let unscale = _mm512_loadu_ps(unscale);
        let mut special = 0;
        for i in 0..groups * LANES {
            let x = _mm512_mul_ps(_mm512_load_ps(s.add(i * LANES)), unscale);
            special |= _mm512_fpclass_ps_mask::<SPECIAL>(x);
            _mm512_store_ps(s.add(i * LANES), x);
        }
        special == 0
    }
}

/// A twin panel: 16 lanes become 8.
// SAFETY: contract of `settle`.
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn settle_twin(s: *mut f32, groups: usize, unscale: *const f32) -> bool {
    // SAFETY: as `settle_wide`; what is written was read.
    unsafe {
        let unscale = _mm512_loadu_ps(unscale);
        let mut special = 0;
        for i in 0..groups * LANES / 2 {
            let (a, b) = (_mm512_load_ps(s.add(2 * i * LANES)), _mm512_load_ps(s.add((2 * i + 1) * LANES)));
            let x = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
            let x = _mm512_mul_ps(x, unscale);
            special |= _mm512_fpclass_ps_mask::<SPECIAL>(x);
            _mm512_store_ps(s.add(i * LANES), x);
        }
        special == 0
    }
}
