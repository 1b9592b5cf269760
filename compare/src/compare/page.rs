//! docs/PERFORMANCE.md: command, machine, date, tables and plots of a session.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::plot::{self, depth_name};
use super::session::Session;
use super::summary::tables;
use super::table;
use crate::{files, machine};

const BEGIN: &str = "<!-- hina-compare: made by the command below; what is written up to the end mark is replaced -->";
const END: &str = "<!-- hina-compare: end -->";

/// Writes the page to `file` and its plots to a folder beside it (named as the file, in small letters). Text of an older page
/// outside of the marks is kept.
///
/// # Errors
/// A sentence that names the file.
pub fn write(session: &Session, file: &Path) -> Result<()> {
    let (plots, stem) = plots_of(file)?;
    let names = plot::write_all(&plots, &tables(session))?;
    let old = std::fs::read_to_string(file).unwrap_or_default();
    files::write(file, placed(&old, &text(session, &stem, &names)))
}

/// Makes the folder for the plots of a page; returns it and its name.
///
/// # Errors
/// A sentence: no name of a file, or no permission.
pub fn plots_of(file: &Path) -> Result<(PathBuf, String)> {
    let stem = file.file_stem().context("--page needs the name of a file")?.to_string_lossy().to_lowercase();
    let plots = file.with_file_name(&stem);
    files::writable_dir(&plots, "name another place with --page")?;
    Ok((plots, stem))
}

/// The old page with the text between the marks; a page without marks keeps all it has, and gets them at its end.
fn placed(old: &str, text: &str) -> String {
    let part = format!("{BEGIN}\n\n{text}\n{END}\n");
    let marks = old.find(BEGIN).zip(old.find(END)).filter(|(from, to)| from < to);
    if let Some((from, to)) = marks {
        let rest = old[to + END.len()..].strip_prefix('\n').unwrap_or(&old[to + END.len()..]);
        return format!("{}{part}{rest}", &old[..from]);
    }
    if old.trim().is_empty() { format!("# Performance\n\n{part}") } else { format!("{}\n\n{part}", old.trim_end()) }
}

fn text(session: &Session, plots: &str, names: &[String]) -> String {
    let image = |name: &str, what: &str| match names.iter().any(|n| n == name) {
        true => format!("\n[![{what}]({plots}/{name}.png)]({plots}/{name}.svg)\n"),
        false => String::new(),
    };
    let below = |t: &super::summary::Table| {
        image(&depth_name(&t.model), "tokens per second of generation, by depth of the KV cache")
    };
    format!(
        "## Stock llama.cpp and HiNa side by side\n\n```sh\n{}\n```\n\n{}\n{}\n{}\n{}",
        session.command,
        about(session),
        HOW,
        image("ratios", "tokens per second as a ratio to stock llama.cpp"),
        table::markdown(session, 3, below),
    )
}

const HOW: &str = "\
Speeds are tokens per second, the median over the rounds. In each round every program runs the same test in turn (stock,
HiNa; in the next round HiNa, stock), each in a process of its own; the ratio is taken within a round, and its geometric
mean over the rounds is given with the lowest and the highest. Absolute speeds of a shared machine drift: compare ratios.
`pp512` is a prompt of 512 tokens, `tg32` is 32 tokens generated one by one, `@d4096` is with 4096 tokens in the KV cache,
and `tg16x8@p64` is 16 tokens for each of 8 sequences at once, after prompts of 64 tokens.
";

fn about(session: &Session) -> String {
    let m = &session.machine;
    let settings = &session.settings;
    let mut rows = vec![
        ("date", session.started.clone()),
        ("CPU", format!("{}{}", m.cpu, if m.virtual_machine { " (virtual machine)" } else { "" })),
        ("CPUs, NUMA nodes, memory", format!("{}, {}, {}", m.cpus, m.nodes, machine::bytes(m.memory))),
        ("kernel", m.kernel.clone()),
        ("HiNa runs on", m.engine.clone()),
        ("threads", session.threads.to_string()),
        ("rounds x repetitions", format!("{} x {}", settings.rounds, settings.repeats)),
    ];
    for (program, commit) in settings.programs.iter().zip(&session.commits).filter(|(_, c)| !c.is_empty()) {
        rows.push(("llama.cpp commit", format!("{commit} ({})", program.name)));
    }
    rows.dedup_by(|b, a| a.0 == "llama.cpp commit" && b.1.split(' ').next() == a.1.split(' ').next());
    let given = [("extra arguments", &settings.extra), ("in front", &settings.wrap), ("settings", &settings.env)];
    rows.extend(
        given.iter().filter(|(_, words)| !words.is_empty()).map(|(k, words)| (*k, format!("`{}`", words.join(" ")))),
    );
    let open = session.open().len();
    if open > 0 {
        rows.push(("not finished", format!("{open} of {} runs are missing", session.steps().len())));
    }
    let lines = rows.iter().map(|(k, v)| format!("| {k} | {v} |\n"));
    ["| | |\n|---|---|\n".to_owned()].into_iter().chain(lines).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::session::tests::{run, session};

    #[test]
    fn text_around_the_marks_is_kept() {
        let first = placed("", "one");
        assert!(first.starts_with("# Performance\n\n<!--"));
        let by_hand = first.replace("# Performance", "# Speed\n\nhello") + "\n## FFN\n";
        let second = placed(&by_hand, "two");
        assert_eq!(second, by_hand.replace("one", "two"));
        assert_eq!(placed("# Mine\n", "x").matches("# Mine\n\n<!--").count(), 1);
        let twisted = format!("{END}\n{BEGIN}\n");
        assert!(placed(&twisted, "x").starts_with(&format!("{END}\n{BEGIN}\n\n")));
    }

    #[test]
    fn a_page_with_its_plots() {
        let dir = std::env::temp_dir().join(format!("hina-compare-page-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut s = session(&["tg4", "tg4@d64"], 1);
        for step in s.steps().into_iter().take(3) {
            s.runs.push(run(step, &[100.0]));
        }
        let file = dir.join("PERFORMANCE.md");
        write(&s, &file).unwrap();
        let page = std::fs::read_to_string(&file).unwrap();
        for part in ["hina-compare -m /m/tiny.gguf", "### tiny", "(performance/ratios.png)", "1 of 4 runs are missing"]
        {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(dir.join("performance/ratios.svg").exists());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
