//! The instructions in process, as a kernel uses them.
use std::arch::asm;
#[repr(align(64))]
struct A<T>(T);
#[test]
fn bf16_and_counts() {
    let mode = amx_emu::install().unwrap();
    let before = amx_emu::stats();
    let mut cfg = A([0u8; 64]);
    cfg.0[0] = 1;
    for t in 0..3 {
        cfg.0[16 + 2 * t] = 64;
        cfg.0[48 + t] = 16;
    }
    let a = A([0x3f80u16; 512]);
    let b = A([0x4000u16; 512]);
    let mut c = A([1.0f32; 256]);
    // SAFETY: the tiles are configured, and each block of memory is as large as its tile.
    unsafe {
        asm!("ldtilecfg [{0}]", in(reg) cfg.0.as_ptr());
        asm!("tileloadd tmm0, [{0} + {1}*1]", in(reg) c.0.as_ptr(), in(reg) 64usize);
        asm!("tileloadd tmm1, [{0} + {1}*1]", in(reg) a.0.as_ptr(), in(reg) 64usize);
        asm!("tileloaddt1 tmm2, [{0} + {1}*2]", in(reg) b.0.as_ptr(), in(reg) 32usize);
        asm!("tdpbf16ps tmm0, tmm1, tmm2");
        asm!("tilestored [{0} + {1}*1], tmm0", in(reg) c.0.as_mut_ptr(), in(reg) 64usize);
        asm!("tilerelease");
    }
    assert!(c.0.iter().all(|&x| x == 65.0), "{:?}", &c.0[..16]);
    if mode == amx_emu::Mode::Emulated {
        assert_eq!(amx_emu::stats().since(&before).get(amx_emu::Op::Tileloadd), 2);
    }
}
