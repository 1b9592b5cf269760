//! The seam to ggml: registry, device, backend and graph. No arithmetic here.
//!
//! The device is a *superset of the CPU device*: it takes every node that would run on the CPU, so that the scheduler makes
//! one split and no copies. `backend` hands the whole graph to an inner CPU backend, in which `graph` has put a
//! `GGML_OP_CUSTOM` node in the place of each node (or chain of nodes) that `claim` says is ours. Our kernels therefore run
//! on ggml's own threads, between ggml's own barriers.
//!
//! [`plugin`] is where a program enters; `cpu` finds the CPU backend; `op` is what a custom node calls.

pub mod plugin;
pub mod sys;

mod backend;
mod claim;
mod cpu;
mod device;
mod fuse;
mod graph;
mod log;
mod op;
mod probe;
mod stats;
mod tensor;
