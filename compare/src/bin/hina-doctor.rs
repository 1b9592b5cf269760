//! See `hina_compare::doctor`.

use std::process::ExitCode;

use clap::Parser;
use hina_compare::doctor::{Options, run};

fn main() -> ExitCode {
    hina_compare::finish(run(&Options::parse()))
}
