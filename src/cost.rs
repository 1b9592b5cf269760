//! What an operation has to read and to compute at the least: what its time is measured by.

use std::ops::Add;

/// Bytes, each counted once, and arithmetic operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes of weights, or of K and V.
    pub bytes: u64,
    /// Arithmetic operations: two for a multiplication and its addition.
    pub operations: u64,
}

impl Add for Cost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, operations: self.operations + other.operations }
    }
}
