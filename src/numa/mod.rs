//! NUMA: each node's threads compute on the weight pages that node holds (paper section 5).
//!
//! Nothing is bound, moved or allocated on a node: it is found out where the pages are, and work follows them.
//!
//! * [`topology`]: nodes, their CPUs and distances. [`placement`]: the node of each page of a tensor, from the kernel.
//! * [`period`]: whether a placement repeats. [`plan`]: from placement to blocks of rows and ranges of columns, by node.
//! * [`threads`]: which worker is on which node, and which part of each node's bytes falls to it.
//! * [`segments`]: the products over a plan's parts and the sum of the nodes' partial results.
//! * [`tensors`]: the plans of a model's tensors. [`tally`]: what was local and what was remote.

pub mod period;
pub mod placement;
pub mod plan;
pub mod segments;
pub mod tally;
pub mod tensors;
pub mod threads;
pub mod topology;

/// A node's number as the kernel counts: `nodeN` below `/sys/devices/system/node`.
pub type NodeId = u16;
