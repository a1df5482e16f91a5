//! Runs `glake bench alloc` on the library built for these tests.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use std::path::PathBuf;

use glake::bench::{AllocOptions, AllocReport, alloc};
use glake_runtime::backend::Backend;
use glake_runtime::config::Config;

fn library() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libgmlake.so")
}

#[test]
fn hits_call_no_driver_and_allocate_nothing() {
    let backend = Backend::find(&"sim".parse().unwrap()).unwrap();
    let options = AllocOptions {
        trace: None,
        live_blocks: 10_000,
        free_ranges: 1_000,
        streams: vec![1, 3],
        pairs: 5_000,
        library: Some(library()),
    };
    let reports = alloc(backend, &Config::default(), &options).unwrap();
    assert_eq!(reports.iter().map(|report| report.streams).collect::<Vec<_>>(), [1, 3]);
    for report in reports {
        assert_eq!(report.live_blocks, 10_000, "{report:?}");
        // Of 100,000 pairs with several streams a few miss: what is free lies with other streams, and is joined.
        let most = if report.streams == 1 { 0 } else { 50 };
        assert!(report.driver_calls <= most && report.heap_allocations <= most, "{report:?}");
        let AllocReport { pair_ns, pool_pair_ns, ordered_set_pair_ns, free_ranges, .. } = report;
        assert!(
            pair_ns > 0.0 && pool_pair_ns > 0.0 && ordered_set_pair_ns > 0.0 && free_ranges > 0,
            "{report:?}"
        );
    }
}
