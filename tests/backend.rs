//! The backend inside a real ggml.
