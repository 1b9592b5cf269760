//! NUMA against a real kernel: run by `cargo test` on whatever machine this is, and by `cargo xtask numa-vm` as the only
//! program of a virtual machine with several nodes.
//!
//! As a machine's first process it mounts what it reads, and switches the machine off at the end. Arguments of the form
//! `nodes=2` say what the machine must look like.

use std::fs;
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use ggml_hina::isa::{Avx2, Avx512};
use ggml_hina::kernels::Engine;
use ggml_hina::kernels::reference::{Reference, nmse, pack_panel};
use ggml_hina::numa::NodeId;
use ggml_hina::numa::period::Pattern;
use ggml_hina::numa::placement::{Placement, page_size};
use ggml_hina::numa::segments::{ROOM, Sums, Tokens, Use, Uses, products, sum_lanes};
use ggml_hina::numa::tensors::Numa;
use ggml_hina::numa::threads::{CpuSet, Duty, Mode, Seats, node_of_this_thread, spread_node};
use ggml_hina::numa::topology::{Topology, parse_list};
use ggml_hina::pack::{PANEL, Panels, panel_bytes};
use ggml_hina::team;
use ggml_hina::tensor::{DType, Weights};
use half::bf16;

/// What the runner looks for.
const PASSED: &str = "numa-vm: all checks passed";

type Check = (&'static str, fn(&Machine) -> Result<String, String>);

const CHECKS: [Check; 7] = [
    ("topology", topology),
    ("interleaved memory", interleaved),
    ("huge pages", huge_pages),
    ("a mapped file in the page cache", mapped_file),
    ("untouched pages", untouched),
    ("threads", threads),
    ("segments", segments),
];

/// What this machine is.
struct Machine {
    topology: Topology,
    expected_nodes: Option<usize>,
}

impl Machine {
    fn ids(&self) -> Vec<NodeId> {
        self.topology.nodes().iter().map(|node| node.id).collect()
    }
}

fn main() -> ExitCode {
    let first = std::process::id() == 1;
    if first {
        mount("proc", "/proc");
        mount("sysfs", "/sys");
    }
    let expected_nodes = std::env::args().find_map(|a| a.strip_prefix("nodes=")?.parse().ok());
    let machine = Machine { topology: Topology::of_this_machine(), expected_nodes };
    let mut failed = 0;
    for (name, check) in CHECKS {
        match check(&machine) {
            Ok(what) => println!("numa-vm: {name}: ok: {what}"),
            Err(why) => {
                failed += 1;
                println!("numa-vm: {name}: FAILED: {why}");
            }
        }
    }
    println!("{}", if failed == 0 { PASSED.to_string() } else { format!("numa-vm: {failed} checks failed") });
    if first {
        // SAFETY: flushes and ends the machine.
        unsafe {
            libc::sync();
            libc::reboot(libc::RB_POWER_OFF);
        }
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn mount(kind: &str, at: &str) {
    let c = |s: &str| std::ffi::CString::new(s).expect("no NUL inside");
    let (kind, to) = (c(kind), c(at));
    let _ = fs::create_dir_all(at);
    // SAFETY: NUL-terminated strings; no data.
    let rc = unsafe { libc::mount(kind.as_ptr(), to.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    if rc != 0 {
        println!("numa-vm: mount {at}: {}", io::Error::last_os_error());
    }
}

/// Fails a check with a reason.
fn ensure(good: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if good { Ok(()) } else { Err(why()) }
}

/// Memory of its own mapping.
struct Map {
    at: *mut u8,
    len: usize,
}

// SAFETY: plain memory; the checks see to who writes.
unsafe impl Sync for Map {}

impl Map {
    fn anonymous(len: usize) -> Self {
        Self::new(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    fn new(len: usize, flags: i32, fd: i32) -> Self {
        // SAFETY: a mapping wherever the kernel likes; unmapped on drop.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
        assert_ne!(at, libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
        Self { at: at.cast(), len }
    }

    fn advise(&self, advice: i32) {
        // SAFETY: this mapping.
        unsafe { libc::madvise(self.at.cast(), self.len, advice) };
    }

    /// `mbind(MPOL_INTERLEAVE)` over the nodes.
    fn interleave(&self, nodes: &[NodeId]) -> Result<(), String> {
        const MPOL_INTERLEAVE: libc::c_ulong = 3;
        let mask: u64 = nodes.iter().map(|&n| 1 << n).sum();
        // SAFETY: this mapping; a mask of 64 bits (the kernel takes one off the count).
        let rc = unsafe { libc::syscall(libc::SYS_mbind, self.at, self.len, MPOL_INTERLEAVE, &raw const mask, 65, 0) };
        ensure(rc == 0, || format!("mbind: {}", io::Error::last_os_error()))
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped, writable, zeroed by the kernel.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }

    /// Its first byte; whoever shares it sees to who writes.
    fn start(&self) -> *mut u8 {
        self.at
    }

    fn touch(&mut self) {
        self.bytes().iter_mut().step_by(page_size()).for_each(|b| *b = 1);
    }

    fn placement(&self) -> Result<Placement, String> {
        Placement::query(self.at.addr(), self.len).map_err(|e| format!("move_pages: {e}"))
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

/// Bytes by node of the mapping at `at`, as `/proc/self/numa_maps` counts them.
fn numa_maps(at: *const u8) -> Result<Vec<(NodeId, usize)>, String> {
    let text = fs::read_to_string("/proc/self/numa_maps").map_err(|e| format!("numa_maps: {e}"))?;
    let start = format!("{:x} ", at.addr());
    let line = text.lines().find(|l| l.trim_start_matches('0').starts_with(&start)).ok_or("not in numa_maps")?;
    let field = |name: &str| line.split(' ').find_map(|f| f.strip_prefix(name)?.parse::<usize>().ok());
    let unit = field("kernelpagesize_kB=").unwrap_or(4) << 10;
    let node = |f: &str| {
        let (node, pages) = f.strip_prefix('N')?.split_once('=')?;
        Some((node.parse().ok()?, pages.parse::<usize>().ok()? * unit))
    };
    Ok(line.split(' ').filter_map(node).collect())
}

/// The placement and the kernel's own count agree; returns the bytes by node.
fn agree(map: &Map) -> Result<Vec<(NodeId, usize)>, String> {
    let placement = map.placement()?;
    let (ours, unknown) = placement.bytes(placement.range());
    let theirs = numa_maps(map.at)?;
    ensure(ours == theirs && unknown == 0, || format!("we say {ours:?} and {unknown} unknown, numa_maps {theirs:?}"))?;
    Ok(ours)
}

fn topology(m: &Machine) -> Result<String, String> {
    let count = m.topology.nodes().len();
    if let Some(expected) = m.expected_nodes {
        ensure(count == expected, || format!("{count} nodes, not {expected}"))?;
    }
    for node in m.topology.nodes() {
        let root = Path::new("/sys/devices/system/node").join(format!("node{}", node.id));
        if let Ok(text) = fs::read_to_string(root.join("cpulist")) {
            let all = parse_list(&text).map_err(|e| e.to_string())?;
            ensure(node.cpus.iter().all(|cpu| all.contains(cpu)), || format!("node {}: {:?}", node.id, node.cpus))?;
        }
        for &cpu in &node.cpus {
            ensure(m.topology.node_of_cpu(cpu) == Some(node.id), || format!("CPU {cpu}"))?;
        }
    }
    let cpus: Vec<usize> = m.topology.nodes().iter().map(|node| node.cpus.len()).collect();
    let far = m.topology.distance(m.ids()[0], m.ids()[count - 1]);
    Ok(format!("{count} nodes with {cpus:?} CPUs, distance {far}"))
}

fn interleaved(m: &Machine) -> Result<String, String> {
    let mut map = Map::anonymous(8 << 20);
    map.advise(libc::MADV_NOHUGEPAGE);
    map.interleave(&m.ids())?;
    map.touch();
    let bytes = agree(&map)?;
    let found = Pattern::find(&map.placement()?);
    if m.ids().len() > 1 {
        let expected = Pattern::interleave(page_size(), &m.ids()).period();
        let period = found.as_ref().map(Pattern::period);
        ensure(period == Some(expected), || format!("period {period:?}, not {expected}"))?;
    }
    Ok(format!("{bytes:?}, {}", found.map_or("no period".into(), |p| format!("period {}", p.period()))))
}

fn huge_pages(m: &Machine) -> Result<String, String> {
    const HUGE: usize = 2 << 20;
    let mut map = Map::anonymous(18 * HUGE);
    map.advise(libc::MADV_HUGEPAGE);
    map.interleave(&m.ids())?;
    map.touch();
    let bytes = agree(&map)?;
    Ok(format!("{bytes:?} in {} runs", map.placement()?.runs()))
}

fn mapped_file(m: &Machine) -> Result<String, String> {
    use std::os::fd::AsRawFd;
    // Each half is written, and so brought into the page cache, by a thread on another node.
    let path = std::env::temp_dir().join(format!("numa-vm-{}", std::process::id()));
    let _ = fs::create_dir_all(std::env::temp_dir());
    let len = 1 << 20;
    let file = fs::File::options().create(true).truncate(true).read(true).write(true).open(&path);
    let file = file.map_err(|e| format!("{}: {e}", path.display()))?;
    let with_cpus: Vec<_> = m.topology.nodes().iter().filter(|node| !node.cpus.is_empty()).collect();
    for (half, node) in [with_cpus[0], with_cpus[with_cpus.len() - 1]].into_iter().enumerate() {
        let file = &file;
        std::thread::scope(|s| {
            s.spawn(move || {
                use std::os::unix::fs::FileExt;
                CpuSet::new(node.cpus.iter().copied()).bind()?;
                file.write_all_at(&vec![1; len / 2], (half * len / 2) as u64)
            })
            .join()
        })
        .map_err(|_| "a thread panicked")?
        .map_err(|e| e.to_string())?;
    }
    let mut map = Map::new(len, libc::MAP_SHARED, file.as_raw_fd());
    let _ = fs::remove_file(&path);
    map.touch();
    Ok(format!("{:?} in {} runs", agree(&map)?, map.placement()?.runs()))
}

fn untouched(_: &Machine) -> Result<String, String> {
    let mut map = Map::anonymous(1 << 20);
    map.advise(libc::MADV_NOHUGEPAGE);
    let mut placement = map.placement()?;
    let before = placement.bytes(placement.range()).1;
    ensure(before == map.len, || format!("{before} of {} bytes are unknown before the first touch", map.len))?;
    map.touch();
    placement.refresh().map_err(|e| e.to_string())?;
    let after = placement.bytes(placement.range()).1;
    ensure(after == 0, || format!("{after} bytes are unknown after it"))?;
    Ok(format!("{before} bytes unknown before the first touch, {after} after"))
}

fn threads(m: &Machine) -> Result<String, String> {
    for node in m.topology.nodes().iter().filter(|node| !node.cpus.is_empty()) {
        let found = std::thread::scope(|s| {
            s.spawn(|| CpuSet::new(node.cpus.iter().copied()).bind().map(|()| node_of_this_thread(&m.topology))).join()
        });
        let found = found.map_err(|_| "a thread panicked")?.map_err(|e| e.to_string())?;
        ensure(found == node.id, || format!("bound to node {}, found on {found}", node.id))?;
        if let Some(&cpu) = node.cpus.first() {
            ensure(m.topology.node_of_cpu(cpu) == Some(node.id), || format!("CPU {cpu}"))?;
        }
    }
    Ok("bound threads are found on their nodes".into())
}

fn segments(m: &Machine) -> Result<String, String> {
    let Some(numa) = Numa::new(Mode::Pin, None) else {
        ensure(m.topology.nodes().len() < 2, || "no NUMA with several nodes".into())?;
        return Ok("skipped: one node".into());
    };
    match (Avx512::detect(), Avx2::detect()) {
        (Some(isa), _) => segments_on(isa, "AVX-512", &numa),
        (None, Some(isa)) => segments_on(isa, "AVX2", &numa),
        (None, None) => segments_on(Reference, "plain loops: no AVX2 here", &numa),
    }
}

/// Two experts in interleaved memory times three tokens: as the plain product, and no byte from the other node.
fn segments_on<E: Engine>(engine: E, name: &str, numa: &Numa) -> Result<String, String> {
    let (k, n, experts, lanes) = (768, 256, 2, 3);
    let mut map = Map::anonymous(DType::Bf16.row_bytes(k) * n * experts);
    map.advise(libc::MADV_NOHUGEPAGE);
    map.interleave(numa.ids())?;
    let value = |i: usize| ((i.wrapping_mul(2_654_435_761) >> 7) % 2001) as f32 / 1000.0 - 1.0;
    map.bytes()
        .as_chunks_mut::<2>()
        .0
        .iter_mut()
        .enumerate()
        .for_each(|(i, b)| *b = bf16::from_f32(value(i)).to_le_bytes());
    // SAFETY: written just now; it is read only from here on, and lives to the end.
    let bytes = unsafe { std::slice::from_raw_parts(map.at, map.len) };
    let w = Weights::contiguous(DType::Bf16, bytes, [k, n, experts]);

    let x: Vec<Vec<f32>> = (0..lanes).map(|t| (0..k).map(|i| value(i * 31 + t)).collect()).collect();
    let mut packed = Map::anonymous(panel_bytes(DType::Bf16, k));
    pack_panel(DType::Bf16, k, &x.iter().map(Vec::as_slice).collect::<Vec<_>>(), packed.bytes());
    // SAFETY: packed just now, page aligned, and not written again.
    let panels = || unsafe { Panels::from_raw(DType::Bf16, packed.start(), k, lanes) };

    let plan = numa.tensor(&w).ok_or("no plan for interleaved weights")?;
    let len = plan.sets() * n * PANEL;
    let of = |i: usize| Use {
        plan: plan.expert(i),
        expert: i,
        panels: 1,
        rows: 0,
        lanes_at: i * len,
        rows_at: experts * len,
    };
    let uses = Uses { count: experts, of };
    let partial = Map::anonymous(experts * len * 4);
    let workers = 4;
    let (seats, local, all) = (Seats::new(workers), AtomicU64::new(0), AtomicU64::new(0));
    // Workers that the kernel runs elsewhere than where they say they are, and those that are not freed behind the call.
    let (astray, bound) = (AtomicU64::new(0), AtomicU64::new(0));
    let is_bound = || CpuSet::of_this_thread().and_then(|set| set.single_node(numa.topology())).is_some();
    team::run(workers, |worker| {
        let bound_before = is_bound();
        let pinned = numa.pin(worker.ith(), worker.nth());
        seats.take(worker.ith(), numa.place(worker.ith(), worker.nth()));
        worker.barrier();
        let duty = Duty::new(&uses.bytes(numa.ids()), &seats, numa.near(), (worker.ith(), worker.nth()));
        let node = numa.ids()[seats.place(worker.ith())];
        let tokens = |_| Tokens { panels: Some(panels()), rows: None };
        let c = Map::anonymous(ROOM * 4);
        let to = Sums { partial: partial.start().cast(), c: c.start().cast() };
        // SAFETY: the buffer has room for all uses, and all workers read the same seats.
        let (a, l) = unsafe { products(engine, &w, &uses, (numa.ids(), node, &duty), tokens, to) };
        all.fetch_add(a, Ordering::Relaxed);
        local.fetch_add(l, Ordering::Relaxed);
        let should = spread_node(numa.topology(), worker.ith(), worker.nth());
        for _ in 0..20 {
            // SAFETY: no arguments.
            let cpu = unsafe { libc::sched_getcpu() };
            let on = usize::try_from(cpu).ok().and_then(|cpu| numa.topology().node_of_cpu(cpu));
            astray.fetch_add(u64::from(on != Some(node) || on != should), Ordering::Relaxed);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        drop(pinned);
        bound.fetch_add(u64::from(is_bound() != bound_before), Ordering::Relaxed);
    });
    let places: Vec<usize> = (0..workers).map(|i| seats.place(i)).collect();
    let mut worst = 0f64;
    for u in uses.iter() {
        let (mut plain, mut sums) = (Map::anonymous(n * PANEL * 4), Map::anonymous(n * PANEL * 4));
        // SAFETY: C blocks of one panel and n rows, page aligned; the team has ended.
        unsafe {
            engine.product(&mut engine.begin(), w.rows(u.expert, 0, n), panels(), plain.at.cast(), false);
            sum_lanes(&u, partial.at.cast(), 0..1, (0, n), sums.at.cast());
        }
        let f32s = |map: &mut Map| -> Vec<f32> {
            let lanes = |row: &[[u8; 4]]| row[..3].iter().map(|&b| f32::from_le_bytes(b)).collect::<Vec<_>>();
            map.bytes().as_chunks::<4>().0.chunks(PANEL).take(n).flat_map(lanes).collect()
        };
        let want: Vec<f64> = f32s(&mut plain).into_iter().map(f64::from).collect();
        worst = worst.max(nmse(&f32s(&mut sums), &want));
    }
    let (all, local) = (all.into_inner(), local.into_inner());
    let (astray, bound) = (astray.into_inner(), bound.into_inner());
    ensure(astray == 0, || format!("{astray} times of 80 a worker ran on another node than its own, {places:?}"))?;
    ensure(bound == 0, || format!("{bound} workers were still bound behind the call"))?;
    ensure(worst < 1e-12, || format!("NMSE {worst:e} against the plain product"))?;
    ensure(all == map.len as u64, || format!("{all} bytes computed of {}", map.len))?;
    ensure(local == all, || format!("{local} of {all} bytes local with workers at {places:?}"))?;
    Ok(format!(
        "{name}: NMSE {worst:.1e} against the plain product, {local} of {all} bytes local, workers ran at {places:?}"
    ))
}
