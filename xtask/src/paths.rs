//! Where things lie: everything that xtask brings or builds is under `target/`.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// What the user gives in an environment variable; an empty one counts as not set.
pub fn given(name: &str) -> Option<OsString> {
    env::var_os(name).filter(|value| !value.is_empty())
}

/// The repository's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask/ lies in the repository")
}

/// A file of this crate, by its path from `xtask/`.
pub fn asset(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// `target/`. Not cargo's target directory, which a user may have moved: build.rs looks for llama.cpp here.
pub fn target() -> PathBuf {
    root().join("target")
}

/// The log file of one step.
pub fn log(name: &str) -> PathBuf {
    target().join("xtask-logs").join(format!("{name}.log"))
}

/// Cargo's own target directory, where the plugin is built.
pub fn cargo_target() -> PathBuf {
    given("CARGO_TARGET_DIR").map_or_else(target, |dir| root().join(dir))
}
