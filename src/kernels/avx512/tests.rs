//! The AVX-512 products against the oracle.

use proptest::prelude::*;

use super::{dots, pack};
use crate::isa::Avx512;
use crate::kernels::Engine;
use crate::kernels::reference::{matvec, nmse};
use crate::pack::{PANEL, Panels, TokenRows, panel_bytes, token_row_bytes};
use crate::tensor::{DType, Weights};
use crate::testing::{Aligned, Guarded, Random};

fn isa() -> Option<Avx512> {
    let isa = Avx512::detect();
    if isa.is_none() {
        println!("skipped: this CPU has no AVX-512 BF16 and VNNI");
    }
    isa
}

/// All tokens through both forms: `[form][token][row]`.
fn products(isa: Avx512, w: &Weights<'_>, x: &[Vec<f32>]) -> [Vec<Vec<f32>>; 2] {
    let (n, k, tokens) = (w.n, w.k, x.len());
    let rows = w.rows(0, 0, n);
    let panels = tokens.div_ceil(PANEL);
    let px = Aligned::new(panels * panel_bytes(w.dtype, k));
    let rx = Aligned::new(tokens * token_row_bytes(w.dtype, k));
    let c = Aligned::new(panels * n * PANEL * 4);
    let mut y = vec![0f32; tokens * (n + 3)];
    // SAFETY: every area has the size its layout asks for.
    unsafe {
        for (p, chunk) in x.chunks(PANEL).enumerate() {
            let addresses: Vec<_> = chunk.iter().map(|x| x.as_ptr()).collect();
            pack::panel(isa, w.dtype, k, &addresses, px.ptr().add(p * panel_bytes(w.dtype, k)));
        }
        for (t, x) in x.iter().enumerate() {
            pack::token_row(isa, w.dtype, k, x.as_ptr(), rx.ptr().add(t * token_row_bytes(w.dtype, k)));
        }
        isa.product(&mut isa.begin(), rows, Panels::from_raw(w.dtype, px.ptr(), k, tokens), c.ptr().cast(), false);
        dots(isa, rows, TokenRows::from_raw(w.dtype, rx.ptr(), k, tokens), y.as_mut_ptr(), n + 3);
    }
    let lane = |t: usize, i: usize| c.f32()[(t / PANEL * n + i) * PANEL + t % PANEL];
    let by_panels = (0..tokens).map(|t| (0..n).map(|i| lane(t, i)).collect()).collect();
    [by_panels, y.chunks(n + 3).map(|y| y[..n].to_vec()).collect()]
}

fn check(dtype: DType, [k, n, tokens]: [usize; 3], seed: u64) -> Result<(), TestCaseError> {
    let Some(isa) = isa() else { return Ok(()) };
    let mut random = Random(seed);
    let bytes = Guarded::new(&random.weights(dtype, k * n));
    let w = Weights::contiguous(dtype, &bytes, [k, n, 1]);
    let x: Vec<Vec<f32>> = (0..tokens).map(|_| random.vec(k)).collect();
    for (form, got) in products(isa, &w, &x).into_iter().enumerate() {
        for (t, got) in got.iter().enumerate() {
            let error = nmse(got, &matvec(w.rows(0, 0, n), &x[t]));
            prop_assert!(error < 1e-10, "form {form}, token {t}: NMSE {error}");
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn bf16_products_are_the_oracles(k in 1usize..700, n in 1usize..70, tokens in 1usize..66, seed: u64) {
        check(DType::Bf16, [k, n, tokens], seed)?;
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

/// `vdpbf16ps` takes denormals for zero, in and out: the result is as if they were.
#[test]
fn denormal_weights_are_zeros() {
    let Some(isa) = isa() else { return };
    let bytes: Vec<u8> = (0..64 * 4).flat_map(|i| [(i % 2) as u8 * 0x7F, 0]).collect();
    let w = Weights::contiguous(DType::Bf16, &bytes, [64, 4, 1]);
    let x = vec![vec![1f32; 64]; 3];
    assert!(products(isa, &w, &x).iter().flatten().flatten().all(|&y| y == 0.0));
}

/// Adding to a C block gives the same bits as one product over all columns: sums run on in registers or in memory.
#[test]
fn a_product_in_two_parts_is_the_whole() {
    let Some(isa) = isa() else { return };
    let mut random = Random(5);
    let (k, n, tokens) = (416, 37, 70usize);
    for dtype in [DType::Bf16] {
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
                pack::panel(isa, dtype, k, &addresses, px.ptr().add(p * panel_bytes(dtype, k)));
            }
            let px = Panels::from_raw(dtype, px.ptr(), k, tokens);
            let rows = w.rows(0, 0, n);
            isa.product(&mut (), rows, px, whole.ptr().cast(), false);
            isa.product(&mut (), rows.columns(0, 160), px.columns(0, 160), parts.ptr().cast(), false);
            isa.product(&mut (), rows.columns(160, k - 160), px.columns(160, k - 160), parts.ptr().cast(), true);
        }
        assert_eq!(whole.f32(), parts.f32());
    }
}
