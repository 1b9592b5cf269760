//! The programs that are compared, and one run of one of them.

use std::fmt;
use std::io::{self, ErrorKind, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::quoted;

/// What makes a program HiNa's or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// llama.cpp without us.
    Stock,
    /// The same llama.cpp with the plugin.
    Plugin(PathBuf),
    /// The same llama.cpp, which has HiNa linked in.
    Linked,
    /// Another build of llama-bench.
    Other,
}

/// One column of the comparison.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Its name in tables.
    pub name: String,
    /// The folder of its `llama-bench`.
    pub dir: PathBuf,
    /// What makes it HiNa's or not.
    pub role: Role,
}

/// Lets a run be ended from outside.
#[derive(Clone, Copy, Debug)]
pub struct Limits<'a> {
    /// Set by Ctrl-C.
    pub interrupted: &'a AtomicBool,
    /// When to end the run at the latest.
    pub until: Option<Instant>,
}

/// What a run that ended well wrote.
#[derive(Clone, Debug, Default)]
pub struct Output {
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// How long it took.
    pub time: Duration,
}

/// Why a run gave nothing.
#[derive(Debug)]
pub enum Failure {
    /// Ctrl-C.
    Interrupted,
    /// The time limit.
    OutOfTime,
    /// It did not start, crashed or refused: a sentence, with the end of its log.
    Failed(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Interrupted => f.write_str("interrupted"),
            Self::OutOfTime => f.write_str("the time limit came first"),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

impl Program {
    /// Whether HiNa computes in it.
    pub fn is_hina(&self) -> bool {
        matches!(self.role, Role::Plugin(_) | Role::Linked)
    }

    /// The file of one of llama.cpp's programs.
    pub fn file(&self, tool: &str) -> PathBuf {
        self.dir.join(tool)
    }

    /// Runs `tool` with `args`, behind the words of `wrap` (as `numactl --interleave=all`).
    ///
    /// # Errors
    /// [`Failure`].
    pub fn run(
        &self,
        tool: &str,
        args: &[String],
        wrap: &[String],
        env: &[(&str, &str)],
        limits: Limits<'_>,
    ) -> Result<Output, Failure> {
        let file = self.file(tool);
        let mut words = wrap.iter().map(PathBuf::from).chain([file.clone()]);
        let mut command = Command::new(words.next().unwrap_or_else(|| file.clone()));
        command.args(words).args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        self.environment(&mut command);
        command.envs(env.iter().copied());
        let start = Instant::now();
        let child = command.spawn().map_err(|e| Failure::Failed(not_started(&file, wrap, &e)))?;
        let (status, stdout, stderr) = wait(child, limits)?;
        let output = Output { stdout, stderr, time: start.elapsed() };
        // A signal that ended the child in the moment of Ctrl-C is no crash: the terminal sent it to both.
        if limits.interrupted.load(Ordering::Relaxed) {
            return Err(Failure::Interrupted);
        }
        if status.success() {
            Ok(output)
        } else {
            Err(Failure::Failed(crashed(&file, status, &output.stderr) + &self.alone(tool, args, wrap)))
        }
    }

    /// How to run the same by hand, as one more line of a message.
    pub fn alone(&self, tool: &str, args: &[String], wrap: &[String]) -> String {
        let variable = match &self.role {
            Role::Plugin(so) => format!("GGML_BACKEND_PATH={} ", quoted(&so.to_string_lossy())),
            Role::Stock | Role::Linked | Role::Other => String::new(),
        };
        let file = self.file(tool).to_string_lossy().into_owned();
        let words: Vec<String> = wrap.iter().chain([&file]).chain(args).map(|word| quoted(word)).collect();
        format!("\n  to see it alone: {variable}{}", words.join(" "))
    }

    /// Only HiNa's column sees the plugin and its settings.
    fn environment(&self, command: &mut Command) {
        const PATH: &str = "GGML_BACKEND_PATH";
        const DISABLE: &str = "GGML_HINA_DISABLE";
        match &self.role {
            Role::Plugin(so) => command.env(PATH, so).env_remove(DISABLE),
            Role::Linked => command.env_remove(DISABLE),
            Role::Stock | Role::Other => command.env_remove(PATH).env(DISABLE, "1"),
        };
    }
}

/// Waits for the child while looking at the limits; a child that must end is killed.
fn wait(mut child: Child, limits: Limits<'_>) -> Result<(ExitStatus, String, String), Failure> {
    let readers = (drain(child.stdout.take()), drain(child.stderr.take()));
    let stopped = loop {
        match child.try_wait() {
            Ok(Some(status)) => break Ok(status),
            Ok(None) => {}
            Err(e) => break Err(Failure::Failed(format!("waiting for a program failed: {e}"))),
        }
        if limits.interrupted.load(Ordering::Relaxed) {
            break Err(Failure::Interrupted);
        }
        if limits.until.is_some_and(|t| Instant::now() >= t) {
            break Err(Failure::OutOfTime);
        }
        thread::sleep(Duration::from_millis(20));
    };
    if stopped.is_err() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let text =
        |reader: thread::JoinHandle<Vec<u8>>| String::from_utf8_lossy(&reader.join().unwrap_or_default()).into_owned();
    let status = stopped?;
    Ok((status, text(readers.0), text(readers.1)))
}

fn drain(pipe: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // What came before an error is kept; the exit status tells the rest.
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}

fn not_started(file: &Path, wrap: &[String], e: &io::Error) -> String {
    let name = file.display();
    match (wrap.first(), e.kind()) {
        (Some(word), ErrorKind::NotFound) => format!("'{word}' (from --wrap) is not installed"),
        (_, ErrorKind::NotFound) => {
            format!("{name} is not there; --llama and --also name the folder that holds llama-bench (build/bin)")
        }
        (_, ErrorKind::PermissionDenied) => {
            format!("{name} may not be run: it is no program, or lacks the x permission")
        }
        _ => format!("{name} did not start: {e}"),
    }
}

fn crashed(file: &Path, status: ExitStatus, stderr: &str) -> String {
    let how = match (status.signal(), status.code()) {
        (Some(libc::SIGILL), _) => {
            "crashed on an instruction that this CPU lacks (SIGILL): rebuild it on this machine".into()
        }
        (Some(libc::SIGKILL), _) => "was killed (SIGKILL): often the kernel, when memory is short".into(),
        (Some(signal), _) => format!("crashed (signal {signal})"),
        (_, code) => format!("ended with exit code {}", code.unwrap_or(-1)),
    };
    format!("{} {how}{}", file.display(), tail(stderr))
}

/// The last lines of a log that say something, as an indented block.
pub fn tail(log: &str) -> String {
    let worth = |l: &&str| !l.trim().is_empty() && !l.starts_with("load_backend: loaded");
    let lines: Vec<&str> = log.lines().filter(worth).collect();
    let last: Vec<String> =
        lines[lines.len().saturating_sub(5)..].iter().map(|l| format!("\n  | {}", l.trim_end())).collect();
    if last.is_empty() { "; it said nothing".into() } else { format!("; its last words:{}", last.concat()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    static CALM: AtomicBool = AtomicBool::new(false);

    fn shell(script: &str, limits: Limits<'_>) -> Result<Output, Failure> {
        let sh = Program { name: "sh".into(), dir: "/bin".into(), role: Role::Stock };
        sh.run("sh", &["-c".into(), script.into()], &[], &[], limits)
    }

    fn calm() -> Limits<'static> {
        Limits { interrupted: &CALM, until: None }
    }

    #[test]
    fn output_and_environment() {
        let out = shell("echo $GGML_HINA_DISABLE; echo two >&2", calm()).unwrap();
        assert_eq!((out.stdout.trim(), out.stderr.trim()), ("1", "two"));
    }

    #[test]
    fn a_missing_program_a_crash_and_a_refusal_are_sentences() {
        let none = Program { name: "x".into(), dir: "/nonexistent".into(), role: Role::Stock };
        let text = |f: Failure| f.to_string();
        let missing = text(none.run("llama-bench", &[], &[], &[], calm()).unwrap_err());
        assert!(missing.contains("/nonexistent/llama-bench is not there") && missing.contains("--llama"), "{missing}");
        let killed = text(shell("echo bang >&2; kill -SEGV $$", calm()).unwrap_err());
        assert!(killed.contains("signal 11") && killed.contains("| bang"), "{killed}");
        assert!(killed.ends_with("\n  to see it alone: /bin/sh -c 'echo bang >&2; kill -SEGV $$'"), "{killed}");
        let code = text(shell("exit 3", calm()).unwrap_err());
        assert!(code.contains("exit code 3; it said nothing"), "{code}");
        let wrap = ["no-such-numactl".to_owned()];
        let wrapped = text(none.run("llama-bench", &[], &wrap, &[], calm()).unwrap_err());
        assert!(wrapped.contains("'no-such-numactl' (from --wrap)"), "{wrapped}");
    }

    #[test]
    fn limits_end_a_run() {
        let soon = Limits { interrupted: &CALM, until: Some(Instant::now() + Duration::from_millis(50)) };
        assert!(matches!(shell("exec sleep 60", soon), Err(Failure::OutOfTime)));
        let pressed = AtomicBool::new(true);
        let now = Limits { interrupted: &pressed, until: None };
        assert!(matches!(shell("exec sleep 60", now), Err(Failure::Interrupted)));
    }
}
