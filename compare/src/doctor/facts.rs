//! What the machine is like, read from /proc and /sys below a root that a test can choose.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use ggml_hina::isa::{Amx, Avx2, Isa};
use ggml_hina::numa::topology::{Allowed, Topology, parse_list};
use serde::Serialize;

use crate::machine::{self, Machine};

/// The machine, as far as it matters for speed.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Facts {
    /// CPU, memory, kernel.
    pub machine: Machine,
    /// CPU features that the kernels use, and whether each is there.
    pub features: Vec<(&'static str, bool)>,
    /// Whether any engine runs here.
    pub runs: bool,
    /// Why AMX is not used; none where it is.
    pub amx_refused: Option<String>,
    /// Whether the CPU shows AMX at all.
    pub amx_in_cpu: bool,
    /// Cores behind the CPUs that this process may use.
    pub cores: usize,
    /// CPUs' worth of time that a control group allows, where it sets a limit.
    pub quota: Option<f64>,
    /// NUMA nodes.
    pub nodes: Vec<NodeFacts>,
    /// `never`, `madvise` or `always`.
    pub huge_pages: Option<String>,
    /// The frequency governor.
    pub governor: Option<String>,
    /// Whether the kernel moves pages between nodes by itself.
    pub numa_balancing: bool,
    /// Bytes that can be had without swapping.
    pub memory_available: u64,
}

/// One NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NodeFacts {
    /// The kernel's number.
    pub id: u16,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// Bytes of memory.
    pub memory: u64,
    /// Bytes that are free.
    pub free: u64,
}

impl Facts {
    /// This machine's.
    pub fn this() -> Self {
        let topology = Topology::of_this_machine();
        let amx = Amx::detect();
        let mut facts = Self {
            machine: Machine::this(),
            features: features(),
            runs: Isa::best().is_some(),
            amx_refused: amx.err().map(|e| e.to_string()),
            amx_in_cpu: !matches!(amx, Err(ggml_hina::isa::AmxRefused::NotInCpu)),
            memory_available: machine::meminfo("MemAvailable").unwrap_or(0),
            ..Self::default()
        };
        facts.read(Path::new("/"), &topology, &Allowed::of_this_thread());
        facts
    }

    /// The part that comes from files below `root`.
    fn read(&mut self, root: &Path, topology: &Topology, allowed: &Allowed) {
        let text = |path: &str| fs::read_to_string(root.join(path)).ok().map(|t| t.trim().to_owned());
        self.cores = cores(root, allowed).unwrap_or(self.machine.cpus);
        self.quota = quota(root, text("proc/self/cgroup").as_deref());
        self.nodes = topology.nodes().iter().map(|node| node_facts(root, node.id, node.cpus.len())).collect();
        self.huge_pages = text("sys/kernel/mm/transparent_hugepage/enabled").as_deref().and_then(chosen);
        self.governor = text("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
        self.numa_balancing = text("proc/sys/kernel/numa_balancing").is_some_and(|t| t != "0");
    }
}

fn features() -> Vec<(&'static str, bool)> {
    vec![
        ("AVX2 with FMA and F16C", Avx2::detect().is_some()),
        ("AVX-VNNI", Avx2::detect().is_some_and(|avx2| avx2.vnni().is_some())),
        ("AVX-512 F/BW/DQ/VL", {
            is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        }),
        ("AVX-512 VNNI", is_x86_feature_detected!("avx512vnni")),
        ("AVX-512 BF16", is_x86_feature_detected!("avx512bf16")),
        ("AMX BF16 and INT8", Amx::detect().is_ok()),
        ("AMX FP16", Amx::detect().is_ok_and(|amx| amx.fp16().is_some())),
    ]
}

/// `[always] madvise never` has one word in brackets.
fn chosen(line: &str) -> Option<String> {
    Some(line.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// Cores behind the allowed CPUs: two threads of a core list the same siblings.
fn cores(root: &Path, allowed: &Allowed) -> Option<usize> {
    let base = root.join("sys/devices/system/cpu");
    let online = parse_list(&fs::read_to_string(base.join("online")).ok()?).ok()?;
    let may = |cpu: &usize| allowed.cpus.as_ref().is_none_or(|set| set.contains(cpu));
    let siblings = |cpu: usize| {
        let text = fs::read_to_string(base.join(format!("cpu{cpu}/topology/thread_siblings_list")));
        text.unwrap_or_else(|_| cpu.to_string()).trim().to_owned()
    };
    Some(online.into_iter().filter(may).map(siblings).collect::<BTreeSet<_>>().len()).filter(|&n| n > 0)
}

/// The tightest limit of a version 2 control group from this process's own up to the root.
fn quota(root: &Path, cgroup: Option<&str>) -> Option<f64> {
    let own = cgroup.and_then(|t| t.lines().find_map(|l| l.strip_prefix("0::"))).unwrap_or("/");
    let base = root.join("sys/fs/cgroup");
    let groups = Path::new(own.trim_start_matches('/')).ancestors().map(|g| base.join(g));
    let limit = |group: PathBuf| {
        let text = fs::read_to_string(group.join("cpu.max")).ok()?;
        let (max, period) = text.trim().split_once(' ')?;
        Some(max.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
    };
    groups.filter_map(limit).min_by(f64::total_cmp)
}

fn node_facts(root: &Path, id: u16, cpus: usize) -> NodeFacts {
    let text = fs::read_to_string(root.join(format!("sys/devices/system/node/node{id}/meminfo"))).unwrap_or_default();
    let kib = |key: &str| {
        let line = text.lines().find_map(|l| l.split_once(key))?.1;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    NodeFacts { id, cpus, memory: kib("MemTotal:").unwrap_or(0) * 1024, free: kib("MemFree:").unwrap_or(0) * 1024 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(name: &str, files: &[(&str, &str)]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("hina-doctor-{}-{name}", std::process::id()));
        for (file, text) in files {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn a_made_up_machine() {
        let cpu = |i: usize| format!("sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list");
        let root = tree(
            "full",
            &[
                ("sys/devices/system/cpu/online", "0-3\n"),
                (&cpu(0), "0,2\n"),
                (&cpu(1), "1,3\n"),
                (&cpu(2), "0,2\n"),
                (&cpu(3), "1,3\n"),
                ("sys/fs/cgroup/a/b/cpu.max", "max 100000\n"),
                ("sys/fs/cgroup/a/cpu.max", "150000 100000\n"),
                ("proc/self/cgroup", "0::/a/b\n"),
                ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
                ("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n"),
                ("proc/sys/kernel/numa_balancing", "1\n"),
                ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:  2048 kB\nNode 1 MemFree:  1024 kB\n"),
            ],
        );
        let mut facts = Facts::default();
        facts.read(&root, &Topology::made_up(2, 2), &Allowed::default());
        assert_eq!((facts.cores, facts.quota, facts.numa_balancing), (2, Some(1.5), true));
        assert_eq!((facts.huge_pages.as_deref(), facts.governor.as_deref()), (Some("madvise"), Some("powersave")));
        assert_eq!(facts.nodes[1], NodeFacts { id: 1, cpus: 2, memory: 2 << 20, free: 1 << 20 });
        let one = Allowed { cpus: Some([1, 3].into()), mems: None };
        assert_eq!(cores(&root, &one), Some(1));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_bare_tree_leaves_things_unknown() {
        let root = tree("bare", &[("x", "")]);
        let mut facts = Facts::default();
        facts.machine.cpus = 5;
        facts.read(&root, &Topology::made_up(1, 5), &Allowed::default());
        assert_eq!((facts.cores, facts.quota, facts.governor, facts.numa_balancing), (5, None, None, false));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn this_machine() {
        let facts = Facts::this();
        assert!(facts.cores > 0 && !facts.nodes.is_empty() && facts.memory_available > 0);
        assert_eq!(facts.amx_refused.is_none(), facts.features[3].1);
    }
}
