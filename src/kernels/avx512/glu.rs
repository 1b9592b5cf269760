//! Gated linear units, 16 values at a time.

use std::arch::x86_64::*;
use std::arch::x86_64::{
    _mm512_abs_ps as abs, _mm512_add_ps as add, _mm512_and_ps as and, _mm512_cmp_ps_mask as compare,
    _mm512_div_ps as div, _mm512_fmadd_ps as fmadd, _mm512_maskz_mov_ps as zero_unless, _mm512_max_ps as max,
    _mm512_min_ps as min, _mm512_mul_ps as mul, _mm512_or_ps as or, _mm512_set1_ps as set, _mm512_sub_ps as sub,
    _mm512_xor_ps as xor,
};

use crate::kernels::glu::{Glu, vector_units};
use crate::kernels::series;
use crate::pack::PANEL;

vector_units!(__m512, "avx512f,avx512dq,fma");

#[target_feature(enable = "avx512f,avx512dq,fma")]
// SAFETY: contract of `Vectors::glu_lanes`, on a CPU with the features.
pub unsafe fn lanes(glu: Glu, gate: *mut f32, up: *const f32, n: usize, [gate_bias, up_bias]: [*const f32; 2]) {
    // SAFETY: values below n.
    let bias = |b: *const f32, i: usize| unsafe {
        if b.is_null() { _mm512_setzero_ps() } else { _mm512_set1_ps(b.add(i).read_unaligned()) }
    };
    for i in 0..n {
        // SAFETY: vector i.
        unsafe {
            let g = _mm512_add_ps(_mm512_load_ps(gate.add(i * PANEL)), bias(gate_bias, i));
            let u = _mm512_add_ps(_mm512_load_ps(up.add(i * PANEL)), bias(up_bias, i));
            _mm512_store_ps(gate.add(i * PANEL), apply(glu, g, u));
        }
    }
}

#[target_feature(enable = "avx512f,avx512dq,fma")]
// SAFETY: contract of `Vectors::glu_row`, on a CPU with the features.
pub unsafe fn row(glu: Glu, gate: *mut f32, up: *const f32, n: usize, [gate_bias, up_bias]: [*const f32; 2]) {
    for i in (0..n).step_by(PANEL) {
        let mask = if n - i >= PANEL { !0 } else { (1u16 << (n - i)) - 1 };
        // SAFETY: values i .. n under the mask.
        let load = |p: *const f32| unsafe { _mm512_maskz_loadu_ps(mask, p.add(i)) };
        let bias = |b: *const f32| if b.is_null() { _mm512_setzero_ps() } else { load(b) };
        let g = _mm512_add_ps(load(gate), bias(gate_bias));
        let u = _mm512_add_ps(load(up), bias(up_bias));
        // SAFETY: as above.
        unsafe { _mm512_mask_storeu_ps(gate.add(i), mask, apply(glu, g, u)) };
    }
}

/// `v`, but 0 where the mask is set.
#[inline]
#[target_feature(enable = "avx512f")]
fn zero_where(mask: __mmask16, v: __m512) -> __m512 {
    zero_unless(!mask, v)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn select(mask: __mmask16, yes: __m512, no: __m512) -> __m512 {
    _mm512_mask_mov_ps(no, mask, yes)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn to_f16_and_back(v: __m512) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v))
}

/// `exp(x)` within 2 units in the last place: `2^n * p(r)` with `x = n ln 2 + r`, |r| <= ln(2) / 2. NaN stays NaN; too
/// large is Inf.
#[inline]
#[target_feature(enable = "avx512f,fma")]
fn exp(x: __m512) -> __m512 {
    // min and max give their second operand where one is NaN.
    let x = _mm512_max_ps(set(-110.0), _mm512_min_ps(set(90.0), x));
    let n = _mm512_roundscale_ps::<0>(_mm512_mul_ps(x, set(std::f32::consts::LOG2_E)));
    let r = series::LN_2.into_iter().fold(x, |r, part| _mm512_fnmadd_ps(n, set(part), r));
    let [first, rest @ ..] = series::EXP;
    let mut p = set(first);
    for c in rest {
        p = _mm512_fmadd_ps(p, r, set(c));
    }
    _mm512_scalef_ps(p, n)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::isa::Avx512;
    use crate::kernels::Vectors;

    const ALL: [Glu; 7] = [
        Glu::ReGlu,
        Glu::GeGlu,
        Glu::GeGluErf,
        Glu::GeGluQuick,
        Glu::SwiGlu,
        Glu::SwiGluOai { alpha: 1.702, limit: 7.0 },
        Glu::SwiGluClamp { limit: 7.0 },
    ];

    fn vector(isa: Avx512, glu: Glu, g: &[f32], u: &[f32]) -> Vec<f32> {
        let mut out = g.to_vec();
        // SAFETY: both have g.len() values.
        unsafe { isa.glu_row(glu, out.as_mut_ptr(), u.as_ptr(), g.len(), [std::ptr::null(); 2]) };
        out
    }

    proptest! {
        #[test]
        fn units_are_the_oracles(pairs in prop::collection::vec((-30f32..30.0, -3f32..3.0), 1..50)) {
            let Some(isa) = Avx512::detect() else { return Ok(()) };
            let (g, u): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            for glu in ALL {
                for ((&g, &u), got) in g.iter().zip(&u).zip(vector(isa, glu, &g, &u)) {
                    let want = glu.of(g, u);
                    // One unit of f16 where a table of f16 is followed: an input on the edge may round the other way.
                    let table = matches!(glu, Glu::GeGlu | Glu::GeGluQuick);
                    let (relative, absolute) = if table { (1e-3, 1e-6) } else { (2e-6, 1e-6) };
                    let error = (f64::from(got) - want).abs();
                    prop_assert!(error <= relative * want.abs() + absolute, "{glu:?}({g}, {u}) = {got}, not {want}");
                }
            }
        }
    }

    #[test]
    fn extremes_and_nan() {
        let Some(isa) = Avx512::detect() else {
            println!("skipped: this CPU has no AVX-512");
            return;
        };
        for glu in ALL {
            let got = vector(isa, glu, &[f32::NAN, -6e4, 6e4, 0.0], &[1.0; 4]);
            assert!(got[0].is_nan() || glu == Glu::ReGlu, "{glu:?}");
            assert!(got[1].abs() < 1e-6 && got[2] > 1.0 && got[3] == 0.0, "{glu:?}: {got:?}");
        }
    }
}
