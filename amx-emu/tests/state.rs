//! Configuration and tile registers of a thread.

mod common;

use amx_emu::{Mode, Op};
use common::*;
use proptest::prelude::*;

fn shapes() -> impl Strategy<Value = Vec<(u8, u16)>> {
    proptest::collection::vec(prop_oneof![Just((0, 0)), (1u8..=16, 1u16..=64)], 8)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_configuration_comes_back(shapes in shapes(), start_row in any::<u8>()) {
        setup();
        let mut c = config(&shapes);
        c[1] = start_row;
        ldtilecfg(&c);
        prop_assert_eq!(sttilecfg(), c);
        tilerelease();
    }

    /// Load and store move `rows` x `colsb` bytes by stride, and nothing else.
    #[test]
    fn rows_move_by_stride(rows in 1u8..=16, groups in 1u16..=16, stride in 64usize..200, backwards in any::<bool>()) {
        setup();
        let colsb = 4 * groups;
        let memory: Vec<u8> = (0..16 * 200).map(|i| (i * 31 % 255) as u8).collect();
        let (first, step) = if backwards { (15 * stride, stride.wrapping_neg()) } else { (0, stride) };
        ldtilecfg(&config(&[(rows, colsb)]));
        // SAFETY: rows lie in `memory`, 16 x 200 bytes, either way.
        unsafe { tileloadd::<0>(memory.as_ptr().add(first), step) };
        let mut out = vec![0xeeu8; memory.len()];
        // SAFETY: as above.
        unsafe { tilestored::<0>(out.as_mut_ptr().add(first), step) };
        let mut want = vec![0xeeu8; memory.len()];
        for row in 0..usize::from(rows) {
            let at = if backwards { first - row * stride } else { row * stride };
            let bytes = at..at + usize::from(colsb);
            want[bytes.clone()].copy_from_slice(&memory[bytes]);
        }
        prop_assert_eq!(out, want);
        tilerelease();
    }
}

#[test]
fn the_initial_state() {
    setup();
    // A new thread has no configuration; tilerelease and palette 0 give that back.
    std::thread::spawn(|| assert_eq!(sttilecfg(), [0; 64])).join().unwrap();
    ldtilecfg(&full());
    tilerelease();
    assert_eq!(sttilecfg(), [0; 64]);
    ldtilecfg(&full());
    ldtilecfg(&[0; 64]);
    assert_eq!(sttilecfg(), [0; 64]);
}

#[test]
fn tiles_are_zero_after_a_configuration() {
    setup();
    let ones = [1u8; 1024];
    let fill = || {
        // SAFETY: 16 rows of 64 bytes.
        unsafe { tileloadd::<4>(ones.as_ptr(), 64) };
        assert_eq!(stored::<4>().as_flattened(), ones);
    };
    ldtilecfg(&full());
    fill();
    ldtilecfg(&full());
    assert_eq!(stored::<4>(), [[0; 64]; 16], "LDTILECFG, even with the same shapes");
    fill();
    tilezero::<4>();
    assert_eq!(stored::<4>(), [[0; 64]; 16], "TILEZERO");
    tilerelease();
}

#[test]
fn threads_have_their_own_tiles() {
    setup();
    let barrier = std::sync::Barrier::new(4);
    std::thread::scope(|s| {
        for id in 1..=4u8 {
            let barrier = &barrier;
            s.spawn(move || {
                let c = config(&[(id, 4 * u16::from(id))]);
                ldtilecfg(&c);
                for round in 0..50 {
                    let mine = [id * 50 + round; 1024];
                    // SAFETY: 16 rows of 64 bytes are enough for any tile.
                    unsafe { tileloadd::<0>(mine.as_ptr(), 64) };
                    barrier.wait();
                    let got = stored::<0>();
                    let n = usize::from(id);
                    assert!(got[..n].iter().all(|r| r[..4 * n].iter().all(|&b| b == mine[0])));
                    assert_eq!(sttilecfg(), c);
                }
                tilerelease();
            });
        }
    });
}

#[test]
fn counts() {
    if amx_emu::install().unwrap() == Mode::Native {
        println!("skipped: the CPU runs AMX itself, and nothing counts");
        return;
    }
    // The counts are the process's; this file's other tests run no tdpbusd and no tileloaddt1.
    let before = amx_emu::stats();
    ldtilecfg(&full());
    let block = [0u8; 1024];
    for _ in 0..3 {
        // SAFETY: 16 rows of 64 bytes.
        unsafe { tileloaddt1::<1>(block.as_ptr(), 64) };
        dot::<0, 1, 2>(amx_emu::Dot::UnsignedSigned);
    }
    tilerelease();
    let ran = amx_emu::stats().since(&before);
    assert_eq!((ran.get(Op::Tileloaddt1), ran.get(Op::Tdpbusd), ran.get(Op::Tdpbuud)), (3, 3, 0));
    assert!(ran.get(Op::Ldtilecfg) >= 1 && ran.get(Op::Tilerelease) >= 1);
}

/// The registers and flags of the program, and its vector registers, are as before.
#[test]
fn nothing_else_changes() {
    setup();
    ldtilecfg(&full());
    let block = [3u8; 1024];
    let (a, b, flags): (u64, u64, u64);
    let mut vector = [1.5f32, 2.5, 3.5, 4.5];
    // SAFETY: 16 rows of 64 bytes; the stack is as before at the end.
    unsafe {
        std::arch::asm!(
            "movups xmm5, [{v}]", "mov rax, 0x1122334455667788", "mov rcx, rax", "not rcx", "stc",
            "tileloadd tmm0, [{p} + {s}*1]", "tdpbssd tmm1, tmm0, tmm2",
            "pushfq", "pop {f}", "movups [{v}], xmm5",
            p = in(reg) block.as_ptr(), s = in(reg) 64usize, v = in(reg) vector.as_mut_ptr(), f = out(reg) flags,
            out("rax") a, out("rcx") b, out("xmm5") _);
    }
    assert_eq!((a, b, flags & 1), (0x1122_3344_5566_7788, !0x1122_3344_5566_7788, 1));
    assert_eq!(vector, [1.5, 2.5, 3.5, 4.5]);
    tilerelease();
}
