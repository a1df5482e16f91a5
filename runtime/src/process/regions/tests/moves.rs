//! Regions leave and come back.

use std::time::Instant;

use super::*;

#[test]
fn a_region_leaves_two_devices_and_comes_back() {
    let process = started("");
    process.regions().define(RegionOptions::of("weights")).unwrap();
    let mut blocks: Vec<Written> =
        (0..6).map(|i| process.written_in("weights", i % 2, mib(5), i as u64)).collect();
    let other = process.written(0, mib(7), 99);
    let before = [process.reserved(0), process.reserved(1)];
    let tags: Vec<Option<String>> =
        blocks.iter().chain([&other]).map(|block| process.regions().tag_of(block.address)).collect();
    assert!(tags[..6].iter().all(|tag| tag.as_deref() == Some("weights")) && tags[6].is_none());

    let report = process.regions().shrink(&shrink_of(&["weights"])).unwrap();
    assert_eq!((report.copied, report.resident, report.regions.len()), (mib(30), Bytes::ZERO, 2));
    assert!(report.freed >= mib(30) && report.regions.iter().all(|moved| moved.skipped.is_empty()));
    assert!(report.predicted_refill > Duration::ZERO);
    assert_eq!(
        before[0]
            .saturating_sub(process.reserved(0))
            .saturating_add(before[1].saturating_sub(process.reserved(1))),
        report.freed
    );
    assert_eq!(process.regions().gate().view().closed, ["weights"]);
    let view = process.view("weights", 1);
    assert_eq!((view.resident, view.live, view.place()), (Bytes::ZERO, mib(15), Some(Place::Host)));
    assert!(view.evicted >= mib(15) && view.predicted_refill > Duration::ZERO);
    process.check(&other);
    let snapshot = process.reports().snapshot();
    let evicted = |tag: &str| {
        let regions = snapshot["allocator_settings"]["glake_regions"].as_array().unwrap();
        regions
            .iter()
            .filter(|region| region["tag"] == tag)
            .filter_map(|region| region["evicted"].as_u64())
            .sum::<u64>()
    };
    assert!(evicted("weights") >= 30 << 20 && evicted("default") == 0);
    process.free(blocks.remove(0).address).unwrap();
    process.trim(None, Bytes::ZERO).unwrap();
    let again = process.regions().shrink(&shrink_of(&["weights"])).unwrap();
    assert_eq!((again.freed, again.copied), (Bytes::ZERO, Bytes::ZERO));

    let report = process.regions().refill(&Refill::default()).unwrap();
    assert!(report.copied >= mib(25) && report.evicted.is_zero(), "{report:?}");
    assert!(process.regions().gate().view().closed.is_empty());
    blocks.iter().chain([&other]).for_each(|block| process.check(block));
    process.end(blocks.into_iter().chain([other]));
}

#[test]
fn what_costs_least_goes_first() {
    let process = started("");
    process.regions().define(RegionOptions::of("keep")).unwrap();
    process.regions().define(options("sealed", Policy::Sealed, CopyPolicy::Retain)).unwrap();
    process.regions().define(options("cache", Policy::Discard, CopyPolicy::Drop)).unwrap();
    let blocks = ["keep", "sealed"].map(|tag| process.written_in(tag, 0, mib(16), tag.len() as u64));
    let cache = [1, 2, 3, 4].map(|seed| process.written_in("cache", 0, mib(4), seed));
    let rest = process.written(0, mib(16), 7);
    process.regions().seal("sealed", false).unwrap();
    assert!(process.regions().seal("keep", false).is_err());
    let by = |bytes| process.regions().shrink(&Shrink { bytes: Some(bytes), ..Shrink::default() }).unwrap();
    let tags =
        |report: &ShrinkReport| report.regions.iter().map(|moved| moved.tag.clone()).collect::<Vec<_>>();
    let first = by(mib(10));
    assert_eq!((tags(&first), first.copied), (vec!["cache".to_owned()], Bytes::ZERO));
    assert!(first.freed >= mib(10) && first.resident > Bytes::ZERO);
    assert_eq!(process.regions().gate().view().closed, ["cache"]);
    let second = by(mib(24));
    assert_eq!(tags(&second), ["cache", "sealed", "keep"]);
    let all = process.regions().shrink(&Shrink::default()).unwrap();
    assert_eq!(all.resident, Bytes::ZERO);
    assert_eq!(process.reserved(0), Bytes::ZERO);
    assert_eq!(process.regions().gate().view().closed, ["cache", "default", "keep", "sealed"]);
    process.regions().set_order(&["keep".to_owned()]).unwrap();
    let one = process.regions().refill(&Refill { bytes: Some(mib(16)), ..Refill::default() }).unwrap();
    assert!(one.regions.iter().all(|moved| moved.tag == "keep"), "{one:?}");
    process.regions().refill(&Refill::default()).unwrap();
    [&blocks[0], &blocks[1], &rest].into_iter().for_each(|block| process.check(block));
    let sealed = process.regions().shrink(&shrink_of(&["sealed"])).unwrap();
    assert_eq!(sealed.copied, Bytes::ZERO, "its copy was kept");
    process.regions().refill(&Refill::default()).unwrap();
    process.check(&blocks[1]);
    process.regions().unseal("sealed").unwrap();
    process.end(blocks.into_iter().chain(cache).chain([rest]));
}

#[test]
fn what_is_touched_comes_back_first() {
    let process = started("");
    process.regions().define(RegionOptions::of("a")).unwrap();
    let mut blocks = vec![process.written_in("a", 0, mib(9), 1), process.written_in("a", 1, mib(9), 2)];
    process.regions().shrink(&Shrink::default()).unwrap();
    blocks.push(process.written_in("a", 0, mib(2), 3));
    process.check(&blocks[0]);
    assert!(process.view("a", 1).evicted > Bytes::ZERO, "of the device that was touched");
    assert_eq!(process.regions().gate().view().closed, ["a"]);
    process.regions().bring_back(Address(blocks[1].address.0 + 4096)).unwrap();
    process.check(&blocks[1]);
    assert!(process.regions().gate().view().closed.is_empty());
    process.regions().bring_back(Address(0x1000)).unwrap();
    process.regions().shrink(&Shrink::default()).unwrap();
    process.regions().wait_for("a", 1, STREAM).unwrap();
    process.check(&blocks[1]);
    assert!(
        matches!(process.regions().wait_for("b", 1, STREAM), Err(ref error) if error.says("there is no region"))
    );
    process.end(blocks);
}

#[test]
fn graphs_pools_leave_whole() {
    let process = started("");
    process.pools().begin(0, PoolId(0, 5), None).unwrap();
    let kept = process.written(0, mib(6), 1);
    let freed = process.written(0, mib(6), 2);
    process.pools().end(0, PoolId(0, 5)).unwrap();
    process.free(freed.address).unwrap();
    let report = process.regions().shrink(&Shrink::default()).unwrap();
    let graph = report.regions.iter().find(|moved| moved.tag == "graph (0, 5)").unwrap();
    assert!(graph.copied >= mib(12) && graph.copied == graph.memory, "{graph:?}");
    assert_eq!(process.reserved(0), Bytes::ZERO);
    process.regions().refill(&Refill::default()).unwrap();
    process.check(&kept);
    process.check(&freed);
    process.pools().release(0, PoolId(0, 5)).unwrap();
    process.end([kept]);
}

#[test]
fn bytes_go_to_another_gpu_and_to_files_and_are_compared() {
    let folder = std::env::temp_dir().join(format!("glake-regions-{}", std::process::id()));
    let process = started(&format!("tiers.files = {folder:?}\ntiers.verify = true"));
    process.regions().define(RegionOptions::of("a")).unwrap();
    let blocks = [process.written_in("a", 0, mib(9), 1), process.written_in("a", 1, mib(5), 2)];
    for (tier, place) in
        [("peer", None), ("peer:3", Some(Place::Peer(DeviceId(3)))), ("file", Some(Place::File))]
    {
        let ask = Shrink { tier: tier.parse().unwrap(), ..shrink_of(&["a"]) };
        let report = process.regions().shrink(&ask).unwrap();
        assert_eq!((report.copied, report.resident), (mib(14), Bytes::ZERO), "{tier}");
        let view = process.view("a", 0);
        assert!(view.resident.is_zero() && place.is_none_or(|place| view.place() == Some(place)), "{view:?}");
        process.regions().refill(&Refill::default()).unwrap();
        blocks.iter().for_each(|block| process.check(block));
    }
    process.end(blocks);
    std::fs::remove_dir_all(folder).unwrap();
}

/// A byte that changes in a copy is found without a request for it, and the error names region, extent and block.
#[test]
fn a_byte_that_changes_elsewhere_is_found_unasked() {
    let process = started("");
    process.regions().define(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(6), 1);
    let ask = Shrink { tier: "peer:1".parse().unwrap(), ..shrink_of(&["a"]) };
    process.regions().shrink(&ask).unwrap();
    let copies = process.reports().segments(1).unwrap();
    let copy = copies.iter().flat_map(|segment| &segment.blocks).find(|block| block.live).unwrap().address;
    let peer = &process.regions().set().registry.devices[1].started().unwrap().pool;
    let mut byte = [0];
    peer.read(copy, &mut byte).unwrap();
    peer.write(copy, &[byte[0] ^ 1]).unwrap();
    let error = process.regions().refill(&Refill::default()).unwrap_err().to_string();
    for part in ["region 'a'", "damaged", &format!("{} at {}", mib(6), block.address)] {
        assert!(error.contains(part), "{part}: {error}");
    }
    process.regions().refill(&Refill { verify: Some(false), ..Refill::default() }).unwrap();
    process.free(block.address).unwrap();
    process.end([]);
}

/// What is demoted is the host's again, and not only the process's.
#[test]
fn what_is_demoted_is_pinned_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let process = started(&format!("tiers.files = {:?}", folder.path().join("extents")));
    process.regions().define(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(40), 1);
    process.regions().shrink(&shrink_of(&["a"])).unwrap();
    let set = process.regions().set();
    let pinned = || -> Bytes { set.stores.host_statistics().iter().map(|host| host.pinned).sum() };
    let before = pinned();
    assert!(before >= mib(40));
    assert_eq!(set.demote(Bytes::MAX, &|| false).unwrap(), Bytes::ZERO);
    assert_eq!(pinned(), before);
    assert!(set.demote(mib(1), &|| true).unwrap() >= mib(1));
    assert!(pinned() > Bytes::ZERO, "no more than was asked for");
    set.demote(Bytes::MAX, &|| true).unwrap();
    assert_eq!(pinned(), Bytes::ZERO);
    process.regions().refill(&Refill::default()).unwrap();
    process.check(&block);
    process.end([block]);
}

/// The bytes in files are the process's own, and end with it.
#[test]
fn nothing_stays_in_files_when_the_process_stops() {
    let folder = std::env::temp_dir().join(format!("glake-regions-stop-{}", std::process::id()));
    let process = started(&format!("tiers.files = {folder:?}"));
    process.regions().define(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(9), 1);
    let to_files = Shrink { tier: "file".parse().unwrap(), ..shrink_of(&["a"]) };
    process.regions().shrink(&to_files).unwrap();
    assert!(std::fs::read_dir(&folder).unwrap().count() > 1);
    process.stop();
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    // Nothing new goes there.
    let other = process.written(0, mib(9), 2);
    assert!(process.regions().shrink(&Shrink { tags: None, ..to_files }).is_err());
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    process.check(&other);
    for block in [block, other] {
        process.free(block.address).unwrap();
    }
    drop(process);
    std::fs::remove_dir(&folder).unwrap();
}

/// Of two wishes the later one holds.
#[test]
fn what_is_shrunk_after_a_refill_that_nobody_waits_for_stays_away() {
    let process = started("tiers.extent = \"2MiB\"\n");
    for tag in ["a", "b"] {
        process.regions().define(RegionOptions::of(tag)).unwrap();
    }
    let blocks = [process.written_in("a", 0, mib(8), 1), process.written_in("b", 0, mib(8), 2)];
    let resident = || -> Bytes { process.regions().views().unwrap().iter().map(|view| view.resident).sum() };
    for round in 0..60 {
        let ask = match round % 3 {
            0 => Refill { wait: false, ..Refill::default() },
            1 => Refill { timeout: Some(Duration::ZERO), ..Refill::default() },
            _ => Refill { timeout: Some(Duration::from_micros(300)), ..Refill::default() },
        };
        assert!(matches!(process.regions().refill(&ask), Ok(_) | Err(ProcessError::StillComing { .. })));
        std::thread::sleep(Duration::from_micros(40 * (round % 7)));
        process.regions().shrink(&Shrink::default()).unwrap();
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(resident(), Bytes::ZERO, "round {round}");
    }
    // Whoever asks after that has it.
    process.regions().refill(&Refill { wait: false, ..Refill::default() }).unwrap();
    let id = process.regions().begin_use(&Tags::All, WhenClosed::Refill, None).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.regions().gate().end_use(id).unwrap();
    process.end(blocks);
}

#[test]
fn a_shrink_of_one_device_leaves_the_refill_of_another_alone() {
    let process = started("tiers.extent = \"2MiB\"\n");
    process.regions().define(RegionOptions::of("a")).unwrap();
    let blocks = [0, 1].map(|device| process.written_in("a", device, mib(8), device as u64));
    for round in 0..20 {
        process.regions().shrink(&Shrink::default()).unwrap();
        process.regions().refill(&Refill { wait: false, ..Refill::default() }).unwrap();
        std::thread::sleep(Duration::from_micros(40 * (round % 7)));
        let first = Shrink { device: Some(DeviceId(0)), ..Shrink::default() };
        process.regions().shrink(&first).unwrap();
        let begin = Instant::now();
        while !process.view("a", 1).evicted.is_zero() {
            assert!(begin.elapsed() < Duration::from_secs(10), "round {round}: it comes back");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(process.view("a", 0).resident, Bytes::ZERO, "round {round}");
    }
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn evicted_bytes_are_read_from_host_memory() {
    let folder = tempfile::tempdir().unwrap();
    let process = started(&format!("tiers.files = {:?}\ntiers.extent = \"2MiB\"", folder.path()));
    process.regions().define(RegionOptions::of("weights")).unwrap();
    // Freed neighbours make room that no piece of home has by itself: the last block is stitched of two.
    let blocks: Vec<Written> = (0..5).map(|seed| process.written_in("weights", 0, mib(6), seed)).collect();
    for at in [1, 3] {
        process.free(blocks[at].address).unwrap();
    }
    let stitched = process.written_in("weights", 0, mib(12), 7);
    assert!(process.reports().stats(0).unwrap().own.stitches > 0);
    let read = |address: Address, size: Bytes| {
        let mut found = vec![0xee; usize::try_from(size.get()).unwrap()];
        process.regions().read_evicted(address, &mut found).map(|()| found)
    };
    let refused = |found: crate::process::Result<Vec<u8>>| match found.unwrap_err() {
        error @ ProcessError::NotInHostMemory { .. } => error.to_string(),
        error => panic!("{error}"),
    };
    assert!(refused(read(stitched.address, mib(12))).contains("read memory on the GPU with a copy"));
    process.regions().shrink(&Shrink::default()).unwrap();
    for block in [&blocks[0], &blocks[2], &blocks[4], &stitched] {
        let whole = bytes(block.size, block.seed);
        assert!(read(block.address, block.size).unwrap() == whole, "{block:?}");
        for (start, size) in [(0_u64, 1_u64), (5, 4099), (2 << 20, 3 << 20), ((6 << 20) - 7, 7)] {
            let at = block.address.checked_add(start).unwrap();
            let part = usize::try_from(start).unwrap()..usize::try_from(start + size).unwrap();
            assert!(read(at, Bytes::new(size)).unwrap() == whole[part], "{start} {size}");
        }
    }
    assert!(matches!(read(stitched.address, mib(13)), Err(ProcessError::Region(_))));
    assert!(matches!(read(blocks[1].address, mib(1)), Ok(_) | Err(ProcessError::InNoBlock { .. })));
    process.regions().refill(&Refill::default()).unwrap();
    process.check(&stitched);
    process.regions().shrink(&Shrink { tier: "file".parse().unwrap(), ..Shrink::default() }).unwrap();
    refused(read(stitched.address, mib(1)));
    process.regions().refill(&Refill::default()).unwrap();
    process.end([blocks[0], blocks[2], blocks[4], stitched]);
}
