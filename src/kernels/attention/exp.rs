//! How `e^x` is computed: the same numbers whatever the vectors.
//!
//! x = n ln 2 + r with |r| <= ln 2 / 2, and `e^x` = 2^n `e^r`.

/// Below this `e^x` counts as zero: it is 1e-38 of the largest weight.
pub const SMALLEST: f32 = -87.3;
/// ln 2 in two parts, so that n times the first is exact (Cody and Waite).
pub const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
/// Taylor to degree 7 is within f32 rounding for such r; the highest power first.
pub const TAYLOR: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
