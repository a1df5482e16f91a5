//! Traced test processes, whose system calls are stopped by the test that started them.
//!
//! ```text
//!  test ── starts ──► the same program, one ignored test of it      go, and questions and answers, over its input and output
//!   └──── traces ───► the thread of that test, and those that it starts
//! ```

mod disk;

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use nix::sys::ptrace::{self, Options};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

pub(crate) use disk::{Disk, Order, calls};

/// Variable that passes the directory to the started process.
const DIRECTORY: &str = "GLAKE_TEST_DIRECTORY";

/// Process that a test has started.
pub(crate) struct Process {
    pub(crate) child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// Thread that runs the ignored test.
    pub(crate) thread: Pid,
}

impl Process {
    /// Starts an ignored test of this program, up to its [`begin`].
    pub(crate) fn start(test: &str, directory: &Path) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--ignored", "--nocapture"]);
        command.env(DIRECTORY, directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut process = Process { child, lines, thread: Pid::from_raw(0) };
        process.thread = Pid::from_raw(process.wait_for("thread ").parse().unwrap());
        process
    }

    /// Returns the rest of its next line with this prefix.
    pub(crate) fn wait_for(&mut self, prefix: &str) -> String {
        let found = self.lines.find_map(|line| line.unwrap().strip_prefix(prefix).map(str::to_owned));
        found.unwrap()
    }

    /// Answers its pending question.
    pub(crate) fn answer(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Stops its thread from now on at each entry and exit of a system call.
    pub(crate) fn seize(&self, options: Options) -> nix::Result<()> {
        let options = options | Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_EXITKILL;
        ptrace::seize(self.thread, options)?;
        ptrace::interrupt(self.thread)?;
        waitpid(self.thread, Some(WaitPidFlag::__WALL)).map(drop)
    }
}

/// Reports the test's thread to the starting process, and waits for its permission to go on.
pub(crate) fn begin() {
    let link = std::fs::read_link("/proc/thread-self").unwrap();
    println!("\nthread {}", link.file_name().unwrap().to_str().unwrap());
    answer();
}

/// Returns the next line from the starting process.
fn answer() -> String {
    std::io::stdin().lines().next().unwrap().unwrap()
}

/// Returns the working directory of a started process; `None` in a process that no test has started.
pub(crate) fn directory() -> Option<PathBuf> {
    std::env::var_os(DIRECTORY).map(Into::into)
}
