//! Snapshots that torch wrote are traces: `snapshot.pickle` has every shape that the reader knows (`make_snapshot.py` writes it),
//! `torch-2.11.pickle.gz` is a real one.

#![allow(clippy::unwrap_used)]

use std::path::Path;

use glake_replay::baselines::Caching;
use glake_replay::trace::Trace;
use glake_replay::{Report, Setting, replay};
use glake_units::Bytes;

fn replayed(name: &str) -> Report {
    let trace = Trace::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)).unwrap();
    replay(&trace, &mut Caching::new(Bytes::MAX), &Setting::default(), None, &mut |_| Ok(())).unwrap().report
}

/// Dumped by torch 2.11 on an H200 after a dozen steps of a small model on two streams; torch reported 786,432,000 bytes
/// reserved and 754,254,336 allocated at most.
#[test]
fn a_snapshot_of_a_real_torch_replays_to_what_torch_reported() {
    let report = replayed("torch-2.11.pickle.gz");
    let (reserved, live) = (report.reserved_peak.get(), report.active_peak.get());
    assert!(reserved.abs_diff(786_432_000) <= 786_432_000 / 33, "{reserved} reserved");
    assert!(live.abs_diff(754_254_336) <= 754_254_336 / 33, "{live} live");
}

#[test]
fn a_torch_snapshot_replays() {
    let report = replayed("snapshot.pickle");
    assert_eq!((report.trace.as_str(), report.allocations, report.ooms), ("snapshot", 6, 0));
}
