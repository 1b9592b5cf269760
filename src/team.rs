//! A team of threads that work on one operation together.
//!
//! ggml's threads call a custom op as `(ith, nth)` with no barrier, so the team brings its own: spin for a while, then give
//! the core away, because there may be more threads than cores. The same operations run on rayon's threads in tests and
//! benches, through [`run`].

use std::hint::spin_loop;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// Spins before a waiting thread yields its core: a few microseconds.
const SPINS: u32 = 4096;

/// What the threads of one operation share. Make it once, reuse it for any number of operations of the same team size.
#[derive(Debug)]
pub struct Team {
    size: usize,
    arrived: Line<AtomicUsize>,
    generation: Line<AtomicU32>,
    next: Line<AtomicUsize>,
    broken: AtomicBool,
}

/// What a worker unwinds with when another worker of its team failed: it carries no message of its own.
#[derive(Debug)]
pub struct TeamBroken;

/// How one worker's part of an operation ended badly.
#[derive(Debug)]
pub enum WorkerError<E> {
    /// The operation said no.
    Op(E),
    /// The operation panicked, with this message.
    Panic(String),
    /// Another worker failed (it has the reason), so this one left at a barrier or did not start.
    Broken,
}

/// A cache line of its own, so that a spinning reader does not slow a writer of something else.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

impl Team {
    /// A team of `size` threads (at least one).
    pub fn new(size: usize) -> Self {
        Self {
            size: size.max(1),
            arrived: Line::default(),
            generation: Line::default(),
            next: Line::default(),
            broken: AtomicBool::new(false),
        }
    }

    /// Number of threads.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The worker `ith` of this team; each of the `size` threads takes its own.
    pub fn worker(&self, ith: usize) -> Worker<'_> {
        debug_assert!(ith < self.size);
        Worker { ith, team: self }
    }

    /// Whether a worker failed since the team was made. A broken team does no more work: make a new one.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// Runs worker `ith`'s part of an operation. An error or a panic breaks the team, so that no other worker waits at a
    /// barrier for this one; nothing unwinds out of here.
    pub fn run<E>(&self, ith: usize, work: impl FnOnce(Worker<'_>) -> Result<(), E>) -> Result<(), WorkerError<E>> {
        if self.is_broken() {
            return Err(WorkerError::Broken);
        }
        let error = match catch_unwind(AssertUnwindSafe(|| work(self.worker(ith)))) {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(e)) => WorkerError::Op(e),
            Err(payload) if payload.is::<TeamBroken>() => WorkerError::Broken,
            Err(payload) => WorkerError::Panic(panic_message(payload.as_ref())),
        };
        self.broken.store(true, Ordering::Release);
        Err(error)
    }
}

/// The text of a panic's payload.
pub fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().copied();
    text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message").into()
}

/// One thread's place in a [`Team`].
#[derive(Clone, Copy, Debug)]
pub struct Worker<'a> {
    ith: usize,
    team: &'a Team,
}

impl Worker<'_> {
    /// This thread's number, from 0.
    pub fn ith(&self) -> usize {
        self.ith
    }

    /// Number of threads.
    pub fn nth(&self) -> usize {
        self.team.size
    }

    /// Waits until every worker of the team is here. Writes before it are seen after it by all.
    ///
    /// The shared counter starts again at 0 behind every barrier. If a worker of the team failed, this unwinds with
    /// [`TeamBroken`] to [`Team::run`].
    pub fn barrier(&self) {
        let team = self.team;
        if team.size == 1 {
            team.next.0.store(0, Ordering::Relaxed);
            return;
        }
        let generation = team.generation.0.load(Ordering::Relaxed);
        if team.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == team.size {
            team.arrived.0.store(0, Ordering::Relaxed);
            team.next.0.store(0, Ordering::Relaxed);
            team.generation.0.store(generation.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut spins = 0;
        while team.generation.0.load(Ordering::Acquire) == generation {
            if spins < SPINS {
                spins += 1;
                spin_loop();
            } else {
                if team.is_broken() {
                    resume_unwind(Box::new(TeamBroken));
                }
                std::thread::yield_now();
            }
        }
    }

    /// The next number of the team's shared counter: for work that is handed out as threads become free.
    pub fn next(&self) -> usize {
        self.team.next.0.fetch_add(1, Ordering::Relaxed)
    }

    /// This worker's contiguous share of `n` items, all shares within one item of each other, in order of `ith`.
    pub fn share(&self, n: usize) -> Range<usize> {
        let nth = self.team.size;
        n * self.ith / nth..n * (self.ith + 1) / nth
    }
}

/// Runs `work` on `threads` rayon threads as one team and waits for all.
///
/// # Panics
/// If the pool cannot be made or a worker panics.
pub fn run(threads: usize, work: impl Fn(Worker<'_>) + Sync) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
    run_on(&pool, &work);
}

/// Like [`run`], on a pool that is there already: what a bench times.
///
/// # Panics
/// If a worker panics.
pub fn run_on(pool: &rayon::ThreadPool, work: &(impl Fn(Worker<'_>) + Sync)) {
    let team = Team::new(pool.current_num_threads());
    let ended = pool.broadcast(|ctx| {
        team.run(ctx.index(), |w| {
            work(w);
            Ok::<(), ()>(())
        })
    });
    let panic = ended.into_iter().find_map(|e| if let Err(WorkerError::Panic(m)) = e { Some(m) } else { None });
    assert!(panic.is_none(), "a worker panicked: {panic:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_all_once() {
        let team = Team::new(5);
        let mut seen = [0; 13];
        (0..5).for_each(|i| team.worker(i).share(13).for_each(|j| seen[j] += 1));
        assert!(seen.iter().all(|&n| n == 1));
    }

    #[test]
    fn a_barrier_orders_writes_with_more_threads_than_cores() {
        let cells: Vec<AtomicUsize> = (0..8).map(|_| AtomicUsize::new(0)).collect();
        run(8, |w| {
            for round in 1..=200 {
                cells[w.ith()].store(round, Ordering::Relaxed);
                w.barrier();
                assert!(cells.iter().all(|c| c.load(Ordering::Relaxed) == round));
                w.barrier();
            }
        });
    }

    #[test]
    fn the_counter_hands_out_each_number_once_and_restarts() {
        let seen: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
        run(4, |w| {
            for round in 1..=3 {
                while let Some(cell) = seen.get(w.next()) {
                    cell.fetch_add(1, Ordering::Relaxed);
                }
                w.barrier();
                assert!(seen.iter().all(|c| c.load(Ordering::Relaxed) == round));
                w.barrier();
            }
        });
    }

    #[test]
    fn a_failed_worker_frees_the_others() {
        let team = Team::new(3);
        let ends = std::thread::scope(|s| {
            let parts: Vec<_> = (0..3)
                .map(|i| {
                    let team = &team;
                    s.spawn(move || {
                        team.run(i, |w| {
                            if w.ith() == 1 {
                                return Err("no");
                            }
                            w.barrier();
                            Ok(())
                        })
                    })
                })
                .collect();
            parts.into_iter().map(|p| p.join().unwrap()).collect::<Vec<_>>()
        });
        assert!(matches!(ends[0], Err(WorkerError::Broken)));
        assert!(matches!(ends[1], Err(WorkerError::Op("no"))));
        assert!(team.is_broken());
        assert!(matches!(team.run(0, |_| Ok::<(), ()>(())), Err(WorkerError::Broken)));
    }

    #[test]
    fn a_panic_is_an_error_with_its_message() {
        let ended = Team::new(1).run(0, |_| -> Result<(), ()> { panic!("by test") });
        assert!(matches!(ended, Err(WorkerError::Panic(m)) if m == "by test"));
    }
}
