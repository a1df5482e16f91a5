//! Names of files in the directory, and the processes they belong to.
//!
//! ```text
//!  glake-<pid>-<start>.owner               locked by the process while it is alive
//!  glake-<pid>-<start>-<number>.part       draft being written
//!  glake-<pid>-<start>-<number>.extent     sealed file
//! ```
//!
//! Invariant: an owner counts as ended only if no visible process has its pid and start time *and* its lock can be taken. The start time
//! distinguishes a process from a later one with the same pid. The lock covers processes that are not visible here, such as those of
//! another container that shares the directory.

use std::io;

use glake_meter::ProcessStat;

/// Identity of a process: its pid and start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Owner {
    pid: u32,
    /// Start time in clock ticks since boot.
    start: u64,
}

/// Kind of a file in the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Lock,
    Draft(u64),
    Sealed(u64),
}

impl Owner {
    /// Returns the identity of a running process.
    pub(super) fn of(pid: u32) -> io::Result<Owner> {
        Ok(Owner { pid, start: ProcessStat::of(pid)?.start })
    }

    /// Returns whether the process is running and visible to this one.
    pub(super) fn is_seen(self) -> bool {
        ProcessStat::of(self.pid).is_ok_and(|process| !process.has_ended() && process.start == self.start)
    }

    /// Returns the file name for a kind of file of this process.
    pub(super) fn name(self, kind: Kind) -> String {
        let Owner { pid, start } = self;
        match kind {
            Kind::Lock => format!("glake-{pid}-{start}.owner"),
            Kind::Draft(number) => format!("glake-{pid}-{start}-{number}.part"),
            Kind::Sealed(number) => format!("glake-{pid}-{start}-{number}.extent"),
        }
    }

    /// Parses a file name. Returns `None` for a file that is not of a tier.
    pub(super) fn parse(name: &str) -> Option<(Owner, Kind)> {
        let (stem, extension) = name.strip_prefix("glake-")?.rsplit_once('.')?;
        let mut fields = stem.split('-').map(|field| field.parse::<u64>().ok());
        let (pid, start) = (u32::try_from(fields.next()??).ok()?, fields.next()??);
        let kind = match (fields.next(), extension) {
            (None, "owner") => Kind::Lock,
            (Some(Some(number)), "part") => Kind::Draft(number),
            (Some(Some(number)), "extent") => Kind::Sealed(number),
            _ => return None,
        };
        let owner = Owner { pid, start };
        (owner.name(kind) == name).then_some((owner, kind))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back_and_nothing_else_does() {
        let owner = Owner { pid: 7, start: 99 };
        for kind in [Kind::Lock, Kind::Draft(0), Kind::Sealed(12)] {
            assert_eq!(Owner::parse(&owner.name(kind)), Some((owner, kind)));
        }
        let others = [
            "glake-7-99",
            "glake-7-99.part",
            "glake-7-99-1.owner",
            "glake-7-99-1-2.part",
            "glake-07-99.owner",
            "glake-7--1.owner",
            "glake-x-99.owner",
            "glake-4294967296-1.owner",
            "other-7-99.owner",
            "glake-7-99-1.txt",
        ];
        for other in others {
            assert_eq!(Owner::parse(other), None, "{other}");
        }
    }

    #[test]
    fn a_process_is_told_from_a_later_one_of_its_number() {
        let this = Owner::of(std::process::id()).unwrap();
        assert!(this.is_seen());
        assert!(!Owner { start: this.start + 1, ..this }.is_seen());
        assert!(!Owner { pid: u32::MAX, ..this }.is_seen());
    }
}
