//! Kernels of the avx512 engine.
