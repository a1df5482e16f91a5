//! The process that a command is about, as `/proc` tells of it: whose it is, and whether its driver's state can be
//! taken away and brought back.
//!
//! What is found by what: see [`Obstacle`].

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Maximum length of a file that holds a process ID.
const LONGEST_NUMBER: u64 = 32;

/// A process that lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    root: PathBuf,
    pub(crate) pid: u32,
    /// User ID of the owner.
    pub(crate) uid: u32,
    /// Start time in clock ticks since boot.
    pub(crate) start: u64,
}

/// Obstacle to checkpointing a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// A child that uses a GPU, by the meter: the driver checkpoints one process, and the child shares its memory or
    /// waits for it.
    Child { pid: u32 },
    /// NCCL communicators, detected by a segment in `/dev/shm` or a thread of torch's process group. The mapped library proves nothing:
    /// torch always maps it.
    Nccl { found: String },
    /// The daemon of MPS, in the folder that its environment names or in the default one.
    Mps { daemon: u32 },
    /// Unreadable file that would reveal obstacles.
    Unread { path: PathBuf, error: String },
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Child { pid } => {
                write!(f, "its child {pid} uses a GPU too: end it first, or leave both where they are")
            }
            Obstacle::Nccl { found } => write!(
                f,
                "it has communicators of NCCL ({found}), whose memory other GPUs and processes have open: destroy them \
                 first (torch.distributed.destroy_process_group())"
            ),
            Obstacle::Mps { daemon } => write!(
                f,
                "it runs under MPS (daemon {daemon}), which the driver does not checkpoint: start it without MPS"
            ),
            Obstacle::Unread { path, error } => write!(
                f,
                "whether it uses NCCL or MPS is not known, for {} cannot be read ({error}): ask as root",
                path.display()
            ),
        }
    }
}

impl Target {
    /// A process by its id; none: there is no such process, or it has ended.
    pub(crate) fn of(root: &Path, pid: u32) -> Option<Target> {
        let (start, _) = stat(root, pid)?;
        let status = fs::read_to_string(root.join(format!("{pid}/status"))).ok()?;
        let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
        // Real, effective, saved, of the file system: the driver looks at the effective one.
        let uid = uids.split_whitespace().nth(1)?.parse().ok()?;
        Some(Target { root: root.to_owned(), pid, uid, start })
    }

    /// Returns an obstacle to checkpointing the process, or to finding out. `users` are the processes that use GPUs.
    pub(crate) fn obstacle(&self, users: &BTreeSet<u32>) -> Option<Obstacle> {
        let child = self.descendants().into_iter().find(|pid| users.contains(pid));
        if let Some(pid) = child {
            return Some(Obstacle::Child { pid });
        }
        match (self.nccl(), self.mps()) {
            (Ok(nccl), Ok(mps)) => nccl.or(mps),
            (Ok(Some(nccl)), Err(_)) => Some(nccl),
            (Err(unread), _) | (_, Err(unread)) => Some(unread),
        }
    }

    /// Its children, and theirs.
    fn descendants(&self) -> BTreeSet<u32> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().filter_map(Result::ok);
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let parents: Vec<(u32, u32)> = pids.filter_map(|pid| Some((pid, stat(&self.root, pid)?.1))).collect();
        let mut found = BTreeSet::from([self.pid]);
        loop {
            let more: Vec<u32> = parents
                .iter()
                .filter(|(pid, parent)| found.contains(parent) && !found.contains(pid))
                .map(|(pid, _)| *pid)
                .collect();
            if more.is_empty() {
                found.remove(&self.pid);
                return found;
            }
            found.extend(more);
        }
    }

    fn nccl(&self) -> Result<Option<Obstacle>, Obstacle> {
        let own = self.root.join(self.pid.to_string());
        let maps = read(own.join("maps"))?;
        let maps = String::from_utf8_lossy(&maps);
        let segment =
            maps.lines().find_map(|line| line.find("/dev/shm/nccl-").map(|at| line[at..].to_owned()));
        let tasks = own.join("task");
        let threads = fs::read_dir(&tasks).map_err(|error| unread(tasks, &error))?;
        // A thread may end meanwhile.
        let names = threads.filter_map(|thread| fs::read(thread.ok()?.path().join("comm")).ok());
        let mut names = names.map(|name| String::from_utf8_lossy(&name).into_owned());
        let mut thread = || names.find(|name| name.starts_with("pt_nccl") || name.starts_with("NCCL "));
        let found = segment.or_else(|| thread().map(|name| format!("thread {}", name.trim_end())));
        Ok(found.map(|found| Obstacle::Nccl { found }))
    }

    fn mps(&self) -> Result<Option<Obstacle>, Obstacle> {
        let own = self.root.join(self.pid.to_string());
        let environment = read(own.join("environ"))?;
        let named = environment.split(|byte| *byte == 0).find_map(|variable| {
            let folder = variable.strip_prefix(b"CUDA_MPS_PIPE_DIRECTORY=")?;
            Some(PathBuf::from(OsStr::from_bytes(folder)))
        });
        let folder = named.unwrap_or_else(|| PathBuf::from("/tmp/nvidia-mps"));
        let Some(daemon) = number_in(&folder.join("nvidia-cuda-mps-control.pid"))? else { return Ok(None) };
        let name = fs::read_to_string(self.root.join(format!("{daemon}/comm")));
        // What is left of one that has ended is nobody's.
        let is_mps = name.is_ok_and(|name| name.starts_with("nvidia-cuda-mps"));
        Ok(is_mps.then_some(Obstacle::Mps { daemon }))
    }
}

fn unread(path: PathBuf, error: &io::Error) -> Obstacle {
    Obstacle::Unread { path, error: error.to_string() }
}

fn read(path: PathBuf) -> Result<Vec<u8>, Obstacle> {
    fs::read(&path).map_err(|error| unread(path, &error))
}

/// The number that a small file holds; none: there is no such file. Its name is whatever somebody has written in their
/// environment, and may be a device's.
fn number_in(path: &Path) -> Result<Option<u32>, Obstacle> {
    let is_file = |found: &fs::Metadata| found.is_file() && found.len() <= LONGEST_NUMBER;
    let open = || -> io::Result<Option<u32>> {
        if !is_file(&fs::symlink_metadata(path)?) {
            return Ok(None);
        }
        let flags = i32::try_from((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits()).unwrap_or_default();
        let file = fs::File::options().read(true).custom_flags(flags).open(path)?;
        if !is_file(&file.metadata()?) {
            return Ok(None);
        }
        let mut text = Vec::new();
        file.take(LONGEST_NUMBER).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).trim().parse().ok())
    };
    match open() {
        Ok(number) => Ok(number),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(unread(path.to_owned(), &error)),
    }
}

/// Returns start time and parent of a process; `None` if it has ended.
fn stat(root: &Path, pid: u32) -> Option<(u64, u32)> {
    let text = fs::read_to_string(root.join(format!("{pid}/stat"))).ok()?;
    // The name, in parentheses, may hold anything.
    let (_, fields) = text.rsplit_once(") ")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let has_ended = matches!(fields.first(), Some(&("Z" | "X" | "x")));
    (!has_ended).then_some((fields.get(19)?.parse().ok()?, fields.get(1)?.parse().ok()?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // also in the functions that tests call
mod tests {
    use super::*;

    /// A folder as `/proc` is, which goes when the test does.
    struct Proc(PathBuf);

    impl Proc {
        fn new(name: &str) -> Proc {
            let folder = std::env::temp_dir().join(format!("glake-target-{}-{name}", std::process::id()));
            fs::create_dir_all(&folder).unwrap();
            Proc(folder)
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn process(&self, pid: u32, parent: u32, state: &str) {
            let rest = vec!["0"; 17].join(" ");
            self.file(
                &format!("{pid}/stat"),
                &format!("{pid} (a) b) c) {state} {parent} {rest} {} 0", pid * 10),
            );
            self.file(&format!("{pid}/status"), "Name:\ta\nUid:\t1\t2\t3\t4\n");
            self.file(&format!("{pid}/maps"), "");
            self.file(&format!("{pid}/environ"), "");
            self.file(&format!("{pid}/task/{pid}/comm"), "a\n");
        }
    }

    impl Drop for Proc {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_process_is_whose_it_is_and_when_it_started() {
        let own = Target::of(Path::new("/proc"), std::process::id()).unwrap();
        assert_eq!(own.uid, rustix::process::geteuid().as_raw());
        assert_eq!(own.obstacle(&BTreeSet::from([own.pid])), None);
        let proc = Proc::new("whose");
        proc.process(7, 1, "S");
        proc.process(8, 1, "Z");
        let found = Target::of(&proc.0, 7).unwrap();
        assert_eq!((found.uid, found.start), (2, 70));
        assert_eq!(Target::of(&proc.0, 8), None);
        assert_eq!(Target::of(&proc.0, 9), None);
    }

    #[test]
    fn children_that_use_a_gpu_are_found_however_deep() {
        let proc = Proc::new("children");
        for (pid, parent) in [(7, 1), (8, 7), (9, 8), (10, 1)] {
            proc.process(pid, parent, "S");
        }
        let target = Target::of(&proc.0, 7).unwrap();
        assert_eq!(target.obstacle(&BTreeSet::from([7, 10])), None);
        let found = target.obstacle(&BTreeSet::from([7, 9])).unwrap();
        assert_eq!(
            found.to_string(),
            "its child 9 uses a GPU too: end it first, or leave both where they are"
        );
    }

    #[test]
    fn nccl_is_found_by_what_it_made_and_not_by_its_library() {
        let proc = Proc::new("nccl");
        proc.process(7, 1, "S");
        proc.file("7/maps", "7f00-7f01 r-xp 00000000 00:00 1 /usr/lib/libnccl.so.2\n");
        proc.file("7/task/8/comm", "python\n");
        let target = Target::of(&proc.0, 7).unwrap();
        assert_eq!(target.obstacle(&BTreeSet::new()), None);
        proc.file("7/task/9/comm", "pt_nccl_watchdg\n");
        let found = "thread pt_nccl_watchdg".to_owned();
        assert_eq!(target.obstacle(&BTreeSet::new()), Some(Obstacle::Nccl { found }));
        proc.file("7/maps", "7f00-7f01 rw-s 00000000 00:00 1 /dev/shm/nccl-hCsKIf (deleted)\n");
        let found = "/dev/shm/nccl-hCsKIf (deleted)".to_owned();
        assert_eq!(target.obstacle(&BTreeSet::new()), Some(Obstacle::Nccl { found }));
    }

    #[test]
    fn mps_is_found_by_its_daemon_while_that_lives() {
        let proc = Proc::new("mps");
        proc.process(7, 1, "S");
        let folder = proc.0.join("mps");
        proc.file("7/environ", &format!("A=b\0CUDA_MPS_PIPE_DIRECTORY={}\0", folder.display()));
        let target = Target::of(&proc.0, 7).unwrap();
        assert_eq!(target.obstacle(&BTreeSet::new()), None);
        proc.file("mps/nvidia-cuda-mps-control.pid", "55");
        assert_eq!(target.obstacle(&BTreeSet::new()), None);
        proc.file("55/comm", "nvidia-cuda-mps\n");
        assert_eq!(target.obstacle(&BTreeSet::new()), Some(Obstacle::Mps { daemon: 55 }));
        // What could be read for ever, or is too long, is no number.
        let pid_file = proc.0.join("mps/nvidia-cuda-mps-control.pid");
        proc.file("mps/nvidia-cuda-mps-control.pid", &format!("55{}", " ".repeat(40)));
        assert_eq!(target.obstacle(&BTreeSet::new()), None);
        fs::remove_file(&pid_file).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &pid_file).unwrap();
        assert_eq!(target.obstacle(&BTreeSet::new()), None);
    }

    #[test]
    fn what_cannot_be_read_is_an_obstacle() {
        for gone in ["maps", "environ", "task"] {
            let proc = Proc::new(&format!("unread-{gone}"));
            proc.process(7, 1, "S");
            let target = Target::of(&proc.0, 7).unwrap();
            assert_eq!(target.obstacle(&BTreeSet::new()), None);
            fs::rename(proc.0.join("7").join(gone), proc.0.join("gone")).unwrap();
            let found = target.obstacle(&BTreeSet::new());
            assert!(matches!(found, Some(Obstacle::Unread { .. })), "{gone}: {found:?}");
        }
    }
}
