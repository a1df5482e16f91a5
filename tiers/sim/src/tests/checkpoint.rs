//! A process that shares GPUs is checkpointed by another one, and comes back with its bytes.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::sync::mpsc::{Receiver, channel};

use glake_meter::checkpoint::{CheckpointError, ProcessCheckpoint as _, ProcessState, bring_back, put_away};

use super::*;

const SIZE: u64 = 4;
const TEXT: &[u8; 17] = b"what it held then";

/// The process that is checkpointed: it says what its memory holds for each line that it is told.
#[test]
#[ignore = "run by other tests"]
fn the_worker() {
    let Ok(folder) = std::env::var(FOLDER) else { return };
    let shared = Some(folder.into());
    let options =
        SimOptions { topology: small_server(), shared, clock: Clock::Wall, ..SimOptions::default() };
    let sim = Simulator::new(options).unwrap();
    let handle = sim.create(Bytes::mib(SIZE), properties()).unwrap();
    let at = map(&sim, handle, Bytes::mib(SIZE), &[GPU]);
    // SAFETY: nothing else uses the memory.
    unsafe { sim.write_now(GPU, at, TEXT) }.unwrap();
    println!("\nready");
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "hang" => {
                let stream = sim.stream_create(GPU, Priority::Normal).unwrap();
                sim.enqueue_kernel(GPU, stream, &[], &[], Duration::from_millis(400), |_| {}).unwrap();
                println!("\nhangs");
                sim.stream_synchronize(GPU, stream).unwrap();
            }
            _ => {
                let mut found = [0; 17];
                sim.read_now(GPU, at, &mut found).unwrap();
                println!("\nholds {}", String::from_utf8_lossy(&found));
            }
        }
    }
}

struct Worker {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Worker {
    fn start(folder: &Path) -> Worker {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "--nocapture", "tests::checkpoint::the_worker"])
            .env(FOLDER, folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (said, lines) = channel();
        let out: BufReader<ChildStdout> = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            out.lines().map_while(|line| line.ok()).try_for_each(|line| said.send(line))
        });
        let worker = Worker { stdin: child.stdin.take().unwrap(), child, lines };
        worker.hear("ready");
        worker
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    fn hear(&self, what: &str) -> String {
        let limit = Duration::from_secs(30);
        std::iter::from_fn(|| self.lines.recv_timeout(limit).ok())
            .find(|line| line.starts_with(what))
            .unwrap()
    }

    fn is_silent(&self) -> bool {
        let end = Instant::now() + Duration::from_millis(100);
        let mut lines = std::iter::from_fn(|| {
            self.lines.recv_timeout(end.saturating_duration_since(Instant::now())).ok()
        });
        lines.all(|line| !line.starts_with("holds"))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const SECOND: Duration = Duration::from_secs(1);

fn opened(folder: &Path) -> (SimCheckpoint, SimMeter) {
    let checkpoint = SimCheckpoint::open(folder, &small_server()).unwrap();
    (checkpoint, SimMeter::open(folder, &small_server()).unwrap())
}

#[test]
fn a_checkpointed_process_uses_no_memory_blocks_and_is_restored_intact() {
    let folder = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(folder.path());
    let (pid, (driver, meter)) = (worker.child.id(), opened(folder.path()));
    let used = || meter.read("0").unwrap().of_process(pid);
    for _ in 0..3 {
        assert_eq!((driver.state(pid).unwrap(), used()), (ProcessState::Running, Bytes::mib(100 + SIZE)));
        driver.lock(pid, SECOND).unwrap();
        assert_eq!((driver.state(pid).unwrap(), used()), (ProcessState::Locked, Bytes::mib(100 + SIZE)));
        worker.tell("what?");
        assert!(worker.is_silent());
        driver.checkpoint(pid).unwrap();
        assert_eq!((driver.state(pid).unwrap(), used()), (ProcessState::Checkpointed, Bytes::ZERO));
        assert!(worker.is_silent());
        driver.restore(pid).unwrap();
        assert_eq!((driver.state(pid).unwrap(), used()), (ProcessState::Locked, Bytes::mib(100 + SIZE)));
        assert!(worker.is_silent());
        driver.unlock(pid).unwrap();
        assert_eq!(worker.hear("holds"), "holds what it held then");
    }
}

/// As of the driver that it was measured with: once a restore has failed none succeeds.
#[test]
fn a_restore_without_room_loses_a_process() {
    let folder = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(folder.path());
    let (pid, (driver, meter)) = (worker.child.id(), opened(folder.path()));
    put_away(&driver, pid, SECOND).unwrap();
    let other = shared(folder.path());
    let taken = mapped(&other, 900, &[GPU]);
    let refused = driver.restore(pid).unwrap_err();
    assert!(matches!(refused, CheckpointError::NoRoom { .. }), "{refused}");
    assert_eq!(driver.state(pid).unwrap(), ProcessState::Checkpointed);
    // SAFETY: nothing uses the memory.
    unsafe { other.unmap(taken, Bytes::mib(900)) }.unwrap();
    worker.tell("what?");
    for _ in 0..2 {
        let lost = driver.restore(pid).unwrap_err();
        assert!(matches!(lost, CheckpointError::Failed { code: 304, .. }), "{lost}");
        assert!(matches!(bring_back(&driver, pid), Err(CheckpointError::Lost { .. })));
    }
    assert_eq!(driver.state(pid).unwrap(), ProcessState::Checkpointed);
    assert!(worker.is_silent() && meter.read("0").unwrap().of_process(pid).is_zero());
}

#[test]
fn a_running_call_delays_the_lock() {
    let folder = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(folder.path());
    let (pid, (driver, _)) = (worker.child.id(), opened(folder.path()));
    worker.tell("hang");
    worker.hear("hangs");
    std::thread::sleep(Duration::from_millis(20));
    let late = put_away(&driver, pid, Duration::from_millis(50)).unwrap_err();
    assert!(matches!(late, CheckpointError::Late { .. }), "{late}");
    assert_eq!(driver.state(pid).unwrap(), ProcessState::Running);
    put_away(&driver, pid, Duration::from_secs(30)).unwrap();
    bring_back(&driver, pid).unwrap();
    worker.tell("what?");
    assert_eq!(worker.hear("holds"), "holds what it held then");
}

#[test]
fn processes_in_a_wrong_state_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut worker = Worker::start(folder.path());
    let (pid, (driver, meter)) = (worker.child.id(), opened(folder.path()));
    // As a driver tells it.
    let own = std::process::id();
    assert_eq!(driver.state(own).unwrap(), ProcessState::Running);
    assert!(bring_back(&driver, own).is_ok());
    let none = put_away(&driver, own, SECOND).unwrap_err();
    assert!(matches!(none, CheckpointError::NoContext { .. }), "{none}");
    for refused in [driver.checkpoint(pid), driver.restore(pid), driver.unlock(pid)] {
        assert!(matches!(refused, Err(CheckpointError::State { found: ProcessState::Running, .. })));
    }
    // One that dies while it is checkpointed has nothing, and its record is another's.
    put_away(&driver, pid, SECOND).unwrap();
    worker.child.kill().unwrap();
    worker.child.wait().unwrap();
    assert!(matches!(driver.state(pid), Err(CheckpointError::NoContext { .. })));
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(meter.read("0").unwrap().used, Bytes::ZERO);
    let mut next = Worker::start(folder.path());
    next.tell("what?");
    next.hear("holds");
    assert_eq!(driver.state(next.child.id()).unwrap(), ProcessState::Running);
}
