//! The AMX kernels inside llama.cpp, on AMX in software.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::seam::{LOGITS, lacking, limit, ops_of, ops_of_claimed_types, tiny, within};
use super::{Outcome, Step};
use crate::llama::{cpu_flags, cpuinfo};
use crate::logits;
use crate::model::WeightType;
use crate::paths;
use crate::plugin::{self, Plugin};
use crate::run::{Job, Ui};
use crate::source::cargo;

/// Each runs with `libamx_emu.so` before the program, which prints at its end how often each instruction ran.
pub const STEPS: &[Step] = &[
    Step { name: "amx-emu", about: "AMX in software builds", needs: &[], run: build },
    Step { name: "amx-ops", about: "test-backend-ops on emulated AMX", needs: &["plugin", "amx-emu"], run: ops },
    Step {
        name: "amx-attention",
        about: "the same for attention, a selection",
        needs: &["plugin", "amx-emu"],
        run: attention,
    },
    Step {
        name: "amx-logits",
        about: "logits of `tiny` on emulated AMX as stock's",
        needs: &["plugin", "models", "amx-emu"],
        run: agree,
    },
    Step { name: "amx-native", about: "the static test program builds and checks itself", needs: &[], run: native },
];

/// The weight types that have tile kernels, and the instruction that each is multiplied by.
const TYPES: [(WeightType, &str); 2] = [(WeightType::Bf16, "tdpbf16ps"), (WeightType::Q8_0, "tdpbssd")];

/// Cases of attention whose tiles of query rows go to AMX (27 rows and more): every cache type, mask, sink, ALiBi,
/// softcap and order of heads, MLA, and head sizes that are no multiple of a tile's. In software they take seconds.
const ATTENTION: &str = "(hsk=(64|72|128),.*nr23=\\[4,1\\],kv=512,nb=32,|hsk=65,|\
                         hsk=576,.*nh=1,nr23=\\[20,1\\],kv=512,nb=3,).*\
                         type_K=(f16|bf16|q8_0),type_V=(f16|bf16|q8_0)";

/// Ends a step early where the vector half of the AMX kernels cannot run: that is not emulated.
macro_rules! needs_avx512 {
    () => {
        if let Some(skipped) = lacking(&["avx512vbmi", "avx512_vnni"], "AVX-512 VBMI and VNNI, which go with AMX") {
            return Ok(skipped);
        }
    };
}

fn build(ui: &Ui) -> Result<Outcome> {
    let mut command = cargo("build");
    command.args(["--release", "--package", "amx-emu"]);
    Job::new("building amx-emu", "amx-emu", command).run(ui)?;
    Ok(Outcome::Passed(String::new()))
}

/// A program with the plugin on AMX and nothing else.
fn on_amx(plugin: &Plugin, program: &str) -> Command {
    let mut command = plugin.hina(program);
    let emulator = paths::cargo_target().join("release/libamx_emu.so");
    command.env("LD_PRELOAD", emulator).env("AMX_EMU_STATS", "1").env("GGML_HINA_ISA", "amx");
    command
}

/// What the emulator counted, for the step's line. A CPU with AMX runs its instructions itself: then nothing is counted.
fn count(text: &str, instruction: &str) -> Result<String> {
    let cpu = cpuinfo();
    let flags = cpu_flags(&cpu);
    if flags.contains(&"amx_tile") {
        let there = instruction != "tdpfp16ps" || flags.contains(&"amx_fp16");
        return Ok(if there { format!("{instruction} of the CPU") } else { format!("the CPU shows no {instruction}") });
    }
    Ok(format!("{} {instruction}", ran(text, instruction)?))
}

/// How often `instruction` ran, by the emulator's lines `amx-emu: NAME COUNT`; none is a failure.
fn ran(text: &str, instruction: &str) -> Result<u64> {
    let mine = text
        .lines()
        .filter_map(|line| line.strip_prefix("amx-emu: ")?.strip_prefix(instruction)?.trim().parse::<u64>().ok());
    let sum = mine.sum();
    ensure!(sum > 0, "{instruction} never ran");
    Ok(sum)
}

fn ops(ui: &Ui) -> Result<Outcome> {
    needs_avx512!();
    let (cases, text) = ops_of_claimed_types(ui, on_amx(&plugin::ensure(ui)?, "test-backend-ops"), "amx-ops")?;
    let counts = TYPES.map(|(_, instruction)| count(&text, instruction));
    let counts = counts.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(Outcome::Passed(format!("{cases} cases, {}", counts.join(", "))))
}

fn attention(ui: &Ui) -> Result<Outcome> {
    needs_avx512!();
    let mut command = on_amx(&plugin::ensure(ui)?, "test-backend-ops");
    // F16 products are in the emulator, and in CPUs whose hypervisor does not show them.
    command.env("GGML_HINA_ISA", "amx-fp16");
    let (cases, text) = ops_of(ui, command, ["FLASH_ATTN_EXT", ATTENTION], "amx-attention")?;
    let counts = ["tdpbf16ps", "tdpfp16ps"].map(|instruction| count(&text, instruction));
    Ok(Outcome::Passed(format!("{cases} cases, {}", counts.into_iter().collect::<Result<Vec<_>>>()?.join(", "))))
}

fn agree(ui: &Ui) -> Result<Outcome> {
    needs_avx512!();
    let plugin = plugin::ensure(ui)?;
    let mut notes = Vec::new();
    for (weights, instruction) in TYPES {
        let name = format!("{weights:?}").to_lowercase();
        let model = tiny(ui, weights)?;
        let stock = logits::of(ui, plugin.stock(LOGITS), &format!("amx-{name}-stock"), &model, &[])?;
        let run = format!("amx-{name}-hina");
        let hina = logits::of(ui, on_amx(&plugin, LOGITS), &run, &model, &[])?;
        let nmse = within(&stock, &hina, limit(weights)).with_context(|| name.clone())?;
        let log = fs::read_to_string(paths::log(&format!("logits-{run}")))?;
        notes.push(format!("{name} {nmse:.0e}, {}", count(&log, instruction)?));
    }
    Ok(Outcome::Passed(notes.join("; ")))
}

fn native(ui: &Ui) -> Result<Outcome> {
    needs_avx512!();
    crate::amx_native::build(ui)?;
    Ok(Outcome::Passed(String::new()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_of_whole_names() {
        let text = "noise\namx-emu: tileloadd 12\namx-emu: tileloaddt1 3\namx-emu: tileloadd 1\n";
        assert_eq!(ran(text, "tileloadd").unwrap(), 13);
        assert!(ran(text, "tdpbssd").is_err());
    }
}
