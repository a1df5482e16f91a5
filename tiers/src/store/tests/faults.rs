//! What fails on the way: an error that says so, one good copy of every extent, and both directions go on.

use std::process::{Command, Stdio};

use glake_device::{Fault, Injected, Verb, When};
use rustix::process::{Resource, getrlimit, setrlimit};

use super::*;
use crate::{FileError, FileStep, HostError};

/// Every extent has one good copy.
pub(super) fn assert_sound(fixture: &Fixture) {
    fixture.pool.check().unwrap();
    fixture.peer.check().unwrap();
    assert!(
        fixture.residencies().iter().all(|residency| !residency.is_moving()),
        "{:?}",
        fixture.residencies()
    );
}

pub(super) fn stopped(error: RegionError) -> RegionError {
    match error {
        RegionError::Stopped { source, .. } => *source,
        other => panic!("{other}"),
    }
}

#[test]
fn a_copy_that_fails_at_any_extent_of_any_store() {
    for (to, verb) in ALL.into_iter().flat_map(|to| [(to, Verb::Copy), (to, Verb::StreamSynchronize)]) {
        for way_out in [true, false] {
            let failures = (1..).take_while(|nth| fails(to, verb, way_out, *nth)).count();
            assert!(failures >= 4, "{to:?} {verb:?}: every extent has a copy");
        }
    }
}

/// Whether the n-th call failed, and so the way on which it was made.
fn fails(to: To, verb: Verb, way_out: bool, nth: u64) -> bool {
    // A budget for small slots, so that an extent is several copies.
    let budget = if to == To::File { Bytes::mib(5) } else { Bytes::MAX };
    let mut fixture = fixture_of(Harness { budget, ..Harness::default() });
    fixture.furnish();
    if !way_out {
        fixture.shrink(to, true).unwrap();
    }
    fixture.faults.set(&[Fault { verb: Some(verb), when: When::Nth(nth), error: Injected::Failed(1) }]);
    let outcome = if way_out { fixture.shrink(to, true).map(drop) } else { fixture.refill(true).map(drop) };
    fixture.faults.set(&[]);
    let failed = outcome.is_err();
    if let Err(error) = outcome {
        let source = stopped(error);
        assert!(matches!(source, RegionError::Move { .. }), "{to:?}: {source}");
    }
    assert_sound(&fixture);
    // On from there, the one way or the other.
    if nth.is_multiple_of(2) {
        fixture.shrink(to, true).unwrap();
        assert_eq!(fixture.used(GPU), Bytes::ZERO);
    }
    fixture.refill(true).unwrap();
    assert_eq!(fixture.wrong_bytes(), 0, "{to:?} {verb:?} {nth}");
    fixture.assert_no_copies();
    fixture.end();
    failed
}

#[test]
fn a_budget_that_ends_in_the_middle() {
    let mut fixture = fixture_of(Harness { budget: Bytes::mib(10), ..Harness::default() });
    fixture.furnish();
    let other = fixture.host.take(Bytes::mib(2)).unwrap();
    let source = stopped(fixture.shrink(To::Host, true).unwrap_err());
    assert!(matches!(source, RegionError::Host(HostError::OverBudget { .. })), "{source}");
    assert_sound(&fixture);
    let out = fixture.residencies().iter().filter(|found| matches!(found, Residency::Evicted { .. })).count();
    assert!(out > 0 && out < fixture.residencies().len());
    // There is no slot either, until somebody gives memory back.
    let rest: Vec<_> = std::iter::from_fn(|| fixture.host.take(Bytes::kib(512)).ok()).collect();
    let source = stopped(fixture.shrink(To::File, true).unwrap_err());
    assert!(matches!(source, RegionError::Host(HostError::OverBudget { .. })), "{source}");
    drop((other, rest));
    fixture.shrink(To::File, true).unwrap();
    assert_eq!(fixture.used(GPU), Bytes::ZERO);
    fixture.refill(true).unwrap();
    assert_eq!(fixture.wrong_bytes(), 0);
    fixture.end();
}

#[test]
fn host_memory_that_cannot_be_pinned() {
    for when in [When::Nth(1), When::Nth(2), When::From(1), When::From(3)] {
        let mut fixture = fixture();
        fixture.furnish();
        fixture.faults.set(&[Fault { verb: Some(Verb::HostRegister), when, error: Injected::Failed(304) }]);
        let outcome = fixture.shrink(To::Host, false);
        fixture.faults.set(&[]);
        match outcome {
            // Pinned ahead, it was not; who took it pinned it.
            Ok(_) => assert!(matches!(when, When::Nth(_))),
            Err(error) => {
                let source = stopped(error);
                assert!(matches!(source, RegionError::Host(HostError::PinRefused { .. })), "{source}");
            }
        }
        assert_sound(&fixture);
        fixture.shrink(To::Host, false).unwrap();
        fixture.refill(false).unwrap();
        assert_eq!(fixture.wrong_bytes(), 0);
        fixture.end();
    }
}

#[test]
fn two_pages_of_host_memory_are_enough_for_files() {
    let mut fixture = fixture_of(Harness { budget: Bytes::mib(2), ..Harness::default() });
    fixture.furnish();
    fixture.shrink(To::File, true).unwrap();
    assert!(fixture.host.statistics().pinned <= Bytes::mib(2));
    fixture.refill(true).unwrap();
    assert_eq!(fixture.wrong_bytes(), 0);
    fixture.end();
}

#[test]
fn a_peer_that_is_full() {
    let mut fixture = fixture();
    fixture.furnish();
    fixture.peer.set_memory_fraction(8.0 / 64.0);
    let source = stopped(fixture.shrink(To::Peer, true).unwrap_err());
    let RegionError::Peer { device: GPU, peer: PEER, size, .. } = source else { panic!("{source}") };
    assert!(size <= EXTENT && source.to_string().contains("host or to files"), "{source}");
    assert_sound(&fixture);
    assert!(fixture.residencies().contains(&Residency::Evicted { at: Place::Peer(PEER) }));
    fixture.shrink(To::Host, true).unwrap();
    assert_eq!(fixture.used(GPU), Bytes::ZERO);
    fixture.refill(true).unwrap();
    assert_eq!(fixture.wrong_bytes(), 0);
    fixture.assert_no_copies();
    fixture.end();
}

/// A small file system in memory, unmounted at the end.
struct Mount(TempDir);

impl Mount {
    fn new(size: &str) -> Option<Mount> {
        let root = tempfile::tempdir().unwrap();
        let options = format!("size={size},mode=0700");
        let mut mount = Command::new("mount");
        let mount = mount.args(["-t", "tmpfs", "-o", &options, "glake-test"]).arg(root.path());
        let done = mount.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
        done.then_some(Mount(root))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_disk_that_is_full() {
    let Some(mount) = Mount::new("10m") else {
        return eprintln!("skipped: this process may not mount a tmpfs");
    };
    let mut fixture = fixture_of(Harness { directory: Some(mount.0.path()), ..Harness::default() });
    fixture.furnish();
    let source = stopped(fixture.shrink(To::File, true).unwrap_err());
    assert!(matches!(source, RegionError::File(FileError::DiskFull { .. })), "{source}");
    assert_sound(&fixture);
    let out = fixture.residencies().iter().filter(|found| matches!(found, Residency::Evicted { .. })).count();
    // How much went before the disk was full is a matter of turns: on a machine that is busy it may be nothing.
    assert_eq!(fixture.files.statistics().files, out as u64, "no half file is left");
    fixture.shrink(To::Host, true).unwrap();
    assert_eq!(fixture.used(GPU), Bytes::ZERO);
    fixture.refill(true).unwrap();
    assert_eq!(fixture.wrong_bytes(), 0);
    fixture.end();
}

#[test]
fn a_file_that_cannot_be_given_its_name() {
    let mut fixture = fixture();
    fixture.furnish();
    let (path, aside) = (fixture.files.path().to_path_buf(), fixture.root.path().join("aside"));
    let (from, to) = (path.clone(), aside.clone());
    let mut copies = 0;
    // Each extent is one copy here: the third one's file has no directory when it is sealed.
    fixture.meddle(move |_| {
        copies += 1;
        if copies == 3 {
            std::fs::rename(&from, &to)?;
        }
        Ok(())
    });
    let source = stopped(fixture.shrink(To::File, true).unwrap_err());
    let failed =
        matches!(&source, RegionError::File(FileError::Io { step: FileStep::Rename | FileStep::Open, .. }));
    assert!(failed, "{source}");
    std::fs::rename(&aside, &path).unwrap();
    *fixture.mover.meddle.lock() = None;
    assert_sound(&fixture);
    fixture.shrink(To::File, true).unwrap();
    fixture.refill(true).unwrap();
    assert_eq!(fixture.wrong_bytes(), 0);
    // What could not be removed is there for the next owner.
    for entry in std::fs::read_dir(&path).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|end| end != "owner") {
            std::fs::remove_file(path).unwrap();
        }
    }
    fixture.end();
}

/// Set in the process that [`a_disk_that_does_not_write`] starts.
const LIMITED: &str = "GLAKE_TEST_STORE_LIMITED";

/// The limit of the process falls while a file is written: the kernel then writes no byte past it.
#[test]
fn a_disk_that_does_not_write() {
    if std::env::var_os(LIMITED).is_none() {
        let own = "store::tests::faults::a_disk_that_does_not_write";
        let mut shell = Command::new("bash");
        shell.args(["-c", "trap '' XFSZ; exec \"$0\" --exact \"$1\""]).arg(std::env::current_exe().unwrap());
        let output = shell.arg(own).env(LIMITED, "1").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        return;
    }
    let mut fixture = fixture_of(Harness { budget: Bytes::mib(3), ..Harness::default() });
    // One extent: a file that is begun after the limit fell would be refused at once.
    fixture.add(EXTENT);
    let before = getrlimit(Resource::Fsize);
    let mut copies = 0;
    fixture.meddle(move |_| {
        copies += 1;
        if copies == 2 {
            let limit = rustix::process::Rlimit { current: Some(1 << 20), ..getrlimit(Resource::Fsize) };
            setrlimit(Resource::Fsize, limit)?;
        }
        Ok(())
    });
    let source = stopped(fixture.shrink(To::File, true).unwrap_err());
    let step = match &source {
        RegionError::File(FileError::Io { step, .. }) => *step,
        other => panic!("{other}"),
    };
    assert_eq!(step, FileStep::Write);
    assert_sound(&fixture);
    setrlimit(Resource::Fsize, before).unwrap();
    *fixture.mover.meddle.lock() = None;
    assert_eq!(fixture.wrong_bytes(), 0);
    fixture.shrink(To::File, true).unwrap();
    fixture.refill(true).unwrap();
    assert_eq!(fixture.wrong_bytes(), 0);
    fixture.end();
}
