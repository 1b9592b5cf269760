//! ggml-hina
