//! Records of the memory that processes had when they were checkpointed, stored next to the agent's socket. A restore requires that much
//! free memory, by the meter: a driver that lacks memory for a restore does not restore the process later.
//!
//! ```text
//! checkpoint ─► write ─► the driver is asked ─► it did not: remove
//! restore    ─► read, room? ─► the driver is asked ─► it runs: remove
//! ```
//!
//! Invariant: a process checkpointed by this command has a record until it is known to run. Records of ended processes are removed by the
//! next command that reads them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fmt, io};

use glake_agent::{ListenError, check_folder, open_private, private_folder, read_whole, write_whole};
use glake_meter::Meter;
use glake_units::Bytes;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::target::Target;

/// File name prefix, followed by process ID and start time.
const PREFIX: &str = "checkpoint-";
/// Interval of polling for the end of another restore.
const LOOK: Duration = Duration::from_millis(20);
/// Maximum size of a record in bytes.
const LONGEST: u64 = 64 << 10;

/// Folder of the records, accessible by this user only.
#[derive(Debug)]
pub(crate) struct Records {
    folder: PathBuf,
}

/// Memory of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Bytes per GPU, by the meter's name.
    pub(crate) gpus: BTreeMap<String, Bytes>,
}

impl Records {
    /// Opens the records next to a socket and creates the folder if necessary.
    pub(crate) fn open(socket: &Path) -> Result<Records, ListenError> {
        let folder = folder_of(socket)?;
        private_folder(folder)?;
        Ok(Records { folder: folder.to_owned() })
    }

    /// Opens the records next to a socket without creating the folder.
    pub(crate) fn find(socket: &Path) -> Result<Records, ListenError> {
        let folder = folder_of(socket)?;
        check_folder(folder)?;
        Ok(Records { folder: folder.to_owned() })
    }

    fn path(&self, target: &Target) -> PathBuf {
        self.folder.join(format!("{PREFIX}{}-{}.json", target.pid, target.start))
    }

    /// Writes the record of a process atomically.
    pub(crate) fn write(&self, target: &Target, record: &Record) -> io::Result<()> {
        let path = self.path(target);
        write_whole(&path, &path.with_extension("new"), &serde_json::to_vec(record)?)
    }

    /// Reads the record of a process; `None` if it has none.
    pub(crate) fn read(&self, target: &Target) -> io::Result<Option<Record>> {
        let bytes = read_whole(&self.path(target), LONGEST)?;
        Ok(bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose()?)
    }

    /// Removes the record of a process that runs or was not checkpointed.
    pub(crate) fn remove(&self, target: &Target) {
        // One that stays says what it had, and goes with its process.
        let _ = fs::remove_file(self.path(target));
    }

    /// Removes the records of processes that have ended.
    pub(crate) fn sweep(&self) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().filter_map(Result::ok) {
            let name = entry.file_name();
            let Some((pid, start)) = name.to_str().and_then(process_of) else { continue };
            let lives = Target::of(Path::new("/proc"), pid).is_some_and(|target| target.start == start);
            if !lives {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Locks restores until the file is closed, since two that check for free memory at once would both use it. `None` if another one did
    /// not end within the timeout.
    pub(crate) fn turn(&self, within: Duration) -> io::Result<Option<File>> {
        let until = Instant::now() + within;
        let file = open_private(&self.folder.join("checkpoint.lock"))?;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Some(file)),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(LOOK),
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn folder_of(socket: &Path) -> Result<&Path, ListenError> {
    let folder = socket.parent().filter(|_| socket.is_absolute());
    folder.ok_or_else(|| ListenError::Relative(socket.to_owned()))
}

/// Parses process ID and start time from a file name.
fn process_of(name: &str) -> Option<(u32, u64)> {
    let (name, extension) = name.strip_prefix(PREFIX)?.rsplit_once('.')?;
    let (pid, start) = name.split_once('-')?;
    matches!(extension, "json" | "new").then_some((pid.parse().ok()?, start.parse().ok()?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // also in the functions that tests call
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    fn own() -> Target {
        Target::of(Path::new("/proc"), std::process::id()).unwrap()
    }

    fn record(mib: u64) -> Record {
        Record { gpus: [("0000:07:00.0".to_owned(), Bytes::mib(mib))].into() }
    }

    #[test]
    fn a_record_is_its_process_s_until_it_is_removed_and_nobody_else_s() {
        let base = tempfile::tempdir().unwrap();
        let socket = base.path().join("glake/agent.sock");
        assert!(Records::find(&socket).is_err());
        let records = Records::open(&socket).unwrap();
        let (own, path) = (own(), records.path(&own()));
        assert_eq!(records.read(&own).unwrap(), None);
        for mib in [680, 640] {
            records.write(&own, &record(mib)).unwrap();
            assert_eq!(Records::find(&socket).unwrap().read(&own).unwrap(), Some(record(mib)));
        }
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        fs::write(&path, "{\"gpus\": [").unwrap();
        assert!(records.read(&own).is_err());
        records.remove(&own);
        assert_eq!(records.read(&own).unwrap(), None);
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        assert!(records.read(&own).is_err());
    }

    #[test]
    fn records_of_the_dead_go_and_nothing_else_does() {
        let base = tempfile::tempdir().unwrap();
        let records = Records::open(&base.path().join("glake/agent.sock")).unwrap();
        let own = own();
        let other = |name: &str| fs::write(records.folder.join(name), "{}").unwrap();
        records.write(&own, &record(1)).unwrap();
        let earlier = format!("checkpoint-{}-{}.json", own.pid, own.start + 1);
        let gone = [earlier.as_str(), "checkpoint-4194305-7.json", "checkpoint-4194305-7.new"];
        let kept = ["agent.journal", "checkpoint.lock", "checkpoint-x-7.json", "checkpoint-4194305-7.txt"];
        gone.iter().chain(&kept).for_each(|name| other(name));
        records.sweep();
        assert!(gone.iter().all(|name| !records.folder.join(name).exists()));
        assert!(kept.iter().all(|name| records.folder.join(name).exists()));
        assert_eq!(records.read(&own).unwrap(), Some(record(1)));
    }

    #[test]
    fn one_restore_at_a_time() {
        let base = tempfile::tempdir().unwrap();
        let records = Records::open(&base.path().join("glake/agent.sock")).unwrap();
        let first = records.turn(Duration::ZERO).unwrap();
        assert!(first.is_some() && records.turn(Duration::from_millis(30)).unwrap().is_none());
        drop(first);
        assert!(records.turn(Duration::ZERO).unwrap().is_some());
    }

    #[test]
    fn a_folder_that_others_reach_is_refused() {
        let base = tempfile::tempdir().unwrap();
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let refused = Records::open(&base.path().join("agent.sock")).unwrap_err().to_string();
        assert!(refused.contains("has mode 0755"), "{refused}");
        assert!(matches!(Records::open(Path::new("agent.sock")), Err(ListenError::Relative(_))));
    }
}

/// Minimum free memory in addition to that of the process; a fraction of larger amounts.
const MARGIN: Bytes = Bytes::mib(64);
const PART: u64 = 20;

/// Reason not to attempt a restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// A GPU lacks free memory.
    Short { gpu: String, free: Bytes, needed: Bytes },
    /// GPU whose free memory is unknown.
    Unread { gpu: String, error: String },
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NoRoom::Short { gpu, free, needed } => {
                write!(f, "GPU {gpu} has {free} free, and {needed} are needed")
            }
            NoRoom::Unread { gpu, error } => {
                write!(f, "what is free of GPU {gpu} cannot be read: {error}")
            }
        }
    }
}

/// Checks that each GPU has room for the memory that the process had there; without a record, that each GPU has `otherwise` free.
pub(crate) fn look(meter: &dyn Meter, record: Option<&Record>, otherwise: Bytes) -> Result<(), NoRoom> {
    let needs: Vec<(String, Bytes)> = match record {
        Some(record) => record.gpus.iter().map(|(gpu, had)| (gpu.clone(), with_margin(*had))).collect(),
        None => meter.gpus().into_iter().map(|gpu| (gpu, otherwise)).collect(),
    };
    if needs.is_empty() {
        let (gpu, error) = ("?".to_owned(), "the meter knows none".to_owned());
        return Err(NoRoom::Unread { gpu, error });
    }
    for (gpu, needed) in needs {
        let free = match meter.read(&gpu) {
            Ok(memory) => memory.free(),
            Err(error) => return Err(NoRoom::Unread { gpu, error: error.to_string() }),
        };
        if free < needed {
            return Err(NoRoom::Short { gpu, free, needed });
        }
    }
    Ok(())
}

fn with_margin(had: Bytes) -> Bytes {
    had.saturating_add(MARGIN.max(Bytes::new(had.get() / PART)))
}

#[cfg(test)]
mod room_tests {
    use glake_meter::{GpuMemory, MeterError};

    use super::*;

    /// Two GPUs, with so many MiB free.
    struct Two([u64; 2]);

    impl Meter for Two {
        fn gpus(&self) -> Vec<String> {
            vec!["0".to_owned(), "1".to_owned()]
        }
        fn read(&self, gpu: &str) -> Result<GpuMemory, MeterError> {
            let unknown = || MeterError::Unknown { gpu: gpu.to_owned(), known: self.gpus() };
            let place = self.gpus().iter().position(|known| known == gpu).ok_or_else(unknown)?;
            let (total, reserved) = (Bytes::gib(80), Bytes::mib(512));
            let used = total.saturating_sub(reserved).saturating_sub(Bytes::mib(self.0[place]));
            Ok(GpuMemory { total, used, reserved, processes: Vec::new() })
        }
    }

    fn record(gpu: &str, mib: u64) -> Record {
        Record { gpus: [(gpu.to_owned(), Bytes::mib(mib))].into() }
    }

    #[test]
    fn what_it_had_and_a_margin_has_to_be_free() {
        for (had, needed) in [(680, 744), (1280, 1344), (2000, 2100), (0, 64)] {
            assert_eq!(look(&Two([needed, 0]), Some(&record("0", had)), Bytes::ZERO), Ok(()), "{had}");
            let short = look(&Two([needed - 1, 0]), Some(&record("0", had)), Bytes::ZERO);
            let (free, needed) = (Bytes::mib(needed - 1), Bytes::mib(needed));
            assert_eq!(short, Err(NoRoom::Short { gpu: "0".to_owned(), free, needed }));
        }
    }

    #[test]
    fn without_a_record_each_gpu_has_to_have_so_much() {
        assert_eq!(look(&Two([1024, 1024]), None, Bytes::gib(1)), Ok(()));
        let short = look(&Two([4096, 1023]), None, Bytes::gib(1));
        assert!(matches!(short, Err(NoRoom::Short { gpu, .. }) if gpu == "1"));
    }

    #[test]
    fn what_cannot_be_read_is_no_room() {
        let unread = look(&Two([4096, 4096]), Some(&record("7", 640)), Bytes::ZERO).unwrap_err();
        assert_eq!(
            unread.to_string(),
            "what is free of GPU 7 cannot be read: GPU 7 is not known: there are 0, 1"
        );
        let empty = look(&Two([4096, 4096]), Some(&Record::default()), Bytes::ZERO);
        assert!(matches!(empty, Err(NoRoom::Unread { .. })));
    }
}
