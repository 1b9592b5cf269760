//! Logits of a model through stock llama.cpp and through HiNa, and how far they are apart.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::paths;
use crate::run::{Job, Ui};

/// Stock and HiNa must agree this well: normalised mean squared error.
///
/// Sums of f32 in another order differ by 1e-7 of themselves. Sooner or later, in `tiny` within a few dozen tokens, one such
/// difference lies at an edge where a product's activations are rounded to BF16 (or quantised): then one value moves by a
/// step of 2^-8, and everything after it, through the KV cache too, is rounded anew. So tokens agree to 1e-14 at first and to
/// 1e-5 from some token on, with Q8_0 (one step in 127) to 1e-4. Stock differs as much from itself: in Q8_0 its AMX kernels from its
/// AVX-512 ones (`--no-repack`) by 3e-5 to 5e-5, and with flash attention from without by 1e-4.
pub const LIMIT: f64 = 1e-5;

/// What HiNa counted in one run (`GGML_HINA_STATS`).
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub struct Stats {
    /// Graphs that reached the backend.
    pub graphs: u64,
    /// Nodes in them.
    pub nodes: u64,
    /// Nodes that HiNa computed itself.
    pub claimed: u64,
    /// What it did of each kind.
    #[serde(default)]
    pub kinds: BTreeMap<String, KindStats>,
}

/// The counts of one kind of node.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
pub struct KindStats {
    /// Bytes of weights that lay on the worker's NUMA node; 0 on a machine with one.
    #[serde(default)]
    pub local_bytes: u64,
    /// Bytes of weights that lay on another.
    #[serde(default)]
    pub remote_bytes: u64,
}

impl Stats {
    /// Bytes of weights by where they lay: on the worker's NUMA node, on another.
    pub fn by_node(&self) -> (u64, u64) {
        self.kinds.values().fold((0, 0), |(l, r), k| (l + k.local_bytes, r + k.remote_bytes))
    }
}

/// Runs `hina-logits` (the command, with the environment it needs) and reads what it wrote.
///
/// # Errors
/// When it fails.
pub fn of(ui: &Ui, mut command: Command, name: &str, model: &Path, options: &[&str]) -> Result<Vec<f32>> {
    let out = scratch(&format!("{name}.f32"))?;
    command.arg(model).arg(&out).args(options);
    Job::new(format!("logits, {name}"), &format!("logits-{name}"), command).run(ui)?;
    let bytes = fs::read(&out).with_context(|| out.display().to_string())?;
    fs::remove_file(&out)?;
    Ok(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
}

/// As [`of`], with HiNa's counts.
///
/// # Errors
/// When it fails, or HiNa counted nothing.
pub fn with_stats(
    ui: &Ui,
    mut command: Command,
    name: &str,
    model: &Path,
    options: &[&str],
) -> Result<(Vec<f32>, Stats)> {
    let file = scratch(&format!("{name}.stats.json"))?;
    command.env("GGML_HINA_STATS", &file);
    let logits = of(ui, command, name, model, options)?;
    let text = fs::read_to_string(&file).context("HiNa wrote no counts: the plugin did not run")?;
    fs::remove_file(&file)?;
    Ok((logits, parse_stats(&text)?))
}

/// The sum of all lines: one line is one backend.
fn parse_stats(text: &str) -> Result<Stats> {
    let mut sum = Stats { graphs: 0, nodes: 0, claimed: 0, kinds: BTreeMap::new() };
    for line in text.lines() {
        let stats: Stats = serde_json::from_str(line).with_context(|| format!("HiNa's counts: {line}"))?;
        sum.graphs += stats.graphs;
        sum.nodes += stats.nodes;
        sum.claimed += stats.claimed;
        for (name, kind) in stats.kinds {
            let all = sum.kinds.entry(name).or_default();
            all.local_bytes += kind.local_bytes;
            all.remote_bytes += kind.remote_bytes;
        }
    }
    Ok(sum)
}

/// Normalised mean squared error of `b` against `a`.
///
/// # Errors
/// When the two are no match, or hold a NaN or nothing but zeros.
pub fn nmse(a: &[f32], b: &[f32]) -> Result<f64> {
    ensure!(a.len() == b.len() && !a.is_empty(), "{} logits against {}", a.len(), b.len());
    let square = |x: f64| x * x;
    let error: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(*a) - f64::from(*b))).sum();
    let norm: f64 = a.iter().map(|a| square(f64::from(*a))).sum();
    ensure!(norm > 0.0 && norm.is_finite() && error.is_finite(), "the logits hold a NaN, an infinity or only zeros");
    Ok(error / norm)
}

/// A path for a file that is read back and removed; an old one there is removed first.
pub fn scratch(name: &str) -> Result<PathBuf> {
    let dir = paths::target().join("xtask-tmp");
    fs::create_dir_all(&dir)?;
    let path = dir.join(name);
    if path.exists() {
        fs::remove_file(&path)?;
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_normalised() {
        assert_eq!(nmse(&[3.0, 4.0], &[3.0, 4.0]).unwrap(), 0.0);
        assert_eq!(nmse(&[3.0, 4.0], &[3.0, 9.0]).unwrap(), 1.0);
        for (a, b) in
            [(vec![1.0], vec![1.0, 2.0]), (vec![], vec![]), (vec![0.0], vec![0.0]), (vec![1.0], vec![f32::NAN])]
        {
            assert!(nmse(&a, &b).is_err(), "{a:?} {b:?}");
        }
    }

    #[test]
    fn counts_of_all_backends_add_up() {
        let line = |n: u64| {
            let kind = format!(r#"{{"calls":1,"local_bytes":{n},"remote_bytes":1}}"#);
            format!(r#"{{"graphs":{n},"nodes":{n}0,"claimed":2,"kinds":{{"moe_ffn":{kind}}}}}"#)
        };
        let sum = parse_stats(&format!("{}\n{}\n", line(1), line(2))).unwrap();
        assert_eq!((sum.graphs, sum.nodes, sum.claimed, sum.by_node()), (3, 30, 4, (3, 2)));
        assert!(parse_stats("nonsense").is_err());
    }
}
