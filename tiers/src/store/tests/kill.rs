//! Processes that are killed while a region's bytes are in files, or on their way: what is left is nobody's, and the next owner of the
//! directory removes it.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

use glake_device::Address;
use parking_lot::Mutex;

use super::*;

const DIRECTORY: &str = "GLAKE_TEST_STORE_DIRECTORY";
/// How many steps are taken before the process waits to be killed: copies begun, extents mapped, extents about to be unmapped.
const STEPS: &str = "GLAKE_TEST_STORE_STEPS";

/// Steps that are left. None are counted before the first shrink.
#[derive(Debug, Default)]
struct Steps(Mutex<Option<u32>>);

impl Steps {
    fn take(&self, at: &str) {
        let Some(left) = &mut *self.0.lock() else { return };
        if *left == 0 {
            println!("\nat {at}");
            loop {
                std::thread::park();
            }
        }
        *left -= 1;
    }
}

impl MappingObserver for Steps {
    fn mapped(&self, _: DeviceId, _: Address, _: Bytes) {
        self.take("a mapping");
    }

    fn unmapping(&self, _: DeviceId, _: Address, _: Bytes) {
        self.take("a release");
    }
}

/// Not a test: what the one below starts.
#[test]
#[ignore = "the process that the test beside it starts"]
fn shrinker() {
    let (Some(directory), Ok(count)) = (std::env::var_os(DIRECTORY), std::env::var(STEPS)) else { return };
    let directory = Some(Path::new(&directory));
    let (policy, host_copy, budget) = (Policy::Sealed, CopyPolicy::Retain, Bytes::mib(4));
    let steps = Arc::new(Steps::default());
    let observer: Option<Arc<dyn MappingObserver>> = Some(steps.clone());
    let mut fixture =
        fixture_of(Harness { policy, host_copy, budget, directory, observer, ..Harness::default() });
    fixture.furnish();
    fixture.region.seal(false).unwrap();
    *steps.0.lock() = Some(count.parse().unwrap());
    fixture.meddle(move |copied| {
        steps.take(if copied[0].0.device().is_some() { "a copy in" } else { "a copy out" });
        Ok(())
    });
    fixture.shrink(To::File, true).unwrap();
    fixture.refill(true).unwrap();
    println!("\nat the end");
    loop {
        std::thread::park();
    }
}

fn start(directory: &Path, steps: u32) -> (Child, std::io::Lines<BufReader<ChildStdout>>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "store::tests::kill::shrinker", "--ignored", "--nocapture"]);
    command.env(DIRECTORY, directory).env(STEPS, steps.to_string()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

#[test]
fn what_a_killed_process_leaves_is_collected_and_never_used() {
    let mut seen = Vec::new();
    for steps in 0..200 {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("extents");
        let (mut child, mut lines) = start(&directory, steps);
        let at = lines.find_map(|line| line.unwrap().strip_prefix("at ").map(str::to_owned)).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let left = std::fs::read_dir(&directory).unwrap().count();
        let tier = FileTier::open(&directory).unwrap();
        assert_eq!(tier.collected().files, left as u64 - 1, "all but its lock: {at}");
        assert_eq!(tier.statistics(), FileStatistics::default());
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 1, "the new lock");
        let ended = at == "the end";
        seen.push((at, tier.collected().files));
        if ended {
            break;
        }
    }
    let most = seen.iter().map(|(_, files)| *files).max();
    assert!(most >= Some(4), "{seen:?}");
    let all = ["a copy out", "a release", "a mapping", "a copy in", "the end"];
    assert!(all.iter().all(|at| seen.iter().any(|(found, _)| found == at)), "{seen:?}");
    eprintln!("killed at {seen:?}");
}
