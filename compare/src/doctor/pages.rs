//! Where a model's pages are: in the page cache or not, and on which NUMA node.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;

use ggml_hina::numa::placement::{Placement, page_size};
use serde::Serialize;

/// Bytes looked at in one piece.
const WINDOW: usize = 2 << 20;
/// Windows whose pages are asked for their node: with 4096 of 2 MiB, all of a model up to 8 GiB, then a sample.
const SAMPLES: usize = 4096;

/// What was found about the files of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Pages {
    /// Bytes of the files.
    pub bytes: u64,
    /// Bytes of them in the page cache.
    pub cached: u64,
    /// Share of the cached bytes on each node, of those whose node is known.
    pub by_node: Vec<(u16, f64)>,
    /// Why the nodes are not known.
    pub unknown: Option<String>,
}

impl Pages {
    /// Looks at the files, in turn.
    ///
    /// # Errors
    /// If a file cannot be opened or mapped.
    pub fn of(files: &[PathBuf]) -> io::Result<Self> {
        let mut pages = Self::default();
        let mut nodes: Vec<(u16, u64)> = Vec::new();
        for file in files {
            pages.add(file, SAMPLES / files.len().max(1), &mut nodes)?;
        }
        let known: u64 = nodes.iter().map(|n| n.1).sum();
        nodes.sort_unstable();
        pages.by_node = nodes.iter().map(|&(id, bytes)| (id, bytes as f64 / known as f64)).collect();
        Ok(pages)
    }

    fn add(&mut self, file: &Path, samples: usize, nodes: &mut Vec<(u16, u64)>) -> io::Result<()> {
        let map = Map::new(&File::open(file)?)?;
        let windows = map.len.div_ceil(WINDOW);
        let every = windows.div_ceil(samples.max(1)).max(1);
        self.bytes += map.len as u64;
        for window in 0..windows {
            let (from, len) = (window * WINDOW, WINDOW.min(map.len - window * WINDOW));
            let cached = map.cached(from, len)?;
            self.cached += cached.iter().filter(|&&c| c).count() as u64 * page_size() as u64;
            if window % every != 0 || self.unknown.is_some() {
                continue;
            }
            if let Err(e) = map.nodes(from, len, &cached, nodes) {
                self.unknown = Some(e.to_string());
            }
        }
        self.cached = self.cached.min(self.bytes);
        Ok(())
    }
}

/// A file, mapped for reading.
struct Map {
    at: *mut libc::c_void,
    len: usize,
}

impl Map {
    fn new(file: &File) -> io::Result<Self> {
        let len = usize::try_from(file.metadata()?.len()).unwrap_or(0);
        if len == 0 {
            return Ok(Self { at: null_mut(), len: 0 });
        }
        // SAFETY: a new mapping of an open file; its bytes are never looked at through it.
        let at = unsafe { libc::mmap(null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self { at, len }) }
    }

    /// For each page of a window whether the page cache has it.
    fn cached(&self, from: usize, len: usize) -> io::Result<Vec<bool>> {
        let mut state = vec![0u8; len.div_ceil(page_size())];
        // SAFETY: inside the mapping, page-aligned as windows are; `state` has a byte for each page.
        let rc = unsafe { libc::mincore(self.at.byte_add(from), len, state.as_mut_ptr()) };
        if rc != 0 { Err(io::Error::last_os_error()) } else { Ok(state.iter().map(|s| s & 1 != 0).collect()) }
    }

    /// Adds the bytes of a window's cached pages to their nodes. `move_pages` only knows pages that are in this process's
    /// page table, so they are brought there first; pages that are not cached are left alone and nothing is read from disk.
    fn nodes(&self, from: usize, len: usize, cached: &[bool], nodes: &mut Vec<(u16, u64)>) -> io::Result<()> {
        let page = page_size();
        let mut at = 0;
        for run in cached.chunk_by(|a, b| a == b) {
            let (start, bytes) = (from + at * page, run.len() * page);
            at += run.len();
            if !run[0] {
                continue;
            }
            // SAFETY: inside the mapping; populating reads nothing into this program and faults as an error, not a signal.
            let rc = unsafe { libc::madvise(self.at.byte_add(start), bytes, libc::MADV_POPULATE_READ) };
            if rc != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        let placement = Placement::query(self.at.addr() + from, len)?;
        for (node, bytes) in placement.bytes(placement.range()).0 {
            match nodes.iter_mut().find(|n| n.0 == node) {
                Some(n) => n.1 += bytes as u64,
                None => nodes.push((node, bytes as u64)),
            }
        }
        Ok(())
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: mapped in `new`, used no more.
            unsafe { libc::munmap(self.at, self.len) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_just_written_is_cached_on_some_node() {
        let file = std::env::temp_dir().join(format!("hina-doctor-pages-{}", std::process::id()));
        std::fs::write(&file, vec![7u8; 5 * WINDOW / 2 + 100]).unwrap();
        let pages = Pages::of(&[file.clone(), file.clone()]).unwrap();
        std::fs::remove_file(file).unwrap();
        assert_eq!((pages.bytes, pages.cached), (2 * (5 * WINDOW as u64 / 2 + 100), pages.bytes));
        match &pages.unknown {
            None => assert!((pages.by_node.iter().map(|n| n.1).sum::<f64>() - 1.0).abs() < 1e-9, "{pages:?}"),
            Some(why) => println!("skipped: the kernel does not tell pages' nodes here ({why})"),
        }
    }

    #[test]
    fn empty_and_missing_files() {
        let file = std::env::temp_dir().join(format!("hina-doctor-empty-{}", std::process::id()));
        std::fs::write(&file, "").unwrap();
        assert_eq!(Pages::of(std::slice::from_ref(&file)).unwrap(), Pages::default());
        std::fs::remove_file(&file).unwrap();
        assert!(Pages::of(&[file]).is_err());
    }
}
