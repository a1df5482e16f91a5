//! Disks that fail at every call of a shrink to files and of the refill: an error that says what to do, one good copy of every extent,
//! and the same again succeeds.

use nix::errno::Errno;

use super::faults::{assert_sound, stopped};
use super::*;
use crate::FileError;
use crate::traced::{self, Disk, Order};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// How many extents are where.
fn count(fixture: &Fixture, residency: Residency) -> usize {
    fixture.residencies().into_iter().filter(|found| *found == residency).count()
}

/// The files that there are: those of extents that are evicted or interrupted, and no other.
fn assert_files(fixture: &Fixture, expected: usize) {
    assert_eq!(fixture.files.statistics().files, expected as u64);
    assert_eq!(std::fs::read_dir(fixture.files.path()).unwrap().count(), expected + 1, "and the lock");
}

/// Whether a call of a shrink failed. Whatever did, all bytes are out in the end.
fn shrinks(fixture: &Fixture, call: &str, error: Errno, nth: u32) -> bool {
    let before = descriptors();
    let checked = nth.is_multiple_of(3);
    let order = Order::new(call, error, nth);
    let outcome = fixture.shrink(To::File, checked);
    let failed = order.failed();
    assert_eq!(failed, outcome.is_err(), "{call} {error} {nth}: {outcome:?}");
    assert_sound(fixture);
    let out = count(fixture, Residency::Evicted { at: Place::File });
    assert_eq!(out + count(fixture, Residency::NEW), fixture.residencies().len());
    assert_files(fixture, out);
    assert_eq!(descriptors(), before + out);
    if let Err(told) = outcome {
        let text = told.to_string();
        assert!(text.contains("no bytes are lost") && text.contains("choose"), "{text}");
        let source = stopped(told);
        let expected = matches!(source, RegionError::File(FileError::Io { .. } | FileError::DiskFull { .. }));
        assert!(expected, "{source}");
        fixture.shrink(To::File, checked).unwrap();
    }
    assert_eq!(fixture.used(GPU), Bytes::ZERO);
    fixture.refill(checked).unwrap();
    assert_eq!(fixture.wrong_bytes(), 0, "{call} {error} {nth}");
    failed
}

/// Whether a call of a refill failed. Whatever did, all bytes are back in the end.
fn refills(fixture: &Fixture, nth: u32) -> bool {
    let checked = nth.is_multiple_of(3);
    fixture.shrink(To::File, checked).unwrap();
    let order = Order::new("pread", Errno::EIO, nth);
    let outcome = fixture.refill(checked);
    let failed = order.failed();
    assert_eq!(failed, outcome.is_err(), "{nth}: {outcome:?}");
    assert_sound(fixture);
    if let Err(told) = outcome {
        let text = told.to_string();
        assert!(text.contains("refill again") && text.contains("from their source"), "{text}");
        let RegionError::Unread { source: FileError::Unread { path, .. }, .. } = told else {
            panic!("{told}")
        };
        assert!(path.exists(), "the file stays");
        assert_files(fixture, 1);
        let there =
            (count(fixture, Residency::Interrupted { at: Place::File }), count(fixture, Residency::NEW));
        assert_eq!(there, (1, fixture.residencies().len() - 1), "the others are back");
        if nth.is_multiple_of(2) {
            // Out again, the one from its file.
            fixture.shrink(To::File, checked).unwrap();
            assert_eq!(fixture.used(GPU), Bytes::ZERO);
        }
        fixture.refill(checked).unwrap();
    }
    assert_eq!(fixture.wrong_bytes(), 0, "{nth}");
    fixture.assert_no_copies();
    failed
}

/// Not a test: what the one below starts.
#[test]
#[ignore = "the process that the test beside it starts"]
fn user() {
    let Some(directory) = traced::directory() else { return };
    let mut fixture =
        fixture_of(Harness { directory: Some(&directory), budget: Bytes::mib(6), ..Harness::default() });
    for kib in [4096, 1536, 1000, 3] {
        fixture.add(Bytes::kib(kib));
    }
    fixture.shrink(To::File, true).unwrap();
    fixture.refill(true).unwrap();
    traced::begin();
    let all = [Errno::EIO, Errno::ENOSPC].map(|error| traced::calls(error).map(move |call| (call, error)));
    for (call, error) in all.into_iter().flatten() {
        (1..).take_while(|nth| shrinks(&fixture, call, error, *nth)).for_each(drop);
    }
    assert!((1..).take_while(|nth| refills(&fixture, *nth)).count() >= 6, "every page");
    fixture.end();
}

#[test]
fn a_disk_that_fails_at_any_call() {
    let root = tempfile::tempdir().unwrap();
    let Some(failed) = Disk::run("store::tests::broken::user", &root.path().join("extents")) else {
        return eprintln!("skipped: this process may not trace another");
    };
    for call in ["open", "fallocate", "pwrite", "fsync", "rename"] {
        for error in [Errno::EIO, Errno::ENOSPC] {
            let count = failed.iter().filter(|found| **found == (call, error)).count();
            assert!(count >= 3, "{call} of every extent: {failed:?}");
        }
    }
    eprintln!("failed at {} calls: {failed:?}", failed.len());
}
