//! `llama-bench`, run and read.

use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::run::{Job, Ui};

/// One line of llama-bench's table.
#[derive(Clone, Debug, Deserialize)]
pub struct Row {
    /// The CPUs it names.
    pub cpu_info: String,
    /// The backends that ran.
    pub backends: String,
    /// Threads.
    pub n_threads: u32,
    /// Tokens generated; 0 in a prompt test.
    pub n_gen: u32,
    /// Tokens a second.
    pub avg_ts: f64,
}

/// Runs `llama-bench` (the command, with its environment and options) and reads its rows.
///
/// # Errors
/// When it fails or writes something else than its JSON.
pub fn run(ui: &Ui, title: &str, log: &str, mut command: Command) -> Result<Vec<Row>> {
    command.args(["-o", "json"]);
    parse(&Job::new(title, log, command).capture(ui)?)
}

fn parse(json: &str) -> Result<Vec<Row>> {
    serde_json::from_str(json).with_context(|| format!("llama-bench did not write its JSON but: {json:.200}"))
}

/// The middle one; of an even number, the mean of the middle two.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_and_unknown_fields_are_left() {
        let json = r#"[{"build_commit":"0","cpu_info":"A CPU","backends":"HiNa","n_threads":2,"n_prompt":64,"n_gen":0,
            "avg_ts":61.331034,"samples_ts":[61.331]}]"#;
        let rows = parse(json).unwrap();
        assert_eq!((rows[0].n_gen, rows[0].backends.as_str()), (0, "HiNa"));
        assert!(parse("main: error: failed to load model").is_err());
    }

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0]), 2.5);
        assert!(median(vec![]).is_nan());
    }
}
