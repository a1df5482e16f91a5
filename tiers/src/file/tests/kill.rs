//! Processes that are killed at every step of a write. A step is a system call: the parent stops the writer before its n-th one
//! and kills it there, for every n.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::*;

/// The directory, in the process that writes.
const DIRECTORY: &str = "GLAKE_TEST_WRITER";
/// The numbers of system calls on x86-64.
const READ: u32 = 0;
const PWRITE: u32 = 18;
const FSYNC: u32 = 74;
const RENAME: u32 = 82;
const FALLOCATE: u32 = 285;
const LENGTH: usize = (2 << 20) + 5;

/// A process that writes one file, and holds it.
struct Writer {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    thread: Pid,
}

/// Not a test: what the others start.
#[test]
#[ignore = "the process that the tests beside it start"]
fn writer() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let link = fs::read_link("/proc/thread-self").unwrap();
    println!("\nthread {}", link.file_name().unwrap().to_str().unwrap());
    std::io::stdin().lines().next().unwrap().unwrap();
    let tier = FileTier::open(Path::new(&directory)).unwrap();
    let file = sealed(&tier, &bytes(LENGTH));
    println!("\nsealed");
    let _ = std::io::stdin().lines().next();
    drop(file);
}

impl Writer {
    fn start(directory: &Path) -> Writer {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "file::tests::kill::writer", "--ignored", "--nocapture"]);
        command.env(DIRECTORY, directory).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut writer = Writer { child, lines, thread: Pid::from_raw(0) };
        let thread = writer.wait_for("thread ").parse().unwrap();
        writer.thread = Pid::from_raw(thread);
        writer
    }

    fn wait_for(&mut self, prefix: &str) -> String {
        let found = self.lines.find_map(|line| line.unwrap().strip_prefix(prefix).map(str::to_owned));
        found.unwrap()
    }

    fn go(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Runs the writer up to its n-th system call, and kills it there. The number of that call; `None` where the writer held
    /// its file by then.
    fn kill_at(mut self, directory: &Path, calls: usize) -> nix::Result<Option<u32>> {
        ptrace::seize(self.thread, ptrace::Options::PTRACE_O_TRACESYSGOOD)?;
        ptrace::interrupt(self.thread)?;
        waitpid(self.thread, Some(WaitPidFlag::__WALL))?;
        self.go();
        let mut stops = 0;
        loop {
            ptrace::syscall(self.thread, None)?;
            match waitpid(self.thread, Some(WaitPidFlag::__WALL))? {
                WaitStatus::PtraceSyscall(_) => stops += 1,
                other => panic!("{other:?}"),
            }
            // Entry and exit.
            if stops == 2 * calls + 1 {
                let call = call(self.thread);
                let ended = call == (READ, 0) && is_sealed(directory);
                self.child.kill().unwrap();
                // The process ends when its tracer has been told of the thread's end.
                waitpid(self.thread, Some(WaitPidFlag::__WALL))?;
                self.child.wait().unwrap();
                return Ok((!ended).then_some(call.0));
            }
        }
    }
}

/// What a thread that is stopped is about to call, and the first argument.
fn call(thread: Pid) -> (u32, u64) {
    let call = fs::read_to_string(format!("/proc/{thread}/syscall")).unwrap();
    let mut fields = call.split_ascii_whitespace();
    let argument =
        fields.clone().nth(1).and_then(|hex| u64::from_str_radix(hex.trim_start_matches("0x"), 16).ok());
    (fields.next().unwrap().parse().unwrap(), argument.unwrap())
}

fn is_sealed(directory: &Path) -> bool {
    fs::read_dir(directory).is_ok_and(|mut entries| {
        entries.any(|entry| entry.unwrap().path().extension().is_some_and(|extension| extension == "extent"))
    })
}

/// What a reader finds: whether there is a file that looks whole. Its bytes are then compared.
fn is_whole(directory: &Path) -> bool {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let mut whole = false;
    for path in entries.map(|entry| entry.unwrap().path()) {
        let Ok(contents) = Contents::open(&path) else { continue };
        let mut theirs = vec![0; LENGTH];
        contents.read(Bytes::ZERO, &mut theirs).unwrap();
        assert!(theirs == bytes(LENGTH), "{}", path.display());
        whole |= path.extension().is_some_and(|extension| extension == "extent");
    }
    whole
}

#[test]
#[cfg_attr(not(target_arch = "x86_64"), ignore = "the numbers of the calls are others")]
fn a_writer_killed_at_any_call_leaves_nothing_that_looks_whole_and_is_not() {
    let (mut killed, mut whole, mut made) = (0, 0, Vec::new());
    for calls in 0.. {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("extents");
        let call = match Writer::start(&directory).kill_at(&directory, calls) {
            Err(Errno::EPERM) => return eprintln!("skipped: this process may not trace another"),
            answer => answer.unwrap(),
        };
        killed += 1;
        let found = is_whole(&directory);
        assert!(found || whole == 0, "it was whole one call earlier: {calls}");
        whole += usize::from(found);
        let next = FileTier::open(&directory).unwrap();
        assert_eq!(names(&next).len(), 1, "all of the dead one's is collected: {calls}, {:?}", names(&next));
        let Some(call) = call else { break };
        made.push(call);
    }
    assert!(killed > 20 && whole > 2 && whole < killed, "{whole} of {killed}");
    // What a loss of power leaves is not tested, but the order that it depends on.
    let durable = [FALLOCATE, PWRITE, FSYNC, RENAME];
    made.retain(|call| durable.contains(call));
    made.dedup();
    assert_eq!(made, [FALLOCATE, PWRITE, FSYNC, RENAME, FSYNC]);
    eprintln!("killed at {killed} system calls; in the last {whole} the file was whole");
}

#[test]
fn the_files_of_a_living_process_stay() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("extents");
    let mut writer = Writer::start(&directory);
    writer.go();
    writer.wait_for("sealed");
    let tier = FileTier::open(&directory).unwrap();
    assert_eq!(tier.collected(), Collected::default());
    assert!(is_whole(&directory) && names(&tier).len() == 3);
    writer.kill();
    assert_eq!(tier.collect().unwrap().files, 1);
    assert_eq!(names(&tier).len(), 1);
}
