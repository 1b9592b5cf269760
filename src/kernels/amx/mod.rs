//! Kernels of the amx engine.
