//! What is looked at before the first measurement: the models, the programs, the plugin.

use std::path::Path;

use anyhow::{Result, bail};
use serde::Deserialize;

use super::drive::arguments;
use super::program::{Failure, Limits, Program, Role, tail};
use super::session::{Claims, Settings};
use crate::gguf::Model;

/// Checks all that can be checked in a moment; returns sentences that are worth reading.
///
/// # Errors
/// A sentence that says what is wrong and what to do.
pub fn check(settings: &Settings, limits: Limits<'_>) -> Result<Vec<String>> {
    let mut hints = Vec::new();
    for target in &settings.targets {
        let model = Model::read(&target.file)?;
        if model.of_architecture("expert_count").unwrap_or(0) == 0 {
            hints.push(format!("{} has no experts: HiNa has little to do in it", target.file.display()));
        }
    }
    for program in &settings.programs {
        // Another llama-bench may have no list of devices; that it is there is enough.
        let devices = match &program.role {
            Role::Other if program.file("llama-bench").exists() => continue,
            Role::Plugin(so) => plugin(program, so, &settings.wrap, limits)?,
            _ => list(program, &settings.wrap, limits)?.0,
        };
        if program.role == Role::Linked && !devices.contains("HiNa") {
            bail!("{} has no HiNa linked in: leave --linked out and name the plugin", program.dir.display());
        }
    }
    hints.extend(tools(settings)?);
    Ok(hints)
}

/// Whether every program that the tests need is there; what another llama.cpp lacks is a gap in its column, and a hint.
fn tools(settings: &Settings) -> Result<Vec<String>> {
    let cases = || settings.targets.iter().flat_map(|t| &t.cases);
    let mut hints = Vec::new();
    for program in &settings.programs {
        let Some(case) = cases().find(|c| !program.file(c.program()).exists()) else { continue };
        let sentence = format!("{} is not there; it measures {case}", program.file(case.program()).display());
        if program.role != Role::Other {
            bail!("{sentence}; build it, or choose other --tests");
        }
        hints.push(format!("{sentence}: such tests are left out for {}", program.name));
    }
    Ok(hints)
}

/// Standard output and error of `llama-bench --list-devices`.
fn list(program: &Program, wrap: &[String], limits: Limits<'_>) -> Result<(String, String)> {
    match program.run("llama-bench", &["--list-devices".into()], wrap, &[], limits) {
        Ok(output) => Ok((output.stdout, output.stderr)),
        Err(failure) => bail!("{failure}"),
    }
}

/// The devices of a program with the plugin.
///
/// # Errors
/// A sentence: the plugin is not there, or does not load and why.
pub fn plugin(program: &Program, so: &Path, wrap: &[String], limits: Limits<'_>) -> Result<String> {
    if !so.is_file() {
        bail!("the plugin {} is not there; name it with --plugin", so.display());
    }
    let (devices, log) = list(program, wrap, limits)?;
    if devices.contains("HiNa") {
        return Ok(devices);
    }
    bail!("the plugin {} does not load in {}{}", so.display(), program.dir.display(), why_not_loaded(&log))
}

/// ggml's own line about it.
fn why_not_loaded(log: &str) -> String {
    let about = |l: &&str| {
        let l = l.to_ascii_lowercase();
        ["failed", "not supported", "version", "hina:", "error"].iter().any(|w| l.contains(w))
    };
    let mut lines: Vec<&str> = log.lines().filter(about).collect();
    lines.dedup();
    if lines.is_empty() {
        return "; ggml does not say why: was llama.cpp built with GGML_BACKEND_DL=ON? (a build without it loads no plugins)"
            .into();
    }
    tail(&lines.join("\n"))
        + "\n  what it means and the way out: docs/USING.md, \"When something is wrong\"; most often it is to be built against this llama.cpp"
}

/// Lets HiNa decode a few tokens and count its nodes. This also brings the model into the page cache.
///
/// # Errors
/// [`Failure`]; a model that does not load is one.
pub fn claims(settings: &Settings, target: usize, limits: Limits<'_>) -> Result<Claims, Failure> {
    let Some(program) = settings.programs.iter().find(|p| p.is_hina()) else { return Ok(Claims::default()) };
    let file = std::env::temp_dir().join(format!("hina-compare-stats-{}.jsonl", std::process::id()));
    let _ = std::fs::remove_file(&file);
    let own: Vec<String> = "-p 16 -n 2 -r 1 -o json".split(' ').map(str::to_owned).collect();
    let path = file.to_string_lossy().into_owned();
    let run = program.run(
        "llama-bench",
        &arguments(settings, target, &own),
        &settings.wrap,
        &[("GGML_HINA_STATS", &path)],
        limits,
    );
    let text = std::fs::read_to_string(&file).unwrap_or_default();
    let _ = std::fs::remove_file(&file);
    run.map(|_| count(&text))
}

/// Sums the lines of a `GGML_HINA_STATS` file.
fn count(text: &str) -> Claims {
    #[derive(Deserialize)]
    struct Line {
        nodes: u64,
        claimed: u64,
    }
    let lines = text.lines().filter_map(|l| serde_json::from_str::<Line>(l).ok());
    lines.fold(Claims::default(), |all, l| Claims { claimed: all.claimed + l.claimed, nodes: all.nodes + l.nodes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_all_backends_are_summed() {
        let text = "{\"graphs\":1,\"nodes\":100,\"claimed\":7,\"kinds\":{}}\n{\"nodes\":20,\"claimed\":3}\nbroken\n";
        assert_eq!(count(text), Claims { claimed: 10, nodes: 120 });
    }

    #[test]
    fn ggmls_reason_is_passed_on() {
        let log = "load_backend: loaded CPU backend from /l/libggml-cpu.so\n\
                   load_backend: failed to load /h.so: invalid ELF header\n\
                   load_backend: failed to load /h.so: invalid ELF header\nother\n";
        let why = why_not_loaded(log);
        assert_eq!(why.matches("invalid ELF header").count(), 1, "{why}");
        assert!(why.contains("invalid ELF header") && !why.contains("other"), "{why}");
        assert!(why_not_loaded("nothing\n").contains("GGML_BACKEND_DL"));
    }
}
