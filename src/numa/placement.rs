//! Which node holds each page of a weight tensor, asked of the kernel and kept as run lengths.
//!
//! An assumed interleave is often wrong: a mapped file's page cache was filled in read order, by whoever read it first,
//! in folios of any size. So `move_pages` without targets is asked for each page (`mm/migrate.c`, `do_pages_stat`).

use std::io;
use std::ops::Range;

use super::NodeId;

/// Pages asked for in one call.
const BATCH: usize = 4096;

/// Addresses cut into stretches that lie on one node each.
pub trait Pages {
    /// Calls `f` with the stretches of `range`, ascending and without gaps; `None` where the node is not known (yet).
    fn stretches(&self, range: Range<usize>, f: &mut dyn FnMut(Range<usize>, Option<NodeId>));
}

/// The pages' nodes of one stretch of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// First byte of the memory, any alignment.
    start: usize,
    len: usize,
    page: usize,
    runs: Vec<Run>,
}

/// Pages in a row on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    /// Address behind the run, a multiple of the page size.
    end: usize,
    node: Option<NodeId>,
}

/// Asks for the nodes of pages: addresses in, `move_pages`' statuses out (a node, or a negative errno).
type Ask<'a> = &'a mut dyn FnMut(&[usize], &mut [i32]) -> io::Result<()>;

impl Placement {
    /// Asks the kernel for every page that holds a byte of `[start, start + len)`.
    ///
    /// Pages that are not in this process's page table now (a mapped file's before the first touch) stay unknown until
    /// [`Placement::refresh`].
    ///
    /// # Errors
    /// What `move_pages` returns; `EPERM` and `ENOSYS` where a container's seccomp filter or the kernel has none of it.
    pub fn query(start: usize, len: usize) -> io::Result<Self> {
        let mut all = Self::unknown(start, len, page_size());
        all.refresh()?;
        Ok(all)
    }

    /// Asks again for the pages that are unknown.
    ///
    /// # Errors
    /// As [`Placement::query`].
    pub fn refresh(&mut self) -> io::Result<()> {
        self.ask(&mut move_pages)
    }

    /// A placement by rule, for tests and simulation: `node` gets each page's address.
    pub fn made_up(start: usize, len: usize, page: usize, mut node: impl FnMut(usize) -> Option<NodeId>) -> Self {
        let mut all = Self { runs: Vec::new(), ..Self::unknown(start, len, page) };
        let first = start - start % page;
        (first..start + len).step_by(page).for_each(|at| all.push(at + page, node(at)));
        all
    }

    /// Runs of `run` bytes on nodes `0..nodes` in turn, by address: what an interleave policy gives.
    pub fn interleaved(start: usize, len: usize, page: usize, run: usize, nodes: usize) -> Self {
        Self::made_up(start, len, page, |at| Some((at / run % nodes) as NodeId))
    }

    fn unknown(start: usize, len: usize, page: usize) -> Self {
        let end = (start + len).next_multiple_of(page);
        Self { start, len, page, runs: vec![Run { end, node: None }] }
    }

    /// The memory's first byte and the one behind its last.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }

    /// Bytes of a page.
    pub fn page(&self) -> usize {
        self.page
    }

    /// Number of runs.
    pub fn runs(&self) -> usize {
        self.runs.len()
    }

    /// Bytes on each node that holds any, ascending by node, and bytes whose node is unknown.
    pub fn bytes(&self, range: Range<usize>) -> (Vec<(NodeId, usize)>, usize) {
        let (mut known, mut unknown): (Vec<(NodeId, usize)>, usize) = (Vec::new(), 0);
        self.stretches(range, &mut |r, node| match node {
            None => unknown += r.len(),
            Some(node) => match known.binary_search_by_key(&node, |e| e.0) {
                Ok(i) => known[i].1 += r.len(),
                Err(i) => known.insert(i, (node, r.len())),
            },
        });
        (known, unknown)
    }

    fn push(&mut self, end: usize, node: Option<NodeId>) {
        match self.runs.last_mut() {
            Some(last) if last.node == node => last.end = end,
            _ => self.runs.push(Run { end, node }),
        }
    }

    fn ask(&mut self, of: Ask<'_>) -> io::Result<()> {
        let old = std::mem::take(&mut self.runs);
        let mut begin = self.start - self.start % self.page;
        let (mut at, mut status) = (Vec::with_capacity(BATCH), vec![0; BATCH]);
        for (i, &run) in old.iter().enumerate() {
            if run.node.is_some() {
                self.push(run.end, run.node);
            }
            while run.node.is_none() && begin < run.end {
                let end = run.end.min(begin + BATCH * self.page);
                at.clear();
                at.extend((begin..end).step_by(self.page));
                if let Err(e) = of(&at, &mut status[..at.len()]) {
                    self.push(run.end, None);
                    old[i + 1..].iter().for_each(|r| self.push(r.end, r.node));
                    return Err(e);
                }
                at.iter().zip(&status).for_each(|(&at, &s)| self.push(at + self.page, NodeId::try_from(s).ok()));
                begin = end;
            }
            begin = run.end;
        }
        Ok(())
    }
}

impl Pages for Placement {
    fn stretches(&self, range: Range<usize>, f: &mut dyn FnMut(Range<usize>, Option<NodeId>)) {
        let mut at = range.start;
        let first = self.runs.partition_point(|run| run.end <= at);
        for run in &self.runs[first..] {
            if at >= range.end {
                return;
            }
            let end = run.end.min(range.end);
            f(at..end, run.node);
            at = end;
        }
        if at < range.end {
            f(at..range.end, None);
        }
    }
}

/// The kernel's page size in bytes. Huge pages and folios show up as runs.
pub fn page_size() -> usize {
    // SAFETY: no pointers.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// `move_pages(0, n, pages, NULL, status, 0)`: moves nothing, tells each page's node or a negative errno.
fn move_pages(at: &[usize], status: &mut [i32]) -> io::Result<()> {
    debug_assert_eq!(at.len(), status.len());
    // SAFETY: both arrays have `at.len()` entries; the addresses are only looked up in the page table, never followed.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_move_pages,
            0 as libc::c_long,
            at.len() as libc::c_ulong,
            at.as_ptr(),
            std::ptr::null::<i32>(),
            status.as_mut_ptr(),
            0 as libc::c_long,
        )
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn collect(pages: &dyn Pages, range: Range<usize>) -> Vec<(Range<usize>, Option<NodeId>)> {
        let mut all = Vec::new();
        pages.stretches(range, &mut |r, n| all.push((r, n)));
        all
    }

    #[test]
    fn runs_are_merged_and_clipped() {
        let p = Placement::interleaved(4096 + 100, 5 * 4096, 4096, 8192, 2);
        assert_eq!(p.runs(), 4);
        assert_eq!(collect(&p, 5000..20000), [(5000..8192, Some(0)), (8192..16384, Some(1)), (16384..20000, Some(0))]);
        assert_eq!(p.bytes(p.range()), (vec![(0, 4096 - 100 + 8192), (1, 8192 + 100)], 0));
    }

    #[test]
    fn absent_pages_are_asked_for_again() {
        let mut p = Placement::unknown(64, 10 * 4096, 4096);
        let mut asked = Vec::new();
        let mut even = |at: &[usize], status: &mut [i32]| {
            asked.extend_from_slice(at);
            at.iter().zip(status).for_each(|(at, s)| *s = if at / 4096 % 2 == 0 { 1 } else { -libc::ENOENT });
            Ok(())
        };
        p.ask(&mut even).unwrap();
        assert_eq!(asked, (0..11).map(|i| i * 4096).collect::<Vec<_>>());
        assert_eq!(p.bytes(p.range()).1, 5 * 4096);

        asked = Vec::new();
        let mut rest = |at: &[usize], status: &mut [i32]| {
            asked.extend_from_slice(at);
            status.fill(3);
            Ok(())
        };
        p.ask(&mut rest).unwrap();
        assert_eq!(asked, (0..5).map(|i| (2 * i + 1) * 4096).collect::<Vec<_>>());
        let (known, unknown) = p.bytes(p.range());
        assert_eq!((known, unknown), (vec![(1, 5 * 4096), (3, 5 * 4096)], 0));
    }

    #[test]
    fn a_refusal_keeps_what_was_known() {
        let mut p = Placement::made_up(0, 3 * 4096, 4096, |at| (at == 4096).then_some(7));
        let before = p.clone();
        assert!(p.ask(&mut |_, _| Err(io::Error::from_raw_os_error(libc::EPERM))).is_err());
        assert_eq!(p, before);
    }

    #[test]
    fn the_kernel_tells_the_node_of_touched_memory() {
        let bytes = vec![1u8; 1 << 20];
        match Placement::query(bytes.as_ptr() as usize, bytes.len()) {
            Ok(p) => {
                let (known, unknown) = p.bytes(p.range());
                assert_eq!((known.iter().map(|e| e.1).sum::<usize>(), unknown), (bytes.len(), 0));
            }
            Err(e) => println!("skipped: move_pages is refused here ({e})"),
        }
    }

    #[test]
    fn untouched_memory_is_unknown_until_touched() {
        // SAFETY: an anonymous mapping; it is unmapped below.
        let at = unsafe {
            let at = libc::mmap(
                std::ptr::null_mut(),
                64 << 12,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            );
            assert_ne!(at, libc::MAP_FAILED);
            libc::madvise(at, 64 << 12, libc::MADV_NOHUGEPAGE);
            at
        };
        if let Ok(mut p) = Placement::query(at as usize, 64 << 12) {
            assert_eq!(p.bytes(p.range()).1, 64 << 12);
            // SAFETY: inside the mapping.
            unsafe { at.cast::<u8>().add(5 << 12).write_volatile(1) };
            p.refresh().unwrap();
            assert_eq!(p.bytes(p.range()).1, 63 * page_size());
        } else {
            println!("skipped: move_pages is refused here");
        }
        // SAFETY: mapped above, used no more.
        unsafe { libc::munmap(at, 64 << 12) };
    }

    proptest! {
        #[test]
        fn stretches_are_the_rule(start in 0usize..100_000, len in 1usize..300_000, run in 1usize..9, nodes in 1usize..9) {
            let p = Placement::interleaved(start, len, 4096, run * 4096, nodes);
            let mut at = start;
            for (r, node) in collect(&p, p.range()) {
                prop_assert_eq!(r.start, at);
                for b in [r.start, r.end - 1] {
                    prop_assert_eq!(node, Some((b / (run * 4096) % nodes) as NodeId));
                }
                at = r.end;
            }
            prop_assert_eq!(at, start + len);
        }
    }
}
