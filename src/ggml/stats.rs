//! Counts for `GGML_HINA_STATS`: how many nodes were ours, and how long they took.

use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{log, plugin};
use crate::config::StatsChoice;
use crate::numa::tally::Tally;

/// What a claimed node does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One expert product.
    MulMatId,
    /// A plain product with a weight.
    MulMat,
    /// A whole expert FFN.
    Ffn,
    /// Attention.
    FlashAttn,
}

impl Kind {
    const ALL: [Self; 4] = [Self::MulMatId, Self::MulMat, Self::Ffn, Self::FlashAttn];

    fn name(self) -> &'static str {
        match self {
            Self::MulMatId => "mul_mat_id",
            Self::MulMat => "mul_mat",
            Self::Ffn => "moe_ffn",
            Self::FlashAttn => "flash_attn_ext",
        }
    }
}

/// The counts of one backend.
#[derive(Debug, Default)]
pub struct Stats {
    nodes: AtomicU64,
    claimed: AtomicU64,
    graphs: AtomicU64,
    kinds: [Count; Kind::ALL.len()],
}

#[derive(Debug, Default)]
struct Count {
    calls: AtomicU64,
    nanos: AtomicU64,
    /// Bytes of weights by where they lay, on a machine with several nodes.
    weights: Tally,
}

impl Stats {
    /// Whether the user asked for counts.
    pub fn on(&self) -> bool {
        plugin::config().stats != StatsChoice::Off
    }

    /// A graph of `nodes` computing nodes of which `claimed` are ours (a fused chain counts each of its nodes).
    pub fn add_graph(&self, nodes: usize, claimed: usize) {
        self.graphs.fetch_add(1, Ordering::Relaxed);
        self.nodes.fetch_add(nodes as u64, Ordering::Relaxed);
        self.claimed.fetch_add(claimed as u64, Ordering::Relaxed);
    }

    /// One call that took `time`.
    pub fn add(&self, kind: Kind, time: Duration) {
        let count = &self.kinds[kind as usize];
        count.calls.fetch_add(1, Ordering::Relaxed);
        count.nanos.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The tally of a kind's weights.
    pub fn tally(&self, kind: Kind) -> &Tally {
        &self.kinds[kind as usize].weights
    }

    /// Says the counts where the user wants them.
    pub fn report(&self, choice: &StatsChoice) {
        if self.graphs.load(Ordering::Relaxed) == 0 {
            return;
        }
        match choice {
            StatsChoice::Off => {}
            StatsChoice::Log => self.lines().iter().for_each(|l| log::info(l)),
            StatsChoice::File(path) => {
                let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
                if let Err(e) = file.and_then(|mut f| writeln!(f, "{}", self.json())) {
                    log::warn(&format!("GGML_HINA_STATS: {} cannot be written: {e}", path.display()));
                }
            }
        }
    }

    fn used(&self) -> impl Iterator<Item = Used> {
        let of = |k: Kind| {
            let c = &self.kinds[k as usize];
            let (local, remote) = c.weights.bytes();
            let ms = c.nanos.load(Ordering::Relaxed) as f64 * 1e-6;
            Used { name: k.name(), calls: c.calls.load(Ordering::Relaxed), ms, local, remote }
        };
        Kind::ALL.into_iter().map(of).filter(|u| u.calls > 0)
    }

    fn lines(&self) -> Vec<String> {
        let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
        let head =
            format!("claimed {} of {} nodes in {} graphs", get(&self.claimed), get(&self.nodes), get(&self.graphs));
        std::iter::once(head).chain(self.used().map(|u| u.line())).collect()
    }

    fn json(&self) -> String {
        let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
        let mut out = format!(
            "{{\"graphs\":{},\"nodes\":{},\"claimed\":{},\"kinds\":{{",
            get(&self.graphs),
            get(&self.nodes),
            get(&self.claimed)
        );
        for (i, u) in self.used().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            let _ = write!(out, "{comma}\"{}\":{{\"calls\":{},\"ms\":{:.3}", u.name, u.calls, u.ms);
            if u.local + u.remote > 0 {
                let _ = write!(out, ",\"local_bytes\":{},\"remote_bytes\":{}", u.local, u.remote);
            }
            out.push('}');
        }
        out + "}}"
    }
}

/// One kind's counts.
struct Used {
    name: &'static str,
    calls: u64,
    ms: f64,
    local: u64,
    remote: u64,
}

impl Used {
    fn line(&self) -> String {
        let Self { name, calls, ms, local, remote } = *self;
        let mut line = format!("{name}: {calls} calls, {ms:.1} ms");
        if local + remote > 0 {
            let gb = |bytes: u64| bytes as f64 * 1e-9;
            let rate = gb(local + remote) / (ms * 1e-3);
            let share = 100.0 * remote as f64 / (local + remote) as f64;
            let _ = write!(line, ", weights {:.3} GB local, {:.3} GB remote", gb(local), gb(remote));
            let _ = write!(line, " ({share:.2} %), {rate:.1} GB/s");
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_become_lines_and_json() {
        let stats = Stats::default();
        stats.add_graph(100, 12);
        stats.add(Kind::MulMatId, Duration::from_micros(1500));
        stats.add(Kind::MulMatId, Duration::from_micros(500));
        assert_eq!(stats.lines(), ["claimed 12 of 100 nodes in 1 graphs", "mul_mat_id: 2 calls, 2.0 ms"]);
        assert_eq!(
            stats.json(),
            r#"{"graphs":1,"nodes":100,"claimed":12,"kinds":{"mul_mat_id":{"calls":2,"ms":2.000}}}"#
        );
        stats.tally(Kind::MulMatId).add(3_000_000, 1_000_000);
        let want = "mul_mat_id: 2 calls, 2.0 ms, weights 0.003 GB local, 0.001 GB remote (25.00 %), 2.0 GB/s";
        assert_eq!(stats.lines()[1], want);
        assert!(stats.json().ends_with(r#""ms":2.000,"local_bytes":3000000,"remote_bytes":1000000}}}"#));
    }
}
