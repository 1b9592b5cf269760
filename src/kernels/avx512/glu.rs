//! Gated linear units, 16 values at a time.

use std::arch::x86_64::*;

use crate::kernels::glu::Glu;
use crate::kernels::series;
use crate::pack::PANEL;

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

#[inline]
#[target_feature(enable = "avx512f,avx512dq,fma")]
fn apply(glu: Glu, g: __m512, u: __m512) -> __m512 {
    let clamp = |u, limit| {
        // min and max give their second operand where one is NaN.
        let below = _mm512_min_ps(_mm512_set1_ps(limit), u);
        _mm512_max_ps(_mm512_set1_ps(-limit), below)
    };
    match glu {
        Glu::SwiGlu => _mm512_mul_ps(times_sigmoid(g, g), u),
        Glu::SwiGluOai { alpha, limit } => {
            let g = _mm512_min_ps(_mm512_set1_ps(limit), g);
            let gated = times_sigmoid(g, _mm512_mul_ps(g, _mm512_set1_ps(alpha)));
            _mm512_mul_ps(gated, _mm512_add_ps(clamp(u, limit), _mm512_set1_ps(1.0)))
        }
        Glu::SwiGluClamp { limit } => {
            let g = _mm512_min_ps(_mm512_set1_ps(limit), g);
            _mm512_mul_ps(times_sigmoid(g, g), clamp(u, limit))
        }
        Glu::ReGlu => _mm512_maskz_mul_ps(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(g, _mm512_setzero_ps()), g, u),
        Glu::GeGlu => {
            let x = to_f16_and_back(g);
            // 0.5 (1 + tanh z) = sigmoid(2 z).
            let cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044_715), _mm512_set1_ps(1.0));
            let z2 = _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.595_769)), cubic);
            let gelu = to_f16_and_back(times_sigmoid(x, z2));
            let high = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(g, _mm512_set1_ps(10.0));
            let low = _mm512_cmp_ps_mask::<_CMP_LE_OQ>(g, _mm512_set1_ps(-10.0));
            // Below, ggml has 0 whatever u is.
            _mm512_maskz_mul_ps(!low, _mm512_mask_mov_ps(gelu, high, g), u)
        }
        Glu::GeGluErf => {
            let half = _mm512_mul_ps(g, _mm512_set1_ps(0.5));
            let erf = erf(_mm512_mul_ps(g, _mm512_set1_ps(std::f32::consts::FRAC_1_SQRT_2)));
            _mm512_mul_ps(_mm512_fmadd_ps(half, erf, half), u)
        }
        Glu::GeGluQuick => {
            let x = to_f16_and_back(g);
            let quick = times_sigmoid(x, _mm512_mul_ps(x, _mm512_set1_ps(1.702)));
            _mm512_mul_ps(to_f16_and_back(quick), u)
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn to_f16_and_back(v: __m512) -> __m512 {
    _mm512_cvtph_ps(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v))
}

/// `x * sigmoid(z) = x / (1 + exp(-z))`.
#[inline]
#[target_feature(enable = "avx512f,avx512dq,fma")]
fn times_sigmoid(x: __m512, z: __m512) -> __m512 {
    let minus_z = _mm512_xor_ps(z, _mm512_set1_ps(-0.0));
    _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0), exp(minus_z)))
}

/// `exp(x)` within 2 units in the last place: `2^n * p(r)` with `x = n ln 2 + r`, |r| <= ln(2) / 2, and the Taylor polynomial
/// of degree 7, whose next term is below 2^-27. NaN stays NaN; too large is Inf.
#[inline]
#[target_feature(enable = "avx512f,fma")]
fn exp(x: __m512) -> __m512 {
    let set = |v: f32| _mm512_set1_ps(v);
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

/// The error function within 2e-7 (Abramowitz and Stegun 7.1.26).
#[inline]
#[target_feature(enable = "avx512f,avx512dq,fma")]
fn erf(x: __m512) -> __m512 {
    let set = |v: f32| _mm512_set1_ps(v);
    let a = _mm512_abs_ps(x);
    let t = _mm512_div_ps(set(1.0), _mm512_fmadd_ps(a, set(series::ERF_SLOPE), set(1.0)));
    let [first, rest @ ..] = series::ERF;
    let mut p = set(first);
    for c in rest {
        p = _mm512_fmadd_ps(p, t, set(c));
    }
    let tail = _mm512_mul_ps(p, exp(_mm512_xor_ps(_mm512_mul_ps(a, a), set(-0.0))));
    let sign = _mm512_and_ps(x, set(-0.0));
    _mm512_or_ps(_mm512_sub_ps(set(1.0), tail), sign)
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
