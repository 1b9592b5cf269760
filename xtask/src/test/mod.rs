//! `cargo xtask test`: every check and test of the project, one line each.

mod amx;
mod checks;
mod linked;
mod numa;
mod seam;
mod versions;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;

use crate::run::{Ui, seconds};

/// Which steps to run.
#[derive(Args, Debug)]
pub struct TestArgs {
    /// Run this step and those that it needs; may be given more than once
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Show the steps and do nothing
    #[arg(long)]
    list: bool,
}

/// How a step ended, when it did not fail.
pub enum Outcome {
    /// With what it found, for the line.
    Passed(String),
    /// Why it could not run here.
    Skipped(String),
}

/// One check.
#[derive(Clone, Copy)]
pub struct Step {
    name: &'static str,
    about: &'static str,
    /// Steps that must have passed.
    needs: &'static [&'static str],
    run: fn(&Ui) -> Result<Outcome>,
}

fn steps() -> Vec<Step> {
    [checks::STEPS, seam::STEPS, amx::STEPS, linked::STEPS, versions::STEPS, numa::STEPS].concat()
}

/// Runs the steps and prints a line for each and the sum. True when none failed.
///
/// # Errors
/// When a name of `--only` is no step.
pub fn run(ui: &Ui, args: &TestArgs) -> Result<bool> {
    let steps = steps();
    if args.list {
        steps.iter().for_each(|step| println!("{:<16} {}", step.name, step.about));
        return Ok(true);
    }
    let chosen = choose(&steps, &args.only)?;
    let mut ended: BTreeMap<&str, Verdict> = BTreeMap::new();
    for step in steps.iter().filter(|step| chosen.contains(step.name)) {
        let title = format!("{:<16} {}", step.name, step.about);
        let start = Instant::now();
        ui.begin(&title);
        let missing = step.needs.iter().find(|need| ended.get(*need) != Some(&Verdict::Passed));
        let result = match missing {
            Some(need) => Ok(Outcome::Skipped(format!("{need} did not pass"))),
            None => (step.run)(&ui.inside(step.name)),
        };
        let (verdict, text) = match result {
            Ok(Outcome::Passed(note)) if note.is_empty() => (Verdict::Passed, format!("ok, {}", seconds(start))),
            Ok(Outcome::Passed(note)) => (Verdict::Passed, format!("ok, {} ({note})", seconds(start))),
            Ok(Outcome::Skipped(why)) => (Verdict::Skipped, format!("skipped: {why}")),
            Err(error) => (Verdict::Failed, format!("FAILED, {}\n  {error:#}", seconds(start))),
        };
        ui.done(&title, &text);
        ended.insert(step.name, verdict);
    }
    let count = |verdict| ended.values().filter(|v| **v == verdict).count();
    let failed = count(Verdict::Failed);
    println!("{} passed, {failed} failed, {} skipped", count(Verdict::Passed), count(Verdict::Skipped));
    Ok(failed == 0)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed,
    Skipped,
}

/// The steps named and all that they need; all steps where none is named.
fn choose(steps: &[Step], only: &[String]) -> Result<BTreeSet<&'static str>> {
    let mut open: Vec<&str> = only.iter().map(String::as_str).collect();
    if only.is_empty() {
        open = steps.iter().map(|step| step.name).collect();
    }
    let mut chosen = BTreeSet::new();
    while let Some(name) = open.pop() {
        let Some(step) = steps.iter().find(|step| step.name == name) else {
            bail!("there is no step {name}; `cargo xtask test --list` shows them");
        };
        if chosen.insert(step.name) {
            open.extend(step.needs);
        }
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_brings_what_it_needs() {
        let chosen = choose(&steps(), &["logits".into()]).unwrap();
        assert!(chosen.contains("llama") && chosen.contains("plugin") && chosen.contains("logits"), "{chosen:?}");
        assert!(!chosen.contains("fmt"));
        assert!(choose(&steps(), &["nonsense".into()]).is_err());
    }

    #[test]
    fn needs_come_first() {
        let steps = steps();
        for (i, step) in steps.iter().enumerate() {
            for need in step.needs {
                assert!(steps[..i].iter().any(|s| s.name == *need), "{} needs {need}", step.name);
            }
        }
    }
}
