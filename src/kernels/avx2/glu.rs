//! Gated linear units, 16 values at a time.

use std::arch::x86_64::*;

use super::{exp, part};
use crate::kernels::glu::{Glu, vector_units};
use crate::kernels::series;
use crate::pack::PANEL;

/// The 16 lanes of C blocks; also, two chains of instructions that do not wait for each other.
type Lanes = [__m256; 2];

vector_units!(Lanes, "avx2,fma,f16c");

/// Functions of 16 lanes by those of 8.
macro_rules! twice {
    ($($name:ident($($x:ident),+) = $of:path;)+) => {$(
        #[inline]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name($($x: Lanes),+) -> Lanes {
            [$of($($x[0]),+), $of($($x[1]),+)]
        }
    )+};
}

twice! {
    add(a, b) = _mm256_add_ps;
    sub(a, b) = _mm256_sub_ps;
    mul(a, b) = _mm256_mul_ps;
    div(a, b) = _mm256_div_ps;
    min(a, b) = _mm256_min_ps;
    max(a, b) = _mm256_max_ps;
    and(a, b) = _mm256_and_ps;
    or(a, b) = _mm256_or_ps;
    xor(a, b) = _mm256_xor_ps;
    fmadd(a, b, c) = _mm256_fmadd_ps;
    exp(x) = exp::exp;
    zero_where(mask, x) = _mm256_andnot_ps;
    zero_unless(mask, x) = _mm256_and_ps;
    select(mask, yes, no) = select8;
    to_f16_and_back(x) = to_f16_and_back8;
}

#[inline]
#[target_feature(enable = "avx2")]
fn set(v: f32) -> Lanes {
    [_mm256_set1_ps(v); 2]
}

#[inline]
#[target_feature(enable = "avx2")]
fn compare<const HOW: i32>(a: Lanes, b: Lanes) -> Lanes {
    [_mm256_cmp_ps::<HOW>(a[0], b[0]), _mm256_cmp_ps::<HOW>(a[1], b[1])]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn abs(x: Lanes) -> Lanes {
    zero_where(set(-0.0), x)
}

#[inline]
#[target_feature(enable = "avx2")]
fn select8(mask: __m256, yes: __m256, no: __m256) -> __m256 {
    _mm256_blendv_ps(no, yes, mask)
}

#[inline]
#[target_feature(enable = "avx2,f16c")]
fn to_f16_and_back8(v: __m256) -> __m256 {
    _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v))
}

#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: contract of `Vectors::glu_lanes`, on a CPU with the features.
pub unsafe fn lanes(glu: Glu, gate: *mut f32, up: *const f32, n: usize, [gate_bias, up_bias]: [*const f32; 2]) {
    // SAFETY: values below n.
    let bias = |b: *const f32, i: usize| unsafe { if b.is_null() { set(0.0) } else { set(b.add(i).read_unaligned()) } };
    for i in 0..n {
        // SAFETY: vector i.
        unsafe {
            let to = gate.add(i * PANEL);
            let g = add(part::load16(to, PANEL), bias(gate_bias, i));
            let u = add(part::load16(up.add(i * PANEL), PANEL), bias(up_bias, i));
            part::store16(to, PANEL, apply(glu, g, u));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
// SAFETY: contract of `Vectors::glu_row`, on a CPU with the features.
pub unsafe fn row(glu: Glu, gate: *mut f32, up: *const f32, n: usize, [gate_bias, up_bias]: [*const f32; 2]) {
    for i in (0..n).step_by(PANEL) {
        // SAFETY: values i .. n.
        let load = |p: *const f32| unsafe { part::load16(p.add(i), n - i) };
        let bias = |b: *const f32| if b.is_null() { set(0.0) } else { load(b) };
        let g = add(load(gate), bias(gate_bias));
        let u = add(load(up), bias(up_bias));
        // SAFETY: as above.
        unsafe { part::store16(gate.add(i), n - i, apply(glu, g, u)) };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::Vectors;
    use crate::kernels::reference::Reference;
    use crate::testing::{Random, avx2, floats, guarded};

    const ALL: [Glu; 7] = [
        Glu::ReGlu,
        Glu::GeGlu,
        Glu::GeGluErf,
        Glu::GeGluQuick,
        Glu::SwiGlu,
        Glu::SwiGluOai { alpha: 1.702, limit: 7.0 },
        Glu::SwiGluClamp { limit: 7.0 },
    ];

    /// Gate and up values, and their biases: of each gate or up value of a row, or of the 16 of a vector.
    fn check(in_lanes: bool, n: usize, shift: usize, seed: u64) -> Result<(), TestCaseError> {
        let Some(isa) = avx2() else { return Ok(()) };
        let mut random = Random(seed);
        let values = if in_lanes { n * PANEL } else { n };
        let g: Vec<f32> = random.wild(values).iter().map(|g| g * 30.0).collect();
        // Not so large that what rounds to zero in a gate counts.
        let u: Vec<f32> = random.wild(values).into_iter().map(|u| if u.abs() > 3.0 { 3.0 } else { u }).collect();
        let bias = [(); 2].map(|()| (random.below(2) == 0).then(|| guarded(&random.vec(n), shift)));
        let bias = bias.each_ref().map(|b| b.as_ref().map_or(std::ptr::null(), |b| b.ptr().cast_const().cast()));
        let up = guarded(&u, shift);
        for glu in ALL {
            let [got, want] = [(); 2].map(|()| guarded(&g, shift));
            let [to, oracle] = [&got, &want].map(|v| v.ptr().cast());
            // SAFETY: n values or vectors in each (aligned, as they then end with a page), n values in the biases.
            unsafe {
                if in_lanes {
                    isa.glu_lanes(glu, to, up.ptr().cast(), n, bias);
                    Reference.glu_lanes(glu, oracle, up.ptr().cast(), n, bias);
                } else {
                    isa.glu_row(glu, to, up.ptr().cast(), n, bias);
                    Reference.glu_row(glu, oracle, up.ptr().cast(), n, bias);
                }
            }
            // One unit of f16 where a table of f16 is followed: an input on the edge may round the other way.
            let relative = if matches!(glu, Glu::GeGlu | Glu::GeGluQuick) { 1e-3 } else { 2e-6 };
            for (i, (got, want)) in floats(&got).into_iter().zip(floats(&want)).enumerate() {
                let close = (got - want).abs() <= relative * want.abs() + 1e-6;
                let equal = got == want || got.is_nan() && want.is_nan();
                prop_assert!(close || equal, "{glu:?}({}, {}) = {got}, not {want}", g[i], u[i]);
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn lanes_are_the_oracles(n in 1usize..70, seed: u64) {
            check(true, n, 0, seed)?;
        }

        #[test]
        fn rows_are_the_oracles(n in 1usize..200, shift in 0usize..4, seed: u64) {
            check(false, n, shift, seed)?;
        }
    }
}
