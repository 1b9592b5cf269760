//! llama.cpp with HiNa linked in by the build flag, and every MoE architecture that it knows.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use super::seam::{needs_fit_cpu, within};
use super::{Outcome, Step};
use crate::plugin::{self, Plugin};
use crate::run::{Job, Ui};
use crate::{llama, logits, paths};

/// In this order: the build, its own test, and the models that it can write.
pub const STEPS: &[Step] = &[
    Step { name: "linked", about: "the build flag, in a static llama.cpp", needs: &["llama"], run: linked },
    Step { name: "archs", about: "test-llama-archs on HiNa", needs: &["linked"], run: archs },
    Step { name: "archs-bf16", about: "every MoE architecture in BF16", needs: &["linked", "plugin"], run: archs_bf16 },
];

const PROGRAM: &str = "test-llama-archs";
/// What test-llama-archs itself allows: its weights are not scaled to keep rounding small, as those of `tiny` are.
const ARCH_LIMIT: f64 = 1e-4;

fn linked(ui: &Ui) -> Result<Outcome> {
    llama::linked(ui)?;
    Ok(Outcome::Passed(String::new()))
}

/// llama.cpp's own test: logits on HiNa against the CPU's, and a model saved and loaded again. Its weights are F32, which
/// HiNa leaves to the CPU backend: this is about everything around the products.
fn archs(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let mut command = Command::new(llama::linked(ui)?.program(PROGRAM));
    command.args(["-s", "1", "-b", "HiNa"]);
    let text = Job::new("test-llama-archs", "archs", command).run(ui)?;
    let (all, moe) = good_archs(&text);
    ensure!(moe > 30, "only {moe} MoE architectures were tested");
    Ok(Outcome::Passed(format!("{all} architectures, {moe} of them MoE")))
}

/// How many rows of the table are good, and how many of these are MoE. That none is bad, the exit status says; the sum below
/// the table is printed by a thread of the program's log, which the program's end sometimes overtakes.
fn good_archs(text: &str) -> (usize, usize) {
    let good: Vec<&str> = text.lines().filter(|line| line.starts_with('|') && line.contains("OK")).collect();
    (good.len(), good.iter().filter(|line| line.contains("|   MoE|")).count())
}

/// The same architectures with weights that HiNa claims: each model is saved, turned into BF16 and run with the plugin.
fn archs_bf16(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let plugin = plugin::ensure(ui)?;
    let dir = paths::target().join("xtask-tmp/archs");
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir)?;
    let mut command = Command::new(llama::linked(ui)?.program(PROGRAM));
    command.args(["-s", "1", "-o"]).arg(&dir);
    Job::new("saving models", "archs-save", command).run(ui)?;

    let (mut good, mut bad, mut not_by_stock) = (0, Vec::new(), Vec::new());
    for model in moe_models(&dir)? {
        match one_arch(ui, &plugin, &model) {
            Ok(true) => good += 1,
            Ok(false) => not_by_stock.push(name(&model)),
            Err(error) => bad.push(format!("{}: {error:#}", name(&model))),
        }
    }
    ensure!(bad.is_empty(), "{} of {} architectures:\n{}", bad.len(), good + bad.len(), bad.join("\n"));
    ensure!(good > 30, "only {good} models were saved");
    fs::remove_dir_all(&dir)?;
    let mut note = format!("{good} architectures");
    if !not_by_stock.is_empty() {
        note += &format!("; stock llama.cpp cannot run {} in BF16", not_by_stock.join(", "));
    }
    Ok(Outcome::Passed(note))
}

fn moe_models(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut models: Vec<PathBuf> = fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    models.retain(|path| name(path).ends_with("-moe"));
    models.sort();
    Ok(models)
}

fn name(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// False where stock llama.cpp itself does not run the model in BF16.
fn one_arch(ui: &Ui, plugin: &Plugin, model: &Path) -> Result<bool> {
    let (name, bf16) = (name(model), model.with_extension("bf16.gguf"));
    let mut command = plugin.stock("llama-quantize");
    command.arg("--pure").arg(model).arg(&bf16).arg("bf16");
    Job::new(format!("{name} to BF16"), "archs-quantize", command).run(ui)?;
    let options = ["--batch", "40", "--decode", "3"];
    let Ok(stock) = logits::of(ui, plugin.stock("hina-logits"), "arch-stock", &bf16, &options) else {
        return Ok(false);
    };
    let (hina, stats) = logits::with_stats(ui, plugin.hina("hina-logits"), "arch-hina", &bf16, &options)?;
    fs::remove_file(&bf16)?;
    ensure!(stats.claimed > 0, "HiNa claimed no node");
    within(&stock, &hina, ARCH_LIMIT)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_rows_of_test_llama_archs() {
        let text = "|arch|HiNa|Config|\n|qwen3moe|HiNa|   MoE|OK (1e-9)|OK|\n|llama|HiNa| Dense|OK (1e-9)|OK|\n|t5|HiNa| Dense|SKIP|SKIP|";
        assert_eq!(good_archs(text), (2, 1));
    }
}
