//! What the benches share: ceilings of the machine, FFN layers with random weights, ggml's chain.

use ggml_hina::isa::Isa;

pub mod ggml;
pub mod layer;
pub mod meter;

/// The engine to measure: the CPU's best, or what `BENCH_ISA` names (`amx`, `avx512`, `avx2`); none if there is none such.
pub fn isa() -> Option<Isa> {
    let wanted = given("BENCH_ISA").map(|name| name.to_string_lossy().to_lowercase());
    Isa::all().into_iter().find(|isa| wanted.as_deref().is_none_or(|wanted| wanted == isa.name()))
}

/// What the user gives in an environment variable; an empty one counts as not set.
pub fn given(name: &str) -> Option<std::ffi::OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}
