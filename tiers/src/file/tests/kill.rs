//! Processes that are killed at every step of a write. A step is a system call: the parent stops the writer before its n-th one
//! and kills it there, for every n.

use nix::errno::Errno;
use nix::sys::ptrace::{self, Options};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::*;
use crate::traced::{self, Process};

/// The numbers of system calls on x86-64.
const READ: u32 = 0;
const PWRITE: u32 = 18;
const FSYNC: u32 = 74;
const RENAME: u32 = 82;
const FALLOCATE: u32 = 285;
const LENGTH: usize = (2 << 20) + 5;

/// Not a test: what the others start.
#[test]
#[ignore = "the process that the tests beside it start"]
fn writer() {
    let Some(directory) = traced::directory() else { return };
    traced::begin();
    let tier = FileTier::open(&directory).unwrap();
    let file = sealed(&tier, &bytes(LENGTH));
    println!("\nsealed");
    let _ = std::io::stdin().lines().next();
    drop(file);
}

fn start(directory: &Path) -> Process {
    Process::start("file::tests::kill::writer", directory)
}

/// Runs a writer up to its n-th system call, and kills it there. The number of that call; `None` where it held its file by then.
fn killed_at(mut writer: Process, directory: &Path, calls: usize) -> nix::Result<Option<u32>> {
    writer.seize(Options::empty())?;
    writer.answer("go");
    let mut stops = 0;
    loop {
        ptrace::syscall(writer.thread, None)?;
        match waitpid(writer.thread, Some(WaitPidFlag::__WALL))? {
            WaitStatus::PtraceSyscall(_) => stops += 1,
            other => panic!("{other:?}"),
        }
        // Entry and exit.
        if stops == 2 * calls + 1 {
            let call = call(writer.thread);
            let ended = call == (READ, 0) && is_sealed(directory);
            writer.child.kill().unwrap();
            // The process ends when its tracer has been told of the thread's end.
            waitpid(writer.thread, Some(WaitPidFlag::__WALL))?;
            writer.child.wait().unwrap();
            return Ok((!ended).then_some(call.0));
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
fn a_writer_killed_at_any_call_leaves_nothing_that_looks_whole_and_is_not() {
    let (mut killed, mut whole, mut made) = (0, 0, Vec::new());
    for calls in 0.. {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("extents");
        let call = match killed_at(start(&directory), &directory, calls) {
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
    let mut writer = start(&directory);
    writer.answer("go");
    writer.wait_for("sealed");
    let tier = FileTier::open(&directory).unwrap();
    assert_eq!(tier.collected(), Collected::default());
    assert!(is_whole(&directory) && names(&tier).len() == 3);
    writer.child.kill().unwrap();
    writer.child.wait().unwrap();
    assert_eq!(tier.collect().unwrap().files, 1);
    assert_eq!(names(&tier).len(), 1);
}
