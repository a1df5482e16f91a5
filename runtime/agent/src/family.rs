//! Processes of one start: the process that the agent started, and its descendants.
//!
//! They are recognized by their process group, which is the first process's number, and by the start number in their environment: a
//! launcher gives ranks their own groups, and a program that sets a process title overwrites its environment. A process that hides both
//! ways is not found.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

use glake_meter::ProcessStat;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// Environment variable with the number of the start.
pub(crate) const MARK: &str = "GLAKE_START";

/// Identification of the processes of a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Family {
    /// Number of the start.
    pub(crate) mark: String,
    /// Process group of the first process; `None` if unknown or possibly reused.
    pub(crate) group: Option<u32>,
}

impl Family {
    /// Returns the living processes, each with a pidfd.
    pub(crate) fn members(&self) -> Vec<(u32, OwnedFd)> {
        let own = std::process::id();
        let entries = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| *pid != own && self.has(*pid))
            .filter_map(|pid| {
                let pidfd = pidfd_open(Pid::from_raw(i32::try_from(pid).ok()?)?, PidfdFlags::empty()).ok()?;
                // After the descriptor: its number may have gone to another one before.
                self.has(pid).then_some((pid, pidfd))
            })
            .collect()
    }

    /// Sends a signal to all living processes and returns their pidfds.
    pub(crate) fn signal(&self, signal: Signal) -> Vec<OwnedFd> {
        let members = self.members();
        for (_, pidfd) in &members {
            // It may have ended meanwhile.
            let _ = pidfd_send_signal(pidfd, signal);
        }
        members.into_iter().map(|(_, pidfd)| pidfd).collect()
    }

    /// Finds the process that the agent started by the start number alone: the leader of its group.
    pub(crate) fn leader(&self) -> Option<(u32, u64)> {
        let pids = self.members().into_iter().map(|(pid, _)| pid);
        let mut known = pids.into_iter().filter_map(|pid| Some((pid, ProcessStat::of(pid).ok()?)));
        known.find(|(pid, process)| process.group == *pid).map(|(pid, process)| (pid, process.start))
    }

    fn has(&self, pid: u32) -> bool {
        let running = ProcessStat::of(pid).ok().filter(|process| !process.has_ended());
        running.is_some_and(|process| self.group == Some(process.group) || self.is_marked(pid))
    }

    fn is_marked(&self, pid: u32) -> bool {
        let wanted = format!("{MARK}={}", self.mark);
        // Of another user's it cannot be read.
        let environment =
            fs::read(Path::new("/proc").join(pid.to_string()).join("environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| variable == wanted.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Starts a process with a child in its group and another child in another group with the same environment.
    fn started(mark: &str, script: &str) -> (Child, Family) {
        let mut command = Command::new("sh");
        command
            .args(["-c", script])
            .env(MARK, mark)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let child = command.spawn().unwrap();
        let family = Family { mark: mark.to_owned(), group: Some(child.id()) };
        (child, family)
    }

    fn ready(child: &mut Child) {
        let mut byte = [0; 1];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut byte).unwrap();
    }

    #[test]
    fn those_of_a_group_and_those_with_the_number_are_found_and_no_other() {
        let mark = format!("{}-a", std::process::id());
        let (mut child, family) = started(&mark, "env -i sleep 100 & setsid sleep 100 & echo; wait");
        ready(&mut child);
        let (mut other, _) = started(&format!("{mark}-other"), "echo; exec sleep 100");
        ready(&mut other);
        let count = |family: &Family| family.members().len();
        // A child may not have got as far as its program.
        while count(&Family { group: None, ..family.clone() }) != 2 || count(&family) != 3 {
            std::thread::yield_now();
        }
        assert_eq!(family.leader().map(|(pid, _)| pid), Some(child.id()));
        let deaths = family.signal(Signal::KILL);
        assert_eq!(deaths.len(), 3);
        child.wait().unwrap();
        while count(&family) > 0 {
            std::thread::yield_now();
        }
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
