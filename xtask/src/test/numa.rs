//! Weights on several NUMA nodes: made-up ones inside llama.cpp, and real ones of a virtual machine.

use anyhow::{Context, Result, ensure};

use super::seam::{LOGITS, limit, needs_fit_cpu, tiny, within};
use super::{Outcome, Step};
use crate::logits;
use crate::model::{self, ModelArgs, Preset, WeightType};
use crate::plugin;
use crate::run::Ui;

/// In the order of their cost.
pub const STEPS: &[Step] = &[
    Step {
        name: "numa-sim",
        about: "weights on two made-up nodes give stock's logits",
        needs: &["plugin", "models"],
        run: simulated,
    },
    Step { name: "numa-vm", about: "NUMA on a virtual machine with two nodes", needs: &[], run: crate::numa_vm::run },
];

/// Two nodes whose pages alternate, as under `numactl --interleave=all`.
const SIM: (&str, &str) = ("GGML_HINA_NUMA_SIM", "2:4096");
/// A short text, so that a big model's logits take seconds; few tokens at a time, as only those follow the pages.
const TEXT: &[&str] = &["--batch", "16", "--decode", "4"];

fn simulated(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let plugin = plugin::ensure(ui)?;
    let mut qwen3 = ModelArgs::new(Preset::Qwen3, WeightType::Bf16);
    qwen3.layers = Some(2);
    let models = [
        ("tiny bf16", tiny(ui, WeightType::Bf16)?, limit(WeightType::Bf16)),
        ("tiny q8_0", tiny(ui, WeightType::Q8_0)?, limit(WeightType::Q8_0)),
        ("qwen3", model::ensure(ui, &qwen3)?, limit(WeightType::Bf16)),
    ];
    let mut notes = Vec::new();
    for (name, model, limit) in models {
        let file = name.replace(' ', "-");
        let stock = logits::of(ui, plugin.stock(LOGITS), &format!("sim-{file}-stock"), &model, TEXT)?;
        // How far roundings alone take this model on this text, without nodes.
        let plain = logits::of(ui, plugin.hina(LOGITS), &format!("sim-{file}-plain"), &model, TEXT)?;
        let plain = logits::nmse(&stock, &plain)?;
        let mut command = plugin.hina(LOGITS);
        command.env(SIM.0, SIM.1);
        let (hina, stats) = logits::with_stats(ui, command, &format!("sim-{file}-hina"), &model, TEXT)?;
        let nmse = within(&stock, &hina, limit.max(4.0 * plain)).context(name)?;
        let (local, remote) = stats.by_node();
        ensure!(local > 0, "{name}: no weights were counted on a node");
        notes.push(format!(
            "{name} {nmse:.0e} (without nodes {plain:.0e}), {:.1} % local",
            100.0 * local as f64 / (local + remote) as f64
        ));
    }
    Ok(Outcome::Passed(notes.join("; ")))
}
