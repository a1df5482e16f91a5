//! Processes that are killed while a region's bytes are in files, or on their way: what is left is nobody's, and the next owner of the
//! directory removes it.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout, Command, Stdio};

use super::*;

const DIRECTORY: &str = "GLAKE_TEST_STORE_DIRECTORY";
/// How many copies are begun before the process waits to be killed.
const COPIES: &str = "GLAKE_TEST_STORE_COPIES";

/// Not a test: what the one below starts.
#[test]
#[ignore = "the process that the test beside it starts"]
fn shrinker() {
    let (Some(directory), Ok(copies)) = (std::env::var_os(DIRECTORY), std::env::var(COPIES)) else { return };
    let (directory, mut copies) = (Path::new(&directory), copies.parse::<u32>().unwrap());
    let (policy, host_copy, budget) = (Policy::Sealed, CopyPolicy::Retain, Bytes::mib(4));
    let mut bed = bed_of(Ground { policy, host_copy, budget, directory: Some(directory) });
    bed.furnish();
    bed.region.seal(false).unwrap();
    bed.meddle(move |copied| {
        if copies == 0 {
            println!("\nat {}", if copied[0].0.device().is_some() { "a copy in" } else { "a copy out" });
            loop {
                std::thread::park();
            }
        }
        copies -= 1;
        Ok(())
    });
    bed.shrink(To::File, true).unwrap();
    bed.refill(true).unwrap();
    println!("\nat the end");
    loop {
        std::thread::park();
    }
}

fn start(directory: &Path, copies: u32) -> (Child, std::io::Lines<BufReader<ChildStdout>>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "store::tests::kill::shrinker", "--ignored", "--nocapture"]);
    command.env(DIRECTORY, directory).env(COPIES, copies.to_string()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

#[test]
fn what_a_killed_process_leaves_is_collected_and_never_used() {
    let mut seen = Vec::new();
    for copies in 0..100 {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("extents");
        let (mut child, mut lines) = start(&directory, copies);
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
    assert!(
        ["a copy out", "a copy in", "the end"].iter().all(|at| seen.iter().any(|(found, _)| found == at))
    );
    eprintln!("killed at {seen:?}");
}
