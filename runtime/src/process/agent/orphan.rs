//! Lock by which workers that wait for memory without an agent take it one after the other.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};

/// Exclusive turn among all workers that lost the agent of a socket; ends on drop.
#[derive(Debug)]
pub(super) struct Turn {
    file: File,
}

impl Turn {
    /// Takes the turn; `None` if another worker has it.
    ///
    /// # Errors
    /// The operating system's error; no worker can take a turn then.
    pub(super) fn take(socket: &Path) -> std::io::Result<Option<Turn>> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".orphans");
        let path = PathBuf::from(path);
        let flags = OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::RDWR;
        let file = File::from(open(&path, flags, Mode::RUSR | Mode::WUSR)?);
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Turn { file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // A child forked meanwhile also has the file open and must not keep the lock.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_the_turn() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let turn = Turn::take(&socket).unwrap().unwrap();
        assert!(Turn::take(&socket).unwrap().is_none());
        drop(turn);
        assert!(Turn::take(&socket).unwrap().is_some());
        assert!(Turn::take(Path::new("/nowhere/agent.sock")).is_err());
    }
}
