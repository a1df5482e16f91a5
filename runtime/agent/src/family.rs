//! The processes of one start: what the agent started, and whatever that started.
//!
//! They are known by their process group, which is the first one's number, and by the number of the start in their
//! environment: a launcher gives ranks groups of their own, and a program that shows a title writes it over its
//! environment. One that hides both ways is not found.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

use glake_meter::ProcessStat;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// The variable that has the number of the start.
pub(crate) const MARK: &str = "GLAKE_START";

/// A start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Family {
    /// Its number.
    pub(crate) mark: String,
    /// The group of its first process, where that is known, and cannot be another one's by now.
    pub(crate) group: Option<u32>,
}

impl Family {
    /// Those that live, each with what tells of its death.
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

    /// Asks all that live to end, or ends them. Answers what tells of their deaths.
    pub(crate) fn signal(&self, signal: Signal) -> Vec<OwnedFd> {
        let members = self.members();
        for (_, pidfd) in &members {
            // It may have ended meanwhile.
            let _ = pidfd_send_signal(pidfd, signal);
        }
        members.into_iter().map(|(_, pidfd)| pidfd).collect()
    }

    /// The process that the agent started, by the start's number alone: it leads its group.
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

    /// A process whose children are of its group, and one of another group with the same environment.
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
