//! `hina-compare`: stock llama.cpp and HiNa side by side.

mod case;
mod drive;
mod options;
mod page;
mod parse;
mod plot;
mod preflight;
mod program;
mod progress;
mod session;
mod summary;
mod table;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

pub use case::Case;
pub use options::{Options, found_plugin};

use crate::machine::Machine;
use crate::{files, print};
use drive::End;
use program::{Limits, Program, Role};
use session::Session;

/// What Ctrl-C leaves: 128 + SIGINT.
const INTERRUPTED: u8 = 130;

/// What to do about a folder that cannot be written to.
const OTHER_OUT: &str = "name another place with --out";

static INTERRUPT: AtomicBool = AtomicBool::new(false);

/// Runs a comparison to its end. `command` is the command line to be written into the results.
///
/// # Errors
/// A sentence that says what is wrong and what to do.
pub fn run(options: &Options, command: &str) -> Result<ExitCode> {
    // A caller may have a handler of its own; then Ctrl-C is its matter.
    let _ = drive::on_interrupt(&INTERRUPT);
    let until = options.minutes().map(|m| Instant::now() + Duration::from_secs_f64(m * 60.0));
    let limits = Limits { interrupted: &INTERRUPT, until };
    let (mut session, dir) = match &options.resume {
        Some(dir) => (Session::load(dir)?, dir.clone()),
        None => begin(options, command)?,
    };
    if !session.open().is_empty() {
        for hint in preflight::check(&session.settings, limits)? {
            eprintln!("note: {hint}");
        }
    }
    let other =
        if options.resume.is_some() { "copy it to a place that is yours and resume it there" } else { OTHER_OUT };
    files::writable_dir(&dir, other)?;
    options.page.as_deref().map(page::plots_of).transpose()?;
    session.save(&dir)?;
    let end = drive::measure(&mut session, &dir, limits);
    let me = options.shown_as.first().map_or("hina-compare", String::as_str);
    let again = format!("{me} --resume {}", crate::quoted(&dir.to_string_lossy()));
    report(&session, &dir, options.page.as_deref())
        .with_context(|| format!("what was measured is kept; make room and write it out by {again}"))?;
    let left = session.open().len();
    match end {
        Ok(End::Complete) => return Ok(ExitCode::SUCCESS),
        Ok(End::OutOfTime) => eprintln!("the time is up with {left} runs left; to go on: {again}"),
        Ok(End::Interrupted) => {
            eprintln!("stopped with {left} runs left; what was measured is kept; to go on: {again}");
            return Ok(INTERRUPTED.into());
        }
        Err(e) => return Err(e.context(format!("stopped with {left} runs left (to go on later: {again})"))),
    }
    Ok(ExitCode::SUCCESS)
}

fn begin(options: &Options, command: &str) -> Result<(Session, PathBuf)> {
    let settings = options.settings()?;
    let session = Session::new(settings, Machine::this(), command.to_owned());
    let by_date = || format!("hina-compare-{}", session.started.replace([':', 'Z'], "")).into();
    let dir: PathBuf = options.out.clone().unwrap_or_else(by_date);
    if dir.join(session::FILE).exists() {
        bail!("{} holds a comparison already: --resume goes on with it, another --out begins a new one", dir.display());
    }
    Ok((session, dir))
}

/// Whether `llama-bench` in `llama` loads the plugin.
///
/// # Errors
/// A sentence that says why it does not.
pub fn check_plugin(llama: &Path, plugin: &Path) -> Result<()> {
    let absolute = |p: &Path| std::path::absolute(p).unwrap_or_else(|_| p.to_owned());
    let (dir, so) = (absolute(llama), absolute(plugin));
    let program = Program { name: "HiNa".into(), dir, role: Role::Plugin(so.clone()) };
    preflight::plugin(&program, &so, &[], Limits { interrupted: &INTERRUPT, until: None }).map(drop)
}

/// The table to standard output; table and plots to the folder; the page where one is wanted.
fn report(session: &Session, dir: &Path, page: Option<&Path>) -> Result<()> {
    let tables = summary::tables(session);
    if tables.is_empty() {
        return Ok(());
    }
    let colour = console::colors_enabled() && console::Term::stdout().is_term();
    print(&table::plain(session, colour));
    files::write(&dir.join("table.md"), table::markdown(session, 2, |_| String::new()))?;
    let plots = plot::write_all(dir, &tables)?;
    print(&format!("{}/: {}, table.md, {} as .png and .svg\n", dir.display(), session::FILE, plots.join(", ")));
    if let Some(file) = page {
        page::write(session, file)?;
        print(&format!("{} is written\n", file.display()));
    }
    Ok(())
}
