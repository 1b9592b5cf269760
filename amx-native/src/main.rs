//! Tests and times the AMX kernels on a machine that has AMX. One static program, so that it can be copied there:
//! `cargo xtask amx-native` builds it.
//!
//! `check` compares the tile instructions with the emulator's model, bit by bit, and the products with the f64 oracle.
//! `bench` gives the products' speed beside the memory's. `--emulate` runs the checks where there is no AMX.

mod bench;
mod check;
mod memory;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use ggml_hina::isa::{Amx, Avx512};

#[derive(Parser)]
#[command(version, about = "Tests and times ggml-hina's AMX kernels on this machine")]
struct Cli {
    /// What to do
    #[arg(value_enum, default_value = "all")]
    what: What,
    /// Check on emulated AMX
    #[arg(long)]
    emulate: bool,
    /// Threads to time with: best one for each core; numactl or taskset says which
    #[arg(long, default_value_t = std::thread::available_parallelism().map_or(1, |n| n.get()))]
    threads: usize,
    /// MiB of weights for each thread, all together more than the caches hold
    #[arg(long, default_value_t = 64)]
    mib: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    All,
    Check,
    Bench,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    println!("{}, {} threads", cpu_name(), cli.threads);
    let amx = match token(cli.emulate) {
        Ok(amx) => Some(amx),
        Err(why) => {
            println!("AMX cannot be used: {why}");
            None
        }
    };
    let mut good = amx.is_some();
    if let (Some(amx), What::All | What::Check) = (amx, cli.what) {
        good = check::run(amx);
    }
    if cli.what != What::Check {
        if cli.emulate {
            println!("not timed: the speed of an emulator says nothing");
        } else if let Some(avx512) = Avx512::detect() {
            bench::run(amx, avx512, cli.threads.max(1), cli.mib.max(1) << 20);
        }
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn token(emulate: bool) -> Result<Amx, String> {
    if emulate {
        match amx_emu::install() {
            Ok(amx_emu::Mode::Native) => println!("this CPU has AMX, so nothing is emulated"),
            // SAFETY: the emulator was installed just now, for all threads and for good.
            Ok(amx_emu::Mode::Emulated) => return unsafe { Amx::assume_emulated() }.map_err(|e| e.to_string()),
            Err(e) => return Err(e.to_string()),
        }
    }
    Amx::detect().map_err(|e| e.to_string())
}

fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(": "));
    name.map_or("unknown CPU", |(_, name)| name).into()
}
