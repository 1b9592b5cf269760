//! The AMX kernels' checks and speed as one static program, to be copied to a machine that has AMX.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::paths;
use crate::run::{Job, Ui};
use crate::source::cargo;

const NAME: &str = "amx-native";
/// Named so that the flags below reach the program alone, not the build scripts and macros.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// Builds `target/amx-native` and runs its checks on emulated AMX.
///
/// # Errors
/// When it does not build, or a check fails.
pub fn build(ui: &Ui) -> Result<PathBuf> {
    let mut command = cargo("build");
    command.args(["--release", "--package", NAME, "--target", TRIPLE]);
    command.env("RUSTFLAGS", "-C target-feature=+crt-static -C strip=symbols");
    Job::new(format!("building {NAME}"), NAME, command).run(ui)?;
    let built = paths::cargo_target().join(TRIPLE).join("release").join(NAME);
    let packed = paths::target().join(NAME);
    fs::copy(&built, &packed).with_context(|| format!("cargo did not leave {}", built.display()))?;
    let mut check = Command::new(&packed);
    check.args(["check", "--emulate"]);
    Job::new("checking it on emulated AMX", "amx-native-check", check).run(ui)?;
    Ok(packed)
}
