//! The expert FFN: routing and the products as pipelines over a team of threads. Knows nothing of ggml.

mod awaited;
mod blocks;
mod cblock;
mod cost;
mod ffn;
mod gather;
mod matmul;
mod nodes;
pub mod routing;

use std::fmt;

pub use ffn::{Bias, Ffn, FfnParts, Output};
pub use matmul::{MulMat, MulMatId};
pub use nodes::OnNodes;
pub use routing::{Ids, Routing};

/// Why an operation did not run. Nothing was written then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpError {
    /// An expert id lies outside `[0, n_expert)`.
    ExpertId {
        /// The id as it was read.
        id: i32,
        /// Its place among the token's experts.
        slot: usize,
        /// Its token.
        token: usize,
    },
}

impl fmt::Display for OpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ExpertId { id, slot, token } => {
                write!(f, "expert id {id} (token {token}, slot {slot}) is out of range")
            }
        }
    }
}

impl std::error::Error for OpError {}

/// Cuts typed, 64-byte aligned pieces off scratch memory; made from no memory, it only counts the bytes.
#[derive(Clone, Copy, Debug)]
struct Carver {
    base: *mut u8,
    used: usize,
}

impl Carver {
    fn new(base: *mut u8) -> Self {
        debug_assert!(base.addr().is_multiple_of(64));
        Self { base, used: 0 }
    }

    /// Room for `n` values of `T`; uninitialised.
    fn take<T>(&mut self, n: usize) -> *mut T {
        let at = self.base.wrapping_add(self.used);
        self.used += (n * size_of::<T>()).next_multiple_of(64);
        at.cast()
    }

    /// Room of `bytes` for each of `nth` workers; the address of worker `ith`'s.
    fn take_each(&mut self, bytes: usize, ith: usize, nth: usize) -> *mut u8 {
        let bytes = bytes.next_multiple_of(64);
        self.take::<u8>(bytes * nth).wrapping_add(bytes * ith)
    }
}

/// Bytes that any engine of this CPU may want a thread to lend it ([`Engine::ROOM`](crate::kernels::Engine::ROOM)).
fn most_room() -> usize {
    use crate::kernels::Engine;
    if crate::isa::Amx::detect().is_ok() { crate::kernels::amx::AmxEngine::ROOM } else { 0 }
}

/// Runs an expression with the engine that `isa` stands for.
macro_rules! on_engine {
    ($isa:expr, |$engine:ident| $run:expr) => {
        match $isa {
            $crate::isa::Isa::Amx(amx) => {
                let $engine = $crate::kernels::amx::AmxEngine::new(amx);
                $run
            }
            $crate::isa::Isa::Avx512($engine) => $run,
            $crate::isa::Isa::Avx2($engine) => $run,
        }
    };
}
use on_engine;

#[cfg(test)]
mod tests;
