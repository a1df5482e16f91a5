//! Host system: process queries, inherited descriptors, and small private files that are written atomically.

use std::cell::RefCell;
use std::collections::HashSet;
use std::env;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::rc::Rc;

use glake_meter::ProcessStat;
use rustix::fs::OFlags;
use rustix::process::{Pid, Resource, Rlimit, WaitOptions, child_subreaper, getrlimit, setrlimit, waitpid};

/// Returns whether a process is stopped or blocked in the kernel, so that it cannot respond.
pub(crate) fn is_stopped(pid: u32) -> bool {
    ProcessStat::of(pid).is_ok_and(|process| process.is_stopped())
}

/// Processes that the agent has started and waits for itself.
pub(crate) type OwnChildren = Rc<RefCell<HashSet<u32>>>;

/// Returns whether processes without a parent become this process's children: it is process 1 of a container, or a child subreaper.
pub(crate) fn adopts_orphans() -> bool {
    std::process::id() == 1 || child_subreaper().is_ok_and(|subreaper| subreaper.is_some())
}

/// Reaps ended children except for those in `own`, whose exit status their own waits need. A wait for any child would take that too.
pub(crate) fn reap_orphans(own: &OwnChildren) {
    let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for pid in pids.filter(|pid| !own.borrow().contains(pid)) {
        let is_ended_child =
            |process: ProcessStat| process.parent == std::process::id() && process.has_ended();
        let pid = ProcessStat::of(pid).is_ok_and(is_ended_child).then_some(pid);
        if let Some(pid) = pid.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }
}

/// Returns an epoch that differs at each start.
pub(crate) fn epoch() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    // Below 2^53, which JSON readers represent exactly.
    u64::try_from(now.tv_sec * 1_000_000 + now.tv_nsec / 1000).unwrap_or(1).max(1)
}

/// Number of low descriptors kept for a start.
const SPARE: usize = 16;

/// Limit of open files: raised for the agent, because a worker takes three descriptors, and the original one for the processes that it
/// starts. Some programs allocate tables of the limit's size, or use `select`.
#[derive(Debug)]
pub(crate) struct OpenFiles {
    original: Rlimit,
    raised: Rlimit,
    /// Open files with low numbers, which a start needs below the original limit.
    spare: RefCell<Vec<File>>,
}

impl OpenFiles {
    /// Raises the limit of this process.
    pub(crate) fn raise() -> OpenFiles {
        let original = getrlimit(Resource::Nofile);
        let raised = Rlimit { current: original.maximum, ..original };
        let files = OpenFiles { original, raised, spare: RefCell::default() };
        files.keep_spare();
        files.set(raised);
        files
    }

    fn set(&self, limit: Rlimit) {
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::debug!(target: "glake::agent", %error, "the limit of open files cannot be changed");
        }
    }

    fn keep_spare(&self) {
        if self.original.current != self.raised.current {
            let spare = std::iter::repeat_with(|| File::open("/dev/null")).take(SPARE).map_while(Result::ok);
            self.spare.replace(spare.collect());
        }
    }

    /// Calls a function under the original limit, which new processes inherit. To change the limit of a process after its start would be
    /// too late: it may have read the limit already. Other threads that need a descriptor meanwhile may get none.
    pub(crate) fn with_original<T>(&self, start: impl FnOnce() -> T) -> T {
        self.spare.take();
        self.set(self.original);
        let started = start();
        self.set(self.raised);
        self.keep_spare();
        started
    }
}

/// Flag of close-on-exec descriptors in `/proc/self/fdinfo`.
const CLOSED_AT_EXEC: u32 = 0o2_000_000;
/// First descriptor that systemd passes.
const FIRST_SOCKET: i32 = 3;

/// Closes all inherited descriptors except the standard streams and the sockets from systemd. Workers would inherit them too: a pipe of the
/// parent would stay open as long as workers run.
///
/// The function closes every descriptor without close-on-exec. Call it at the beginning of a program, before any such descriptor is opened;
/// files of the standard library are close-on-exec.
pub fn close_inherited() {
    let told = |name| env::var(name).ok().and_then(|text| text.parse::<i32>().ok());
    let first = told("LISTEN_FDS_FIRST_FD").unwrap_or(FIRST_SOCKET);
    let sockets = first..first.saturating_add(told("LISTEN_FDS").unwrap_or(0));
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().filter_map(Result::ok);
    let numbers: Vec<i32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let others = numbers.into_iter().filter(|number| *number > 2 && !sockets.contains(number));
    for number in others.filter(|number| is_inherited(*number)) {
        // No code of this process uses the descriptor.
        let _ = nix::unistd::close(number);
    }
}

/// Returns whether a child would inherit the descriptor; false if it was closed meanwhile.
fn is_inherited(number: i32) -> bool {
    let told = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap_or_default();
    let flags =
        told.lines().find_map(|line| u32::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
    flags.is_some_and(|flags| flags & CLOSED_AT_EXEC == 0)
}

/// Opens or creates a file that only this user can access, without following links.
///
/// # Errors
/// The error of the file system.
pub fn open_private(path: &Path) -> io::Result<File> {
    private().truncate(false).write(true).open(path)
}

/// Opens a file like [`open_private`], for appending.
pub(crate) fn append_private(path: &Path) -> io::Result<File> {
    private().append(true).open(path)
}

/// Options of files that only this user can access, without following links.
pub(crate) fn private() -> fs::OpenOptions {
    let flags = i32::try_from(OFlags::NOFOLLOW.bits()).unwrap_or_default();
    let mut options = File::options();
    options.create(true).mode(0o600).custom_flags(flags);
    options
}

/// Replaces a file atomically through a temporary file. Without sync: processes do not survive a loss of power either.
///
/// # Errors
/// The error of the file system; the old file is unchanged.
pub fn write_whole(path: &Path, beside: &Path, bytes: &[u8]) -> io::Result<()> {
    let written = open_private(beside).and_then(|mut file| {
        file.set_len(0)?;
        file.write_all(bytes)
    });
    written.and_then(|()| fs::rename(beside, path)).inspect_err(|_| {
        // Remove the incomplete file.
        let _ = fs::remove_file(beside);
    })
}

/// Reads a file of at most `longest` bytes; `None` if it does not exist.
///
/// # Errors
/// The error of the file system, or the file is too long or not regular.
pub fn read_whole(path: &Path, longest: u64) -> io::Result<Option<Vec<u8>>> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Ok(found) if found.is_file() && found.len() <= longest => {}
        Ok(_) => return Err(io::Error::new(io::ErrorKind::InvalidData, "it is no record")),
        Err(error) => return Err(error),
    }
    fs::read(path).map(Some)
}
