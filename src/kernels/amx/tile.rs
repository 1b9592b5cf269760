//! The AMX instructions, one method each, and the guard without which they cannot be reached (SDM vol. 2, chapter 3 and 4).
//!
//! [`Session`] keeps the thread's tile configuration of before and puts it back when dropped, because ggml's own AMX
//! kernels configure a thread once and rely on it for ever. [`Session::configure`] loads a [`Config`] where it is not the
//! current one, and hands out [`Tiles`], whose methods are the instructions. The *contents* of tile registers are nobody's
//! across a call (System V ABI: caller-saved), so they are not kept.
//!
//! The compiler never touches tile registers, since no code of ours enables the feature for it. That is why a value may
//! stay in one from one `asm!` to the next.

use std::arch::asm;
use std::marker::PhantomData;

use crate::isa::{Amx, AmxFp16};

/// The 64 bytes that `ldtilecfg` reads: palette 1, and for each tile its bytes a row and its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    colsb: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// What `sttilecfg` stores on a thread that has no configuration.
    pub const NONE: Self = Self { palette: 0, start_row: 0, reserved: [0; 14], colsb: [0; 16], rows: [0; 16] };

    /// The configuration in which tile `i` has `tiles[i] = [rows, bytes a row]`, at most 16 and 64.
    pub fn new(tiles: [[usize; 2]; 8]) -> Self {
        let mut config = Self { palette: 1, ..Self::NONE };
        for (i, [rows, colsb]) in tiles.into_iter().enumerate() {
            debug_assert!((1..=16).contains(&rows) && (1..=64).contains(&colsb));
            config.rows[i] = rows as u8;
            config.colsb[i] = colsb as u16;
        }
        config
    }

    /// The thread's configuration.
    pub fn current(_: Amx) -> Self {
        let mut config = Self::NONE;
        // SAFETY: `Amx` proves that the instruction runs; it writes the 64 bytes of `config`.
        unsafe { asm!("sttilecfg [{}]", in(reg) &raw mut config, options(nostack, preserves_flags)) };
        config
    }

    /// Makes this the thread's configuration; all tiles become zero.
    fn load(&self, _: Amx) {
        if self.palette == 0 {
            // SAFETY: `Amx` proves that the instruction runs; it changes tile state only.
            unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
        } else {
            // SAFETY: as above; it reads the 64 bytes of `self`, which `new` or `sttilecfg` made well-formed.
            unsafe { asm!("ldtilecfg [{}]", in(reg) self, options(readonly, nostack, preserves_flags)) };
        }
    }
}

/// A thread's use of the tiles: saves its configuration when made, puts it back when dropped.
///
/// Bound to the thread that made it. Where two exist on one thread, the later one is dropped before the earlier is used
/// again.
#[derive(Debug)]
pub struct Session {
    amx: Amx,
    saved: Config,
    loaded: Config,
    thread: PhantomData<*mut ()>,
}

impl Session {
    /// Saves the thread's configuration; none of ours is loaded yet.
    pub fn begin(amx: Amx) -> Self {
        let saved = Config::current(amx);
        Self { amx, saved, loaded: saved, thread: PhantomData }
    }

    /// Loads `config` unless it is the current one, and gives access to the instructions.
    #[inline]
    pub fn configure(&mut self, config: &Config) -> Tiles<'_> {
        if self.loaded != *config {
            config.load(self.amx);
            self.loaded = *config;
        }
        debug_assert_eq!(Config::current(self.amx), *config, "somebody else configured this thread's tiles");
        Tiles(PhantomData)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.loaded != self.saved {
            self.saved.load(self.amx);
        }
    }
}

/// The instructions, on a thread whose tiles are configured.
///
/// Tile numbers are const parameters, 0 to 7. Operands whose shapes do not fit each other fault (SIGILL), as the SDM says.
#[derive(Debug)]
pub struct Tiles<'a>(PhantomData<&'a mut Session>);

impl Tiles<'_> {
    /// `tilezero`.
    #[inline(always)]
    pub fn zero<const T: u8>(&self) {
        // SAFETY: `self` proves a configuration; only tile `T` changes.
        unsafe { asm!("tilezero tmm{t}", t = const T, options(nomem, nostack, preserves_flags)) };
    }

    /// `tileloadd`: the tile's rows from `base`, `stride` bytes apart.
    ///
    /// # Safety
    /// Every row's bytes, as many as the tile is wide, are readable.
    // SAFETY: contract above.
    #[inline(always)]
    pub unsafe fn load<const T: u8>(&self, base: *const u8, stride: usize) {
        // SAFETY: `self` proves a configuration, the caller the memory.
        unsafe {
            asm!("tileloadd tmm{t}, [{b} + {s}*1]", t = const T, b = in(reg) base, s = in(reg) stride,
                options(readonly, nostack, preserves_flags));
        }
    }

    /// `tileloaddt1`: as [`Tiles::load`], with the hint that the data will not be wanted again soon.
    ///
    /// # Safety
    /// As [`Tiles::load`].
    // SAFETY: contract above.
    #[inline(always)]
    pub unsafe fn load_once<const T: u8>(&self, base: *const u8, stride: usize) {
        // SAFETY: `self` proves a configuration, the caller the memory.
        unsafe {
            asm!("tileloaddt1 tmm{t}, [{b} + {s}*1]", t = const T, b = in(reg) base, s = in(reg) stride,
                options(readonly, nostack, preserves_flags));
        }
    }

    /// `tilestored`: the tile's rows to `base`, `stride` bytes apart.
    ///
    /// # Safety
    /// Every row's bytes, as many as the tile is wide, are writable.
    // SAFETY: contract above.
    #[inline(always)]
    pub unsafe fn store<const T: u8>(&self, base: *mut u8, stride: usize) {
        // SAFETY: `self` proves a configuration, the caller the memory.
        unsafe {
            asm!("tilestored [{b} + {s}*1], tmm{t}", t = const T, b = in(reg) base, s = in(reg) stride,
                options(nostack, preserves_flags));
        }
    }

    /// `tdpbf16ps`: `C[row][col] += sum over pairs of A[row][pair] . B[pair][col]`, BF16 to f32.
    #[inline(always)]
    pub fn dp_bf16<const C: u8, const A: u8, const B: u8>(&self) {
        // SAFETY: `self` proves a configuration; only tile `C` changes.
        unsafe {
            asm!("tdpbf16ps tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nomem, nostack, preserves_flags));
        }
    }

    /// `tdpfp16ps`: the same of F16. Denormals count; sums are f32, and those of them become zeros.
    #[inline(always)]
    pub fn dp_f16<const C: u8, const A: u8, const B: u8>(&self, _: AmxFp16) {
        // SAFETY: `self` proves a configuration, the token the instruction; only tile `C` changes.
        unsafe {
            asm!("tdpfp16ps tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nomem, nostack, preserves_flags));
        }
    }

    /// `tdpbssd`: `C[row][col] += sum over fours of A[row][four] . B[four][col]`, signed bytes to i32.
    #[inline(always)]
    pub fn dp_i8<const C: u8, const A: u8, const B: u8>(&self) {
        // SAFETY: `self` proves a configuration; only tile `C` changes.
        unsafe {
            asm!("tdpbssd tmm{c}, tmm{a}, tmm{b}", c = const C, a = const A, b = const B,
                options(nomem, nostack, preserves_flags));
        }
    }
}
