//! See `hina_compare::compare`.

use std::process::ExitCode;

use clap::Parser;
use hina_compare::compare::{Options, run};

fn main() -> ExitCode {
    let options = Options::parse();
    let command = hina_compare::command_line(&options.shown_as);
    hina_compare::finish(run(&options, &command))
}
