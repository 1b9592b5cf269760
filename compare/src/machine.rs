//! The machine in a few words: what a reader of a table must know.

use std::fs;
use std::thread::available_parallelism;

use ggml_hina::isa::{Amx, Isa};
use ggml_hina::numa::topology::Topology;
use serde::{Deserialize, Serialize};

/// What a table says about where it was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The CPU's name.
    pub cpu: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// NUMA nodes.
    pub nodes: usize,
    /// Bytes of memory.
    pub memory: u64,
    /// What HiNa runs on, or why not.
    pub engine: String,
    /// The kernel.
    pub kernel: String,
    /// Whether a hypervisor is below.
    pub virtual_machine: bool,
}

impl Machine {
    /// This one.
    pub fn this() -> Self {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            cpu: line(&cpuinfo, "model name").unwrap_or("unknown").to_owned(),
            cpus: available_parallelism().map_or(1, usize::from),
            nodes: Topology::of_this_machine().nodes().len(),
            memory: meminfo("MemTotal").unwrap_or(0),
            engine: engine(),
            kernel: kernel.trim().to_owned(),
            virtual_machine: line(&cpuinfo, "flags").is_some_and(|f| f.split(' ').any(|f| f == "hypervisor")),
        }
    }
}

/// The engine that HiNa takes here, in words.
pub fn engine() -> String {
    match (Isa::best(), Amx::detect()) {
        (Some(isa), Ok(_)) => isa.to_string(),
        (Some(isa), Err(why)) => format!("{isa} ({why})"),
        (None, _) => "none: this CPU lacks AVX2, FMA or F16C".into(),
    }
}

/// Bytes of a line of `/proc/meminfo`.
pub fn meminfo(key: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = line(&text, key)?.strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

/// The value behind the first `key :` of a file in the kernel's style.
fn line<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|l| l.split_once(':').filter(|(k, _)| k.trim() == key).map(|(_, v)| v.trim()))
}

/// `5.0 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let step = (0..UNITS.len() - 1).take_while(|&i| n >> (10 * (i + 1)) > 0).count();
    let value = n as f64 / (1u64 << (10 * step)) as f64;
    if step == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[step]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_something_of_everything() {
        let m = Machine::this();
        assert!(m.cpus > 0 && m.nodes > 0 && m.memory > 1 << 20 && !m.kernel.is_empty(), "{m:?}");
    }

    #[test]
    fn sizes() {
        assert_eq!([0, 1023, 1024, 5 << 29].map(bytes), ["0 B", "1023 B", "1.0 KiB", "2.5 GiB"]);
    }
}
