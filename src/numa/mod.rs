//! NUMA: which node holds which page, and who computes what (paper section 5).
