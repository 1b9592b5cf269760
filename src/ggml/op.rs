//! What a custom node calls: one claimed operation, carried out by ggml's threads together.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::time::Instant;

use super::stats::{Kind, Stats};
use super::{log, plugin, sys};
use crate::attention::FlashAttn;
use crate::cost::Cost;
use crate::isa::Isa;
use crate::moe::{Ffn, MulMat, MulMatId, OnNodes, OpError};
use crate::numa::threads::Seats;
use crate::team::{Team, Worker, WorkerError};

/// An operation of ours, ready to run.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each claimed node, most of them the large one")]
pub enum Work {
    /// One expert product.
    MulMatId(MulMatId<'static>),
    /// A product with one matrix of weights.
    MulMat(MulMat<'static>),
    /// A whole expert FFN.
    Ffn(Ffn<'static>),
    /// Attention.
    FlashAttn(FlashAttn<'static>),
}

impl Work {
    /// Bytes of shared scratch for up to `threads` threads.
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        match self {
            Self::MulMatId(op) => op.scratch_bytes(threads),
            Self::MulMat(op) => op.scratch_bytes(threads),
            Self::Ffn(op) => op.scratch_bytes(threads),
            Self::FlashAttn(op) => op.scratch_bytes(threads),
        }
    }

    /// # Safety
    /// `scratch` is 4096-byte aligned, has [`Work::scratch_bytes`] for this team, and no other work uses it meanwhile.
    // SAFETY: contract above.
    unsafe fn run(&self, isa: Isa, worker: &Worker<'_>, scratch: *mut u8) -> Result<(), OpError> {
        match self {
            // SAFETY: the caller's promise.
            Self::MulMatId(op) => unsafe { op.run(isa, worker, scratch) },
            // SAFETY: the caller's promise.
            Self::MulMat(op) => unsafe { op.run(isa, worker, scratch) },
            // SAFETY: the caller's promise.
            Self::Ffn(op) => unsafe { op.run(isa, worker, scratch) },
            Self::FlashAttn(op) => {
                // SAFETY: the caller's promise.
                unsafe { op.run(isa, worker, scratch) };
                Ok(())
            }
        }
    }

    /// The same work, following its weights' pages where they lie on several NUMA nodes.
    pub fn on_nodes(self, run: &'static Run) -> Self {
        let Some(numa) = plugin::numa() else { return self };
        let tally = run.stats.tally(self.kind());
        let nodes = OnNodes { numa, seats: &run.seats, tally, count_plain: run.stats.on() };
        match self {
            Self::MulMatId(op) => Self::MulMatId(op.follow_pages(nodes)),
            Self::MulMat(op) => Self::MulMat(op.follow_pages(nodes)),
            Self::Ffn(op) => Self::Ffn(op.follow_pages(nodes)),
            Self::FlashAttn(_) => self,
        }
    }

    /// What it has to read and compute; for before it runs.
    fn cost(&self) -> Cost {
        match self {
            Self::MulMatId(op) => op.cost(),
            Self::MulMat(op) => op.cost(),
            Self::Ffn(op) => op.cost(),
            Self::FlashAttn(op) => op.cost(),
        }
    }

    /// Under which heading it is counted.
    pub fn kind(&self) -> Kind {
        match self {
            Self::MulMatId(_) => Kind::MulMatId,
            Self::MulMat(_) => Kind::MulMat,
            Self::Ffn(_) => Kind::Ffn,
            Self::FlashAttn(_) => Kind::FlashAttn,
        }
    }
}

/// What the workers of all claimed nodes of a backend share.
#[derive(Debug)]
pub struct Run {
    /// The engine.
    pub isa: Isa,
    /// A team for each possible number of threads: OpenMP may start fewer than were asked for.
    teams: Vec<Team>,
    /// Which NUMA node each worker is on.
    seats: Seats,
    scratch: AtomicPtr<u8>,
    failed: AtomicBool,
    /// The user's own abort callback and its data.
    abort: (sys::ggml_abort_callback, *mut c_void),
    /// Counts, where the user asked for them.
    pub stats: Stats,
}

impl Run {
    /// For up to `threads` threads.
    pub fn new(isa: Isa, threads: usize) -> Self {
        let mut run = Self {
            isa,
            teams: Vec::new(),
            seats: Seats::new(threads),
            scratch: AtomicPtr::default(),
            failed: AtomicBool::new(false),
            abort: (None, std::ptr::null_mut()),
            stats: Stats::default(),
        };
        run.prepare(threads);
        run
    }

    /// Before each graph: as many teams as threads, none of them broken by an earlier graph.
    pub fn prepare(&mut self, threads: usize) {
        if *self.failed.get_mut() {
            self.teams.clear();
            *self.failed.get_mut() = false;
        }
        if self.seats.len() < threads {
            self.seats = Seats::new(threads);
        }
        (self.teams.len()..threads).for_each(|n| self.teams.push(Team::new(n + 1)));
    }

    /// The scratch all nodes of the graph use, one after the other.
    pub fn set_scratch(&self, scratch: *mut u8) {
        self.scratch.store(scratch, Ordering::Relaxed);
    }

    /// Sets the user's abort callback.
    pub fn set_abort(&mut self, callback: sys::ggml_abort_callback, data: *mut c_void) {
        self.abort = (callback, data);
    }

    /// Whether the graph is to stop: a node of ours failed, or the user says so.
    pub fn should_abort(&self) -> bool {
        let (callback, data) = self.abort;
        // SAFETY: the user's callback with the user's data, as ggml would call it.
        self.failed() || callback.is_some_and(|f| unsafe { f(data) })
    }

    /// Whether a node failed since [`Run::prepare`].
    pub fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}

/// One claimed node: the work, and what it needs to run and to say what went wrong. A custom node's user data.
#[derive(Debug)]
pub struct Claimed {
    /// The operation.
    pub work: Work,
    /// What the backend's nodes share.
    pub run: *const Run,
    /// The node of the caller's graph that it stands for.
    pub node: *const sys::ggml_tensor,
}

impl Claimed {
    fn work_as(&self, run: &Run, ith: usize, nth: usize) {
        if run.failed() {
            return;
        }
        let Some(team) = run.teams.get(nth - 1) else {
            self.fail(run, &format!("{nth} threads came, {} were planned for", run.teams.len()));
            return;
        };
        let scratch = run.scratch.load(Ordering::Relaxed);
        // SAFETY: the backend reserved what the largest node of the graph needs, and nodes run one after the other.
        let ended = team.run(ith, |w| unsafe { self.work.run(run.isa, &w, scratch) });
        match ended {
            Ok(()) => {}
            Err(WorkerError::Op(e)) => self.fail(run, &e.to_string()),
            Err(WorkerError::Panic(message)) => self.fail(run, &format!("internal error: {message}")),
            Err(WorkerError::Broken) => run.failed.store(true, Ordering::Release),
        }
    }

    fn fail(&self, run: &Run, why: &str) {
        run.failed.store(true, Ordering::Release);
        // SAFETY: the node lives while its graph is computed; ggml keeps its name NUL-terminated.
        let name = unsafe { CStr::from_ptr((*self.node).name.as_ptr()) };
        log::error(&format!("node '{}': {why}", name.to_string_lossy()));
    }
}

/// The callback of every custom node (`ggml_custom_op_t`).
///
/// # Safety
/// ggml calls it with the user data of the node: a [`Claimed`] that lives through the graph's computation.
// SAFETY: contract above.
pub unsafe extern "C" fn call(_dst: *mut sys::ggml_tensor, ith: c_int, nth: c_int, data: *mut c_void) {
    // SAFETY: by the contract; the run outlives the graph's computation.
    let (claimed, run) = unsafe {
        let claimed = &*data.cast::<Claimed>();
        (claimed, &*claimed.run)
    };
    // Nothing in here unwinds: `Team::run` catches, and the log's own formatting does not panic.
    let timed = ith == 0 && run.stats.on();
    // The cost first: the result may overwrite the ids that it depends on. No thread writes before this one has come.
    let begun = timed.then(|| (claimed.work.cost(), Instant::now()));
    claimed.work_as(run, ith as usize, nth as usize);
    if let Some((cost, start)) = begun {
        run.stats.add(claimed.work.kind(), cost, start.elapsed());
    }
}
