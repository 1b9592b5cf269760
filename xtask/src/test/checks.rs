//! What cargo checks by itself, and the builds that the other steps use.

use std::process::Command;

use anyhow::Result;

use super::{Outcome, Step};
use crate::run::{Job, Ui};
use crate::source::cargo;
use crate::{llama, plugin};

/// In the order in which they run. All but `fmt` compile against ggml's headers, so llama.cpp comes first.
pub const STEPS: &[Step] = &[
    Step { name: "fmt", about: "formatting", needs: &[], run: fmt },
    Step { name: "llama", about: "llama.cpp that loads backends", needs: &[], run: build_llama },
    Step { name: "clippy", about: "clippy, warnings denied", needs: &["llama"], run: clippy },
    Step { name: "doc", about: "rustdoc, warnings denied", needs: &["llama"], run: doc },
    Step { name: "unit", about: "unit, property and in-process tests", needs: &["llama"], run: unit },
    Step { name: "plugin", about: "the plugin builds", needs: &["llama"], run: build_plugin },
];

fn passed() -> Result<Outcome> {
    Ok(Outcome::Passed(String::new()))
}

fn fmt(ui: &Ui) -> Result<Outcome> {
    let mut command = cargo("fmt");
    command.args(["--all", "--check"]);
    Job::new("cargo fmt", "fmt", command).run(ui)?;
    passed()
}

fn build_llama(ui: &Ui) -> Result<Outcome> {
    llama::plugins(ui)?;
    passed()
}

fn clippy(ui: &Ui) -> Result<Outcome> {
    let deny = |mut command: Command| {
        command.args(["--all-targets", "--", "-D", "warnings"]);
        command
    };
    let mut all = cargo("clippy");
    all.arg("--workspace");
    Job::new("cargo clippy", "clippy", deny(all)).run(ui)?;
    let mut kernels = cargo("clippy");
    kernels.args(["--package", "ggml-hina", "--no-default-features"]);
    Job::new("cargo clippy, without the plugin", "clippy-kernels", deny(kernels)).run(ui)?;
    passed()
}

fn doc(ui: &Ui) -> Result<Outcome> {
    let mut command = cargo("doc");
    command.args(["--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings");
    Job::new("cargo doc", "doc", command).run(ui)?;
    passed()
}

fn unit(ui: &Ui) -> Result<Outcome> {
    let mut command = cargo("test");
    command.args(["--workspace", "--no-fail-fast"]);
    let text = Job::new("cargo test", "unit", command).run(ui)?;
    Ok(Outcome::Passed(format!("{} tests", passed_tests(&text))))
}

/// The sum over the lines `test result: ok. 12 passed; …`.
fn passed_tests(text: &str) -> u32 {
    let count = |line: &str| line.strip_prefix("test result: ok. ")?.split(' ').next()?.parse::<u32>().ok();
    text.lines().filter_map(count).sum()
}

fn build_plugin(ui: &Ui) -> Result<Outcome> {
    plugin::ensure(ui)?;
    passed()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_all_test_programs_add_up() {
        let text = "running 2 tests\ntest result: ok. 2 passed; 0 failed;\nx\ntest result: ok. 40 passed; 0 failed;\n";
        assert_eq!(passed_tests(text), 42);
    }
}
