//! Bytes of weights that were computed on, by whether they lay on the worker's node.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counts of one kind of operation; all workers add to it.
#[derive(Debug, Default)]
pub struct Tally {
    local: AtomicU64,
    remote: AtomicU64,
    /// Those of `local` and `remote` that were multiplied by segments.
    segments: AtomicU64,
}

impl Tally {
    /// Nothing counted yet.
    pub const fn new() -> Self {
        Self { local: AtomicU64::new(0), remote: AtomicU64::new(0), segments: AtomicU64::new(0) }
    }

    /// One worker read so many bytes of its own node and of others, in plain blocks of rows.
    pub fn plain(&self, local: u64, remote: u64) {
        self.local.fetch_add(local, Ordering::Relaxed);
        self.remote.fetch_add(remote, Ordering::Relaxed);
    }

    /// The same, by segments.
    pub fn segments(&self, local: u64, remote: u64) {
        self.plain(local, remote);
        self.segments.fetch_add(local + remote, Ordering::Relaxed);
    }

    /// Local and remote bytes so far.
    pub fn bytes(&self) -> (u64, u64) {
        (self.local.load(Ordering::Relaxed), self.remote.load(Ordering::Relaxed))
    }

    /// How many of them were multiplied by segments.
    pub fn segment_bytes(&self) -> u64 {
        self.segments.load(Ordering::Relaxed)
    }
}
