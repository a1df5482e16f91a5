//! Copies of what is offloaded take every link that copies may take, beside a shrink and the end of the process.

use std::time::Instant;

use super::super::super::Process;
use super::*;
use crate::config::{Environment, Sources};

const STREAM: Stream = Stream(0);
const SIZE: Bytes = Bytes::mib(64);

fn process() -> Process {
    let environment = Environment::from_iter([("GLAKE_DEVICE", "sim:h200x4")]);
    let sources = Sources { environment, ..Sources::default() };
    let settings = "tiers = { extent = \"4MiB\", host_spare = 0 }\ntransfer.calibrations = \"\"\n";
    let mut config = sources.with_overrides("test", settings).unwrap().load().unwrap();
    config.tiers.host_arena = Bytes::mib(64);
    Process::start(config).unwrap()
}

fn pool(process: &Process) -> &GpuPool {
    &process.device(0).unwrap().started().unwrap().pool
}

fn read(process: &Process, written: Written) {
    process.streams().synchronize(Some(0), STREAM).unwrap();
    let mut found = vec![0; usize::try_from(written.size.get()).unwrap()];
    pool(process).read(written.address, &mut found).unwrap();
    assert!(written.is(&found), "{written:?}");
}

#[test]
fn both_ways_take_several_links() {
    let process = process();
    process.copies().multi_path(true).unwrap();
    let begin = Instant::now();
    while !process.copies().statistics().ready {
        assert!(begin.elapsed() < Duration::from_secs(30), "relays are not made ready");
        std::thread::sleep(Duration::from_millis(1));
    }
    let split = || process.copies().statistics().split_copies;
    let mut written =
        Written { address: process.malloc(0, SIZE, STREAM).unwrap(), size: SIZE, seed: 1, skipped: 0 };
    for seed in 1..6 {
        written.seed = seed;
        pool(&process).write(written.address, &written.bytes()).unwrap();
        // Lanes are made for a queue once it has asked.
        let before = split();
        let id = process.offload().offload(STREAM, written.address, SIZE).unwrap();
        process.free(written.address).unwrap();
        let between = process.malloc(0, SIZE, STREAM).unwrap();
        written.address = process.malloc(0, SIZE, STREAM).unwrap();
        process.offload().reload(id, STREAM, written.address).unwrap();
        read(&process, written);
        process.offload().release(id).unwrap();
        process.free(between).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(seed < 5 || split() == before + 2, "{:?}", process.copies().statistics());
    }
    // Everything leaves, and relays are suspended, while copies run.
    let ids = [(); 3].map(|()| process.offload().offload(STREAM, written.address, SIZE).unwrap());
    let target = process.malloc(0, SIZE, STREAM).unwrap();
    process.offload().begin_reload(ids[0], STREAM, target).unwrap();
    process.regions().shrink(&Shrink::default()).unwrap();
    process.regions().refill(&Refill::default()).unwrap();
    process.offload().wait_reload(ids[0], STREAM).unwrap();
    read(&process, Written { address: target, ..written });
    read(&process, written);
    for id in ids {
        process.offload().release(id).unwrap();
    }
    for address in [written.address, target] {
        process.free(address).unwrap();
    }
    process.trim(None, Bytes::ZERO).unwrap();
    let stats = process.offload().statistics();
    assert_eq!((stats.entries, stats.host_bytes, stats.host_pinned_bytes, stats.held_bytes), (0, 0, 0, 0));
    assert_eq!(pool(&process).reserved(), Bytes::ZERO);
    process.stop();
}
