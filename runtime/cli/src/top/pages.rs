//! Counters pages of processes, found under `/proc`.
//!
//! ```text
//! /proc/PID/fd/N ─► "/memfd:glake-counters (deleted)" ─► opened ─► seals, size, version ─► pid and start time are PID's ─► read
//! ```
//!
//! Invariants: a page counts for the process that it names, and only while that process lives and has it open: a forked child has its
//! parent's page, and a process may hold a dead one's. Opening never blocks, whatever the descriptor is.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::{Duration, Instant};

use glake_meter::ProcessStat;
use glake_wire::{Counters, CountersView, PageError};
use rustix::fs::OFlags;

use super::processes::Process;

/// Time between two searches for new processes.
const SEARCH_INTERVAL: Duration = Duration::from_secs(2);
/// Target of the link of a counters page's descriptor.
const LINK: &str = "/memfd:glake-counters (deleted)";
/// Maximum number of pages that are read.
const MOST_PAGES: usize = 4096;
/// Maximum number of descriptors of a process that are looked at.
const MOST_DESCRIPTORS: usize = 1 << 16;
/// Longest command line that is kept.
const LONGEST_COMMAND: usize = 256;

/// Pages that were found.
#[derive(Debug, Default)]
pub struct Pages {
    /// By process and inode.
    known: BTreeMap<(u32, u64), Page>,
    searched: Option<Instant>,
    /// Reason why the last refused page cannot be read.
    refused: Option<(u32, PageError)>,
}

#[derive(Debug)]
struct Page {
    view: CountersView,
    command: String,
    counters: Counters,
}

impl Pages {
    /// Reads the pages of all processes that can be read; searches for new ones every two seconds.
    pub fn read(&mut self, now: Instant) -> Vec<Process> {
        if self.searched.is_none_or(|searched| now.duration_since(searched) >= SEARCH_INTERVAL) {
            self.searched = Some(now);
            self.search();
        }
        self.known.retain(|(pid, _), page| page.update(*pid));
        let process = |((pid, inode), page): (&(u32, u64), &Page)| Process {
            pid: *pid,
            page: *inode,
            command: page.command.clone(),
            counters: page.counters.clone(),
        };
        self.known.iter().map(process).collect()
    }

    /// Returns the process whose page was refused last, and the reason.
    pub fn refused(&self) -> Option<&(u32, PageError)> {
        self.refused.as_ref()
    }

    fn search(&mut self) {
        self.refused = None;
        let mut before = std::mem::take(&mut self.known);
        let folders = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = folders.filter_map(|folder| folder.file_name().to_str()?.parse::<u32>().ok());
        for pid in pids {
            // A process of another user, or one that has just ended.
            let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
            for descriptor in descriptors.flatten().take(MOST_DESCRIPTORS) {
                let path = descriptor.path();
                if fs::read_link(&path).is_ok_and(|target| target == Path::new(LINK)) {
                    self.take(pid, &path, &mut before);
                }
            }
        }
    }

    /// Takes the page behind a descriptor of a process, unless it is another process's.
    fn take(&mut self, pid: u32, path: &Path, before: &mut BTreeMap<(u32, u64), Page>) {
        // Anything may have this name, also what blocks when it is opened.
        let nonblocking = OFlags::NONBLOCK.bits().cast_signed();
        let Ok(file) = OpenOptions::new().read(true).custom_flags(nonblocking).open(path) else { return };
        let Ok(inode) = file.metadata().map(|metadata| metadata.ino()) else { return };
        if self.known.contains_key(&(pid, inode)) || self.known.len() >= MOST_PAGES {
            return;
        }
        match before.remove(&(pid, inode)).map_or_else(|| Page::open(pid, file), |page| Ok(Some(page))) {
            Ok(Some(page)) => {
                self.known.insert((pid, inode), page);
            }
            Ok(None) => {}
            Err(error) => self.refused = Some((pid, error)),
        }
    }
}

impl Page {
    /// Returns the page if it is the process's own.
    fn open(pid: u32, file: File) -> Result<Option<Page>, PageError> {
        let view = CountersView::new(OwnedFd::from(file))?;
        let counters = view.read()?;
        Ok(owns(pid, &counters).then(|| Page { view, command: command(pid), counters }))
    }

    /// Reads the page again; returns whether it still is the living process's.
    fn update(&mut self, pid: u32) -> bool {
        // A page that is being written just now keeps its last contents.
        if let Ok(counters) = self.view.read() {
            self.counters = counters;
        }
        owns(pid, &self.counters)
    }
}

/// Returns whether a process is the one that a page names, and lives.
fn owns(pid: u32, counters: &Counters) -> bool {
    let is_same = ProcessStat::of(pid).is_ok_and(|stat| stat.start == counters.start && !stat.has_ended());
    is_same && (counters.pid == pid || innermost_pid(pid) == Some(counters.pid))
}

/// Returns the id of a process in its own namespace: in a container it is another one than outside.
fn innermost_pid(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    ids.split_ascii_whitespace().next_back()?.parse().ok()
}

/// Returns the command line of a process, which may contain anything; its name if there is none.
fn command(pid: u32) -> String {
    let read = |file: &str| fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
    let bytes = match read("cmdline") {
        bytes if bytes.is_empty() => read("comm"),
        bytes => bytes,
    };
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(LONGEST_COMMAND)]).replace('\0', " ");
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::process::{Command, Stdio};
    use std::sync::atomic::AtomicU64;

    use glake_device::owned::SharedWords;
    use glake_units::Bytes;
    use glake_wire::{COUNTERS_WORDS, GpuCounters};
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    struct Published {
        _descriptor: OwnedFd,
        words: SharedWords,
        inode: u64,
    }

    fn inode(descriptor: &OwnedFd) -> u64 {
        File::from(descriptor.try_clone().unwrap()).metadata().unwrap().ino()
    }

    fn publish(counters: &Counters) -> Published {
        let (descriptor, words) =
            Counters::create_page(|file| SharedWords::map(file, COUNTERS_WORDS)).unwrap();
        counters.publish(words.words());
        Published { inode: inode(&descriptor), _descriptor: descriptor, words }
    }

    fn own(live: Bytes) -> Counters {
        let pid = std::process::id();
        let start = ProcessStat::of(pid).unwrap().start;
        let gpu = GpuCounters { gpu: "0".to_owned(), live, ..GpuCounters::default() };
        Counters { pid, start, changed_ns: 1, backend: "cuda".to_owned(), gpus: vec![gpu] }
    }

    fn live(pages: &mut Pages, pid: u32, inode: u64) -> Option<Bytes> {
        // Each read searches.
        pages.searched = None;
        let seen = pages.read(Instant::now());
        let own = seen.iter().find(|process| (process.pid, process.page) == (pid, inode));
        own.map(|process| process.counters.gpus[0].live)
    }

    #[test]
    fn a_page_is_found_and_followed_until_it_is_closed() {
        let (mut pages, pid) = (Pages::default(), std::process::id());
        let published = publish(&own(Bytes::mib(1)));
        let inode = published.inode;
        assert_eq!(live(&mut pages, pid, inode), Some(Bytes::mib(1)));
        own(Bytes::mib(2)).publish(published.words.words());
        assert_eq!(live(&mut pages, pid, inode), Some(Bytes::mib(2)));
        // Being written, and then stopped there: its last contents stay.
        published.words.words()[2].store(7, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(live(&mut pages, pid, inode), Some(Bytes::mib(2)));
        let command = &pages.known[&(pid, inode)].command;
        assert!(command.contains("glake"), "{command}");
        drop(published);
        // This process has it open for reading, too.
        pages.known.clear();
        assert_eq!(live(&mut pages, pid, inode), None);
    }

    /// A forked child, and any process that was given the descriptor, has the page open.
    #[test]
    fn a_process_that_inherited_a_page_does_not_own_it() {
        let (mut pages, pid) = (Pages::default(), std::process::id());
        let published = publish(&own(Bytes::mib(1)));
        let inherited = Stdio::from(published._descriptor.as_fd().try_clone_to_owned().unwrap());
        let mut child = Command::new("sleep").arg("60").stdin(inherited).spawn().unwrap();
        let link = fs::read_link(format!("/proc/{}/fd/0", child.id())).unwrap();
        assert_eq!(link, Path::new(LINK));
        assert_eq!(live(&mut pages, child.id(), published.inode), None);
        assert_eq!(live(&mut pages, pid, published.inode), Some(Bytes::mib(1)));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_page_that_lies_about_its_process_is_not_shown() {
        let mut pages = Pages::default();
        let pid = std::process::id();
        let lies = [
            Counters { pid: 1, ..own(Bytes::mib(1)) },
            Counters { pid: pid + 1, ..own(Bytes::mib(1)) },
            Counters { start: 1, ..own(Bytes::mib(1)) },
            Counters { pid: 0, start: u64::MAX, ..own(Bytes::mib(1)) },
        ];
        for lie in lies {
            let published = publish(&lie);
            assert_eq!(live(&mut pages, pid, published.inode), None, "{lie:?}");
        }
        // One that begins to lie.
        let published = publish(&own(Bytes::mib(1)));
        assert!(live(&mut pages, pid, published.inode).is_some());
        Counters { pid: 1, ..own(Bytes::mib(1)) }.publish(published.words.words());
        assert_eq!(live(&mut pages, pid, published.inode), None);
    }

    #[test]
    fn unsealed_short_and_garbled_memory_is_refused() {
        let mut pages = Pages::default();
        let pid = std::process::id();
        let memory = |size: u64, seals: SealFlags| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let memory = memfd_create("glake-counters", flags).unwrap();
            ftruncate(&memory, size).unwrap();
            let words: Vec<AtomicU64> = (0..COUNTERS_WORDS).map(|_| AtomicU64::new(0)).collect();
            own(Bytes::mib(1)).publish(&words);
            let record: Vec<u8> = words
                .iter()
                .flat_map(|word| word.load(std::sync::atomic::Ordering::Relaxed).to_le_bytes())
                .collect();
            let record = &record[..record.len().min(usize::try_from(size).unwrap())];
            rustix::io::pwrite(&memory, record, 0).unwrap();
            fcntl_add_seals(&memory, seals).unwrap();
            memory
        };
        let size = SealFlags::SHRINK | SealFlags::GROW;
        for memory in [
            memory(4096, SealFlags::empty()),
            memory(4096, size | SealFlags::SEAL),
            memory(4096, SealFlags::FUTURE_WRITE | SealFlags::SEAL),
            memory(64, size | SealFlags::FUTURE_WRITE | SealFlags::SEAL),
            memory(1 << 30, size | SealFlags::FUTURE_WRITE | SealFlags::SEAL),
        ] {
            let inode = inode(&memory);
            assert_eq!(live(&mut pages, pid, inode), None);
            assert!(pages.refused().is_some());
        }
        let good = memory(4096, size | SealFlags::FUTURE_WRITE | SealFlags::SEAL);
        let inode = inode(&good);
        assert_eq!(live(&mut pages, pid, inode), Some(Bytes::mib(1)));
    }
}
