//! Traced test processes, whose system calls are stopped by the test that started them, and disk failures simulated in them: system calls
//! that fail at the process's own request.
//!
//! ```text
//!  test ── starts ──► the same program, one ignored test of it      go, and questions and answers, over its input and output
//!   └──── traces ───► the thread of that test, and those that it starts
//!
//!  process ── Order::new: the 3rd pwrite, EIO ──► Disk     counts calls on files of the directory, by any thread
//!          ── pwrite ───────────── stopped ───►          at its entry its number becomes none, at its exit its result EIO
//!          ── Order::failed? ──── "pwrite" ◄──
//! ```

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use nix::errno::Errno;
use nix::libc::user_regs_struct;
use nix::sys::ptrace::{self, Options};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rustc_hash::FxHashMap;

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

/// Request of a process to fail one of its calls.
pub(crate) struct Order(());

/// Tracer of a process that fails the requested calls.
pub(crate) struct Disk {
    process: Process,
    directory: PathBuf,
    /// Whether the process was told to begin.
    begun: bool,
    ordered: Option<(&'static str, Errno, u32)>,
    /// Call that failed on request.
    failed: Option<&'static str>,
    /// Threads that are in a failing call.
    failing: FxHashMap<Pid, Errno>,
    /// Calls that failed so far.
    all: Vec<(&'static str, Errno)>,
}

/// System calls on files: number on x86-64, name, the argument that identifies the file, and whether the call takes space.
const CALLS: [(u64, &str, Argument, bool); 11] = [
    (1, "write", Argument::Descriptor, true),
    (17, "pread", Argument::Descriptor, false),
    (18, "pwrite", Argument::Descriptor, true),
    (73, "flock", Argument::Descriptor, false),
    (74, "fsync", Argument::Descriptor, true),
    (75, "fdatasync", Argument::Descriptor, true),
    (82, "rename", Argument::Path, true),
    (91, "fchmod", Argument::Descriptor, false),
    (217, "getdents", Argument::Descriptor, false),
    (257, "open", Argument::PathBehind, true),
    (285, "fallocate", Argument::Descriptor, true),
];
const READ: u64 = 0;
/// Invalid call number: the kernel does nothing.
const NONE: u64 = u64::MAX;

#[derive(Clone, Copy)]
enum Argument {
    Descriptor,
    Path,
    PathBehind,
}

/// Returns the calls that may fail with this error.
pub(crate) fn calls(error: Errno) -> impl Iterator<Item = &'static str> {
    let may = move |takes_space: bool| error != Errno::ENOSPC || takes_space;
    CALLS.iter().filter(move |(.., takes_space)| may(*takes_space)).map(|(_, name, ..)| *name)
}

impl Order {
    /// Makes the n-th of these calls fail from now on, on any thread.
    pub(crate) fn new(call: &str, error: Errno, nth: u32) -> Order {
        println!("\norder {call} {} {nth}", error as i32);
        answer();
        Order(())
    }

    /// Withdraws the request. Returns whether a call has failed.
    pub(crate) fn failed(self) -> bool {
        println!("\norder none 0 0");
        !answer().is_empty()
    }
}

impl Disk {
    /// Runs an ignored test of this program on a directory to its end. Returns the calls that failed, with their errors; `None` if this
    /// process may not trace another.
    pub(crate) fn run(test: &str, directory: &Path) -> Option<Vec<(&'static str, Errno)>> {
        let process = Process::start(test, directory);
        match process.seize(Options::PTRACE_O_TRACECLONE) {
            Err(Errno::EPERM) => return None,
            seized => seized.unwrap(),
        }
        let (directory, thread) = (directory.to_path_buf(), process.thread);
        let (begun, ordered, failed, failing, all) = Default::default();
        let mut disk = Disk { process, directory, begun, ordered, failed, failing, all };
        ptrace::syscall(thread, None).unwrap();
        disk.follow();
        Some(disk.all)
    }

    fn follow(&mut self) {
        let own = Pid::from_raw(self.process.child.id().cast_signed());
        loop {
            // Waits only for children of this thread: other tests have their own.
            match waitpid(None, Some(WaitPidFlag::__WALL | WaitPidFlag::__WNOTHREAD)).unwrap() {
                WaitStatus::PtraceSyscall(thread) => self.stopped(thread),
                WaitStatus::PtraceEvent(thread, ..) => proceed(thread, None),
                WaitStatus::Stopped(thread, signal) => proceed(thread, Some(signal)),
                WaitStatus::Exited(process, code) if process == own => {
                    assert_eq!(code, 0, "its test failed");
                    return;
                }
                WaitStatus::Signaled(process, signal, _) if process == own => panic!("{signal}"),
                _ => {}
            }
        }
    }

    /// Handles a thread that is about to make a call, or has made one.
    fn stopped(&mut self, thread: Pid) {
        // The thread may be gone because its process has ended.
        let Ok(mut registers) = ptrace::getregs(thread) else { return };
        if let Some(error) = self.failing.remove(&thread) {
            registers.rax = i64::from(-(error as i32)).cast_unsigned();
            ptrace::setregs(thread, registers).unwrap();
        } else if registers.rax == i64::from(-(Errno::ENOSYS as i32)).cast_unsigned() {
            self.begins(thread, registers);
        }
        proceed(thread, None);
    }

    fn begins(&mut self, thread: Pid, mut registers: user_regs_struct) {
        if (registers.orig_rax, registers.rdi) == (READ, 0) {
            return self.order();
        }
        let Some((call, error, left)) = self.ordered else { return };
        let known = CALLS.iter().find(|(number, name, ..)| *number == registers.orig_rax && *name == call);
        let Some(&(_, _, argument, _)) = known else { return };
        if !self.is_ours(thread, argument, &registers) {
            return;
        }
        if left > 1 {
            self.ordered = Some((call, error, left - 1));
            return;
        }
        registers.orig_rax = NONE;
        ptrace::setregs(thread, registers).unwrap();
        self.failing.insert(thread, error);
        (self.ordered, self.failed) = (None, Some(call));
        self.all.push((call, error));
    }

    /// Handles a request: the process reads its input and waits for an answer.
    fn order(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            return self.process.answer("");
        }
        let line = self.process.wait_for("order ");
        let failed = self.failed.take().unwrap_or_default();
        let fields: Vec<&str> = line.split(' ').collect();
        let [call, error, nth] = fields[..] else { panic!("{line}") };
        let known = CALLS.iter().find(|(_, name, ..)| *name == call);
        let (error, nth) = (Errno::from_raw(error.parse().unwrap()), nth.parse().unwrap());
        self.ordered = known.map(|(_, name, ..)| (*name, error, nth));
        self.process.answer(failed);
    }

    fn is_ours(&self, thread: Pid, argument: Argument, registers: &user_regs_struct) -> bool {
        let path = |from| {
            let mut bytes = [0; 4096];
            let read = File::open(format!("/proc/{thread}/mem")).unwrap().read_at(&mut bytes, from).unwrap();
            let length = bytes[..read].iter().position(|byte| *byte == 0).unwrap_or(read);
            Some(PathBuf::from(std::str::from_utf8(&bytes[..length]).unwrap()))
        };
        let found = match argument {
            Argument::Descriptor => fs::read_link(format!("/proc/{thread}/fd/{}", registers.rdi)).ok(),
            Argument::Path => path(registers.rdi),
            Argument::PathBehind => path(registers.rsi),
        };
        found.is_some_and(|found| found.starts_with(&self.directory))
    }
}

fn proceed(thread: Pid, signal: Option<nix::sys::signal::Signal>) {
    match ptrace::syscall(thread, signal) {
        // The thread is gone because its process has ended.
        Ok(()) | Err(Errno::ESRCH) => {}
        Err(error) => panic!("{error}"),
    }
}
