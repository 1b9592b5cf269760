//! Workers and nodes: where each worker runs, and which part of each node's bytes falls to it.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU16, Ordering};

use super::NodeId;
use super::topology::Topology;

/// Most nodes that work is split over; on larger machines the normal path runs.
pub const MAX_NODES: usize = 32;
/// A node keeps its own work while that is at most this part above its workers' fair share.
const SLACK: u64 = 16;

/// What to do about nodes: the values of `GGML_HINA_NUMA`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Work follows the pages; threads stay where they are.
    #[default]
    Auto,
    /// The normal path.
    Off,
    /// As `Auto`, and each worker is kept on one node during a call, spread evenly, unless it is bound to one already.
    Pin,
}

/// A thread's CPUs, as `sched_getaffinity` has them.
#[derive(Clone, Copy)]
pub struct CpuSet(libc::cpu_set_t);

impl CpuSet {
    /// This thread's; none if the machine has more CPUs than a `cpu_set_t` (1024).
    pub fn of_this_thread() -> Option<Self> {
        // SAFETY: plain data; all zeros is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        // SAFETY: the kernel writes at most that many bytes.
        let rc = unsafe { libc::sched_getaffinity(0, size_of_val(&set), &raw mut set) };
        (rc == 0).then_some(Self(set))
    }

    /// The set of these CPUs.
    pub fn new(cpus: impl IntoIterator<Item = usize>) -> Self {
        // SAFETY: plain data; all zeros is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        for cpu in cpus.into_iter().filter(|&cpu| cpu < libc::CPU_SETSIZE as usize) {
            // SAFETY: below CPU_SETSIZE.
            unsafe { libc::CPU_SET(cpu, &mut set) };
        }
        Self(set)
    }

    /// Whether it has this CPU.
    pub fn contains(&self, cpu: usize) -> bool {
        // SAFETY: below CPU_SETSIZE.
        cpu < libc::CPU_SETSIZE as usize && unsafe { libc::CPU_ISSET(cpu, &self.0) }
    }

    /// Lets this thread run on these CPUs only.
    ///
    /// # Errors
    /// What `sched_setaffinity` returns: no allowed CPU is in the set.
    pub fn bind(&self) -> io::Result<()> {
        // SAFETY: the kernel reads that many bytes.
        let rc = unsafe { libc::sched_setaffinity(0, size_of_val(&self.0), &raw const self.0) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The one node that all of the set's CPUs belong to.
    pub fn single_node(&self, topology: &Topology) -> Option<NodeId> {
        let mut with = topology.nodes().iter().filter(|node| node.cpus.iter().any(|&cpu| self.contains(cpu)));
        with.next().filter(|_| with.next().is_none()).map(|node| node.id)
    }
}

/// The node this thread is on: that of its affinity if it is one (`--numa distribute`, numactl), else of its CPU now.
pub fn node_of_this_thread(topology: &Topology) -> NodeId {
    let bound = CpuSet::of_this_thread().and_then(|set| set.single_node(topology));
    bound.or_else(|| node_now(topology)).unwrap_or_else(|| topology.nodes()[0].id)
}

/// The node of the CPU this thread runs on now.
fn node_now(topology: &Topology) -> Option<NodeId> {
    // SAFETY: no arguments.
    let cpu = usize::try_from(unsafe { libc::sched_getcpu() }).ok()?;
    topology.node_of_cpu(cpu)
}

/// Keeps a thread on a node until it is dropped.
pub struct Pinned(CpuSet);

impl Pinned {
    /// Keeps this thread, worker `ith` of `nth`, on its node: workers are spread evenly over the nodes with CPUs, in order.
    /// None if the thread is bound to one node already (that is respected), or the kernel refuses.
    pub fn spread(topology: &Topology, ith: usize, nth: usize) -> Option<Self> {
        let old = CpuSet::of_this_thread()?;
        if old.single_node(topology).is_some() {
            return None;
        }
        let node = spread_node(topology, ith, nth)?;
        let cpus = topology.nodes()[topology.index(node)?].cpus.iter().copied().filter(|&cpu| old.contains(cpu));
        CpuSet::new(cpus).bind().ok()?;
        Some(Self(old))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // It was this thread's set before; if a cpuset changed meanwhile, the kernel's choice stands.
        let _ = self.0.bind();
    }
}

/// The node of worker `ith` of `nth` when they are spread evenly over the nodes with CPUs, in order.
pub fn spread_node(topology: &Topology, ith: usize, nth: usize) -> Option<NodeId> {
    let with = topology.nodes().iter().filter(|node| !node.cpus.is_empty());
    let count = with.clone().count();
    with.map(|node| node.id).nth(ith * count / nth.max(1))
}

/// Where the workers of a team are: each writes its place, and behind a barrier all read them.
#[derive(Debug)]
pub struct Seats(Box<[AtomicU16]>);

impl Seats {
    /// For teams of up to `nth`, all at place 0.
    pub fn new(nth: usize) -> Self {
        Self((0..nth).map(|_| AtomicU16::new(0)).collect())
    }

    /// Number of workers.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Worker `ith` is on the node at `place` of the topology.
    pub fn take(&self, ith: usize, place: usize) {
        self.0[ith].store(place as u16, Ordering::Relaxed);
    }

    /// Worker `ith`'s place.
    pub fn place(&self, ith: usize) -> usize {
        usize::from(self.0[ith].load(Ordering::Relaxed))
    }

    /// Of the first `nth` workers, how many are at each place.
    fn counts(&self, nth: usize) -> [u64; MAX_NODES] {
        let mut counts = [0; MAX_NODES];
        (0..nth).for_each(|i| counts[self.place(i)] += 1);
        counts
    }
}

/// Places of a topology and, for each, the others by distance.
#[derive(Clone, Debug)]
pub struct Nearness(Vec<Vec<u8>>);

impl Nearness {
    /// None with more than [`MAX_NODES`] nodes.
    pub fn new(topology: &Topology) -> Option<Self> {
        let ids: Vec<NodeId> = topology.nodes().iter().map(|node| node.id).collect();
        if ids.len() > MAX_NODES {
            return None;
        }
        let others = |&from: &NodeId| {
            let mut others: Vec<u8> = (0..ids.len() as u8).filter(|&to| ids[usize::from(to)] != from).collect();
            others.sort_by_key(|&to| topology.distance(from, ids[usize::from(to)]));
            others
        };
        Some(Self(ids.iter().map(others).collect()))
    }
}

/// A stretch of one node's bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Place of the node in the topology.
    pub place: usize,
    /// Which of its bytes, counted in the order of the plans' shares.
    pub bytes: Range<u64>,
}

/// What falls to one worker: stretches of its own node's bytes, and of other nodes' that have too few workers.
#[derive(Clone, Debug)]
pub struct Duty {
    spans: [Span; 2 * MAX_NODES],
    len: usize,
}

impl Duty {
    /// Splits `bytes` (by place) over the workers by count: each node's workers do their node's work; what lies more than
    /// a sixteenth above their fair share goes to the nearest nodes with room, all of it where a node has no workers.
    ///
    /// This is the part of worker `ith` of `nth`. All get the same split from the same seats, so every byte falls to exactly
    /// one.
    pub fn new(bytes: &[u64; MAX_NODES], seats: &Seats, near: &Nearness, (ith, nth): (usize, usize)) -> Self {
        let counts = seats.counts(nth);
        let me = seats.place(ith);
        let rank = (0..ith).filter(|&i| seats.place(i) == me).count() as u64;
        Self::of_node(bytes, &counts, near, me).cut(rank, counts[me])
    }

    /// What falls to the workers of one node together.
    fn of_node(bytes: &[u64; MAX_NODES], counts: &[u64; MAX_NODES], near: &Nearness, me: usize) -> Self {
        let (total, workers) = (bytes.iter().sum(), counts.iter().sum());
        let fair = |place: usize| part(total, counts[place], workers);
        let kept = |place: usize| {
            let most = fair(place) + if counts[place] > 0 { fair(place) / SLACK } else { 0 };
            if bytes[place] <= most { bytes[place] } else { fair(place) }
        };
        let mut room: [u64; MAX_NODES] = std::array::from_fn(|place| fair(place).saturating_sub(kept(place)));
        let mut all = Self { spans: std::array::from_fn(|_| Span::default()), len: 0 };
        all.push(me, 0..kept(me));
        for (place, others) in near.0.iter().enumerate() {
            let mut at = kept(place);
            let others = || others.iter().map(|&to| usize::from(to));
            for to in others() {
                let n = room[to].min(bytes[place] - at);
                room[to] -= n;
                if to == me {
                    all.push(place, at..at + n);
                }
                at += n;
            }
            // A few bytes are left by rounding.
            if others().find(|&to| counts[to] > 0) == Some(me) {
                all.push(place, at..bytes[place]);
            }
        }
        all
    }

    /// Part `rank` of `count` equal parts.
    fn cut(&self, rank: u64, count: u64) -> Self {
        let all = self.spans().iter().map(|s| s.bytes.end - s.bytes.start).sum();
        let (from, to) = (part(all, rank, count), part(all, rank + 1, count));
        let mut mine = Self { spans: std::array::from_fn(|_| Span::default()), len: 0 };
        let mut before = 0;
        for s in self.spans() {
            let len = s.bytes.end - s.bytes.start;
            let inside = |at: u64| s.bytes.start + at.clamp(before, before + len) - before;
            mine.push(s.place, inside(from)..inside(to));
            before += len;
        }
        mine
    }

    fn push(&mut self, place: usize, bytes: Range<u64>) {
        if bytes.is_empty() {
            return;
        }
        self.spans[self.len] = Span { place, bytes };
        self.len += 1;
    }

    /// The stretches, none empty.
    pub fn spans(&self) -> &[Span] {
        &self.spans[..self.len]
    }
}

/// `all * n / of`, rounded down.
fn part(all: u64, n: u64, of: u64) -> u64 {
    (u128::from(all) * u128::from(n) / u128::from(of.max(1))) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seats(of: &[usize]) -> Seats {
        let seats = Seats::new(of.len());
        of.iter().enumerate().for_each(|(i, &place)| seats.take(i, place));
        seats
    }

    /// Every worker's stretches, and bytes done by each.
    fn duties(bytes: &[u64], of: &[usize], near: &Nearness) -> Vec<Duty> {
        let mut all = [0; MAX_NODES];
        all[..bytes.len()].copy_from_slice(bytes);
        let seats = seats(of);
        (0..of.len()).map(|i| Duty::new(&all, &seats, near, (i, of.len()))).collect()
    }

    fn span(place: usize, bytes: Range<u64>) -> Span {
        Span { place, bytes }
    }

    #[test]
    fn even_nodes_do_their_own() {
        let near = Nearness::new(&Topology::made_up(2, 4)).unwrap();
        let d = duties(&[1000, 1040], &[0, 1, 0, 1], &near);
        assert_eq!(d[0].spans(), [span(0, 0..500)]);
        assert_eq!(d[1].spans(), [span(1, 0..520)]);
        assert_eq!(d[2].spans(), [span(0, 500..1000)]);
        assert_eq!(d[3].spans(), [span(1, 520..1040)]);
    }

    #[test]
    fn uneven_workers_share_by_count() {
        let near = Nearness::new(&Topology::made_up(2, 4)).unwrap();
        let d = duties(&[1000, 1000], &[0, 0, 0, 1], &near);
        assert_eq!(d[3].spans(), [span(1, 0..500)]);
        assert_eq!(d[0].spans(), [span(0, 0..500)]);
        assert_eq!(d[2].spans(), [span(1, 500..1000)]);
    }

    #[test]
    fn a_node_without_workers_is_done_by_the_nearest() {
        // Node 2 has memory only; node 1 is the nearer one.
        let mut t = Topology::made_up(3, 2);
        t = t.with_distances(&[&[10, 21, 30], &[21, 10, 14], &[30, 14, 10]]);
        let near = Nearness::new(&t).unwrap();
        let d = duties(&[600, 300, 300], &[0, 1], &near);
        assert_eq!(d[0].spans(), [span(0, 0..600)]);
        assert_eq!(d[1].spans(), [span(1, 0..300), span(2, 0..300)]);
    }

    #[test]
    fn workers_spread_evenly_over_nodes_with_cpus() {
        let t = Topology::made_up(4, 2);
        let of = |nth: usize| (0..nth).map(|i| spread_node(&t, i, nth).unwrap()).collect::<Vec<_>>();
        assert_eq!(of(8), [0, 0, 1, 1, 2, 2, 3, 3]);
        assert_eq!(of(2), [0, 2]);
    }

    #[test]
    fn a_bound_thread_is_on_its_node_and_is_not_pinned_elsewhere() {
        let old = CpuSet::of_this_thread().unwrap();
        let cpus: Vec<usize> = (0..1024).filter(|&cpu| old.contains(cpu)).collect();
        std::thread::spawn(move || {
            // Two made-up nodes, each with one half of what this thread may use.
            let (a, b) = cpus.split_at(cpus.len() / 2);
            let t = Topology::made_up(2, 0).with_cpus(&[a, b]);
            let node = node_of_this_thread(&t);
            if a.is_empty() {
                println!("skipped: one CPU");
                return;
            }
            assert!(node <= 1);
            {
                let _pin = Pinned::spread(&t, 1, 2).expect("not bound to one node");
                assert_eq!(node_of_this_thread(&t), 1);
                assert!(Pinned::spread(&t, 0, 2).is_none(), "bound to node 1 already");
            }
            let now = CpuSet::of_this_thread().unwrap();
            assert!(cpus.iter().all(|&cpu| now.contains(cpu)));
        })
        .join()
        .unwrap();
    }

    proptest! {
        #[test]
        fn every_byte_falls_to_one_worker(
            bytes in prop::collection::vec(0u64..100_000, 1..9),
            of in prop::collection::vec(0usize..8, 1..20),
        ) {
            let near = Nearness::new(&Topology::made_up(bytes.len(), 1)).unwrap();
            let of: Vec<usize> = of.iter().map(|p| p % bytes.len()).collect();
            let mut seen: Vec<Vec<Range<u64>>> = vec![Vec::new(); bytes.len()];
            let total: u64 = bytes.iter().sum();
            for d in duties(&bytes, &of, &near) {
                let mine: u64 = d.spans().iter().map(|s| s.bytes.end - s.bytes.start).sum();
                prop_assert!(mine <= total / of.len() as u64 * 17 / 16 + 20);
                d.spans().iter().for_each(|s| seen[s.place].push(s.bytes.clone()));
            }
            for (ranges, &end) in seen.iter_mut().zip(&bytes) {
                ranges.sort_by_key(|r| r.start);
                let mut at = 0;
                for r in ranges {
                    prop_assert_eq!(r.start, at);
                    at = r.end;
                }
                prop_assert_eq!(at, end);
            }
        }
    }
}
