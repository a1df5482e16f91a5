//! Runs `glake bench copy` on the library built for these tests.

#![allow(clippy::unwrap_used)] // also in the functions that tests call

use glake::bench::{CopyDirection, CopyMemory, CopyNews, CopyOptions, CopyReport, copy};
use glake_runtime::backend::Backend;
use glake_runtime::config::Config;
use glake_units::Bytes;

#[test]
fn every_memory_is_copied_over_several_links_and_compared() {
    let backend = Backend::find(&"sim".parse().unwrap()).unwrap();
    let memory = vec![CopyMemory::Pool, CopyMemory::Pageable, CopyMemory::Scattered, CopyMemory::Broadcast];
    let options = CopyOptions {
        directions: vec![CopyDirection::H2d, CopyDirection::D2h],
        memory: memory.clone(),
        sizes: vec![Bytes::new((8 << 20) + 20)],
        paths: Some(3),
        target: 1,
        runs: 2,
        block: Bytes::kib(16),
        background: Bytes::mib(4),
        library: Some(std::env::current_exe().unwrap().with_file_name("libgmlake.so")),
    };
    let (mut reports, mut notes) = (Vec::<CopyReport>::new(), Vec::new());
    let done = copy(&backend, &Config::default(), &options, |news| {
        match news {
            CopyNews::Copy(report) => reports.push(report),
            CopyNews::Note(text) => notes.push(text),
            _ => {}
        }
        Ok(())
    });
    done.unwrap();
    assert_eq!(notes.len(), 1, "{notes:?}");
    let told: Vec<_> = reports.iter().map(|report| (report.memory, report.direction)).collect();
    let both = |memory| [CopyDirection::H2d, CopyDirection::D2h].map(|direction| (memory, direction));
    let mut expected: Vec<_> = memory.into_iter().flat_map(both).collect();
    assert_eq!(expected.pop(), Some((CopyMemory::Broadcast, CopyDirection::D2h)));
    assert_eq!(told, expected);
    for report in &reports {
        assert!(
            report.native_gbps > 0.0 && report.limit_gbps > 0.0 && report.engine_gbps > 0.0,
            "{report:?}"
        );
        assert!(report.verified && report.target == 1 && report.host_us <= report.engine_us, "{report:?}");
    }
    assert_eq!(reports[0].paths, 3, "{:?}", reports[0]);
}
