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

/// The command line as a shell would take it: of what started this program in its place (its name, then each word), or of this process.
pub fn command_line(shown_as: &[String]) -> String {
    let own = || {
        let mut words = std::env::args();
        let program = words.next().unwrap_or_default();
        std::iter::once(program.rsplit('/').next().unwrap_or_default().to_owned()).chain(words).collect()
    };
    let words = if shown_as.is_empty() { own() } else { shown_as.to_vec() };
    let name = words.iter().take(1).cloned();
    name.chain(words.iter().skip(1).map(|w| quoted(w))).collect::<Vec<_>>().join(" ")
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,:@+%".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.into() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_command_line_can_be_pasted() {
        let words = ["cargo xtask compare", "--extra", "-fa 1"].map(String::from);
        assert_eq!(super::command_line(&words), "cargo xtask compare --extra '-fa 1'");
    }

    #[test]
    fn words_for_a_shell() {
        assert_eq!(super::quoted("-m=a.gguf"), "-m=a.gguf");
        assert_eq!(super::quoted("it's"), r"'it'\''s'");
        assert_eq!(super::quoted(""), "''");
    }
}
