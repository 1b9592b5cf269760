//! The command line of `hina-compare`.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Parser;

use super::case::Case;
use super::program::{Program, Role};
use super::session::{Settings, Target};

/// Stock llama.cpp and HiNa side by side: the same model, the same programs, in turn.
///
/// Runs llama-bench and llama-batched-bench of your own llama.cpp without and
/// with HiNa's plugin, one test at a time (stock, HiNa, HiNa, stock, ...), so that
/// a machine that grows slower or faster meanwhile weighs on both alike. Prints
/// tokens per second and the ratio with its spread over the rounds, and writes
/// results.json, table.md and plots.
///
/// Tests are written as llama-bench names them:
///   pp512        a prompt of 512 tokens
///   tg32         32 tokens generated one by one
///   tg32@d4096   the same with 4096 tokens in the KV cache
///   tg16x8@p64   16 tokens for each of 8 sequences at once, after prompts of 64
///
/// Exit codes: 0 done, 2 could not run (one sentence says why), 130 stopped by
/// Ctrl-C (what was measured is kept).
#[derive(Clone, Debug, Parser)]
#[command(name = "hina-compare", version, verbatim_doc_comment, after_help = EXAMPLES)]
pub struct Options {
    /// A GGUF model; may be given again, and may carry tests of its own: FILE=pp512,tg32
    #[arg(short, long = "model", value_name = "FILE[=TESTS]", required_unless_present = "resume")]
    pub models: Vec<String>,
    /// The folder with llama-bench and llama-batched-bench (build/bin)
    #[arg(long, value_name = "DIR", required_unless_present = "resume")]
    pub llama: Option<PathBuf>,
    /// HiNa's plugin; without it: $GGML_BACKEND_PATH, or libggml_hina.so beside this program
    #[arg(long, value_name = "SO", conflicts_with = "linked")]
    pub plugin: Option<PathBuf>,
    /// This llama.cpp has HiNa linked in (build flag): no plugin, and stock runs with GGML_HINA_DISABLE=1
    #[arg(long)]
    pub linked: bool,
    /// A third llama-bench to run in the same rounds (as ik_llama.cpp's); may be given again. A test that it cannot run is a gap
    #[arg(long, value_name = "NAME=DIR")]
    pub also: Vec<String>,
    /// Tests for models that carry none of their own (default: pp512,pp128,tg32,tg32@d4096,tg16x8)
    #[arg(long, value_name = "TESTS", value_delimiter = ',')]
    pub tests: Vec<Case>,
    /// Threads of every program [default: each program's own]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub threads: Option<u32>,
    /// Rounds: how often each program runs each test [default: 3, with --quick 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: Option<u32>,
    /// Repetitions within each run [default: 2, with --quick 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeats: Option<u32>,
    /// Under three minutes: short tests, two rounds, and what is not measured by then is left out
    #[arg(long)]
    pub quick: bool,
    /// End after this many minutes with what was measured by then
    #[arg(long, value_name = "MINUTES", value_parser = minutes)]
    pub time_limit: Option<f64>,
    /// A command in front of every program, as "numactl --interleave=all"
    #[arg(long, value_name = "COMMAND", default_value = "", hide_default_value = true)]
    pub wrap: String,
    /// Arguments for every program, as "-fa 1 --numa distribute"
    #[arg(long, value_name = "ARGS", default_value = "", hide_default_value = true, allow_hyphen_values = true)]
    pub extra: String,
    /// The folder for the results [default: hina-compare-DATE]
    #[arg(short, long, value_name = "DIR", conflicts_with = "resume")]
    pub out: Option<PathBuf>,
    /// Also write a page with command, machine, tables and plots (docs/PERFORMANCE.md); text around an older one is kept
    #[arg(long, value_name = "FILE")]
    pub page: Option<PathBuf>,
    /// The command line to name in the results: a program, then each word of it
    #[arg(long, hide = true)]
    pub shown_as: Vec<String>,
    /// Go on with an interrupted comparison, with the settings it was begun with; a finished one is only written out again
    #[arg(long, value_name = "DIR", conflicts_with_all = ["models", "llama", "plugin", "linked", "also", "tests", "threads", "rounds", "repeats"])]
    pub resume: Option<PathBuf>,
}

const EXAMPLES: &str = "\
Examples:
  hina-compare --llama ~/llama.cpp/build/bin --plugin ./libggml_hina.so -m model.gguf --quick
  hina-compare --llama build/bin -m model.gguf --tests tg32,tg32@d4096,tg32@d16384 --extra \"-fa 1\"
  hina-compare --llama build/bin -m model.gguf --wrap \"numactl --interleave=all\" --extra \"--numa distribute\"
  hina-compare --llama build/bin -m model.gguf --also ik=~/ik_llama.cpp/build/bin
  hina-compare --resume hina-compare-2026-11-30T0210";

const TESTS: &[&str] = &["pp512", "pp128", "tg32", "tg32@d4096", "tg16x8"];
const QUICK_TESTS: &[&str] = &["pp128", "tg16", "tg16@d512", "tg8x4@p32"];

/// What `--quick` leaves for a program that is running when the time is up.
const QUICK_MINUTES: f64 = 2.75;

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(m) if m > 0.0 && m <= 1e5 => Ok(m),
        _ => Err(format!("'{text}' is no number of minutes")),
    }
}

impl Options {
    /// Minutes after which to end.
    pub fn minutes(&self) -> Option<f64> {
        self.time_limit.or(self.quick.then_some(QUICK_MINUTES))
    }

    /// What is to be run.
    ///
    /// # Errors
    /// A sentence about an argument that cannot be.
    pub fn settings(&self) -> Result<Settings> {
        let Some(llama) = &self.llama else { bail!("--llama is missing: the folder with llama-bench (build/bin)") };
        let hina = if self.linked { Role::Linked } else { Role::Plugin(self.plugin()?) };
        let llama = absolute(llama);
        let column = |name: &str, role| Program { name: name.into(), dir: llama.clone(), role };
        let mut programs = vec![column("stock", Role::Stock), column("HiNa", hina)];
        for also in &self.also {
            let Some((name, dir)) = also.split_once('=').filter(|(n, d)| !n.is_empty() && !d.is_empty()) else {
                bail!("--also {also}: write NAME=DIR, as ik=/path/to/build/bin");
            };
            if programs.iter().any(|p| p.name.eq_ignore_ascii_case(name)) {
                bail!("--also {also}: there is a column '{name}' already");
            }
            programs.push(Program { name: name.into(), dir: absolute(Path::new(dir)), role: Role::Other });
        }
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect();
        Ok(Settings {
            programs,
            targets: self.models.iter().map(|m| self.target(m)).collect::<Result<_>>()?,
            threads: self.threads,
            rounds: self.rounds.unwrap_or(if self.quick { 2 } else { 3 }),
            repeats: self.repeats.unwrap_or(if self.quick { 1 } else { 2 }),
            extra: words(&self.extra),
            wrap: words(&self.wrap),
            env: hina_variables(),
        })
    }

    fn plugin(&self) -> Result<PathBuf> {
        match found_plugin(self.plugin.as_deref()) {
            Some(so) => Ok(so),
            None => {
                bail!("no plugin: name it with --plugin /path/to/libggml_hina.so (or --linked, if it is linked in)")
            }
        }
    }

    fn target(&self, text: &str) -> Result<Target> {
        let (file, tests) = match text.split_once('=') {
            Some((file, tests)) if !Path::new(text).exists() => (file, Some(tests)),
            _ => (text, None),
        };
        let cases: Vec<Case> = match tests {
            Some(tests) => parse_all(tests.split(','))?,
            None if !self.tests.is_empty() => self.tests.clone(),
            None => parse_all((if self.quick { QUICK_TESTS } else { TESTS }).iter().copied())?,
        };
        let mut unique: Vec<Case> = Vec::new();
        cases.into_iter().for_each(|c| {
            if !unique.contains(&c) {
                unique.push(c)
            }
        });
        Ok(Target { file: absolute(Path::new(file)), cases: unique })
    }
}

fn parse_all<'a>(tests: impl Iterator<Item = &'a str>) -> Result<Vec<Case>> {
    tests.map(|t| t.parse().map_err(anyhow::Error::msg)).collect()
}

/// The plugin that is named, else `$GGML_BACKEND_PATH`, else the one beside this program.
pub fn found_plugin(named: Option<&Path>) -> Option<PathBuf> {
    let beside = || Some(std::env::current_exe().ok()?.with_file_name("libggml_hina.so")).filter(|p| p.exists());
    let from_env = || std::env::var_os("GGML_BACKEND_PATH").filter(|so| !so.is_empty()).map(PathBuf::from);
    named.map(Path::to_owned).or_else(from_env).or_else(beside).map(|so| absolute(&so))
}

/// So that a resumed run in another folder finds it; `~` is left to the shell.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn hina_variables() -> Vec<String> {
    let ours = |(k, v): (String, String)| (k.starts_with("GGML_HINA_")).then(|| format!("{k}={v}"));
    let lossy = |s: std::ffi::OsString| s.to_string_lossy().into_owned();
    let mut all: Vec<String> = std::env::vars_os().filter_map(|(k, v)| ours((lossy(k), lossy(v)))).collect();
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(args: &str) -> Result<Options, clap::Error> {
        Options::try_parse_from(["hina-compare"].into_iter().chain(args.split_whitespace()))
    }

    fn settings(args: &str) -> Result<Settings> {
        options(args).unwrap().settings()
    }

    #[test]
    fn columns_models_and_their_tests() {
        let s = settings("--llama /l --plugin /h.so -m /a.gguf=pp8,tg4@d16,pp8 -m /b.gguf --tests tg2 --also ik=/ik")
            .unwrap();
        assert_eq!(s.programs.iter().map(|p| p.name.as_str()).collect::<Vec<_>>(), ["stock", "HiNa", "ik"]);
        assert_eq!(s.programs[1].role, Role::Plugin("/h.so".into()));
        let cases = |i: usize| s.targets[i].cases.iter().map(Case::to_string).collect::<Vec<_>>();
        assert_eq!((cases(0), cases(1)), (vec!["pp8".into(), "tg4@d16".into()], vec!["tg2".into()]));
    }

    #[test]
    fn quick_is_short_and_has_an_end() {
        let o = options("--llama /l --plugin /h.so -m a.gguf --quick").unwrap();
        let s = o.settings().unwrap();
        assert_eq!((s.rounds, s.repeats, o.minutes()), (2, 1, Some(QUICK_MINUTES)));
        assert!(QUICK_MINUTES < 3.0 && s.targets[0].file.is_absolute());
    }

    #[test]
    fn arguments_that_cannot_be() {
        let e = |args: &str| settings(args).unwrap_err().to_string();
        assert!(e("--llama /l --plugin /h.so -m a.gguf --also ik").contains("NAME=DIR"));
        assert!(e("--llama /l --plugin /h.so -m a.gguf --also hina=/x").contains("already"));
        assert!(e("--llama /l --plugin /h.so -m a.gguf=zz9").contains("'zz9' is no test"));
        for bad in [
            "",
            "--llama /l",
            "-m a.gguf",
            "--llama /l -m a --rounds 0",
            "--resume x -m a",
            "--llama /l -m a --tests x",
        ] {
            assert_eq!(options(bad).unwrap_err().exit_code(), 2, "{bad}");
        }
    }
}
