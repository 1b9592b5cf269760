//! Coefficients of the polynomials by which the vector instruction sets compute `e^x` and the error function, highest
//! power first.

/// `ln 2` in two parts, the first with few bits, so that a small integer times it is exact (Cody and Waite).
pub const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];

/// Taylor's polynomial of `e^r`: its next term is below 2^-27 for |r| <= ln(2) / 2.
pub const EXP: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// The polynomial in `t = 1 / (1 + ERF_SLOPE |x|)` of `(1 - erf |x|) e^(x^2)` (Abramowitz and Stegun 7.1.26).
pub const ERF: [f32; 6] = [1.061_405_4, -1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6, 0.0];

/// See [`ERF`].
pub const ERF_SLOPE: f32 = 0.327_591_1;
