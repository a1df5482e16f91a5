//! Runs `glake bench copy --critical` on the library built for these tests.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use glake::bench::{CopyDirection, CopyMemory, CopyNews, CopyOptions, CriticalReport, critical};
use glake_runtime::backend::Backend;
use glake_runtime::config::Config;
use glake_units::Bytes;

#[test]
fn critical_copies_are_timed_alone_and_beside_others() {
    let backend = Backend::find(&"sim".parse().unwrap()).unwrap();
    let options = CopyOptions {
        directions: vec![CopyDirection::H2d, CopyDirection::D2h],
        memory: vec![CopyMemory::Pool],
        sizes: vec![Bytes::new((8 << 20) + 20)],
        paths: Some(3),
        target: 1,
        runs: 2,
        block: Bytes::kib(16),
        background: Bytes::mib(4),
        library: Some(std::env::current_exe().unwrap().with_file_name("libgmlake.so")),
    };
    let mut reports = Vec::<CriticalReport>::new();
    let done = critical(&backend, &Config::default(), &options, |news| {
        if let CopyNews::Critical(report) = news {
            reports.push(report);
        }
        Ok(())
    });
    done.unwrap();
    let directions: Vec<_> = reports.iter().map(|report| report.direction).collect();
    assert_eq!(directions, [CopyDirection::H2d, CopyDirection::D2h]);
    for report in &reports {
        let CriticalReport { alone_us, alone_p99_us, beside_us, beside_p99_us, .. } = *report;
        assert!(0.0 < alone_us && alone_us <= alone_p99_us, "{report:?}");
        assert!(0.0 < beside_us && beside_us <= beside_p99_us, "{report:?}");
        assert!(report.background_gbps > 0.0 && report.verified && report.target == 1, "{report:?}");
    }
}
