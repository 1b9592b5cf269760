//! What the benches share: ceilings of the machine, FFN layers with random weights, ggml's chain.

pub mod ggml;
pub mod layer;
pub mod meter;

/// What the user gives in an environment variable; an empty one counts as not set.
pub fn given(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}
