//! What the benches share: ceilings of the machine, FFN layers with random weights, ggml's chain.

pub mod ggml;
pub mod layer;
pub mod meter;
