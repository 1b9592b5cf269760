//! How often each instruction ran.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! instructions {
    ($($variant:ident $name:literal,)*) => {
        /// The instructions that the emulator knows.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Op {
            $(#[doc = concat!("`", $name, "`")] $variant,)*
        }

        impl Op {
            /// All of them, in the order of the C function `amx_emu_stats`.
            pub const ALL: [Op; [$($name),*].len()] = [$(Op::$variant),*];

            /// The mnemonic in lower case.
            pub const fn name(self) -> &'static str {
                match self { $(Op::$variant => $name,)* }
            }
        }
    };
}

instructions! {
    Ldtilecfg "ldtilecfg",
    Sttilecfg "sttilecfg",
    Tilerelease "tilerelease",
    Tilezero "tilezero",
    Tileloadd "tileloadd",
    Tileloaddt1 "tileloaddt1",
    Tilestored "tilestored",
    Tdpbf16ps "tdpbf16ps",
    Tdpfp16ps "tdpfp16ps",
    Tdpbssd "tdpbssd",
    Tdpbsud "tdpbsud",
    Tdpbusd "tdpbusd",
    Tdpbuud "tdpbuud",
}

const COUNT: usize = Op::ALL.len();

static COUNTERS: [AtomicU64; COUNT] = [const { AtomicU64::new(0) }; COUNT];

/// Counts of completed instructions, of all threads of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats([u64; COUNT]);

impl Stats {
    /// How often `op` completed. Instructions that faulted are not counted.
    pub fn get(&self, op: Op) -> u64 {
        self.0[op as usize]
    }

    /// Each instruction with its count, zeros too.
    pub fn iter(&self) -> impl Iterator<Item = (Op, u64)> + '_ {
        Op::ALL.into_iter().map(|op| (op, self.get(op)))
    }

    /// What ran between `earlier` and this.
    pub fn since(&self, earlier: &Stats) -> Stats {
        Stats(std::array::from_fn(|i| self.0[i].wrapping_sub(earlier.0[i])))
    }
}

/// The counts up to now. Threads that run while this reads may be counted in part.
pub fn stats() -> Stats {
    Stats(std::array::from_fn(|i| COUNTERS[i].load(Ordering::Relaxed)))
}

/// Sets all counts to zero.
pub fn reset_stats() {
    COUNTERS.iter().for_each(|c| c.store(0, Ordering::Relaxed));
}

pub(crate) fn count(op: Op) {
    COUNTERS[op as usize].fetch_add(1, Ordering::Relaxed);
}
