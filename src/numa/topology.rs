//! The machine's nodes, from `/sys/devices/system/node`.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::Path;

use super::NodeId;

/// Where Linux describes its nodes.
pub const SYSFS: &str = "/sys/devices/system/node";

/// Distance of a node to itself in the ACPI SLIT's units.
const LOCAL: u32 = 10;
/// Distance that the kernel assumes between nodes when the firmware gives none.
const REMOTE: u32 = 20;

/// One online node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The kernel's number of it.
    pub id: NodeId,
    /// Its CPUs that this process may run on, ascending; none on a memory-only node.
    pub cpus: Vec<usize>,
    /// Whether it has memory that this process may use.
    pub memory: bool,
    /// Distances to the nodes of the topology, in their order (ACPI SLIT: 10 is local).
    pub distances: Vec<u32>,
}

/// The online nodes, ascending by number; at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    nodes: Vec<Node>,
}

/// What a process may use: from its affinity mask and `Mems_allowed` (cgroup cpusets narrow both).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// CPUs; all where none.
    pub cpus: Option<BTreeSet<usize>>,
    /// Nodes with memory; all where none.
    pub mems: Option<BTreeSet<usize>>,
}

impl Allowed {
    /// What this thread may use now.
    pub fn of_this_thread() -> Self {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
        Self::parse(&status)
    }

    /// From the text of `/proc/<pid>/status`.
    pub fn parse(status: &str) -> Self {
        let list = |key: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(key))?;
            Some(parse_list(line).ok()?.into_iter().collect())
        };
        Self { cpus: list("Cpus_allowed_list:"), mems: list("Mems_allowed_list:") }
    }
}

impl Topology {
    /// This machine's nodes, as far as this thread may use them; one node where the kernel shows none.
    pub fn of_this_machine() -> Self {
        let allowed = Allowed::of_this_thread();
        Self::read(Path::new(SYSFS), &allowed).unwrap_or_else(|_| Self::single(&allowed))
    }

    /// Reads a tree laid out as `/sys/devices/system/node`.
    ///
    /// # Errors
    /// If `online` or an online node's `cpulist` is missing or not a list of numbers. A missing `distance` is taken for
    /// 10 to itself and 20 to others, as the kernel does; a missing `has_memory` means all nodes have some.
    pub fn read(root: &Path, allowed: &Allowed) -> io::Result<Self> {
        let list = |name: &str| fs::read_to_string(root.join(name)).and_then(|text| parse_list(&text));
        let ids = list("online")?;
        if ids.is_empty() || ids.iter().any(|&id| id > usize::from(NodeId::MAX)) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no online node, or one out of range"));
        }
        let with_memory = list("has_memory").or_else(|_| list("has_normal_memory")).ok();
        let node = |(at, &id): (usize, &usize)| {
            let may_run = |cpu: &usize| allowed.cpus.as_ref().is_none_or(|set| set.contains(cpu));
            let may_hold = allowed.mems.as_ref().is_none_or(|set| set.contains(&id));
            let cpus = list(&format!("node{id}/cpulist"))?.into_iter().filter(may_run).collect();
            let memory = may_hold && with_memory.as_ref().is_none_or(|ids| ids.contains(&id));
            let distances = fs::read_to_string(root.join(format!("node{id}/distance"))).unwrap_or_default();
            let distances = parse_distances(&distances, at, ids.len());
            Ok(Node { id: id as NodeId, cpus, memory, distances })
        };
        Ok(Self { nodes: ids.iter().enumerate().map(node).collect::<io::Result<_>>()? })
    }

    /// One node 0 with all CPUs.
    pub fn single(allowed: &Allowed) -> Self {
        let all = || (0..std::thread::available_parallelism().map_or(1, usize::from)).collect();
        let cpus = allowed.cpus.as_ref().map_or_else(all, |set| set.iter().copied().collect());
        Self { nodes: vec![Node { id: 0, cpus, memory: true, distances: vec![LOCAL] }] }
    }

    /// A made-up machine of `nodes` nodes, `cpus` CPUs each, all equally far apart.
    pub fn made_up(nodes: usize, cpus: usize) -> Self {
        let node = |at: usize| Node {
            id: at as NodeId,
            cpus: (at * cpus..(at + 1) * cpus).collect(),
            memory: true,
            distances: parse_distances("", at, nodes),
        };
        Self { nodes: (0..nodes.max(1)).map(node).collect() }
    }

    /// The same nodes with other distances, for tests.
    #[cfg(test)]
    pub(super) fn with_distances(mut self, rows: &[&[u32]]) -> Self {
        self.nodes.iter_mut().zip(rows).for_each(|(node, row)| node.distances = row.to_vec());
        self
    }

    /// The same nodes with other CPUs, for tests.
    #[cfg(test)]
    pub(super) fn with_cpus(mut self, cpus: &[&[usize]]) -> Self {
        self.nodes.iter_mut().zip(cpus).for_each(|(node, cpus)| node.cpus = cpus.to_vec());
        self
    }

    /// The nodes, ascending by number.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Place of a node in [`Topology::nodes`].
    pub fn index(&self, id: NodeId) -> Option<usize> {
        self.nodes.binary_search_by_key(&id, |node| node.id).ok()
    }

    /// The node of a CPU that this process may run on.
    pub fn node_of_cpu(&self, cpu: usize) -> Option<NodeId> {
        self.nodes.iter().find(|node| node.cpus.binary_search(&cpu).is_ok()).map(|node| node.id)
    }

    /// Distance between two nodes; unknown nodes are as far as the kernel's default.
    pub fn distance(&self, from: NodeId, to: NodeId) -> u32 {
        let fallback = if from == to { LOCAL } else { REMOTE };
        let known = self.index(from).zip(self.index(to));
        known.and_then(|(a, b)| self.nodes[a].distances.get(b).copied()).unwrap_or(fallback)
    }

    /// Whether there is anything to win: two or more nodes with memory, and a node with CPUs.
    pub fn is_numa(&self) -> bool {
        self.nodes.iter().filter(|node| node.memory).count() > 1 && self.nodes.iter().any(|node| !node.cpus.is_empty())
    }
}

/// The kernel's list format (`0-3,8,10-11`), ascending, without doubles.
///
/// # Errors
/// If a part is not a number or a rising range.
pub fn parse_list(text: &str) -> io::Result<Vec<usize>> {
    let bad = || io::Error::new(io::ErrorKind::InvalidData, format!("not a list of numbers: {:?}", text.trim()));
    let mut all = BTreeSet::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        let (from, to): (usize, usize) = (from.parse().map_err(|_| bad())?, to.parse().map_err(|_| bad())?);
        if from > to || to - from > 1 << 20 {
            return Err(bad());
        }
        all.extend(from..=to);
    }
    Ok(all.into_iter().collect())
}

/// Node `at`'s line of `n` distances, or the kernel's defaults if it is not that.
fn parse_distances(line: &str, at: usize, n: usize) -> Vec<u32> {
    let given: Result<Vec<u32>, _> = line.split_whitespace().map(str::parse).collect();
    match given {
        Ok(given) if given.len() == n => given,
        _ => (0..n).map(|to| if to == at { LOCAL } else { REMOTE }).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// A made-up sysfs tree that goes away with its test.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("ggml-hina-{}-{name}", std::process::id()));
            for (file, text) in files {
                let path = root.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(root)
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn two_sockets() {
        let tree = Tree::new(
            "two",
            &[
                ("online", "0-1\n"),
                ("has_memory", "0-1\n"),
                ("node0/cpulist", "0-1,4-5\n"),
                ("node0/distance", "10 21\n"),
                ("node1/cpulist", "2-3,6-7\n"),
                ("node1/distance", "21 10\n"),
            ],
        );
        let t = Topology::read(&tree.0, &Allowed::default()).unwrap();
        assert!(t.is_numa());
        assert_eq!(t.nodes()[1].cpus, [2, 3, 6, 7]);
        assert_eq!((t.node_of_cpu(5), t.node_of_cpu(6), t.node_of_cpu(8)), (Some(0), Some(1), None));
        assert_eq!((t.distance(0, 1), t.distance(1, 1), t.distance(0, 9)), (21, 10, 20));
    }

    #[test]
    fn sparse_offline_memory_only_and_cpu_only_nodes() {
        // Node 1 is offline, node 2 has no CPUs (CXL memory), node 8 no memory, node 8 has no distance line.
        let tree = Tree::new(
            "sparse",
            &[
                ("possible", "0-8\n"),
                ("online", "0,2,8\n"),
                ("has_memory", "0,2\n"),
                ("node0/cpulist", "0-7\n"),
                ("node0/distance", "10 14 32\n"),
                ("node1/cpulist", "\n"),
                ("node2/cpulist", "\n"),
                ("node2/distance", "14 10 40\n"),
                ("node8/cpulist", "8-15\n"),
            ],
        );
        let t = Topology::read(&tree.0, &Allowed::default()).unwrap();
        assert_eq!(t.nodes().iter().map(|n| n.id).collect::<Vec<_>>(), [0, 2, 8]);
        assert_eq!(t.nodes().iter().map(|n| n.memory).collect::<Vec<_>>(), [true, true, false]);
        assert!(t.nodes()[1].cpus.is_empty());
        assert_eq!((t.distance(2, 8), t.distance(8, 2), t.distance(8, 8)), (40, 20, 10));
        assert!(t.is_numa());
    }

    #[test]
    fn a_cpuset_narrows_cpus_and_memory() {
        let tree = Tree::new(
            "cpuset",
            &[("online", "0-1"), ("has_memory", "0-1"), ("node0/cpulist", "0-3"), ("node1/cpulist", "4-7")],
        );
        let status = "Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t2-5\nMems_allowed_list:\t1\n";
        let t = Topology::read(&tree.0, &Allowed::parse(status)).unwrap();
        assert_eq!((t.nodes()[0].cpus.as_slice(), t.nodes()[1].cpus.as_slice()), (&[2, 3][..], &[4, 5][..]));
        assert_eq!((t.nodes()[0].memory, t.nodes()[1].memory), (false, true));
        assert!(!t.is_numa());
    }

    #[test]
    fn thirty_two_nodes() {
        let mut files: Vec<(String, String)> = vec![("online".into(), "0-31".into())];
        files.extend((0..32).map(|i| (format!("node{i}/cpulist"), format!("{}-{}", 4 * i, 4 * i + 3))));
        let files: Vec<(&str, &str)> = files.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let tree = Tree::new("thirty-two", &files);
        let t = Topology::read(&tree.0, &Allowed::default()).unwrap();
        assert_eq!((t.nodes().len(), t.node_of_cpu(127)), (32, Some(31)));
        assert_eq!(t, Topology::made_up(32, 4));
    }

    #[test]
    fn bad_trees_are_errors_and_lists_are_the_kernels() {
        assert!(Topology::read(Path::new("/nonexistent"), &Allowed::default()).is_err());
        let no_cpulist = Tree::new("no-cpulist", &[("online", "0-1"), ("node0/cpulist", "0")]);
        assert!(Topology::read(&no_cpulist.0, &Allowed::default()).is_err());
        let none = Tree::new("none", &[("online", "\n")]);
        assert!(Topology::read(&none.0, &Allowed::default()).is_err());
        assert_eq!(parse_list("3,0-2,2\n").unwrap(), [0, 1, 2, 3]);
        assert!(parse_list("3-1").is_err() && parse_list("a").is_err() && parse_list("").unwrap().is_empty());
    }

    #[test]
    fn this_machine_has_a_node_for_this_thread() {
        let t = Topology::of_this_machine();
        // SAFETY: no arguments.
        let cpu = unsafe { libc::sched_getcpu() };
        assert!(cpu >= 0 && t.node_of_cpu(cpu as usize).is_some());
    }
}
