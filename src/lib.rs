//! `ggml-hina`: a ggml/llama.cpp backend for Mixture-of-Experts models on big CPUs, after the HiNa-MoE paper.
//!
//! Expert weights stay row-major as GGUF stores them; the small intermediate matrices are transformed instead. The crate's
//! parts, from the bottom up (each uses only those before it):
//!
//! * [`isa`]: what this CPU has, as tokens. [`tensor`]: views of weights and activations. [`team`]: threads that work together.
//! * [`pack`]: tokens into panels. [`kernels`]: products of weight rows and panels. [`numa`]: who holds which page.
//! * [`eligible`]: which products are ours. [`moe`]: the expert FFN as one pipeline. [`attention`]: decode attention.

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("ggml-hina is for x86-64 Linux");

pub mod attention;
pub mod config;
pub mod cost;
pub mod eligible;
#[cfg(feature = "plugin")]
pub mod ggml;
pub mod isa;
pub mod kernels;
pub mod moe;
pub mod numa;
pub mod pack;
pub mod team;
pub mod tensor;
#[cfg(test)]
mod testing;
