//! `cargo xtask compare | doctor`: the programs of the crate `hina-compare`, with llama.cpp, plugin and models of `target/`.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use crate::model::{self, ModelArgs, Preset, WeightType};
use crate::plugin;
use crate::run::{Job, Ui};
use crate::source::cargo;
use crate::{llama, paths};

/// What is passed on.
#[derive(Args, Debug)]
#[command(disable_help_flag = true)]
pub struct ToolArgs {
    /// Arguments of the program; --help shows them
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<OsString>,
}

/// Models and tests of docs/PERFORMANCE.md.
const MODELS: &[(Preset, WeightType, &str)] = &[
    (Preset::Qwen3, WeightType::Bf16, "pp512,pp128,tg32,tg16@d4096,tg16@d16384,tg16x8@p64"),
    (Preset::Qwen3, WeightType::Q8_0, "pp512,tg32,tg16@d4096"),
    (Preset::Mixtral, WeightType::Bf16, "pp512,tg32"),
];

/// Options that only print.
const HELP: &[&str] = &["-h", "--help", "-V", "--version"];

impl ToolArgs {
    fn has(&self, names: &[&str]) -> bool {
        let is =
            |arg: &OsString| names.iter().any(|name| arg == OsStr::new(name) || starts_with(arg, &format!("{name}=")));
        self.rest.iter().any(is)
    }
}

fn starts_with(arg: &OsStr, start: &str) -> bool {
    arg.as_encoded_bytes().starts_with(start.as_bytes())
}

/// Builds `hina-compare` and becomes it. Without `-m`, the models are those of docs/PERFORMANCE.md, in `target/models`.
///
/// # Errors
/// When a step fails.
pub fn compare(ui: &Ui, args: &ToolArgs) -> Result<()> {
    let mut command = built(ui, "hina-compare")?;
    if !args.has(&["--resume"]) && !args.has(HELP) {
        if !args.has(&["--llama"]) {
            command.arg("--llama").arg(&llama::plugins(ui)?.bin);
        }
        if !args.has(&["--plugin", "--linked"]) {
            command.arg("--plugin").arg(plugin::ensure(ui)?.path);
        }
        if !args.has(&["-m", "--model"]) {
            for (preset, weights, tests) in MODELS {
                let mut model = model::ensure(ui, &ModelArgs::new(*preset, *weights))?.into_os_string();
                if !args.has(&["--tests", "--quick"]) {
                    model.push(format!("={tests}"));
                }
                command.arg("-m").arg(model);
            }
        }
    }
    if !args.has(HELP) {
        let words = args.rest.iter().map(|w| w.to_string_lossy());
        let shown = std::iter::once("cargo xtask compare".into()).chain(words);
        command.args(shown.map(|word| format!("--shown-as={word}")));
    }
    become_it(command.args(&args.rest))
}

/// Builds `hina-doctor` and becomes it. It looks at the llama.cpp of `target/` too, where that and the plugin are built already.
///
/// # Errors
/// When the build fails.
pub fn doctor(ui: &Ui, args: &ToolArgs) -> Result<()> {
    let mut command = built(ui, "hina-doctor")?;
    let llama = paths::target().join("llama/bin");
    let plugin = paths::cargo_target().join("release").join(plugin::FILE);
    if !args.has(&["--llama", "--plugin"]) && !args.has(HELP) && llama.join("llama-bench").exists() && plugin.exists() {
        command.arg("--llama").arg(llama).arg("--plugin").arg(plugin);
    }
    become_it(command.args(&args.rest))
}

fn built(ui: &Ui, program: &str) -> Result<Command> {
    let mut command = cargo("build");
    command.args(["--release", "--package", "hina-compare", "--bin", program]);
    Job::new(format!("building {program}"), program, command).run(ui)?;
    let release: &Path = &paths::cargo_target().join("release");
    Ok(Command::new(release.join(program)))
}

/// The program takes this process's place: Ctrl-C, exit code and terminal are its own.
fn become_it(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_owned();
    let error = command.exec();
    Err(error).with_context(|| format!("{} did not start", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_seen_in_both_forms() {
        let args = ToolArgs { rest: ["--model=x", "--quick"].map(OsString::from).into() };
        assert!(args.has(&["-m", "--model"]) && args.has(&["--quick"]) && !args.has(&["--plugin", "--mode"]));
    }
}
