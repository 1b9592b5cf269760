//! The plugin itself, built by cargo against one llama.cpp or the other.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::llama::{self, Llama};
use crate::paths;
use crate::run::{Job, Ui};
use crate::source::cargo;

/// File name of the plugin.
pub const FILE: &str = "libggml_hina.so";
/// What names it to llama.cpp.
const LOAD: &str = "GGML_BACKEND_PATH";

/// A plugin file and the llama.cpp that it was built for.
pub struct Plugin {
    /// The llama.cpp that loads it.
    pub llama: Llama,
    /// The file.
    pub path: PathBuf,
}

/// The plugin for `target/llama`, which is built first where it is missing.
///
/// # Errors
/// When a build fails.
pub fn ensure(ui: &Ui) -> Result<Plugin> {
    let llama = llama::plugins(ui)?;
    let mut command = cargo("build");
    command.args(["--release", "--package", "ggml-hina", "--lib"]);
    Job::new("building the plugin", "plugin", command).run(ui)?;
    found(llama, &paths::cargo_target())
}

/// The plugin for ggml 0.26, in `target/api3`.
///
/// # Errors
/// When a build fails.
pub fn ensure_next_version(ui: &Ui) -> Result<Plugin> {
    let llama = llama::next_version(ui)?;
    let target = paths::target().join("api3");
    let mut command = cargo("build");
    command.args(["--release", "--package", "ggml-hina", "--lib", "--target-dir"]).arg(&target);
    command.env("GGML_HINA_GGML_DIR", &llama.source).env("GGML_HINA_GGML_LIB", &llama.bin);
    Job::new("building the plugin for ggml 0.26", "plugin-api3", command).run(ui)?;
    found(llama, &target)
}

fn found(llama: Llama, target: &Path) -> Result<Plugin> {
    let path = target.join("release").join(FILE);
    ensure!(path.exists(), "cargo did not leave {}", path.display());
    Ok(Plugin { llama, path })
}

impl Plugin {
    /// A program of its llama.cpp, as users run it without us.
    pub fn stock(&self, program: &str) -> Command {
        clean(Command::new(self.llama.program(program)))
    }

    /// The same program with the plugin loaded.
    pub fn hina(&self, program: &str) -> Command {
        let mut command = self.stock(program);
        command.env(LOAD, &self.path);
        command
    }

    /// The program with a plugin that was built for another version.
    pub fn with_foreign(&self, program: &str, other: &Plugin) -> Command {
        let mut command = self.stock(program);
        command.env(LOAD, &other.path);
        command
    }
}

/// Takes out what the user's shell may hold, so that every run is the same. A run that aborts, as stock does on some models, prints no
/// backtrace: ggml forks for that, and once both it and its children waited for ever.
fn clean(mut command: Command) -> Command {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text == LOAD || text.starts_with("GGML_HINA_") || text.starts_with("LLAMA_ARG_") {
            command.env_remove(&name);
        }
    }
    command.env("GGML_NO_BACKTRACE", "1");
    command
}
