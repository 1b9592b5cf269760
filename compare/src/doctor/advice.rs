//! From facts to findings: what is fine, what costs speed, what stops HiNa; and the command line to run.

use serde::Serialize;

use super::facts::Facts;
use super::pages::Pages;
use super::weights::{Group, experts};
use crate::machine::bytes;
use crate::quoted;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Worth knowing.
    Note,
    /// Costs speed.
    Slow,
    /// HiNa cannot run.
    Stop,
}

/// One sentence, and what to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// What it is.
    pub what: String,
    /// What to do about it, where something can be done.
    pub fix: Option<String>,
}

impl Finding {
    /// A finding with a way out.
    pub fn new(level: Level, what: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { level, what: what.into(), fix: Some(fix.into()).filter(|f: &String| !f.is_empty()) }
    }
}

/// What is known about a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ModelFacts {
    /// The file that was named.
    pub file: String,
    /// `general.architecture`.
    pub architecture: String,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Experts in a layer, and how many a token uses.
    pub experts: Option<(i64, i64)>,
    /// Its tensors.
    pub groups: Vec<Group>,
    /// Its pages.
    pub pages: Pages,
}

/// Everything that is worth saying, the worst first.
pub fn findings(facts: &Facts, model: Option<&ModelFacts>) -> Vec<Finding> {
    let mut all = cpu(facts);
    all.extend(system(facts));
    if let Some(model) = model {
        all.extend(of_model(facts, model));
    }
    all.sort_by_key(|f| std::cmp::Reverse(f.level));
    all
}

fn cpu(facts: &Facts) -> Vec<Finding> {
    let mut all = Vec::new();
    if !facts.runs {
        let what = "this CPU cannot run HiNa: it lacks AVX2, FMA or F16C";
        all.push(Finding::new(Level::Stop, what, "llama.cpp runs as before; use a CPU from Haswell or Zen on"));
    } else if let (true, Some(why)) = (facts.amx_in_cpu, &facts.amx_refused) {
        let fix = "allow AMX tile state: a kernel from 5.16 on, a hypervisor and a container that pass it through";
        all.push(Finding::new(Level::Slow, format!("AMX is in the CPU but is not used: {why}"), fix));
    }
    if let Some(quota) = facts.quota.filter(|q| *q < facts.machine.cpus as f64) {
        let what = format!("the control group allows {quota:.1} CPUs' time of {} CPUs", facts.machine.cpus);
        all.push(Finding::new(Level::Slow, what, format!("run with -t {} or raise cpu.max", threads(facts))));
    }
    if facts.machine.cpus > facts.cores {
        let what = format!(
            "{} CPUs are {} cores: two threads of a core share its matrix unit",
            facts.machine.cpus, facts.cores
        );
        all.push(Finding::new(Level::Note, what, format!("run with -t {}", threads(facts))));
    }
    if let Some(governor) = facts.governor.as_ref().filter(|g| *g != "performance") {
        let fix = "cpupower frequency-set -g performance";
        all.push(Finding::new(Level::Slow, format!("the frequency governor is '{governor}'"), fix));
    }
    all
}

fn system(facts: &Facts) -> Vec<Finding> {
    let mut all = Vec::new();
    if facts.nodes.len() > 1 && facts.numa_balancing {
        let what = "the kernel's NUMA balancing moves pages while the model runs";
        all.push(Finding::new(Level::Slow, what, "echo 0 > /proc/sys/kernel/numa_balancing"));
    }
    if facts.huge_pages.as_deref() == Some("never") {
        let what = "transparent huge pages are off: buffers that are not mapped files use small pages";
        all.push(Finding::new(
            Level::Note,
            what,
            "echo always > /sys/kernel/mm/transparent_hugepage/enabled (for --load-mode none)",
        ));
    }
    if facts.machine.virtual_machine && !facts.amx_in_cpu {
        all.push(Finding::new(
            Level::Note,
            "this is a virtual machine: the hypervisor may hide AMX that the CPU has",
            "",
        ));
    }
    all
}

fn of_model(facts: &Facts, model: &ModelFacts) -> Vec<Finding> {
    let mut all = Vec::new();
    let (of_experts, claimed) = experts(&model.groups);
    if of_experts == 0 {
        all.push(Finding::new(
            Level::Slow,
            "the model has no experts: HiNa has little to do in it",
            "use a Mixture-of-Experts model",
        ));
    } else if claimed < of_experts {
        let kinds: Vec<&str> =
            model.groups.iter().filter(|g| g.part == "experts" && g.left.is_some()).map(|g| g.kind.as_str()).collect();
        let left = bytes(of_experts - claimed);
        let what = format!(
            "{left} of {} of expert weights stay with ggml's CPU backend ({})",
            bytes(of_experts),
            kinds.join(", ")
        );
        all.push(Finding::new(
            Level::Slow,
            what,
            "use a GGUF file whose experts are of a type that is claimed (see the table)",
        ));
    }
    all.extend(repacked(facts, model));
    if model.bytes > facts.machine.memory {
        let what =
            format!("the model ({}) is larger than the memory ({})", bytes(model.bytes), bytes(facts.machine.memory));
        all.push(Finding::new(Level::Slow, what, "it is read from disk again and again: use a smaller model or type"));
    } else if model.bytes.saturating_sub(model.pages.cached) > facts.memory_available {
        let what =
            format!("{} of memory can be had, the model needs {}", bytes(facts.memory_available), bytes(model.bytes));
        all.push(Finding::new(
            Level::Slow,
            what,
            "end other programs, or parts of the model are read from disk again and again",
        ));
    }
    all.extend(placement(facts, &model.pages));
    all
}

/// What llama.cpp copies into a layout of its own at load is then not HiNa's, though its type is.
fn repacked(facts: &Facts, model: &ModelFacts) -> Option<Finding> {
    let plain = |g: &&Group| g.part == "other products" && g.kind == "q8_0";
    let size = model.groups.iter().filter(plain).map(|g| g.bytes).sum::<u64>();
    let what = format!(
        "a llama.cpp built with AMX copies {} of q8_0 (no experts) at load and multiplies it itself",
        bytes(size)
    );
    let fix =
        "with --no-repack (llama-bench: --repack 0) HiNa does that too; hina-compare --extra tells which is faster";
    (facts.amx_in_cpu && size > 0).then(|| Finding::new(Level::Note, what, fix))
}

/// On several nodes the pages should be spread: else one node's memory feeds all cores.
fn placement(facts: &Facts, pages: &Pages) -> Option<Finding> {
    let with_memory = facts.nodes.iter().filter(|n| n.memory > 0).count();
    let (node, share) = pages.by_node.iter().copied().max_by(|a, b| a.1.total_cmp(&b.1))?;
    let even = 1.0 / with_memory.max(1) as f64;
    if with_memory < 2 || pages.cached * 10 < pages.bytes || share < (even + 1.0) / 2.0 {
        return None;
    }
    let what =
        format!("{:.0} % of the model's cached pages are on node {node}: its memory feeds all cores", share * 100.0);
    let fix = "drop the page cache (echo 1 > /proc/sys/vm/drop_caches), then load under numactl --interleave=all";
    Some(Finding::new(Level::Slow, what, fix))
}

/// Threads to run with: the cores, or what the control group allows.
pub fn threads(facts: &Facts) -> usize {
    let quota = facts.quota.map_or(usize::MAX, |q| q.floor().max(1.0) as usize);
    facts.cores.min(quota).max(1)
}

/// The command line to run.
pub fn command(facts: &Facts, server: Option<&str>, model: Option<&str>, plugin: Option<&str>) -> String {
    let server = quoted(server.unwrap_or("llama-server"));
    let plugin = quoted(plugin.unwrap_or("/path/to/libggml_hina.so"));
    let many = facts.nodes.iter().filter(|n| n.memory > 0).count() > 1;
    let (front, numa) = if many { ("numactl --interleave=all ", " --numa distribute") } else { ("", "") };
    let model = quoted(model.unwrap_or("model.gguf"));
    format!("GGML_BACKEND_PATH={plugin} {front}{server} -m {model} -t {}{numa}", threads(facts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::facts::NodeFacts;

    fn good() -> Facts {
        let mut facts = Facts { runs: true, cores: 8, amx_in_cpu: true, memory_available: 1 << 40, ..Facts::default() };
        facts.features = vec![("a", true), ("b", true), ("c", true), ("AMX", true)];
        (facts.machine.cpus, facts.machine.memory) = (8, 1 << 40);
        facts.nodes = vec![NodeFacts { id: 0, cpus: 8, memory: 1 << 40, free: 0 }];
        facts
    }

    fn two_nodes() -> Facts {
        let node = |id| NodeFacts { id, cpus: 4, memory: 1 << 39, free: 0 };
        Facts { nodes: vec![node(0), node(1)], ..good() }
    }

    fn moe(left: Option<&str>) -> ModelFacts {
        let group = |part, left: Option<&str>| Group {
            part,
            kind: "bf16".into(),
            tensors: 3,
            bytes: 1 << 30,
            left: left.map(str::to_owned),
            example: String::new(),
        };
        let groups = vec![group("experts", None), group("experts", left), group("other products", Some("x"))];
        ModelFacts { bytes: 3 << 30, groups, ..ModelFacts::default() }
    }

    fn worst(findings: &[Finding]) -> Option<(Level, &str)> {
        findings.first().map(|f| (f.level, f.what.as_str()))
    }

    #[test]
    fn a_good_machine_and_model_have_no_findings() {
        assert_eq!(findings(&good(), Some(&moe(None))), []);
        assert_eq!(findings(&two_nodes(), None), []);
    }

    #[test]
    fn each_cost_is_named() {
        let slow = |change: &dyn Fn(&mut Facts), word: &str| {
            let mut facts = two_nodes();
            change(&mut facts);
            let found = findings(&facts, Some(&moe(None)));
            let (level, what) = worst(&found).unwrap_or_else(|| panic!("nothing about {word}"));
            assert!(level == Level::Slow && what.contains(word), "{word}: {found:?}");
            assert!(found[0].fix.is_some());
        };
        slow(&|f| f.governor = Some("powersave".into()), "powersave");
        slow(&|f| f.quota = Some(2.5), "2.5 CPUs");
        slow(&|f| f.numa_balancing = true, "NUMA balancing");
        slow(&|f| f.amx_refused = Some("the kernel refuses".into()), "the kernel refuses");
        slow(&|f| f.machine.memory = 1 << 30, "larger than the memory");
        slow(&|f| f.memory_available = 1 << 20, "can be had");
    }

    #[test]
    fn a_cpu_without_the_features_stops() {
        let mut facts = good();
        facts.runs = false;
        facts.amx_refused = Some("none".into());
        let found = findings(&facts, None);
        assert_eq!(worst(&found), Some((Level::Stop, "this CPU cannot run HiNa: it lacks AVX2, FMA or F16C")));
    }

    #[test]
    fn models_that_gain_little() {
        let found = findings(&good(), Some(&moe(Some("no kernel"))));
        assert!(found[0].what.contains("1.0 GiB of 2.0 GiB of expert weights stay"), "{found:?}");
        let dense = ModelFacts { groups: vec![], ..moe(None) };
        assert!(findings(&good(), Some(&dense))[0].what.contains("no experts"));
    }

    #[test]
    fn what_llama_cpp_repacks_is_a_note() {
        let mut model = moe(None);
        model.groups[2].left = None;
        model.groups[2].kind = "q8_0".into();
        let found = findings(&good(), Some(&model));
        assert!(
            found.len() == 1 && found[0].level == Level::Note && found[0].what.contains("1.0 GiB of q8_0"),
            "{found:?}"
        );
        assert_eq!(findings(&Facts { amx_in_cpu: false, ..good() }, Some(&model)), []);
    }

    #[test]
    fn pages_on_one_node_of_two() {
        let mut model = moe(None);
        model.pages = Pages { bytes: 100, cached: 100, by_node: vec![(0, 0.9), (1, 0.1)], unknown: None };
        assert!(
            findings(&two_nodes(), Some(&model))[0].what.contains("90 % of the model's cached pages are on node 0")
        );
        assert_eq!(findings(&good(), Some(&model)), []);
        model.pages.by_node = vec![(0, 0.55), (1, 0.45)];
        assert_eq!(findings(&two_nodes(), Some(&model)), []);
    }

    #[test]
    fn command_lines() {
        let one = command(&good(), Some("/b/llama-server"), Some("my model.gguf"), Some("/h.so"));
        assert_eq!(one, "GGML_BACKEND_PATH=/h.so /b/llama-server -m 'my model.gguf' -t 8");
        let two = command(&two_nodes(), None, None, None);
        assert!(two.contains("numactl --interleave=all llama-server -m model.gguf -t 8 --numa distribute"), "{two}");
        assert_eq!(threads(&Facts { quota: Some(0.5), ..good() }), 1);
    }
}
