//! Decode attention as matrix-matrix products (paper section 6).
