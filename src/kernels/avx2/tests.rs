//! The AVX2 products against the oracle, which also packs their tokens.

use proptest::prelude::*;

use crate::isa::{Avx2, Bf16Form, Reading};
use crate::kernels::reference::{Reference, magnitudes, matvec};
use crate::kernels::{Engine, Vectors};
use crate::pack::{PANEL, Panels, TokenRows, panel_bytes, token_row_bytes};
use crate::tensor::{DType, Rows, Weights};
use crate::testing::{Aligned, Guarded, Part, Random, avx2, avx2_kinds};

/// Tokens, packed both ways.
struct Tokens {
    dtype: DType,
    k: usize,
    n: usize,
    panels: Aligned,
    rows: Aligned,
}

impl Tokens {
    fn new(dtype: DType, x: &[Vec<f32>]) -> Self {
        let (k, n) = (x[0].len(), x.len());
        let (panel, row) = (panel_bytes(dtype, k), token_row_bytes(dtype, k));
        let packed = Self { dtype, k, n, panels: Aligned::new(n.div_ceil(PANEL) * panel), rows: Aligned::new(n * row) };
        // SAFETY: the areas have the sizes that their layouts ask for.
        unsafe {
            for (p, x) in x.chunks(PANEL).enumerate() {
                let x: Vec<_> = x.iter().map(|x| x.as_ptr()).collect();
                Reference.panel(dtype, k, &x, packed.panels.ptr().add(p * panel));
            }
            for (t, x) in x.iter().enumerate() {
                Reference.token_row(dtype, k, x.as_ptr(), 0, k, packed.rows.ptr().add(t * row));
            }
        }
        packed
    }

    fn panels(&self) -> Panels<'_> {
        // SAFETY: packed by `new`.
        unsafe { Panels::from_raw(self.dtype, self.panels.ptr(), self.k, self.n) }
    }

    /// Token rows `[t, t + n)`.
    fn rows(&self, t: usize, n: usize) -> TokenRows<'_> {
        let at = t * token_row_bytes(self.dtype, self.k);
        // SAFETY: packed by `new`.
        unsafe { TokenRows::from_raw((self.dtype, Bf16Form::Fma), self.rows.ptr().add(at), self.k, n) }
    }
}

/// The panel form of some columns, into the C block `c`: the same bits by each kind.
fn product_into(rows: Rows<'_>, panels: Panels<'_>, c: &Aligned, add: bool) {
    let before = c.f32().to_vec();
    let mut first: Option<Vec<u32>> = None;
    for isa in avx2_kinds() {
        // SAFETY: the block is as large as it was; the callers make it large enough.
        unsafe {
            c.ptr().cast::<f32>().copy_from_nonoverlapping(before.as_ptr(), before.len());
            isa.product(&mut (), rows, panels, c.ptr().cast(), add);
        }
        let got: Vec<u32> = c.f32().iter().map(|y| y.to_bits()).collect();
        assert_eq!(first.get_or_insert_with(|| got.clone()), &got);
    }
}

/// The panel form: `[token][row]`.
fn product(rows: Rows<'_>, panels: Panels<'_>) -> Vec<Vec<f32>> {
    let c = Aligned::new(panels.count() * rows.n * PANEL * 4);
    product_into(rows, panels, &c, false);
    let lane = |t: usize, i: usize| c.f32()[(t / PANEL * rows.n + i) * PANEL + t % PANEL];
    (0..panels.tokens).map(|t| (0..rows.n).map(|i| lane(t, i)).collect()).collect()
}

/// The dot form: `[token][row]`, with the same bits in whichever order the rows are read.
fn dots(rows: Rows<'_>, xs: TokenRows<'_>) -> Vec<Vec<f32>> {
    let mut all: Vec<_> =
        avx2_kinds().iter().flat_map(|&isa| Reading::ALL.map(|reading| dots_of(isa, rows.by(reading), xs))).collect();
    let first = all.remove(0);
    assert!(all.iter().all(|other| bits(other) == bits(&first)));
    first
}

fn dots_of(isa: Avx2, rows: Rows<'_>, xs: TokenRows<'_>) -> Vec<Vec<f32>> {
    let ld = rows.n + 3;
    let mut y = vec![f32::NAN; xs.tokens * ld];
    // SAFETY: `y` has a row of `ld` for each token.
    unsafe { isa.dots(rows, xs, y.as_mut_ptr(), ld) };
    assert!(y.chunks(ld).all(|y| y[rows.n..].iter().all(|y| y.is_nan())));
    y.chunks(ld).map(|y| y[..rows.n].to_vec()).collect()
}

/// All tokens through both forms.
fn products(rows: Rows<'_>, x: &[Vec<f32>]) -> [Vec<Vec<f32>>; 2] {
    let packed = Tokens::new(rows.dtype, x);
    [product(rows, packed.panels()), dots(rows, packed.rows(0, packed.n))]
}

fn bits(y: &[Vec<f32>]) -> Vec<Vec<u32>> {
    y.iter().map(|y| y.iter().map(|y| y.to_bits()).collect()).collect()
}

/// Rows that are `gap` bytes apart, with NaN between them, up to the end of a page.
fn check(dtype: DType, [k, n, tokens]: [usize; 3], gap: usize, seed: u64) -> Result<(), TestCaseError> {
    if avx2().is_none() {
        return Ok(());
    }
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
    for (form, got) in ["panels", "dots"].iter().zip(products(rows, &x)) {
        for (t, got) in got.iter().enumerate() {
            for (i, (&got, &(want, magnitude))) in got.iter().zip(&want[t]).enumerate() {
                let error = (f64::from(got) - want).abs();
                prop_assert!(error <= 4e-6 * magnitude, "{form}, token {t}, row {i}: {got}, not {want}");
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn bf16_products_are_the_oracles(
        k in 1usize..1200, n in 1usize..70, tokens in 1usize..66, gap in 0usize..4, seed: u64,
    ) {
        check(DType::Bf16, [k, n, tokens], gap, seed)?;
    }

    #[test]
    fn dots_of_half_groups_are_the_oracles(part in [0usize..5, 0..9, 0..3, 1..16], n in 1usize..40, tokens in 1usize..9, seed: u64) {
        if avx2().is_none() {
            return Ok(());
        }
        let part = Part::new(part, n, tokens, seed);
        let packed = Tokens::new(DType::Bf16, &part.x);
        let y = dots(part.rows(), packed.rows(0, tokens).columns(part.columns.start, part.columns.len()));
        part.check(|t, i| y[t][i])?;
    }

    #[test]
    fn q8_0_products_are_the_oracles(
        blocks in 1usize..38, n in 1usize..70, tokens in 1usize..66, gap in 0usize..4, seed: u64,
    ) {
        check(DType::Q8_0, [blocks * 32, n, tokens], gap, seed)?;
    }

    #[test]
    fn a_row_of_inf_and_nan_stays_alone(
        k in 1usize..100, n in 2usize..40, tokens in 1usize..20, row in 0usize..40, seed: u64,
    ) {
        if avx2().is_none() {
            return Ok(());
        }
        let row = row % n;
        let mut random = Random(seed);
        let mut bytes = random.weights(DType::Bf16, k * n);
        for (j, v) in bytes[row * k * 2..(row + 1) * k * 2].chunks_mut(2).enumerate() {
            v.copy_from_slice(if j % 2 == 0 { &[0x80, 0x7F] } else { &[0xC0, 0x7F] });
        }
        let w = Weights::contiguous(DType::Bf16, &bytes, [k, n, 1]);
        let x: Vec<Vec<f32>> = (0..tokens).map(|_| random.vec(k)).collect();
        for got in products(w.rows(0, 0, n), &x).iter().flatten() {
            for (i, y) in got.iter().enumerate() {
                prop_assert_eq!(y.is_finite(), i != row, "row {} is {}", i, y);
            }
        }
    }

    /// A row's sums are the same bits whatever rows are multiplied with it, and a token's whatever tokens.
    #[test]
    fn rows_and_tokens_do_not_depend_on_their_neighbours(
        q8_0: bool, blocks in 1usize..38, odd in 0usize..32, n in 1usize..30, tokens in 1usize..66, seed: u64,
    ) {
        if avx2().is_none() {
            return Ok(());
        }
        let (dtype, k) = if q8_0 { (DType::Q8_0, blocks * 32) } else { (DType::Bf16, blocks * 32 - odd) };
        let mut random = Random(seed);
        let bytes = random.weights(dtype, k * n);
        let w = Weights::contiguous(dtype, &bytes, [k, n, 1]);
        let x = Tokens::new(dtype, &(0..tokens).map(|_| random.vec(k)).collect::<Vec<_>>());
        let [lanes, rows] = [product(w.rows(0, 0, n), x.panels()), dots(w.rows(0, 0, n), x.rows(0, tokens))];
        for i in 0..n {
            let one = w.rows(0, i, 1);
            let row = |y: &[Vec<f32>]| y.iter().map(|y| vec![y[i]]).collect::<Vec<_>>();
            prop_assert_eq!(bits(&product(one, x.panels())), bits(&row(&lanes)), "row {}", i);
            prop_assert_eq!(bits(&dots(one, x.rows(0, tokens))), bits(&row(&rows)), "row {}", i);
        }
        for t in 0..tokens {
            prop_assert_eq!(bits(&dots(w.rows(0, 0, n), x.rows(t, 1))), bits(&rows[t..t + 1]), "token {}", t);
        }
        for p in 0..x.panels().count() {
            let got = product(w.rows(0, 0, n), x.panels().some(p, 1));
            prop_assert_eq!(bits(&got), bits(&lanes[p * PANEL..][..got.len()]), "panel {}", p);
        }
    }
}

/// Denormals are multiplied for what they are.
#[test]
fn denormal_weights_are_next_to_nothing() {
    if avx2().is_none() {
        return;
    }
    let bytes: Vec<u8> = (0..64 * 4).flat_map(|i| [(i % 2) as u8 * 0x7F, 0]).collect();
    let w = Weights::contiguous(DType::Bf16, &bytes, [64, 4, 1]);
    let x = vec![vec![1f32; 64]; 3];
    let want = 32.0 * f32::from_bits(0x7F << 16);
    assert!(products(w.rows(0, 0, 4), &x).iter().flatten().flatten().all(|&y| y == want));
}

/// The largest integers: weights of -128 and quants of ±127, whose pairs are the largest 16-bit sums.
#[test]
fn the_largest_quants_do_not_overflow() {
    if avx2().is_none() {
        return;
    }
    let (k, n) = (96, 5);
    let block = [&[0x00, 0x3C][..], &[0x80; 32]].concat();
    let bytes = block.repeat(k / 32 * n);
    let w = Weights::contiguous(DType::Q8_0, &bytes, [k, n, 1]);
    // Scales are 1, as 127 / 127.
    for (x, want) in [(127.0, -128.0 * 127.0 * 96.0), (-127.0, 128.0 * 127.0 * 96.0)] {
        for y in products(w.rows(0, 0, n), &vec![vec![x; k]; 4]).iter().flatten().flatten() {
            assert_eq!(*y, want);
        }
    }
}

/// Adding to a C block gives the same bits as one product over all columns: sums run on in registers or in memory.
#[test]
fn a_product_in_two_parts_is_the_whole() {
    if avx2().is_none() {
        return;
    }
    let mut random = Random(5);
    for (dtype, k, first) in
        [(DType::Bf16, 416, 160), (DType::Bf16, 1203, 544), (DType::Q8_0, 416, 160), (DType::Q8_0, 1216, 544)]
    {
        for tokens in [7, 30, 70] {
            let n = 37;
            let bytes = random.weights(dtype, k * n);
            let w = Weights::contiguous(dtype, &bytes, [k, n, 1]);
            let x = Tokens::new(dtype, &(0..tokens).map(|_| random.vec(k)).collect::<Vec<_>>());
            let (rows, x) = (w.rows(0, 0, n), x.panels());
            let [whole, parts] = [(); 2].map(|()| Aligned::new(x.count() * n * PANEL * 4));
            product_into(rows, x, &whole, false);
            product_into(rows.columns(0, first), x.columns(0, first), &parts, false);
            product_into(rows.columns(first, k - first), x.columns(first, k - first), &parts, true);
            assert_eq!(whole.f32(), parts.f32());
        }
    }
}
