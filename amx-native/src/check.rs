//! Whether the instructions do what the emulator says, and the products what the oracle says.

use amx_emu::Dot;

use ggml_hina::isa::Amx;
use ggml_hina::kernels::Engine;
use ggml_hina::kernels::amx::AmxEngine;
use ggml_hina::kernels::amx::tile::{Config, Session};
use ggml_hina::kernels::reference::{matvec, nmse};
use ggml_hina::pack::PANEL;
use ggml_hina::tensor::{DType, Weights};

use crate::memory::{Aligned, Packed, Random};

/// Runs all checks, a line for each; whether all passed.
pub fn run(amx: Amx) -> bool {
    let mut good = true;
    let mut line = |what: &str, ok: bool, detail: String| {
        println!("{} {what}: {detail}", if ok { "ok  " } else { "BAD " });
        good &= ok;
    };
    for op in [Dot::Bf16, Dot::SignedSigned] {
        let (wrong, of) = instructions(amx, op, 200);
        line(&format!("{op:?} against the model"), wrong == 0, format!("{wrong} of {of} results differ"));
    }
    // Whole steps, tails of k and of rows, one token to several panels; rows of the models of the paper.
    let shapes = [[32, 16, 1], [2048, 64, 1], [768, 64, 16], [4096, 48, 17], [1568, 37, 33], [7168, 64, 64]];
    for dtype in [DType::Bf16, DType::Q8_0] {
        for [k, n, tokens] in shapes {
            let error = product(amx, dtype, [k, n, tokens]);
            line(&format!("{dtype:?} k {k} rows {n} tokens {tokens}"), error < 1e-10, format!("NMSE {error:.1e}"));
        }
    }
    for k in [1, 45, 94] {
        let error = product(amx, DType::Bf16, [k, 21, 5]);
        line(&format!("BF16 k {k} rows 21 tokens 5"), error < 1e-10, format!("NMSE {error:.1e}"));
    }
    let kept = foreign_configuration(amx);
    line("a foreign tile configuration", kept, if kept { "kept" } else { "lost" }.into());
    good
}

/// The worst error of a product's tokens.
fn product(amx: Amx, dtype: DType, [k, n, tokens]: [usize; 3]) -> f64 {
    let mut random = Random(k as u64 + 1);
    let mut bytes = vec![0; dtype.row_bytes(k) * n];
    random.weights(dtype, &mut bytes);
    let w = Weights::contiguous(dtype, &bytes, [k, n, 1]);
    let x: Vec<_> = (0..tokens).map(|_| random.vec(k)).collect();
    let packed = Packed::new(amx.avx512(), dtype, k, &x);
    let c = Aligned::new(tokens.div_ceil(PANEL) * n * PANEL * 4);
    let engine = AmxEngine::new(amx);
    // SAFETY: C has the size that the product asks for.
    unsafe { engine.product(&mut engine.begin(), w.rows(0, 0, n), packed.panels(), c.ptr().cast(), false) };
    let error = |(t, x): (usize, &Vec<f32>)| {
        let got: Vec<f32> = (0..n).map(|i| c.f32()[(t / PANEL * n + i) * PANEL + t % PANEL]).collect();
        nmse(&got, &matvec(w.rows(0, 0, n), x))
    };
    x.iter().enumerate().map(error).fold(0.0, f64::max)
}

/// How many results of an instruction differ from the model's in some bit, of how many: random shapes and random bits.
fn instructions(amx: Amx, op: Dot, rounds: usize) -> (usize, usize) {
    let mut random = Random(7);
    let (mut wrong, mut of) = (0, 0);
    for round in 0..rounds {
        let [m, k, n] = [(); 3].map(|()| 1 + random.bits() as usize % 16);
        let shapes = [[m, 4 * n], [m, 4 * k], [k, 4 * n], [1, 4], [1, 4], [1, 4], [1, 4], [1, 4]];
        let operands: [[u8; 1024]; 3] = std::array::from_fn(|operand| {
            let mut bytes = [0; 1024];
            bytes.chunks_mut(4).for_each(|b| b.copy_from_slice(&bits(&mut random, op, operand, round).to_le_bytes()));
            bytes
        });
        let got = on_tiles(amx, op, shapes, &operands);
        let want = on_model(op, shapes, &operands);
        let same = |(a, b): (&[u8; 4], &[u8; 4])| {
            // A NaN is as good as another.
            let [a, b] = [a, b].map(|v| u32::from_le_bytes(*v));
            a == b || op == Dot::Bf16 && f32::from_bits(a).is_nan() && f32::from_bits(b).is_nan()
        };
        let (got, want) = (got.as_chunks().0, want.as_chunks().0);
        wrong += got.iter().zip(want).filter(|&pair| !same(pair)).count();
        of += m * n;
    }
    (wrong, of)
}

/// 4 bytes of an operand: any bits in every fourth round (NaN, Inf, denormals), else numbers near one.
fn bits(random: &mut Random, op: Dot, operand: usize, round: usize) -> u32 {
    let any = random.bits() as u32;
    if op != Dot::Bf16 || round.is_multiple_of(4) {
        return any;
    }
    if operand == 0 {
        return random.f32().to_bits();
    }
    let [lo, hi] = [(); 2].map(|()| u32::from(half::bf16::from_f32(random.f32()).to_bits()));
    lo | hi << 16
}

fn on_tiles(amx: Amx, op: Dot, shapes: [[usize; 2]; 8], operands: &[[u8; 1024]; 3]) -> [u8; 1024] {
    let mut out = [0; 1024];
    let mut session = Session::begin(amx);
    let tiles = session.configure(&Config::new(shapes));
    // SAFETY: every row of every tile lies in its 1024 bytes, 64 bytes apart.
    unsafe {
        tiles.load::<0>(operands[0].as_ptr(), 64);
        tiles.load::<1>(operands[1].as_ptr(), 64);
        tiles.load::<2>(operands[2].as_ptr(), 64);
        match op {
            Dot::Bf16 => tiles.dp_bf16::<0, 1, 2>(),
            _ => tiles.dp_i8::<0, 1, 2>(),
        }
        tiles.store::<0>(out.as_mut_ptr(), 64);
    }
    out
}

fn on_model(op: Dot, shapes: [[usize; 2]; 8], operands: &[[u8; 1024]; 3]) -> [u8; 1024] {
    let mut config = [0; 64];
    config[0] = 1;
    for (t, [rows, colsb]) in shapes.into_iter().enumerate() {
        config[16 + 2 * t] = colsb as u8;
        config[48 + t] = rows as u8;
    }
    let mut out = [0; 1024];
    let mut model = amx_emu::Tiles::new();
    model.load_config(&config).expect("a valid configuration");
    for (t, bytes) in operands.iter().enumerate() {
        let read = |row: usize, to: &mut [u8]| to.copy_from_slice(&bytes[row * 64..][..to.len()]);
        model.load(t as u8, read).expect("a configured tile");
    }
    model.dot(op, 0, 1, 2).expect("shapes that fit");
    model.store(0, |row, from| out[row * 64..][..from.len()].copy_from_slice(from)).expect("a configured tile");
    out
}

/// Whether a configuration of somebody else's is there again after a product of ours.
fn foreign_configuration(amx: Amx) -> bool {
    let foreign = Config::new([[3, 20], [3, 28], [7, 20], [1, 4], [1, 4], [1, 4], [1, 4], [1, 4]]);
    let mut theirs = Session::begin(amx);
    theirs.configure(&foreign);
    product(amx, DType::Bf16, [96, 40, 20]);
    Config::current(amx) == foreign
}
