//! The environment variables, read once.
//!
//! | variable | values | meaning |
//! |---|---|---|
//! | `GGML_HINA_DISABLE` | `0`, `1` | `1`: offer no device |
//! | `GGML_HINA_ISA` | `auto`, `amx`, `amx-fp16`, `avx512`, `avx2` | which engine runs; `auto` takes the best that works |
//! | `GGML_HINA_FUSE` | `1`, `0` | `0`: run every claimed node by itself |
//! | `GGML_HINA_PREFILL` | `gpu`, `cpu` | with a GPU present, who runs large batches over weights in host memory |
//! | `GGML_HINA_NUMA` | `auto`, `off`, `pin` | who computes on which node's pages |
//! | `GGML_HINA_NUMA_SIM` | `nodes:run_bytes` | for tests: act as if pages lay on so many nodes in turn |
//! | `GGML_HINA_Q8_0` | `auto`, `int8` | whether Q8_0 weights always meet activations that are quantised as ggml does it |
//! | `GGML_HINA_READ` | `auto`, `stretch`, `streams` | to measure: in which order weight rows are read |
//! | `GGML_HINA_STATS` | `0`, `1`, a path | counts at exit: `1` to ggml's log, a path (with a `/`) as JSON to that file |
//! | `GGML_HINA_VERBOSE` | `0`, `1` | one line at start about the CPU |
//!
//! A value that is not in the table gets one warning that names the allowed ones, then the default.

use std::path::PathBuf;

use crate::isa::Reading;
use crate::numa::tensors::Sim;
use crate::numa::threads::Mode;

/// Which engine the user asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IsaChoice {
    /// AMX where CPU and kernel allow it, else AVX-512, else AVX2.
    #[default]
    Auto,
    /// AMX or nothing.
    Amx,
    /// AMX, and its F16 products where they work though CPUID does not show them.
    AmxFp16,
    /// AVX-512 even where AMX works.
    Avx512,
    /// AVX2 even where AVX-512 works.
    Avx2,
}

/// Who runs large batches over weights in host memory when a GPU is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefill {
    /// The GPU, if it wants the operation (llama.cpp copies the weights to it).
    #[default]
    Gpu,
    /// This backend.
    Cpu,
}

/// Where the counts go at exit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum StatsChoice {
    /// Nowhere: nothing is counted.
    #[default]
    Off,
    /// To ggml's log.
    Log,
    /// To this file, as JSON.
    File(PathBuf),
}

/// All settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Offer no device.
    pub disable: bool,
    /// Which engine.
    pub isa: IsaChoice,
    /// Whether chains of nodes run as one.
    pub fuse: bool,
    /// Who prefills beside a GPU.
    pub prefill: Prefill,
    /// Whether Q8_0 weights always meet activations that are quantised as ggml does it.
    pub int8: bool,
    /// In which order weight rows are read; none: as is best for the CPU.
    pub reading: Option<Reading>,
    /// NUMA partitioning.
    pub numa: Mode,
    /// A made-up machine with several nodes, for tests.
    pub numa_sim: Option<Sim>,
    /// Counts at exit.
    pub stats: StatsChoice,
    /// A line at start.
    pub verbose: bool,
}

const SWITCH: &[(&str, bool)] = &[("0", false), ("1", true)];

impl Config {
    /// Reads the variables through `var`; each value that is not known goes to `warn` as a finished sentence. An empty one counts
    /// as not set.
    pub fn read(var: impl Fn(&str) -> Option<String>, mut warn: impl FnMut(String)) -> Self {
        let var = |name: &str| var(name).filter(|value| !value.is_empty());
        let mut switch = |name, default| pick(name, &var, SWITCH, default, &mut warn);
        let disable = switch("GGML_HINA_DISABLE", false);
        let fuse = switch("GGML_HINA_FUSE", true);
        let verbose = switch("GGML_HINA_VERBOSE", false);
        let isa = [
            ("auto", IsaChoice::Auto),
            ("amx", IsaChoice::Amx),
            ("amx-fp16", IsaChoice::AmxFp16),
            ("avx512", IsaChoice::Avx512),
            ("avx2", IsaChoice::Avx2),
        ];
        let numa = [("auto", Mode::Auto), ("off", Mode::Off), ("pin", Mode::Pin)];
        let reading = [("auto", None), ("stretch", Some(Reading::Stretch)), ("streams", Some(Reading::Streams))];
        let prefill = [("gpu", Prefill::Gpu), ("cpu", Prefill::Cpu)];
        Self {
            disable,
            fuse,
            verbose,
            isa: pick("GGML_HINA_ISA", &var, &isa, IsaChoice::Auto, &mut warn),
            prefill: pick("GGML_HINA_PREFILL", &var, &prefill, Prefill::Gpu, &mut warn),
            int8: pick("GGML_HINA_Q8_0", &var, &[("auto", false), ("int8", true)], false, &mut warn),
            reading: pick("GGML_HINA_READ", &var, &reading, None, &mut warn),
            numa: pick("GGML_HINA_NUMA", &var, &numa, Mode::Auto, &mut warn),
            numa_sim: numa_sim(&var, &mut warn),
            stats: stats(&var, &mut warn),
        }
    }
}

/// The value of `name` among `allowed`, or the default with a warning.
fn pick<T: Copy>(
    name: &str,
    var: &impl Fn(&str) -> Option<String>,
    allowed: &[(&str, T)],
    default: T,
    warn: &mut impl FnMut(String),
) -> T {
    let Some(value) = var(name).filter(|v| !v.is_empty()) else { return default };
    if let Some((_, found)) = allowed.iter().find(|(text, _)| text.eq_ignore_ascii_case(&value)) {
        return *found;
    }
    let names: Vec<&str> = allowed.iter().map(|(text, _)| *text).collect();
    warn(format!("{name}={value} is not known; allowed: {}; the default is used", names.join(", ")));
    default
}

fn numa_sim(var: &impl Fn(&str) -> Option<String>, warn: &mut impl FnMut(String)) -> Option<Sim> {
    const NAME: &str = "GGML_HINA_NUMA_SIM";
    let value = var(NAME).filter(|v| !v.is_empty())?;
    let sim = value.parse().ok();
    if sim.is_none() {
        warn(format!("{NAME}={value} is not known; allowed: nodes:run_bytes, as 2:4096; nothing is simulated"));
    }
    sim
}

fn stats(var: &impl Fn(&str) -> Option<String>, warn: &mut impl FnMut(String)) -> StatsChoice {
    const NAME: &str = "GGML_HINA_STATS";
    match var(NAME) {
        Some(path) if path.contains('/') => StatsChoice::File(path.into()),
        Some(value) if !["", "0", "1"].contains(&value.as_str()) => {
            warn(format!("{NAME}={value} is not known; allowed: 0, 1, a path with a '/'; the default is used"));
            StatsChoice::Off
        }
        Some(value) if value == "1" => StatsChoice::Log,
        _ => StatsChoice::Off,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> (Config, Vec<String>) {
        let mut warnings = Vec::new();
        let var = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let config = Config::read(var, |w| warnings.push(w));
        (config, warnings)
    }

    #[test]
    fn nothing_set_is_the_default_without_a_word() {
        let (config, warnings) = read(&[]);
        assert_eq!((config.disable, config.fuse, config.isa), (false, true, IsaChoice::Auto));
        assert_eq!((config.stats, warnings.len()), (StatsChoice::Off, 0));
    }

    #[test]
    fn values_are_taken_in_any_case() {
        let (config, warnings) = read(&[
            ("GGML_HINA_ISA", "AMX"),
            ("GGML_HINA_DISABLE", "1"),
            ("GGML_HINA_STATS", "./s.json"),
            ("GGML_HINA_READ", "Stretch"),
        ]);
        assert_eq!((config.isa, config.disable), (IsaChoice::Amx, true));
        assert_eq!(config.stats, StatsChoice::File("./s.json".into()));
        assert_eq!(config.reading, Some(Reading::Stretch));
        assert!(warnings.is_empty());
    }

    #[test]
    fn empty_values_are_not_set() {
        let names = ["DISABLE", "ISA", "FUSE", "PREFILL", "NUMA", "NUMA_SIM", "Q8_0", "READ", "STATS", "VERBOSE"]
            .map(|n| format!("GGML_HINA_{n}"));
        let vars: Vec<(&str, &str)> = names.iter().map(|n| (n.as_str(), "")).collect();
        assert_eq!(read(&vars), read(&[]));
    }

    #[test]
    fn each_unknown_value_gets_one_warning_that_names_the_allowed() {
        let names = ["DISABLE", "ISA", "FUSE", "PREFILL", "NUMA", "NUMA_SIM", "Q8_0", "READ", "STATS", "VERBOSE"]
            .map(|n| format!("GGML_HINA_{n}"));
        let vars: Vec<(&str, &str)> = names.iter().map(|n| (n.as_str(), "maybe")).collect();
        let (config, warnings) = read(&vars);
        assert_eq!(config, read(&[]).0);
        assert_eq!(warnings.len(), names.len());
        let isa = warnings.iter().find(|w| w.contains("_ISA")).unwrap();
        assert!(isa.contains("maybe") && isa.contains("auto, amx, amx-fp16, avx512, avx2"), "{isa}");
    }
}
