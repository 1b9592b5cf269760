//! The expert FFN: routing and the three products as one pipeline.
