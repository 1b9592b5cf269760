//! Runs what is open, step by step, and keeps every result at once.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::case::Case;
use super::parse::{self, Measured};
use super::preflight;
use super::program::{Failure, Limits, Program, Role};
use super::progress::Progress;
use super::session::{Run, Session, Settings, Step};

/// How often llama-batched-bench is run until it prints its result: a thread of its log prints it, which the program's end
/// sometimes overtakes (seen once in eight runs of a small model).
const LOST_LOG_TRIES: u32 = 4;

/// How a comparison ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Everything was measured.
    Complete,
    /// Ctrl-C.
    Interrupted,
    /// The time limit.
    OutOfTime,
}

/// Measures all open steps of the session, and saves it to `dir` after each.
///
/// # Errors
/// A sentence: stock or HiNa failed. What was measured before is saved.
pub fn measure(session: &mut Session, dir: &Path, limits: Limits<'_>) -> Result<End> {
    let open = session.open();
    let progress = Progress::new(session.steps().len(), session.steps().len() - open.len());
    for step in open {
        if session.claims[step.target].is_none() {
            progress.say(&format!("{}: asking HiNa what it claims", session.settings.targets[step.target].name()));
            match preflight::claims(&session.settings, step.target, limits) {
                Ok(claims) => session.claims[step.target] = Some(claims),
                Err(failure) => return stopped(failure),
            }
        }
        progress.begin(session, step);
        let started = Instant::now();
        match one(&session.settings, step, limits) {
            Ok(measured) => keep(session, step, measured, started.elapsed()),
            Err(Failure::Failed(why)) if session.settings.programs[step.program].role == Role::Other => {
                progress
                    .warn(&format!("{} cannot run {}: {why}", session.settings.programs[step.program].name, step.case));
                keep(session, step, Measured::default(), started.elapsed());
            }
            Err(failure) => return stopped(failure),
        }
        session.save(dir)?;
        progress.end(session);
    }
    Ok(End::Complete)
}

fn stopped(failure: Failure) -> Result<End> {
    match failure {
        Failure::Interrupted => Ok(End::Interrupted),
        Failure::OutOfTime => Ok(End::OutOfTime),
        Failure::Failed(why) => bail!(why),
    }
}

fn keep(session: &mut Session, step: Step, measured: Measured, time: Duration) {
    if !measured.commit.is_empty() {
        session.commits[step.program] = measured.commit;
    }
    if measured.threads > 0 && step.program < 2 {
        session.threads = measured.threads;
    }
    let Step { target, round, case, program } = step;
    let seconds = (time.as_secs_f64() * 100.0).round() / 100.0;
    session.runs.push(Run { target, round, case, program, tokens_per_second: measured.samples, seconds });
}

/// One run, in the words of llama.cpp, or where another program does not know these, in its own.
fn one(settings: &Settings, step: Step, limits: Limits<'_>) -> Result<Measured, Failure> {
    let first = checked(settings, step, &step.case.args(settings.repeats), limits);
    let other = step.case.args_without_depth(settings.repeats);
    match (&first, other) {
        (Err(Failure::Failed(_)), Some(args)) if settings.programs[step.program].role == Role::Other => {
            // Where that fails too, the first message is the one that says something.
            checked(settings, step, &args, limits).or_else(|second| match second {
                Failure::Failed(_) => first,
                stop => Err(stop),
            })
        }
        _ => first,
    }
}

/// One run, checked: its output is known, and HiNa computed where it should and only there.
fn checked(settings: &Settings, step: Step, own: &[String], limits: Limits<'_>) -> Result<Measured, Failure> {
    let program = &settings.programs[step.program];
    let args = arguments(settings, step.target, own);
    let tool = step.case.program();
    let mut tries = if matches!(step.case, Case::Parallel { .. }) { LOST_LOG_TRIES } else { 1 };
    loop {
        let output = program.run(tool, &args, &settings.wrap, &[], limits)?;
        tries -= 1;
        match parse::output(step.case, &output.stdout) {
            Ok(measured) => {
                check_backend(program, step.case, &measured, &output.stderr)?;
                return Ok(measured);
            }
            Err(why) if tries == 0 => return Err(Failure::Failed(why + &program.alone(tool, &args, &settings.wrap))),
            Err(_) => {}
        }
    }
}

/// The arguments of any of the programs: model, threads, its own, the user's.
pub fn arguments(settings: &Settings, target: usize, own: &[String]) -> Vec<String> {
    let mut args = vec!["-m".into(), settings.targets[target].file.to_string_lossy().into_owned()];
    args.extend(settings.threads.iter().flat_map(|t| ["-t".to_owned(), t.to_string()]));
    args.extend(own.iter().chain(&settings.extra).cloned());
    args
}

/// llama-bench names its backends; llama-batched-bench does not, but ggml's log names the plugin it loads.
fn check_backend(program: &Program, case: Case, measured: &Measured, stderr: &str) -> Result<(), Failure> {
    let named = !measured.backends.is_empty();
    let hina = measured.backends.split(',').any(|b| b.trim() == "HiNa");
    if program.is_hina() && named && !hina {
        let log = super::program::tail(stderr);
        return Err(Failure::Failed(format!(
            "HiNa was not used: llama-bench names {} as its backend{log}",
            measured.backends
        )));
    }
    if !program.is_hina() && named && hina {
        return Err(Failure::Failed(format!("{} ran {case} on HiNa, so it is nothing to compare with", program.name)));
    }
    Ok(())
}

/// The time that is left, as far as the runs so far tell: of the same program and test, else of the same test, else by the
/// number of tokens.
pub fn time_left(session: &Session, open: &[Step]) -> Option<Duration> {
    let mean = |of: &dyn Fn(&&Run) -> bool| {
        let all: Vec<f64> = session.runs.iter().filter(of).map(|r| r.seconds).collect();
        (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
    };
    let weight: u64 = session.runs.iter().map(|r| r.case.weight()).sum();
    let per_weight = session.runs.iter().map(|r| r.seconds).sum::<f64>() / weight.max(1) as f64;
    let guess = |s: &Step| {
        let same_test = |r: &&Run| (r.target, r.case) == (s.target, s.case);
        mean(&|r| same_test(r) && r.program == s.program)
            .or_else(|| mean(&same_test))
            .unwrap_or(per_weight * s.case.weight() as f64)
    };
    (!session.runs.is_empty()).then(|| Duration::from_secs_f64(open.iter().map(guess).sum()))
}

/// Sets the flag that Ctrl-C raises; a second one ends at once.
///
/// # Errors
/// If the process has a handler already.
pub fn on_interrupt(flag: &'static std::sync::atomic::AtomicBool) -> Result<()> {
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::session::tests::{run, session};

    #[test]
    fn time_left_is_learnt() {
        let mut s = session(&["pp8", "tg4"], 2);
        let steps = s.steps();
        assert_eq!(time_left(&s, &s.open()), None);
        let mut first = run(steps[0], &[1.0]);
        first.seconds = 2.0;
        s.runs.push(first);
        let mut second = run(steps[1], &[1.0]);
        second.seconds = 4.0;
        s.runs.push(second);
        // pp8 again on both: 2 + 4. tg4 four times, by tokens: weights 1 (pp8) and 5 (tg4), 3 seconds a weight.
        assert_eq!(time_left(&s, &s.open()), Some(Duration::from_secs(6 + 4 * 15)));
    }

    #[test]
    fn a_backend_in_the_wrong_column_is_refused() {
        let s = session(&["pp8"], 1);
        let case = s.settings.targets[0].cases[0];
        let with = |backends: &str| Measured { backends: backends.into(), ..Measured::default() };
        let [stock, hina] = [&s.settings.programs[0], &s.settings.programs[1]];
        let log = "load_backend: failed to load /h.so: no such file";
        let e = check_backend(hina, case, &with("CPU"), log).unwrap_err().to_string();
        assert!(e.contains("HiNa was not used") && e.contains("failed to load /h.so"), "{e}");
        assert!(check_backend(stock, case, &with("HiNa"), "").unwrap_err().to_string().contains("nothing to compare"));
        assert!(
            check_backend(hina, case, &with("HiNa"), "").is_ok()
                && check_backend(stock, case, &with("BLAS"), "").is_ok()
        );
        assert!(check_backend(hina, case, &with(""), "").is_ok());
    }
}
