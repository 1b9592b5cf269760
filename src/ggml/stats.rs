//! Counts for `GGML_HINA_STATS`: which nodes were ours and how fast they ran, which were left to the CPU backend and why.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::{log, plugin};
use crate::config::StatsChoice;
use crate::cost::Cost;
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
    /// Nodes left to the CPU backend, by operation and reason. Only touched once for a graph, between graphs.
    left: Mutex<BTreeMap<Left, u64>>,
}

/// ggml's name of an operation, and why it was left where it might have been ours.
type Left = (&'static str, Option<&'static str>);

#[derive(Debug, Default)]
struct Count {
    calls: AtomicU64,
    nanos: AtomicU64,
    bytes: AtomicU64,
    operations: AtomicU64,
    /// Bytes of weights by where they lay, on a machine with several nodes.
    weights: Tally,
}

/// The sums of a kind.
struct Sum {
    name: &'static str,
    calls: u64,
    nanos: u64,
    cost: Cost,
    /// Bytes that were read from the worker's own node and from another, where there are several.
    local: u64,
    remote: u64,
    /// Those of them that were multiplied by segments.
    segments: u64,
}

impl Sum {
    fn line(&self) -> String {
        let (gb, gflop) = self.rates();
        let mut line =
            format!("{}: {} calls, {:.1} ms, {gb:.1} GB/s, {gflop:.1} GFLOP/s", self.name, self.calls, self.ms());
        let (local, all) = (self.local as f64 * 1e-9, (self.local + self.remote) as f64 * 1e-9);
        if all > 0.0 {
            let (remote, share, by_segments) = (all - local, 100.0 * (1.0 - local / all), self.segments as f64 * 1e-9);
            let _ = write!(line, ", weights {local:.3} GB local, {remote:.3} GB remote ({share:.2} %)");
            let _ = write!(line, ", {by_segments:.3} GB of them by segments");
        }
        line
    }

    fn ms(&self) -> f64 {
        self.nanos as f64 * 1e-6
    }

    /// GB/s and GFLOP/s: a thousand millionth of a unit for each nanosecond.
    fn rates(&self) -> (f64, f64) {
        let nanos = self.nanos.max(1) as f64;
        (self.cost.bytes as f64 / nanos, self.cost.operations as f64 / nanos)
    }
}

impl Stats {
    /// Whether the user asked for counts.
    pub fn on(&self) -> bool {
        plugin::config().stats != StatsChoice::Off
    }

    /// A graph of `nodes` computing nodes of which `claimed` are ours (a fused chain counts each of its nodes); the others
    /// by operation and reason.
    pub fn add_graph(&self, nodes: usize, claimed: usize, left: impl Iterator<Item = Left>) {
        self.graphs.fetch_add(1, Ordering::Relaxed);
        self.nodes.fetch_add(nodes as u64, Ordering::Relaxed);
        self.claimed.fetch_add(claimed as u64, Ordering::Relaxed);
        let mut all = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.for_each(|l| *all.entry(l).or_default() += 1);
    }

    /// One call that took `time`.
    pub fn add(&self, kind: Kind, cost: Cost, time: Duration) {
        let count = &self.kinds[kind as usize];
        count.calls.fetch_add(1, Ordering::Relaxed);
        count.nanos.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        count.bytes.fetch_add(cost.bytes, Ordering::Relaxed);
        count.operations.fetch_add(cost.operations, Ordering::Relaxed);
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

    fn used(&self) -> impl Iterator<Item = Sum> {
        let of = |k: Kind| {
            let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
            let c = &self.kinds[k as usize];
            let cost = Cost { bytes: get(&c.bytes), operations: get(&c.operations) };
            let (local, remote) = c.weights.bytes();
            let segments = c.weights.segment_bytes();
            Sum { name: k.name(), calls: get(&c.calls), nanos: get(&c.nanos), cost, local, remote, segments }
        };
        Kind::ALL.into_iter().map(of).filter(|s| s.calls > 0)
    }

    /// What was left, the most frequent first.
    fn left(&self) -> Vec<(Left, u64)> {
        let all = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all: Vec<(Left, u64)> = all.iter().map(|(l, n)| (*l, *n)).collect();
        all.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
        all
    }

    fn lines(&self) -> Vec<String> {
        let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
        let head =
            format!("claimed {} of {} nodes in {} graphs", get(&self.claimed), get(&self.nodes), get(&self.graphs));
        let one = |((op, why), n): &(Left, u64)| why.map_or(format!("{op} {n}"), |why| format!("{op} {n} ({why})"));
        let left = self.left().iter().map(one).collect::<Vec<_>>().join(", ");
        let tail = (!left.is_empty()).then(|| format!("left to the CPU backend: {left}"));
        std::iter::once(head).chain(self.used().map(|s| s.line())).chain(tail).collect()
    }

    fn json(&self) -> String {
        let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
        let mut out = format!(
            "{{\"graphs\":{},\"nodes\":{},\"claimed\":{},\"kinds\":{{",
            get(&self.graphs),
            get(&self.nodes),
            get(&self.claimed)
        );
        for (i, s) in self.used().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            let Cost { bytes, operations } = s.cost;
            let _ = write!(
                out,
                "{comma}\"{}\":{{\"calls\":{},\"ms\":{:.3},\"bytes\":{bytes},\"operations\":{operations}",
                s.name,
                s.calls,
                s.ms()
            );
            if s.local + s.remote > 0 {
                let _ = write!(out, ",\"local_bytes\":{},\"remote_bytes\":{}", s.local, s.remote);
                let _ = write!(out, ",\"segment_bytes\":{}", s.segments);
            }
            out.push('}');
        }
        out += "},\"left\":[";
        for (i, ((op, why), n)) in self.left().into_iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            let why = why.map_or("null".into(), |w| format!("\"{w}\""));
            let _ = write!(out, "{comma}{{\"op\":\"{op}\",\"nodes\":{n},\"why\":{why}}}");
        }
        out + "]}"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_become_lines_and_json() {
        let stats = Stats::default();
        let left = [("ADD", None), ("MUL_MAT", Some("too small")), ("ADD", None)];
        stats.add_graph(100, 12, left.into_iter());
        let cost = Cost { bytes: 3_000_000, operations: 6_000_000 };
        stats.add(Kind::MulMatId, cost, Duration::from_micros(1500));
        stats.add(Kind::MulMatId, cost, Duration::from_micros(500));
        assert_eq!(
            stats.lines(),
            [
                "claimed 12 of 100 nodes in 1 graphs",
                "mul_mat_id: 2 calls, 2.0 ms, 3.0 GB/s, 6.0 GFLOP/s",
                "left to the CPU backend: ADD 2, MUL_MAT 1 (too small)"
            ]
        );
        let want = r#"{"graphs":1,"nodes":100,"claimed":12,"kinds":{"mul_mat_id":{"calls":2,"ms":2.000,"#.to_owned()
            + r#""bytes":6000000,"operations":12000000}},"left":[{"op":"ADD","nodes":2,"why":null},"#
            + r#"{"op":"MUL_MAT","nodes":1,"why":"too small"}]}"#;
        assert_eq!(stats.json(), want);
        stats.tally(Kind::MulMatId).plain(1_000_000, 1_000_000);
        stats.tally(Kind::MulMatId).segments(2_000_000, 0);
        let want = "GFLOP/s, weights 0.003 GB local, 0.001 GB remote (25.00 %), 0.002 GB of them by segments";
        assert!(stats.lines()[1].ends_with(want));
        let want = r#""operations":12000000,"local_bytes":3000000,"remote_bytes":1000000,"segment_bytes":2000000}}"#;
        assert!(stats.json().contains(want));
    }
}
