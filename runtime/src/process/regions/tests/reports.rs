//! What is told: who holds memory, what stays and why, what went.

use glake_device::{Fault, Injected, Verb, When};

use super::*;

#[test]
fn a_shrink_by_bytes_that_fails_tells_what_went_before() {
    let process = started("");
    for tag in ["a", "b"] {
        process.regions().define(RegionOptions::of(tag)).unwrap();
    }
    let blocks =
        [("a", 1), ("a", 2), ("b", 3), ("b", 4)].map(|(tag, seed)| process.written_in(tag, 0, mib(4), seed));
    process.regions().fix(blocks[0].address, true).unwrap();
    let used = process.regions().begin_use(&Tags::of(&["b"]), WhenClosed::Refuse, None).unwrap();
    let ask = Shrink { bytes: Some(mib(8)), timeout: Some(Duration::from_millis(20)), ..Shrink::default() };
    let error = process.regions().shrink(&ask).unwrap_err();
    let ProcessError::Partly { freed, copied, regions, source } = &error else { panic!("{error}") };
    assert_eq!((*freed, *copied), (mib(4), mib(4)));
    assert!(regions.len() == 1 && regions[0].skipped[0].reason == SkipReason::Fixed, "{regions:?}");
    assert!(matches!(**source, ProcessError::StillUsed { uses: 1, .. }), "{error}");
    process.regions().gate().end_use(used).unwrap();
    process.regions().fix(blocks[0].address, false).unwrap();
    assert!(process.regions().shrink(&ask).unwrap().freed >= mib(8));
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn a_gpu_that_does_not_tell_what_it_holds_fails_no_shrink() {
    let (process, faults) = started_with_faults("", |_| ());
    let block = process.written(0, mib(9), 1);
    let silent = Fault { verb: Some(Verb::MemoryInfo), when: When::From(1), error: Injected::Failed(1) };
    faults.set(&[silent]);
    let report = process.regions().shrink(&Shrink::default()).unwrap();
    faults.set(&[]);
    assert!(report.freed >= mib(9) && report.gpu.is_empty(), "{report:?}");
    assert!(matches!(&*report.warnings, [warning] if warning.contains("not known")), "{:?}", report.warnings);
    process.regions().refill(&Refill::default()).unwrap();
    process.check(&block);
    process.end([block]);
}

#[test]
fn a_shrink_that_goes_on_with_others_has_one_time_for_all() {
    let process = started("");
    for tag in ["a", "b"] {
        process.regions().define(RegionOptions::of(tag)).unwrap();
    }
    let blocks = [("a", 1), ("b", 2)].map(|(tag, seed)| process.written_in(tag, 0, mib(4), seed));
    process.regions().fix(blocks[0].address, true).unwrap();
    let uses = ["a", "b"]
        .map(|tag| process.regions().begin_use(&Tags::of(&[tag]), WhenClosed::Refuse, None).unwrap());
    let timeout = Duration::from_secs(2);
    let ask = Shrink { bytes: Some(mib(4)), timeout: Some(timeout), ..Shrink::default() };
    std::thread::scope(|scope| {
        let shrunk = scope.spawn(|| process.regions().shrink(&ask).unwrap_err());
        std::thread::sleep(Duration::from_millis(500));
        process.regions().gate().end_use(uses[0]).unwrap();
        let error = shrunk.join().unwrap();
        let ProcessError::StillUsed { tags, waited, .. } = &error else { panic!("{error}") };
        assert!(tags.to_string().contains('b') && *waited < timeout - Duration::from_millis(300), "{error}");
    });
    process.regions().gate().end_use(uses[1]).unwrap();
    process.regions().fix(blocks[0].address, false).unwrap();
    process.end(blocks);
}

#[test]
fn a_region_of_two_devices_is_in_two_places() {
    let process = started("");
    process.regions().define(RegionOptions::of("a")).unwrap();
    let blocks = [0, 1].map(|device| process.written_in("a", device, mib(8), device as u64));
    let some = Shrink { bytes: Some(mib(8)), ..shrink_of(&["a"]) };
    let first = process.regions().shrink(&some).unwrap();
    assert_eq!((first.regions.len(), first.regions[0].place), (1, Some(Place::Host)));
    let peer = Place::Peer(DeviceId(3));
    let rest =
        process.regions().shrink(&Shrink { tier: "peer:3".parse().unwrap(), ..shrink_of(&["a"]) }).unwrap();
    let moved = rest.regions.iter().find(|moved| moved.device == DeviceId(1)).unwrap();
    assert_eq!((moved.place, moved.copied), (Some(peer), mib(8)));
    assert_eq!(rest.json()["regions"][0]["place"], "peer:3");
    for (device, place) in [(0, Place::Host), (1, peer)] {
        let view = process.view("a", device);
        assert_eq!((view.place(), view.places.len()), (Some(place), 1), "{view:?}");
        assert_eq!(view.places[0].1, view.evicted);
    }
    assert_eq!(process.view("a", 1).json()["places"]["peer:3"], process.view("a", 1).evicted.get());
    process.regions().bring_back(blocks[0].address).unwrap();
    assert_eq!((process.view("a", 0).place(), process.view("a", 1).place()), (None, Some(peer)));
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn everybody_who_holds_memory_is_named() {
    let process = started("transfer.multi_path = \"always\"");
    process.regions().define(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(9), 1);
    let held = |process: &Process, holder: &str| -> Bytes {
        let left = process.regions().memory_usage().unwrap();
        left.iter().filter(|left| left.holder.contains(holder)).map(|left| left.bytes).sum()
    };
    assert_eq!(held(&process, "pool: 'a'"), process.reserved(0));
    let report = process.regions().shrink(&Shrink::default()).unwrap();
    assert_eq!(held(&process, "pool: 'a'"), Bytes::ZERO);
    assert_eq!(held(&process, "bytes that are evicted or offloaded"), mib(9));
    assert!(!report.gpu.iter().any(|left| left.holder.contains("pool: ")), "{report:?}");
    process.regions().refill(&Refill::default()).unwrap();
    process.end([block]);
}

#[test]
fn what_was_imported_stays_and_is_named() {
    let (process, other) = (started(""), started(""));
    process.regions().define(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 1, mib(9), 1);
    let shared = other.written(1, mib(5), 2);
    let (handle, _) = other.sharing().share(shared.address).unwrap();
    let base = process.sharing().open(&handle, 1).unwrap();
    assert_eq!(process.regions().shrink(&shrink_of(&["a"])).unwrap().skipped, []);
    let report = process.regions().shrink(&Shrink::default()).unwrap();
    let [imported] = &*report.skipped else { panic!("{report:?}") };
    assert_eq!((imported.device, imported.address), (DeviceId(1), base));
    assert_eq!(imported.reason, SkipReason::Imported);
    assert!(imported.size >= mib(5) && report.json()["skipped"][0]["reason"] == "imported");
    process.sharing().close(base).unwrap();
    assert_eq!(process.regions().shrink(&Shrink::default()).unwrap().skipped, []);
    process.regions().refill(&Refill::default()).unwrap();
    process.check(&block);
    process.end([block]);
    other.end([shared]);
}

#[test]
fn what_is_fixed_stays_and_is_named() {
    let process = started("");
    process.regions().define(options("a", Policy::Sealed, CopyPolicy::Drop)).unwrap();
    let blocks = [process.written_in("a", 0, mib(8), 1), process.written_in("a", 0, mib(8), 2)];
    process.regions().fix(Address(blocks[0].address.0 + 5), true).unwrap();
    process.regions().seal("a", true).unwrap();
    let report = process.regions().shrink(&shrink_of(&["a"])).unwrap();
    assert!(report.resident >= mib(8) && report.freed >= mib(8), "{report:?}");
    assert!(!report.regions[0].skipped.is_empty());
    assert!(report.json()["regions"][0]["skipped"][0]["reason"] == "fixed", "{}", report.json());
    process.regions().refill(&Refill::default()).unwrap();
    process.regions().unseal("a").unwrap();
    process.regions().fix(blocks[0].address, false).unwrap();
    assert!(
        process.regions().fix(blocks[0].address, false).is_err()
            && process.regions().fix(Address(1), true).is_err()
    );
    assert_eq!(process.regions().shrink(&shrink_of(&["a"])).unwrap().resident, Bytes::ZERO);
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn what_moves_take_is_no_wait_for_uses() {
    let process = started("");
    for tag in ["a", "b"] {
        process.regions().define(RegionOptions::of(tag)).unwrap();
    }
    let blocks = [("a", 1), ("b", 2)].map(|(tag, seed)| process.written_in(tag, 0, mib(4), seed));
    process.regions().fix(blocks[0].address, true).unwrap();
    // The move of the first takes a while: longer than uses are waited for.
    process
        .regions()
        .ask_live(
            blocks[0].address,
            Arc::new(|| {
                std::thread::sleep(Duration::from_millis(1200));
                None
            }),
        )
        .unwrap();
    let ask = Shrink { bytes: Some(mib(4)), timeout: Some(Duration::from_millis(1000)), ..Shrink::default() };
    let over = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        scope.spawn(|| {
            // Uses of 20 ms.
            while !over.load(Ordering::SeqCst) {
                if let Ok(id) = process.regions().begin_use(&Tags::of(&["b"]), WhenClosed::Refuse, None) {
                    std::thread::sleep(Duration::from_millis(20));
                    process.regions().gate().end_use(id).unwrap();
                }
            }
        });
        let outcome = process.regions().shrink(&ask);
        over.store(true, Ordering::SeqCst);
        outcome
    });
    process.regions().fix(blocks[0].address, false).unwrap();
    assert!(outcome.is_ok(), "{outcome:?}");
    process.regions().refill(&Refill::default()).unwrap();
    process.end(blocks);
}

/// A region of 8 MiB, shrunk and refilled, takes its size on its GPU and in host memory.
#[test]
fn a_small_region_takes_its_size() {
    let mut config = configured("tiers.extent = \"128MiB\"");
    config.tiers.host_arena = mib(256);
    let process = Process::start(config).unwrap();
    let free = || process.driver().memory_info(DeviceId(0)).unwrap().free;
    let first = process.written(0, mib(2), 1);
    let before = free();
    process.regions().define(RegionOptions::of("small")).unwrap();
    let block = process.written_in("small", 0, mib(8), 2);
    assert_eq!(before.saturating_sub(free()), mib(8));
    let report = process.regions().shrink(&shrink_of(&["small"])).unwrap();
    assert_eq!((before, report.freed), (free(), mib(8)));
    let set = process.regions().set();
    let pinned: Bytes = set.stores.host_statistics().iter().map(|host| host.pinned).sum();
    assert_eq!(pinned, mib(8), "an arena of 256 MiB was pinned for it");
    process.regions().refill(&Refill::default()).unwrap();
    assert_eq!(before.saturating_sub(free()), mib(8));
    process.end([first, block]);
}
