//! Disks that fail at every call that a file is written or read by: an error that says what to do, nothing left, and the same again
//! succeeds.

use nix::errno::Errno;

use super::*;
use crate::traced::{self, Disk, Order};

const LENGTH: usize = (2 << 20) + 5;

/// Writes a file and reads it back; whoever could not read it does so again.
fn write_and_read(directory: &Path) -> Result<()> {
    let tier = FileTier::open(directory)?;
    let ours = bytes(LENGTH);
    let mut draft = tier.create(Bytes::new(LENGTH as u64))?;
    draft.write(&ours)?;
    let file = draft.seal()?;
    let mut theirs = vec![0; LENGTH];
    let read = file.read(Bytes::ZERO, &mut theirs);
    if read.is_err() {
        assert!(matches!(read, Err(FileError::Unread { .. })), "{read:?}");
        file.read(Bytes::ZERO, &mut theirs)?;
    }
    assert!(theirs == ours);
    read
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Not a test: what the one below starts.
#[test]
#[ignore = "the process that the test beside it starts"]
fn user() {
    let Some(directory) = traced::directory() else { return };
    traced::begin();
    write_and_read(&directory).unwrap();
    let before = descriptors();
    let all = [Errno::EIO, Errno::ENOSPC].map(|error| traced::calls(error).map(move |call| (call, error)));
    for (call, error) in all.into_iter().flatten() {
        for nth in 1.. {
            let order = Order::new(call, error, nth);
            let outcome = write_and_read(&directory);
            let failed = order.failed();
            assert_eq!(failed, outcome.is_err(), "{call} {error} {nth}: {outcome:?}");
            assert_eq!(fs::read_dir(&directory).unwrap().count(), 0, "{call} {error} {nth}: {outcome:?}");
            assert_eq!(descriptors(), before, "{call} {error} {nth}: {outcome:?}");
            let Err(found) = outcome else { break };
            let text = found.to_string();
            let full = matches!(found, FileError::DiskFull { .. });
            assert!(full || text.contains(&std::io::Error::from(error).to_string()), "{text}");
            assert!(["choose", "again"].iter().any(|advice| text.contains(advice)), "{text}");
            write_and_read(&directory).unwrap();
        }
    }
}

#[test]
fn a_disk_that_fails_at_any_call() {
    let root = tempfile::tempdir().unwrap();
    let Some(failed) = Disk::run("file::tests::broken::user", &root.path().join("extents")) else {
        return eprintln!("skipped: this process may not trace another");
    };
    let with = |error| failed.iter().filter(move |(_, found)| *found == error).map(|(call, _)| *call);
    for call in ["open", "getdents", "flock", "fallocate", "pwrite", "fchmod", "fsync", "rename", "pread"] {
        assert!(with(Errno::EIO).any(|found| found == call), "{call}: {failed:?}");
    }
    for call in ["fallocate", "pwrite"] {
        assert!(with(Errno::ENOSPC).any(|found| found == call), "{call}: {failed:?}");
    }
    eprintln!("failed at {failed:?}");
}
