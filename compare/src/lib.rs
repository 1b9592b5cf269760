//! Two programs for users of llama.cpp with HiNa:
//!
//! * `hina-compare` ([`compare`]) runs llama-bench and llama-batched-bench without and with HiNa in turn, and tells the ratio.
//! * `hina-doctor` ([`doctor`]) tells what a machine and a model gain, what costs speed, and the command line to run.
//!
//! Both are also tasks of the repository: `cargo xtask compare`, `cargo xtask doctor`.

pub mod compare;
pub mod doctor;
mod files;
mod gguf;
mod machine;

use std::io::Write;
use std::process::ExitCode;

/// Could not run.
pub const CANNOT_RUN: u8 = 2;

/// Ends a program: its exit code, or one sentence on standard error and [`CANNOT_RUN`].
pub fn finish(ended: anyhow::Result<ExitCode>) -> ExitCode {
    ended.unwrap_or_else(|e| {
        eprintln!("error: {e:#}");
        CANNOT_RUN.into()
    })
}

/// Writes to standard output; a reader that has gone away (`| head`) is no error.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}

/// The command line of this process, as a shell would take it.
pub fn command_line() -> String {
    let mut words = std::env::args();
    let program = words.next().unwrap_or_default();
    let name = program.rsplit('/').next().unwrap_or_default().to_owned();
    std::iter::once(name).chain(words.map(|w| quoted(&w))).collect::<Vec<_>>().join(" ")
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:@+%".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.into() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn words_for_a_shell() {
        assert_eq!(super::quoted("-m=a.gguf"), "-m=a.gguf");
        assert_eq!(super::quoted("it's"), r"'it'\''s'");
        assert_eq!(super::quoted(""), "''");
    }
}
