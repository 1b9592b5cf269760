//! The project's tasks: `cargo xtask llama | model | demo | test | numa-vm | compare | doctor | amx-native`.
//!
//! Everything that a task needs is brought or built under `target/`; what is there already is left alone.

mod amx_native;
mod bench;
mod demo;
mod llama;
mod logits;
mod model;
mod numa_vm;
mod paths;
mod plugin;
mod run;
mod source;
mod test;
mod toolchain;
mod tools;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

use run::Ui;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about, version)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Bring llama.cpp and build it in target/llama (LLAMA_CPP_DIR: build that checkout instead)
    Llama(LlamaArgs),
    /// Write a model of random weights with real layer shapes to target/models
    Model(model::ModelArgs),
    /// The main job: one model through stock llama.cpp and through HiNa, in turn, and one table
    Demo(demo::DemoArgs),
    /// The NUMA code in a virtual machine with two nodes (also a step of `test`)
    NumaVm,
    /// Every check and test of the project
    Test(test::TestArgs),
    /// Stock llama.cpp and HiNa side by side, over prompts, generation, depths and parallel sequences; plots and a page
    Compare(tools::ToolArgs),
    /// What this machine, and a model on it, gain; what costs speed; and the command line to run
    Doctor(tools::ToolArgs),
    /// One static program in target/amx-native that checks and times the AMX kernels where there is AMX
    AmxNative,
}

#[derive(Args)]
struct LlamaArgs {
    /// Build it with HiNa linked in statically, in target/llama-static
    #[arg(long = "static", conflicts_with = "api3")]
    linked: bool,
    /// Build libllama of ggml 0.26 (backend interface 3), in target/llama-026
    #[arg(long)]
    api3: bool,
}

fn main() -> ExitCode {
    match perform(Cli::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(task: Task) -> Result<ExitCode> {
    let ui = Ui::new();
    match task {
        Task::Llama(args) => {
            let llama = match (args.linked, args.api3) {
                (true, _) => llama::linked(&ui)?,
                (_, true) => llama::next_version(&ui)?,
                _ => llama::plugins(&ui)?,
            };
            ui.say(&format!("llama.cpp is ready in {}", llama.bin.display()));
        }
        Task::Model(args) => {
            let path = model::ensure(&ui, &args)?;
            ui.say(&format!("the model is ready: {}", path.display()));
        }
        Task::NumaVm => numa_vm::task(&ui)?,
        Task::Demo(args) => return Ok(code(demo::run(&ui, &args)?)),
        Task::AmxNative => {
            let path = amx_native::build(&ui)?;
            ui.say(&format!("copy {} to a machine with AMX and run it there", path.display()));
        }
        Task::Test(args) => return Ok(code(test::run(&ui, &args)?)),
        Task::Compare(args) => tools::compare(&ui, &args)?,
        Task::Doctor(args) => tools::doctor(&ui, &args)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn code(good: bool) -> ExitCode {
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
