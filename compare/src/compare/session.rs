//! A comparison as data: what is to be run, what was measured so far. This is `results.json`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::case::Case;
use super::program::Program;
use crate::files;
use crate::machine::Machine;

/// Name of the file in the output folder.
pub const FILE: &str = "results.json";

/// Version of the file's layout.
const LAYOUT: u32 = 1;

/// A model and what is measured with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The GGUF file.
    pub file: PathBuf,
    /// The measurements, in order.
    pub cases: Vec<Case>,
}

impl Target {
    /// The file's name without its ending.
    pub fn name(&self) -> String {
        self.file.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }
}

/// All that is needed to go on after an interruption.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Stock first, HiNa second, then the others.
    pub programs: Vec<Program>,
    /// The models.
    pub targets: Vec<Target>,
    /// Threads, where the user gave a number.
    pub threads: Option<u32>,
    /// Times that each program runs each test.
    pub rounds: u32,
    /// Repetitions within a run.
    pub repeats: u32,
    /// Arguments passed to every program.
    pub extra: Vec<String>,
    /// Words in front of every program.
    pub wrap: Vec<String>,
    /// `GGML_HINA_*` variables that were set.
    pub env: Vec<String>,
}

/// One run of one program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Index of the model.
    pub target: usize,
    /// Round, from 0.
    pub round: u32,
    /// What was measured.
    pub case: Case,
    /// Index of the program.
    pub program: usize,
    /// Tokens per second of each repetition; none where this program cannot run the test.
    pub tokens_per_second: Vec<f64>,
    /// Seconds the run took, loading included.
    pub seconds: f64,
}

/// What HiNa said about a model: nodes it claimed of all that computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claims {
    /// Nodes that were HiNa's.
    pub claimed: u64,
    /// Nodes that computed.
    pub nodes: u64,
}

/// `results.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Session {
    layout: u32,
    /// Program and version that wrote it.
    pub made_by: String,
    /// The command line.
    pub command: String,
    /// When it began, UTC.
    pub started: String,
    /// Where it ran.
    pub machine: Machine,
    /// What to run.
    pub settings: Settings,
    /// llama.cpp's commit as each program gave it; empty where it did not.
    pub commits: Vec<String>,
    /// Threads as the programs reported them.
    pub threads: u32,
    /// By model.
    pub claims: Vec<Option<Claims>>,
    /// What was measured, in order.
    pub runs: Vec<Run>,
}

/// One run to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Index of the model.
    pub target: usize,
    /// Round, from 0.
    pub round: u32,
    /// What to measure.
    pub case: Case,
    /// Index of the program.
    pub program: usize,
}

impl Session {
    /// An empty one.
    pub fn new(settings: Settings, machine: Machine, command: String) -> Self {
        Self {
            layout: LAYOUT,
            made_by: concat!("hina-compare ", env!("CARGO_PKG_VERSION")).into(),
            command,
            started: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
            machine,
            commits: vec![String::new(); settings.programs.len()],
            threads: 0,
            claims: vec![None; settings.targets.len()],
            settings,
            runs: Vec::new(),
        }
    }

    /// All steps in order: for each model, round and test, the programs in turn (A B, then B A in the next round), so that a
    /// machine that grows slower or faster meanwhile weighs on all of them alike.
    pub fn steps(&self) -> Vec<Step> {
        let mut steps = Vec::new();
        for (target, t) in self.settings.targets.iter().enumerate() {
            for round in 0..self.settings.rounds {
                for &case in &t.cases {
                    let mut programs: Vec<usize> = (0..self.settings.programs.len()).collect();
                    if round % 2 == 1 {
                        programs.reverse();
                    }
                    steps.extend(programs.into_iter().map(|program| Step { target, round, case, program }));
                }
            }
        }
        steps
    }

    /// The steps that are not done.
    pub fn open(&self) -> Vec<Step> {
        let done = |s: &Step| {
            let same = |r: &Run| (r.target, r.round, r.case, r.program) == (s.target, s.round, s.case, s.program);
            self.runs.iter().any(same)
        };
        self.steps().into_iter().filter(|s| !done(s)).collect()
    }

    /// Reads an output folder's `results.json`.
    ///
    /// # Errors
    /// A sentence: nothing there, or not such a file.
    pub fn load(dir: &Path) -> Result<Self> {
        let file = dir.join(FILE);
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("{} cannot be read: no comparison was begun in that folder", file.display()))?;
        let session: Self = serde_json::from_str(&text)
            .with_context(|| format!("{} is no results file of this program", file.display()))?;
        let (programs, targets) = (session.settings.programs.len(), session.settings.targets.len());
        let known = |r: &Run| r.program < programs && r.target < targets;
        let lengths = session.commits.len() == programs && session.claims.len() == targets && programs >= 2;
        if session.layout != LAYOUT || !session.runs.iter().all(known) || !lengths {
            bail!("{} was written by another version ({})", file.display(), session.made_by);
        }
        Ok(session)
    }

    /// Writes it to the output folder.
    ///
    /// # Errors
    /// A sentence that names the file.
    pub fn save(&self, dir: &Path) -> Result<()> {
        files::write(&dir.join(FILE), serde_json::to_string_pretty(self)? + "\n")
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::compare::program::Role;

    /// Two programs and one model with these tests.
    pub fn session(cases: &[&str], rounds: u32) -> Session {
        let program = |name: &str, role| Program { name: name.into(), dir: "/llama/bin".into(), role };
        let settings = Settings {
            programs: vec![program("stock", Role::Stock), program("HiNa", Role::Plugin("/h.so".into()))],
            targets: vec![Target {
                file: "/m/tiny.gguf".into(),
                cases: cases.iter().map(|c| c.parse().unwrap()).collect(),
            }],
            threads: Some(2),
            rounds,
            repeats: 1,
            extra: vec![],
            wrap: vec![],
            env: vec![],
        };
        Session::new(settings, Machine::default(), "hina-compare -m /m/tiny.gguf".into())
    }

    /// The step with these tokens per second.
    pub fn run(step: Step, samples: &[f64]) -> Run {
        let Step { target, round, case, program } = step;
        Run { target, round, case, program, tokens_per_second: samples.into(), seconds: 1.0 }
    }

    #[test]
    fn programs_take_turns() {
        let order: Vec<(u32, String, usize)> =
            session(&["pp8", "tg4"], 2).steps().iter().map(|s| (s.round, s.case.to_string(), s.program)).collect();
        let want = [(0, "pp8", [0, 1]), (0, "tg4", [0, 1]), (1, "pp8", [1, 0]), (1, "tg4", [1, 0])];
        let want: Vec<_> = want.iter().flat_map(|(r, c, p)| p.map(|p| (*r, c.to_string(), p))).collect();
        assert_eq!(order, want);
    }

    #[test]
    fn what_is_done_is_kept_and_the_rest_is_open() {
        let dir = std::env::temp_dir().join(format!("hina-compare-session-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut s = session(&["pp8", "tg4"], 2);
        let steps = s.steps();
        s.runs.extend(steps[..3].iter().map(|&step| run(step, &[10.0])));
        s.save(&dir).unwrap();
        let back = Session::load(&dir).unwrap();
        assert_eq!(back, s);
        assert_eq!(back.open(), steps[3..]);
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_file_that_is_not_ours_is_refused() {
        let dir = std::env::temp_dir().join(format!("hina-compare-foreign-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let missing = Session::load(&dir).unwrap_err().to_string();
        assert!(missing.contains("no comparison was begun"), "{missing}");
        std::fs::write(dir.join(FILE), "{}").unwrap();
        assert!(Session::load(&dir).unwrap_err().to_string().contains("no results file"));
        let mut s = session(&["pp8"], 1);
        s.layout = 9;
        s.save(&dir).unwrap();
        assert!(Session::load(&dir).unwrap_err().to_string().contains("another version"));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
