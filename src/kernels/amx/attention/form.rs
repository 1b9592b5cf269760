//! How a cache type is on tiles, and the products that this makes.

use std::arch::x86_64::*;

use super::split::{Pairs, pairs};
use crate::isa::{Amx, AmxFp16};
use crate::kernels::amx::tile::Tiles;
use crate::kernels::attention::LANES;
use crate::tensor::DType;

/// Weights are at most 1: times this they leave F16 all of its exponents.
const WEIGHTS: f32 = 32768.0;

/// How the values of a cache type are on tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// BF16, as it lies in memory.
    Bf16,
    /// F16, as it lies in memory, where tiles multiply that.
    F16(AmxFp16),
    /// Two BF16 values, hi + lo.
    Split,
}

impl Form {
    /// The form of a type (not F32, which none holds).
    pub fn of(amx: Amx, dtype: DType) -> Self {
        match (dtype, amx.fp16()) {
            (DType::Bf16, _) => Self::Bf16,
            (DType::F16, Some(fp16)) => Self::F16(fp16),
            _ => Self::Split,
        }
    }

    /// Whether a value is two BF16 values.
    pub fn is_split(self) -> bool {
        self == Self::Split
    }

    /// What weights of values in this form are multiplied by.
    pub fn weights(self) -> f32 {
        if let Self::F16(_) = self { WEIGHTS } else { 1.0 }
    }

    /// Two vectors of f32 that meet values of this form, as hi + lo of its numbers: 17 bits in BF16; in F16 22 where the largest
    /// of a sum's values is some 2^13.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub fn parts(self, a: __m512, b: __m512) -> Pairs {
        if let Self::F16(_) = self { pairs_f16(a, b) } else { pairs(a, b) }
    }
}

/// As [`pairs`], of F16 values. An infinity or NaN has itself as `hi` and NaN as `lo`: a sum that is not finite shows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn pairs_f16(a: __m512, b: __m512) -> Pairs {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    let (hi_a, hi_b) = (_mm512_cvtps_ph::<NEAREST>(a), _mm512_cvtps_ph::<NEAREST>(b));
    let lo_a = _mm512_cvtps_ph::<NEAREST>(_mm512_sub_ps(a, _mm512_cvtph_ps(hi_a)));
    let lo_b = _mm512_cvtps_ph::<NEAREST>(_mm512_sub_ps(b, _mm512_cvtph_ps(hi_b)));
    let hi = _mm512_or_si512(_mm512_cvtepu16_epi32(hi_a), _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(hi_b)));
    let lo = _mm512_or_si512(_mm512_cvtepu16_epi32(lo_a), _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(lo_b)));
    Pairs { hi, lo }
}

/// Pairs `(a[j], b[j])` of 16 words each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn join_pairs(a: __m256i, b: __m256i) -> __m512i {
    let order = _mm512_cvtepu16_epi32(_mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    let order = _mm512_or_si512(order, _mm512_slli_epi32::<16>(_mm512_add_epi32(order, _mm512_set1_epi32(16))));
    _mm512_permutexvar_epi16(order, _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b))
}

/// The same of 32 bytes each.
///
/// # Safety
/// They are readable; AVX-512 F and BW are there.
// SAFETY: contract above.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub unsafe fn interleave(a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: the caller's contract.
    unsafe { join_pairs(_mm256_loadu_si256(a.cast()), _mm256_loadu_si256(b.cast())) }
}

/// The same of 16 elements of two bytes from `at` of two rows of `d`; zeros behind their end and of a null row.
///
/// # Safety
/// A row that is not null is readable; AVX-512 F, BW and VL are there.
// SAFETY: contract above.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub unsafe fn interleave_some(a: *const u8, b: *const u8, d: usize, at: usize) -> __m512i {
    let some = u16::MAX >> (LANES - (d - at).min(LANES));
    let words = |row: *const u8| {
        let some = if row.is_null() { 0 } else { some };
        // SAFETY: masked elements are not read; the others are inside the row.
        unsafe { _mm256_maskz_loadu_epi16(some, row.wrapping_add(at * 2).cast()) }
    };
    join_pairs(words(a), words(b))
}

/// A product of two tiles.
pub trait Product: Copy {
    /// Whether the cache's values have a lo part.
    const SPLIT: bool;

    /// `c += a b`.
    fn dp<const C: u8, const A: u8, const B: u8>(self, tiles: &Tiles<'_>);
}

/// BF16 values: the cache's own, or hi and lo ones.
#[derive(Clone, Copy)]
pub struct InBf16<const SPLIT: bool>;

impl<const SPLIT: bool> Product for InBf16<SPLIT> {
    const SPLIT: bool = SPLIT;

    #[inline(always)]
    fn dp<const C: u8, const A: u8, const B: u8>(self, tiles: &Tiles<'_>) {
        tiles.dp_bf16::<C, A, B>();
    }
}

/// F16 values.
#[derive(Clone, Copy)]
pub struct InF16(pub AmxFp16);

impl Product for InF16 {
    const SPLIT: bool = false;

    #[inline(always)]
    fn dp<const C: u8, const A: u8, const B: u8>(self, tiles: &Tiles<'_>) {
        tiles.dp_f16::<C, A, B>(self.0);
    }
}

/// Calls a function with the product of a form.
macro_rules! with_product {
    ($form:expr, $product:ident => $call:expr) => {
        match $form {
            $crate::kernels::amx::attention::form::Form::Bf16 => {
                let $product = $crate::kernels::amx::attention::form::InBf16::<false>;
                $call
            }
            $crate::kernels::amx::attention::form::Form::Split => {
                let $product = $crate::kernels::amx::attention::form::InBf16::<true>;
                $call
            }
            $crate::kernels::amx::attention::form::Form::F16(fp16) => {
                let $product = $crate::kernels::amx::attention::form::InF16(fp16);
                $call
            }
        }
    };
}
pub(super) use with_product;

/// Calls a function with a const number of tiles and whether the panel is a twin.
macro_rules! with_tiles {
    ($n:expr, $twin:expr, $f:ident ( $($arg:expr),* )) => {
        match ($n, $twin) {
            (1, false) => $f::<1, false, _>($($arg),*),
            (2, false) => $f::<2, false, _>($($arg),*),
            (3, false) => $f::<3, false, _>($($arg),*),
            (_, false) => $f::<4, false, _>($($arg),*),
            (1, true) => $f::<1, true, _>($($arg),*),
            (2, true) => $f::<2, true, _>($($arg),*),
            (3, true) => $f::<3, true, _>($($arg),*),
            (_, true) => $f::<4, true, _>($($arg),*),
        }
    };
}
pub(super) use with_tiles;

/// Pairs into one vector: of the 8 rows of a twin panel, hi below lo.
#[inline]
#[target_feature(enable = "avx512f")]
pub fn twin(both: Pairs) -> __m512i {
    _mm512_shuffle_i32x4::<0x44>(both.hi, both.lo)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, amx};
    use half::f16;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn f16_parts(x: &[f32; 32]) -> [[[u16; 2]; 16]; 2] {
        // SAFETY: 32 f32 and 64 bytes twice; all accesses are unaligned ones.
        unsafe {
            let both = pairs_f16(_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x[16..].as_ptr()));
            [both.hi, both.lo].map(|part| {
                let mut to = [[0; 2]; 16];
                _mm512_storeu_si512(to.as_mut_ptr().cast(), part);
                to
            })
        }
    }

    #[test]
    fn f16_parts_keep_22_bits() {
        if amx().is_none() {
            return;
        }
        let mut random = Random(3);
        for _ in 0..500 {
            let x: [f32; 32] = std::array::from_fn(|_| random.f32() * 8000.0);
            // SAFETY: AMX comes with its AVX-512.
            let [hi, lo] = unsafe { f16_parts(&x) };
            for i in 0..32 {
                let part = |p: &[[u16; 2]; 16]| f64::from(f16::from_bits(p[i % 16][i / 16]));
                let error = (part(&hi) + part(&lo) - f64::from(x[i])).abs();
                assert!(error <= f64::from(x[i].abs()).max(1.0) / f64::from(1 << 22), "{}: {error}", x[i]);
            }
        }
    }
}
