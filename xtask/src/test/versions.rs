//! The two versions of ggml's backend interface: 2 (ggml 0.25) and 3 (ggml 0.26).

use anyhow::{Result, ensure};

use super::seam::{close, needs_fit_cpu, tiny};
use super::{Outcome, Step};
use crate::logits;
use crate::model::WeightType;
use crate::plugin::{self, Plugin};
use crate::run::{Job, Ui};

/// The build against the newer one, a run on it, and what each says to the other's plugin.
pub const STEPS: &[Step] = &[
    Step { name: "api3", about: "the plugin builds against ggml 0.26", needs: &["llama"], run: build },
    Step { name: "api3-logits", about: "logits of `tiny` on ggml 0.26", needs: &["api3", "models"], run: agree },
    Step {
        name: "wrong-version",
        about: "a plugin for another interface",
        needs: &["api3", "plugin", "models"],
        run: refused,
    },
];

const LOGITS: &str = "hina-logits";

fn build(ui: &Ui) -> Result<Outcome> {
    plugin::ensure_next_version(ui)?;
    Ok(Outcome::Passed(String::new()))
}

fn agree(ui: &Ui) -> Result<Outcome> {
    needs_fit_cpu!();
    let plugin = plugin::ensure_next_version(ui)?;
    let model = tiny(ui, WeightType::Bf16)?;
    let stock = logits::of(ui, plugin.stock(LOGITS), "api3-stock", &model, &[])?;
    let (hina, stats) = logits::with_stats(ui, plugin.hina(LOGITS), "api3-hina", &model, &[])?;
    ensure!(stats.claimed > 0, "HiNa claimed no node");
    Ok(Outcome::Passed(format!("NMSE {:.0e}, {} nodes", close(&stock, &hina)?, stats.claimed)))
}

fn refused(ui: &Ui) -> Result<Outcome> {
    // ggml asks a plugin whether the CPU suits before it looks at the version.
    needs_fit_cpu!();
    let (old, new) = (plugin::ensure(ui)?, plugin::ensure_next_version(ui)?);
    foreign(ui, &old, &new)?;
    foreign(ui, &new, &old)?;
    Ok(Outcome::Passed("refused both ways".into()))
}

/// Runs a model with the plugin of another version: it must be named and refused, and the run go on without it.
fn foreign(ui: &Ui, host: &Plugin, other: &Plugin) -> Result<()> {
    let mut command = host.with_foreign(LOGITS, other);
    command.env("GGML_HINA_STATS", "1").arg(tiny(ui, WeightType::Bf16)?).arg(logits::scratch("foreign.f32")?);
    let text = Job::new("a plugin for another version", "wrong-version", command).run(ui)?;
    ensure!(!text.contains("claimed"), "a plugin of another version computed");
    let said = text.lines().any(|line| line.contains("version") && line.contains("libggml_hina"));
    ensure!(said, "no line says that the plugin is for another version\n{text:.2000}");
    Ok(())
}
