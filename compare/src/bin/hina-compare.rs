//! See `hina_compare::compare`.

use std::process::ExitCode;

use clap::Parser;
use hina_compare::compare::{Options, run};

fn main() -> ExitCode {
    let options = Options::parse();
    let command = options.shown_as.clone().unwrap_or_else(hina_compare::command_line);
    hina_compare::finish(run(&options, &command))
}
