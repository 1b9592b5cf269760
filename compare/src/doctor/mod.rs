//! `hina-doctor`: one page about this machine and, where one is named, a model.

mod advice;
mod facts;
mod pages;
mod show;
mod weights;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Parser;
use serde::Serialize;

use crate::compare::{check_plugin, found_plugin};
use crate::gguf::Model;
use crate::{CANNOT_RUN, print};
use advice::{Finding, Level, ModelFacts};
use facts::Facts;
use pages::Pages;

/// What this machine, and a model on it, gain from HiNa; what costs speed; and the command line to run.
///
/// Shows the CPU's matrix units and whether the kernel grants them, NUMA nodes and where the model's pages lie in the page
/// cache, what of the model HiNa claims and what it leaves to llama.cpp's CPU backend and why. Reads the head of the model
/// file alone, changes nothing, and needs no llama.cpp; with --llama it also sees whether the plugin loads in it.
///
/// Exit codes: 0 all is well, 1 something costs speed (it is named), 2 HiNa cannot run (one sentence says why).
#[derive(Clone, Debug, Parser)]
#[command(name = "hina-doctor", version)]
pub struct Options {
    /// A GGUF model (of a split model: its first part)
    #[arg(short, long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// The folder with llama-bench: does the plugin load in it?
    #[arg(long, value_name = "DIR")]
    pub llama: Option<PathBuf>,
    /// HiNa's plugin; without it: $GGML_BACKEND_PATH, or libggml_hina.so beside this program
    #[arg(long, value_name = "SO")]
    pub plugin: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// All that is shown.
#[derive(Debug, Serialize)]
struct Report {
    machine: Facts,
    model: Option<ModelFacts>,
    threads: usize,
    findings: Vec<Finding>,
    command: String,
}

/// Looks, shows, and returns the exit code.
///
/// # Errors
/// A sentence: the model cannot be read.
pub fn run(options: &Options) -> Result<ExitCode> {
    let machine = Facts::this();
    let model = options.model.as_deref().map(look).transpose()?;
    let mut findings = advice::findings(&machine, model.as_ref());
    let plugin = found_plugin(options.plugin.as_deref());
    if let Some(llama) = &options.llama {
        let Some(plugin) = &plugin else {
            bail!("no plugin to look at: name it with --plugin /path/to/libggml_hina.so")
        };
        if let Err(e) = check_plugin(llama, plugin) {
            findings.insert(0, Finding::new(Level::Stop, format!("{e:#}"), ""));
        }
    }
    let text = |path: &Option<PathBuf>| path.as_ref().map(|p| p.to_string_lossy().into_owned());
    let server = options.llama.as_ref().map(|dir| dir.join("llama-server")).filter(|file| file.exists());
    let command =
        advice::command(&machine, text(&server).as_deref(), text(&options.model).as_deref(), text(&plugin).as_deref());
    let report = Report { threads: advice::threads(&machine), machine, model, findings, command };
    let colour = console::colors_enabled() && console::Term::stdout().is_term();
    match options.json {
        true => print(&(serde_json::to_string_pretty(&report)? + "\n")),
        false => print(&show::page(&report, colour)),
    }
    Ok(match report.findings.iter().map(|f| f.level).max() {
        Some(Level::Stop) => CANNOT_RUN.into(),
        Some(Level::Slow) => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    })
}

fn look(file: &Path) -> Result<ModelFacts> {
    let model = Model::read(file)?;
    let pages = Pages::of(&model.files).with_context(|| format!("the pages of {} cannot be seen", file.display()))?;
    let experts = model.of_architecture("expert_count").filter(|&n| n > 0);
    Ok(ModelFacts {
        file: file.to_string_lossy().into_owned(),
        architecture: model.text("general.architecture").unwrap_or("unknown").into(),
        bytes: model.bytes(),
        experts: experts.map(|n| (n, model.of_architecture("expert_used_count").unwrap_or(0))),
        groups: weights::groups(&model),
        pages,
    })
}
