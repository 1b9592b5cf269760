//! Which vector instructions the products may use. They only make them faster: the results are the same.

use std::sync::atomic::{AtomicU8, Ordering};

/// What the CPU has, from slow to fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Level {
    /// Plain x86-64: SSE2, no fused multiply-add.
    Base = 1,
    /// AVX2 and FMA.
    Avx2 = 2,
    /// AVX-512 F and BW.
    Avx512 = 3,
}

static LEVEL: AtomicU8 = AtomicU8::new(0);

impl Level {
    /// Detected on the first call, then one load. Signal-safe after the first call.
    #[inline]
    pub fn get() -> Level {
        match LEVEL.load(Ordering::Relaxed) {
            0 => Self::detect(),
            1 => Level::Base,
            2 => Level::Avx2,
            _ => Level::Avx512,
        }
    }

    #[cold]
    fn detect() -> Level {
        let level = if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
            Level::Avx512
        } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            Level::Avx2
        } else {
            Level::Base
        };
        LEVEL.store(level as u8, Ordering::Relaxed);
        level
    }
}

/// Calls an `#[inline(always)]` body, compiled once for each level, at the level of this CPU. At the lowest
/// it is the expression after `base`.
macro_rules! multiversion {
    ($body:ident::<$($g:ident),*>($($arg:ident: $ty:ty),*), base: $base:expr) => {{
        #[target_feature(enable = "avx512f,avx512bw,avx2,fma")]
        fn avx512<$(const $g: bool),*>($($arg: $ty),*) {
            $body::<$($g),*>($($arg),*)
        }
        #[target_feature(enable = "avx2,fma")]
        fn avx2<$(const $g: bool),*>($($arg: $ty),*) {
            $body::<$($g),*>($($arg),*)
        }
        match $crate::level::Level::get() {
            // SAFETY: the level says that the CPU has what the function enables.
            $crate::level::Level::Avx512 => unsafe { avx512::<$($g),*>($($arg),*) },
            // SAFETY: as above.
            $crate::level::Level::Avx2 => unsafe { avx2::<$($g),*>($($arg),*) },
            $crate::level::Level::Base => $base,
        }
    }};
}
pub(crate) use multiversion;
