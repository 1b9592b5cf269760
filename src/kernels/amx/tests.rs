//! The AMX products against the oracle, on the CPU's AMX or the emulator's.

use proptest::prelude::*;

use super::tile::{Config, Session};
use super::{AmxEngine, Tiling};
use crate::isa::{Amx, Reading};
use crate::kernels::Engine;
use crate::kernels::Vectors;
use crate::kernels::reference::{magnitudes, matvec, matvec_by, nmse, nmse_against, widened};
use crate::pack::{PANEL, Panels, panel_bytes};
use crate::tensor::{DType, QK8_0, Rows, Weights};
use crate::testing::{Aligned, Guarded, Part, Random, amx};

fn panels(amx: Amx, dtype: DType, k: usize, x: &[Vec<f32>]) -> Aligned {
    let bytes = panel_bytes(dtype, k);
    let area = Aligned::new(x.len().div_ceil(PANEL) * bytes);
    for (p, x) in x.chunks(PANEL).enumerate() {
        let tokens: Vec<_> = x.iter().map(|x| x.as_ptr()).collect();
        // SAFETY: k values a token; a panel of the area.
        unsafe { amx.avx512().panel(dtype, k, &tokens, area.ptr().add(p * bytes)) };
    }
    area
}

/// Some weights (one expert, rows `step` rows apart), and tokens that are packed as `form`.
struct Case<'a> {
    w: Weights<'a>,
    form: DType,
    step: usize,
    x: Vec<Vec<f32>>,
}

impl Case<'_> {
    fn rows(&self) -> Rows<'_> {
        self.w.rows_apart(0, 0, self.step, self.w.n.div_ceil(self.step))
    }

    /// The C block, which was `before` everywhere, as `[token][row]`: the same bits in whichever order the rows are read, and with or
    /// without room.
    fn product(&self, amx: Amx, before: f32, add: bool) -> Vec<Vec<f32>> {
        let [stretch, streams] = Reading::ALL.map(|reading| self.product_by((reading, true), amx, before, add));
        let no_room = self.product_by((Reading::Streams, false), amx, before, add);
        let bits = |y: &[Vec<f32>]| y.concat().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(&stretch), bits(&streams));
        assert_eq!(bits(&stretch), bits(&no_room));
        stretch
    }

    fn product_by(&self, (reading, room): (Reading, bool), amx: Amx, before: f32, add: bool) -> Vec<Vec<f32>> {
        let (rows, tokens) = (self.rows().by(reading), self.x.len());
        let px = panels(amx, self.form, self.w.k, &self.x);
        let memory = Aligned::new(AmxEngine::ROOM);
        let c = Aligned::new(tokens.div_ceil(PANEL) * rows.n * PANEL * 4);
        let engine = AmxEngine::new(amx);
        // SAFETY: every area has the size its layout asks for.
        unsafe {
            (0..c.f32().len()).for_each(|i| c.ptr().cast::<f32>().add(i).write(before));
            let panels = Panels::from_raw(self.form, px.ptr(), self.w.k, tokens);
            let mut session = engine.begin();
            if room {
                engine.lend(&mut session, memory.ptr());
            }
            engine.product(&mut session, rows, panels, c.ptr().cast(), add);
        }
        let lane = |t: usize, i: usize| c.f32()[(t / PANEL * rows.n + i) * PANEL + t % PANEL];
        (0..tokens).map(|t| (0..rows.n).map(|i| lane(t, i)).collect()).collect()
    }
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    k: usize,
    n: usize,
    tokens: usize,
    step: usize,
    add: bool,
}

fn shapes(k: impl Strategy<Value = usize>) -> impl Strategy<Value = Shape> {
    let n = prop_oneof![1usize..80, (1usize..6).prop_map(|tiles| tiles * 16)];
    (k, n, 1usize..66, 1usize..3, any::<bool>()).prop_map(|(k, n, tokens, step, add)| Shape { k, n, tokens, step, add })
}

/// The weights end at a page that must not be read, so their base is as aligned as chance has it.
fn check(dtype: DType, s: Shape, seed: u64) -> Result<(), TestCaseError> {
    check_as(dtype, dtype, s, seed)
}

fn check_as(dtype: DType, form: DType, s: Shape, seed: u64) -> Result<(), TestCaseError> {
    let Some(amx) = amx() else { return Ok(()) };
    let mut random = Random(seed);
    let bytes = Guarded::new(&random.weights(dtype, s.k * s.n));
    let w = Weights::contiguous(dtype, &bytes, [s.k, s.n, 1]);
    check_case(amx, &Case { w, form, step: s.step, x: (0..s.tokens).map(|_| random.vec(s.k)).collect() }, s.add)
}

fn check_case(amx: Amx, case: &Case<'_>, add: bool) -> Result<(), TestCaseError> {
    let before = if add { 0.5 } else { f32::NAN };
    for (t, got) in case.product(amx, before, add).iter().enumerate() {
        let mut want = matvec_by(case.form, case.rows(), &case.x[t]);
        if add {
            want.iter_mut().for_each(|v| *v += f64::from(before));
        }
        let mut norm = magnitudes(case.rows(), &case.x[t]);
        norm.iter_mut().for_each(|v| *v += if add { f64::from(before) } else { 0.0 });
        let error = nmse_against(got, &want, &norm);
        prop_assert!(error < 1e-12, "token {t}: NMSE {error}");
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn bf16_products_are_the_oracles(s in shapes(1usize..300), seed: u64) {
        check(DType::Bf16, s, seed)?;
    }

    /// Rows that are all off the cache lines alike. What lies before and behind them is NaN, then comes a page that must not be
    /// read.
    #[test]
    fn bf16_rows_off_the_cache_lines_are_the_oracles(s in shapes((1usize..12).prop_map(|b| b * 32)), pairs in 0usize..16, seed: u64) {
        let Some(amx) = amx() else { return Ok(()) };
        let mut random = Random(seed);
        let values = random.weights(DType::Bf16, s.k * s.n);
        let (before, behind) = (64, 64 - pairs * 4);
        let mut bytes = vec![0xff; before + values.len() + behind];
        bytes[before..][..values.len()].copy_from_slice(&values);
        let bytes = Guarded::new(&bytes);
        let w = Weights::contiguous(DType::Bf16, &bytes[before..][..values.len()], [s.k, s.n, 1]);
        prop_assert_eq!(w.data.addr() % 64, pairs * 4);
        check_case(amx, &Case { w, form: DType::Bf16, step: s.step, x: (0..s.tokens).map(|_| random.vec(s.k)).collect() }, s.add)?;
    }

    /// Half a step is a seam where rows end with a cache line, else a step by itself.
    #[test]
    fn bf16_products_of_half_groups_are_the_oracles(
        part in [0usize..5, 0..9, 0..3, 1..16],
        n in 1usize..40,
        tokens in 1usize..70,
        seed: u64,
    ) {
        let Some(amx) = amx() else { return Ok(()) };
        let part = Part::new(part, n, tokens, seed);
        let (px, engine) = (panels(amx, DType::Bf16, part.k, &part.x), AmxEngine::new(amx));
        for reading in Reading::ALL {
            let c = Aligned::new(tokens.div_ceil(PANEL) * n * PANEL * 4);
            // SAFETY: every area has the size its layout asks for.
            unsafe {
                let panels = Panels::from_raw(DType::Bf16, px.ptr(), part.k, tokens);
                let columns = panels.columns(part.columns.start, part.columns.len());
                engine.product(&mut engine.begin(), part.rows().by(reading), columns, c.ptr().cast(), false);
            }
            part.check(|t, i| c.f32()[(t / PANEL * n + i) * PANEL + t % PANEL])?;
        }
    }

    #[test]
    fn int8_products_are_the_oracles(s in shapes((1usize..10).prop_map(|b| b * QK8_0)), seed: u64) {
        check(DType::Q8_0, s, seed)?;
    }

    #[test]
    fn q8_0_made_bf16_is_the_oracles(s in shapes((1usize..10).prop_map(|b| b * QK8_0)), seed: u64) {
        check_as(DType::Q8_0, DType::Bf16, s, seed)?;
    }

    #[test]
    fn a_row_of_inf_and_nan_stays_alone(k in 1usize..100, n in 2usize..70, tokens in 1usize..40, row: usize, seed: u64) {
        let Some(amx) = amx() else { return Ok(()) };
        for (dtype, form) in [(DType::Bf16, DType::Bf16), (DType::Q8_0, DType::Q8_0), (DType::Q8_0, DType::Bf16)] {
            let (k, row) = (k.next_multiple_of(dtype.block()), row % n);
            let mut random = Random(seed);
            let mut bytes = random.weights(dtype, k * n);
            // BF16: Inf and NaN in turn; Q8_0: the same as scales.
            let (unit, values) = match dtype {
                DType::Q8_0 => (34, [[0x00, 0x7C], [0x00, 0x7E]]),
                _ => (2, [[0x80, 0x7F], [0xC0, 0x7F]]),
            };
            let row_bytes = dtype.row_bytes(k);
            for (j, v) in bytes[row * row_bytes..(row + 1) * row_bytes].chunks_mut(unit).enumerate() {
                v[..2].copy_from_slice(&values[j % 2]);
            }
            let bytes = Guarded::new(&bytes);
            let w = Weights::contiguous(dtype, &bytes, [k, n, 1]);
            let case = Case { w, form, step: 1, x: (0..tokens).map(|_| random.vec(k)).collect() };
            for got in case.product(amx, f32::NAN, false) {
                for (i, y) in got.iter().enumerate() {
                    prop_assert_eq!(y.is_finite(), i != row, "{:?}: row {} is {}", dtype, i, y);
                }
            }
        }
    }
}

/// More blocks than INT8 keeps scales for.
#[test]
fn long_rows_are_the_oracles() {
    let shape = Shape { k: 75 * QK8_0, n: 21, tokens: 18, step: 1, add: false };
    check(DType::Q8_0, shape, 3).unwrap();
    check(DType::Q8_0, Shape { add: true, ..shape }, 4).unwrap();
    check(DType::Bf16, Shape { k: shape.k + 7, ..shape }, 5).unwrap();
    check_as(DType::Q8_0, DType::Bf16, shape, 6).unwrap();
    // Two parts of k in a session's room, and too many rows for it.
    for (n, add) in [(120, false), (120, true), (600, false)] {
        check_as(DType::Q8_0, DType::Bf16, Shape { n, tokens: 70, add, ..shape }, 7).unwrap();
    }
}

/// A Q8_0 weight as BF16 is what it was within BF16's last bit, exactly so where that holds it, and neither larger nor smaller on average.
#[test]
fn q8_0_weights_made_bf16_are_near() {
    let scales = (0..1024u16).map(|m| half::f16::from_bits(0x2000 + m).to_f32());
    let (mut bias, mut square, mut n) = (0.0, 0.0, 0.0);
    for (scale, quant) in scales.flat_map(|scale| (-127..=127i8).map(move |quant| (scale, quant))) {
        let (got, want) = (f64::from(widened(scale, quant)), f64::from(scale) * f64::from(quant));
        assert!((got - want).abs() <= want.abs() / 128.0, "{scale} * {quant}: {got}");
        if quant != 0 {
            let error = (got - want) / want;
            (bias, square, n) = (bias + error, square + error * error, n + 1.0);
        }
    }
    let (bias, rms) = (bias / n, f64::sqrt(square / n));
    assert!(bias.abs() < 2e-4 && rms < 2.5e-3, "bias {bias}, root of the mean square {rms}");
    assert!((-127..=127).all(|quant| widened(0.25, quant) == f32::from(quant) * 0.25 && widened(0.0, quant) == 0.0));
}

/// Rows of which many panels meet a part at a time: on the cache lines and off them, added to what was there, and with the same bits
/// as fewer panels, which meet whole rows.
#[test]
fn parts_of_k_make_whole_rows() {
    let Some(amx) = amx() else { return };
    let mut random = Random(8);
    let (k, n) = (32 * 271, 34);
    for (offset, add) in [(0usize, false), (32, true)] {
        let area = Aligned::new(offset + k * n * 2);
        let values = random.weights(DType::Bf16, k * n);
        // SAFETY: room for the values behind the offset, that lives as long as the slice.
        let bytes = unsafe {
            area.ptr().add(offset).copy_from_nonoverlapping(values.as_ptr(), values.len());
            std::slice::from_raw_parts(area.ptr().add(offset), values.len())
        };
        let w = Weights::contiguous(DType::Bf16, bytes, [k, n, 1]);
        let x: Vec<_> = (0..100).map(|_| random.vec(k)).collect();
        let few = Case { w, form: DType::Bf16, step: 1, x: x[..64].to_vec() };
        let many = Case { w, form: DType::Bf16, step: 1, x };
        check_case(amx, &many, add).unwrap();
        check_case(amx, &few, add).unwrap();
        // Off the cache lines, what a part's first and last lines have beside it is added behind its other steps.
        let same = many.product(amx, 0.5, add)[..64] == few.product(amx, 0.5, add);
        assert!(same || offset > 0, "parts are not the whole");
    }
}

/// `tdpbf16ps` takes denormals for zero; the last column of an odd k goes another way and comes to f32 denormals at most.
#[test]
fn denormal_weights_are_zeros() {
    let Some(amx) = amx() else { return };
    for k in [64, 70, 71] {
        let bytes: Vec<u8> = (0..k * 20).flat_map(|_| [0x7F, 0]).collect();
        let w = Weights::contiguous(DType::Bf16, &bytes, [k, 20, 1]);
        let case = Case { w, form: DType::Bf16, step: 1, x: vec![vec![1f32; k]; 3] };
        let largest = case.product(amx, 0.0, false).into_iter().flatten().fold(0f32, f32::max);
        assert!(largest < f32::MIN_POSITIVE, "{k}: {largest}");
    }
}

/// Adding to a C block gives one product over all columns: the same bits where the sums have one order, which they have
/// not with one panel of BF16, or where a seam is added last.
#[test]
fn a_product_in_two_parts_is_the_whole() {
    let Some(amx) = amx() else { return };
    let engine = AmxEngine::new(amx);
    let mut random = Random(5);
    let (k, n, cut) = (1568, 37, 1184);
    for (dtype, tokens, offset) in [
        (DType::Bf16, 70usize, 0),
        (DType::Bf16, 70, 2),
        (DType::Bf16, 70, 32),
        (DType::Bf16, 9, 0),
        (DType::Bf16, 20, 0),
        (DType::Bf16, 20, 32),
        (DType::Q8_0, 70, 0),
        (DType::Q8_0, 9, 0),
    ] {
        let values = random.weights(dtype, k * n);
        let area = Aligned::new(offset + values.len());
        // SAFETY: room for the values behind the offset, that lives as long as the slice.
        let bytes = unsafe {
            area.ptr().add(offset).copy_from_nonoverlapping(values.as_ptr(), values.len());
            std::slice::from_raw_parts(area.ptr().add(offset), values.len())
        };
        let w = Weights::contiguous(dtype, bytes, [k, n, 1]);
        let x: Vec<_> = (0..tokens).map(|_| random.vec(k)).collect();
        let px = panels(amx, dtype, k, &x);
        let [whole, parts] = [(); 2].map(|()| Aligned::new(tokens.div_ceil(PANEL) * n * PANEL * 4));
        // SAFETY: every area has the size its layout asks for.
        unsafe {
            let panels = Panels::from_raw(dtype, px.ptr(), k, tokens);
            let rows = w.rows(0, 0, n);
            let session = &mut engine.begin();
            engine.product(session, rows, panels, whole.ptr().cast(), false);
            engine.product(session, rows.columns(0, cut), panels.columns(0, cut), parts.ptr().cast(), false);
            let (rows, panels) = (rows.columns(cut, k - cut), panels.columns(cut, k - cut));
            engine.product(session, rows, panels, parts.ptr().cast(), true);
        }
        let want: Vec<f64> = whole.f32().iter().map(|&v| v.into()).collect();
        assert!(nmse(parts.f32(), &want) < 1e-12, "{dtype:?} {tokens} {offset}");
        if dtype == DType::Q8_0 || (tokens > PANEL && offset != 32) {
            assert!(whole.f32() == parts.f32(), "{dtype:?} {tokens} {offset}");
        }
    }
}

/// What ggml's own AMX kernels do: configure a thread once and rely on that for good.
#[test]
fn a_foreign_configuration_survives_our_products() {
    let Some(amx) = amx() else { return };
    // Shapes that none of ours has: C 3 x 5, A 3 x 7 pairs, B 7 pairs x 5.
    let full = [16, 64];
    let foreign = Config::new([[3, 20], [3, 28], [7, 20], full, full, full, full, full]);
    let a: [[f32; 14]; 3] = std::array::from_fn(|i| std::array::from_fn(|k| (i + 1) as f32 + k as f32));
    let b: [[f32; 5]; 14] = std::array::from_fn(|k| std::array::from_fn(|j| j as f32 - (k % 3) as f32));
    let bits = |v: f32| half::bf16::from_f32(v).to_bits();
    let tile_a: [[u16; 14]; 3] = a.map(|row| row.map(bits));
    let tile_b: [[u16; 10]; 7] = std::array::from_fn(|p| std::array::from_fn(|j| bits(b[2 * p + j % 2][j / 2])));
    let product = |session: &mut Session| {
        let mut c = [[f32::NAN; 5]; 3];
        let tiles = session.configure(&foreign);
        // SAFETY: the arrays have the tiles' shapes.
        unsafe {
            tiles.load::<1>(tile_a.as_ptr().cast(), 28);
            tiles.load::<2>(tile_b.as_ptr().cast(), 20);
            tiles.zero::<0>();
            tiles.dp_bf16::<0, 1, 2>();
            tiles.store::<0>(c.as_mut_ptr().cast(), 20);
        }
        c
    };
    let want: [[f32; 5]; 3] =
        std::array::from_fn(|i| std::array::from_fn(|j| (0..14).map(|k| a[i][k] * b[k][j]).sum()));
    // The foreign user: as far as its session knows, its configuration stays loaded, so it never loads it again.
    let mut theirs = Session::begin(amx);
    let mut random = Random(1);
    for dtype in [DType::Bf16, DType::Q8_0] {
        assert_eq!(product(&mut theirs), want);
        let bytes = random.weights(dtype, 96 * 40);
        let w = Weights::contiguous(dtype, &bytes, [96, 40, 1]);
        let case = Case { w, form: dtype, step: 1, x: (0..20).map(|_| random.vec(96)).collect() };
        let ours = case.product(amx, f32::NAN, false);
        assert!(ours.iter().zip(&case.x).all(|(y, x)| nmse(y, &matvec(case.rows(), x)) < 1e-10));
        assert_eq!(Config::current(amx), foreign);
        assert_eq!(product(&mut theirs), want);
    }
    drop(theirs);
    assert_eq!(Config::current(amx), Config::NONE);
}

#[test]
fn a_thread_without_configuration_stays_without() {
    let Some(amx) = amx() else { return };
    let mut session = Session::begin(amx);
    assert_eq!(Config::current(amx), Config::NONE);
    session.configure(&Config::new([[16, 64]; 8]));
    drop(session);
    assert_eq!(Config::current(amx), Config::NONE);
}

#[test]
fn tiles_cover_all_rows_and_overlap_only_in_their_group() {
    for n in 1..200 {
        let tiling = Tiling::neighbours(n);
        for size in [2, 4] {
            let groups: Vec<_> = tiling.groups(size).collect();
            let all: Vec<_> = groups.iter().cloned().flatten().collect();
            assert_eq!(all, (0..tiling.count()).collect::<Vec<_>>(), "{n}");
            let mut done = 0;
            for group in groups {
                assert!((1..=size).contains(&group.len()));
                assert!(group.start == 0 || tiling.start(group.start) == done, "{n}: group {group:?}");
                done = tiling.start(group.end - 1) + tiling.height;
            }
            assert_eq!(done, n);
        }
    }
}

#[test]
fn tiles_have_each_row_once_as_a_new_one() {
    for (n, reading) in (1..200).flat_map(|n| Reading::ALL.map(|reading| (n, reading))) {
        let tiling = Tiling::by(reading, n);
        let rows = |t: usize| tiling.fresh(t).map(move |r| tiling.start(t) + r * tiling.apart);
        let mut all: Vec<_> = (0..tiling.count()).flat_map(rows).collect();
        all.sort_unstable();
        assert_eq!(all, (0..n).collect::<Vec<_>>(), "{reading:?}");
        // Each tile goes on where the one before it was.
        let streams = reading == Reading::Streams && n % 16 == 0;
        assert!(!streams || (1..tiling.count()).all(|t| tiling.start(t) == tiling.start(t - 1) + 1), "{n}");
    }
}
