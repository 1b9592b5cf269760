//! The AVX-512 products against the oracle.

use proptest::prelude::*;

use super::{bf16_fma, bf16_pairs, int8, pack};
use crate::isa::{Avx512, Bf16Form, Reading};
use crate::kernels::Vectors;
use crate::kernels::reference::{magnitudes, matvec};
use crate::pack::{PANEL, Panels, TokenRows, panel_bytes, token_row_bytes};
use crate::tensor::{DType, Rows, Weights};
use crate::testing::{Aligned, Guarded, Part, Random};

fn isa() -> Option<Avx512> {
    let isa = Avx512::detect();
    if isa.is_none() {
        println!("skipped: this CPU has no AVX-512 with VNNI");
    }
    isa
}

type Product = unsafe fn(Rows<'_>, Panels<'_>, *mut f32, bool);
type Dots = unsafe fn(Rows<'_>, TokenRows<'_>, *mut f32, usize);

/// The panel and dot forms for a type, all ways, whichever is the faster one here.
fn forms(dtype: DType) -> Vec<(Bf16Form, Product, Dots)> {
    match dtype {
        DType::Q8_0 => {
            [int8::ready_first as Product, int8::in_place].map(|f| (Bf16Form::best(), f, int8::dots as Dots)).to_vec()
        }
        _ => [
            (Bf16Form::Pairs, bf16_pairs::panels as Product, bf16_pairs::dots as Dots),
            (Bf16Form::Fma, bf16_fma::panels, bf16_fma::dots),
        ]
        .into_iter()
        .filter(|(form, ..)| form.runs())
        .collect(),
    }
}

/// All tokens through every form, and both ways of reading: `[form][token][row]`.
fn products(isa: Avx512, w: &Weights<'_>, x: &[Vec<f32>]) -> Vec<Vec<Vec<f32>>> {
    let (n, k, tokens) = (w.n, w.k, x.len());
    let panels = tokens.div_ceil(PANEL);
    let px = Aligned::new(panels * panel_bytes(w.dtype, k));
    for (p, chunk) in x.chunks(PANEL).enumerate() {
        let addresses: Vec<_> = chunk.iter().map(|x| x.as_ptr()).collect();
        // SAFETY: the area has the size its layout asks for.
        unsafe { isa.panel(w.dtype, k, &addresses, px.ptr().add(p * panel_bytes(w.dtype, k))) };
    }
    let mut all = vec![];
    for (reading, (form, product, dots)) in
        Reading::ALL.into_iter().flat_map(|r| forms(w.dtype).into_iter().map(move |f| (r, f)))
    {
        let rows = w.rows(0, 0, n).by(reading);
        let c = Aligned::new(panels * n * PANEL * 4);
        let bf16 = w.dtype == DType::Bf16;
        let stride = if bf16 { k.next_multiple_of(32) * form.element_bytes() } else { token_row_bytes(w.dtype, k) };
        let rx = Aligned::new(tokens * stride);
        let mut y = vec![0f32; tokens * (n + 3)];
        // SAFETY: every area has the size its layout asks for; the features are there.
        unsafe {
            for (t, x) in x.iter().enumerate() {
                let row = rx.ptr().add(t * stride);
                match w.dtype {
                    DType::Bf16 => pack::row_bf16(form, x.as_ptr(), 0, k, row),
                    dtype => isa.token_row(dtype, k, x.as_ptr(), 0, k, row),
                }
            }
            product(rows, Panels::from_raw(w.dtype, px.ptr(), k, tokens), c.ptr().cast(), false);
            let mut xs = TokenRows::from_raw((w.dtype, form), rx.ptr(), k, tokens);
            xs.stride = stride;
            dots(rows, xs, y.as_mut_ptr(), n + 3);
        }
        let lane = |t: usize, i: usize| c.f32()[(t / PANEL * n + i) * PANEL + t % PANEL];
        all.push((0..tokens).map(|t| (0..n).map(|i| lane(t, i)).collect()).collect());
        all.push(y.chunks(n + 3).map(|y| y[..n].to_vec()).collect());
    }
    all
}

/// Rows that are `gap` bytes apart, with NaN between them, up to the end of a page.
fn check(dtype: DType, [k, n, tokens]: [usize; 3], gap: usize, seed: u64) -> Result<(), TestCaseError> {
    let Some(isa) = isa() else { return Ok(()) };
    let mut random = Random(seed);
    let row = dtype.row_bytes(k);
    let mut bytes = vec![0xFF; (row + gap) * n - gap];
    bytes.chunks_mut(row + gap).for_each(|to| to[..row].copy_from_slice(&random.weights(dtype, k)));
    let bytes = Guarded::new(&bytes);
    // SAFETY: n rows with gaps.
    let w = unsafe { Weights::from_raw(dtype, bytes.as_ptr(), [k, n, 1], [row + gap, 0]) };
    let x: Vec<Vec<f32>> = (0..tokens).map(|_| random.vec(k)).collect();
    let rows = w.rows(0, 0, n);
    let want: Vec<_> =
        x.iter().map(|x| matvec(rows, x).into_iter().zip(magnitudes(rows, x)).collect::<Vec<_>>()).collect();
    for (form, got) in products(isa, &w, &x).into_iter().enumerate() {
        for (t, got) in got.iter().enumerate() {
            for (i, (&got, &(want, magnitude))) in got.iter().zip(&want[t]).enumerate() {
                let error = (f64::from(got) - want).abs();
                prop_assert!(error <= 4e-6 * magnitude, "form {form}, token {t}, row {i}: {got}, not {want}");
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn bf16_products_are_the_oracles(k in 1usize..700, n in 1usize..70, tokens in 1usize..66, gap in 0usize..4, seed: u64) {
        check(DType::Bf16, [k, n, tokens], gap, seed)?;
    }

    #[test]
    fn dots_of_half_groups_are_the_oracles(part in [0usize..5, 0..9, 0..3, 1..16], n in 1usize..40, tokens in 1usize..9, seed: u64) {
        if isa().is_none() { return Ok(()) };
        let part = Part::new(part, n, tokens, seed);
        for (reading, (form, _, dots)) in Reading::ALL.into_iter().flat_map(|r| forms(DType::Bf16).into_iter().map(move |f| (r, f))) {
            let stride = token_row_bytes(DType::Bf16, part.k);
            let (xs, mut y) = (Aligned::new(tokens * stride), vec![f32::NAN; tokens * n]);
            // SAFETY: room for each token's row, and for the results; the features are there.
            unsafe {
                part.x.iter().enumerate().for_each(|(t, x)| pack::row_bf16(form, x.as_ptr(), 0, part.k, xs.ptr().add(t * stride)));
                let xs = TokenRows::from_raw((DType::Bf16, form), xs.ptr(), part.k, tokens);
                let columns = xs.columns(part.columns.start, part.columns.len());
                dots(part.rows().by(reading), columns, y.as_mut_ptr(), n);
            }
            part.check(|t, i| y[t * n + i])?;
        }
    }

    #[test]
    fn q8_0_products_are_the_oracles(blocks in 1usize..24, n in 1usize..70, tokens in 1usize..66, gap in 0usize..4, seed: u64) {
        check(DType::Q8_0, [blocks * 32, n, tokens], gap, seed)?;
    }

    #[test]
    fn a_row_of_inf_and_nan_stays_alone(k in 1usize..100, n in 2usize..40, tokens in 1usize..20, row in 0usize..40, seed: u64) {
        let Some(isa) = isa() else { return Ok(()) };
        let row = row % n;
        let mut random = Random(seed);
        let mut bytes = random.weights(DType::Bf16, k * n);
        for (j, v) in bytes[row * k * 2..(row + 1) * k * 2].chunks_mut(2).enumerate() {
            v.copy_from_slice(if j % 2 == 0 { &[0x80, 0x7F] } else { &[0xC0, 0x7F] });
        }
        let w = Weights::contiguous(DType::Bf16, &bytes, [k, n, 1]);
        let x: Vec<Vec<f32>> = (0..tokens).map(|_| random.vec(k)).collect();
        for got in products(isa, &w, &x).iter().flatten() {
            for (i, y) in got.iter().enumerate() {
                prop_assert_eq!(y.is_finite(), i != row, "row {} is {}", i, y);
            }
        }
    }
}

/// `vdpbf16ps` takes denormals for zero, an FMA takes them for what they are: either way they do no harm.
#[test]
fn denormal_weights_are_next_to_nothing() {
    let Some(isa) = isa() else { return };
    let bytes: Vec<u8> = (0..64 * 4).flat_map(|i| [(i % 2) as u8 * 0x7F, 0]).collect();
    let w = Weights::contiguous(DType::Bf16, &bytes, [64, 4, 1]);
    let x = vec![vec![1f32; 64]; 3];
    assert!(products(isa, &w, &x).iter().flatten().flatten().all(|&y| (0.0..1e-36).contains(&y)));
}

/// Adding to a C block gives the same bits as one product over all columns: sums run on in registers or in memory. But half a panel of
/// Q8_0 has two sums for each, which become one in between.
#[test]
fn a_product_in_two_parts_is_the_whole() {
    let Some(isa) = isa() else { return };
    let mut random = Random(5);
    let (k, n) = (416, 37);
    for (dtype, tokens) in [DType::Bf16, DType::Q8_0].into_iter().flat_map(|d| [70, 33, 13, 7].map(|t: usize| (d, t))) {
        let bytes = random.weights(dtype, k * n);
        let w = Weights::contiguous(dtype, &bytes, [k, n, 1]);
        let x: Vec<Vec<f32>> = (0..tokens).map(|_| random.vec(k)).collect();
        let panels = tokens.div_ceil(PANEL);
        let px = Aligned::new(panels * panel_bytes(dtype, k));
        let [whole, parts] = [(); 2].map(|()| Aligned::new(panels * n * PANEL * 4));
        // SAFETY: every area has the size its layout asks for.
        unsafe {
            for (p, chunk) in x.chunks(PANEL).enumerate() {
                let addresses: Vec<_> = chunk.iter().map(|x| x.as_ptr()).collect();
                isa.panel(dtype, k, &addresses, px.ptr().add(p * panel_bytes(dtype, k)));
            }
            let px = Panels::from_raw(dtype, px.ptr(), k, tokens);
            let rows = w.rows(0, 0, n);
            for (_, product, _) in forms(dtype) {
                product(rows, px, whole.ptr().cast(), false);
                product(rows.columns(0, 160), px.columns(0, 160), parts.ptr().cast(), false);
                product(rows.columns(160, k - 160), px.columns(160, k - 160), parts.ptr().cast(), true);
                if (dtype, tokens) != (DType::Q8_0, 7) {
                    assert_eq!(whole.f32(), parts.f32());
                }
                let most = whole.f32().iter().fold(0f32, |most, v| most.max(v.abs()));
                let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * most;
                assert!(whole.f32().iter().zip(parts.f32()).all(near), "{dtype:?} {tokens}");
            }
        }
    }
}

/// More panels than meet the rows at a time, since they are many or long.
#[test]
fn many_panels_are_the_oracles() {
    for (shape, dtype) in [[64, 30, 300], [4096, 7, 70]].into_iter().flat_map(|s| [(s, DType::Bf16), (s, DType::Q8_0)])
    {
        check(dtype, shape, 0, 9).expect("the oracle's");
    }
}
