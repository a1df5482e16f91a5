//! Identity of processes. Process IDs are reused; the start time distinguishes a process from later ones with its ID.

use std::{fs, io};

/// Status of a process, read from `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessStat {
    /// State letter of the kernel.
    state: char,
    /// Process ID of the parent; 0: none in this namespace.
    pub parent: u32,
    /// Process group ID; 0: none.
    pub group: u32,
    /// Start time in clock ticks since boot.
    pub start: u64,
}

impl ProcessStat {
    /// Reads the status of a process, also of a zombie.
    ///
    /// # Errors
    /// Errors of reading: `NotFound` or `ESRCH` if there is no such process, `InvalidData` for an unknown format.
    pub fn of(pid: u32) -> io::Result<ProcessStat> {
        let told = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        ProcessStat::parse(&told).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Parses fields 3, 4, 5 and 22 of `proc_pid_stat(5)`. The second field, the command's name, may contain anything, including parentheses
    /// and blanks.
    fn parse(told: &str) -> Option<ProcessStat> {
        let (_, fields) = told.rsplit_once(')')?;
        let mut fields = fields.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        // The process group is 0 while the process is exiting.
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse::<i32>().ok()?;
        let group = u32::try_from(group).unwrap_or(0);
        let start = fields.nth(16)?.parse().ok()?;
        Some(ProcessStat { state, parent, group, start })
    }

    /// Returns whether the process is a zombie.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }

    /// Returns whether the process is stopped by a signal or a debugger, or blocked in the kernel, and cannot respond.
    pub fn is_stopped(&self) -> bool {
        matches!(self.state, 'T' | 't' | 'D')
    }
}

/// Returns the name of a process's command, as the kernel cuts it (15 bytes); `None` if there is no such process in this namespace. A program
/// may give itself any name.
pub fn process_name(pid: u32) -> Option<String> {
    let name = fs::read(format!("/proc/{pid}/comm")).ok()?;
    Some(String::from_utf8_lossy(&name).trim_end_matches('\n').to_owned())
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn names_do_not_confuse() {
        let told = "12 (a) b (c)) S 1 7 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21";
        let found = ProcessStat::parse(told).unwrap();
        assert_eq!(
            (found.parent, found.group, found.start, found.has_ended(), found.is_stopped()),
            (1, 7, 4711, false, false)
        );
        assert!(ProcessStat::parse(&told.replace(") S", ") Z")).unwrap().has_ended());
        assert!(ProcessStat::parse(&told.replace(") S", ") T")).unwrap().is_stopped());
        assert_eq!(
            ProcessStat::parse(&told.replace("S 1 7", "X 0 -1")).map(|found| (found.group, found.start)),
            Some((0, 4711))
        );
        for short in ["", "12", "12 (short)", "12 (short) S 1", "12 (a) S 1 7 x"] {
            assert_eq!(ProcessStat::parse(short), None, "{short:?}");
        }
    }

    #[test]
    fn a_child_that_nobody_waits_for_has_ended_and_is_then_no_more() {
        let mut child = Command::new("true").stdin(Stdio::null()).spawn().unwrap();
        let pid = child.id();
        while !ProcessStat::of(pid).unwrap().has_ended() {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert_eq!(ProcessStat::of(pid).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(ProcessStat::of(u32::MAX).is_err());
        assert_eq!(process_name(u32::MAX), None);
    }
}
