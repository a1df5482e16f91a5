//! What counts of a block is asked when nothing runs any more, and all of it is copied where nobody says.

use glake_tiers::ByteRange;

use super::*;

fn range(start: u64, end: u64) -> ByteRange {
    ByteRange { start: Bytes::kib(start), end: Bytes::kib(end) }
}

#[test]
fn what_does_not_count_is_not_copied_and_told() {
    let process = started("");
    process.regions().define(RegionOptions::of("cache")).unwrap();
    let blocks = [process.written_in("cache", 0, mib(8), 1), process.written_in("cache", 0, mib(4), 2)];
    process.regions().set_live(blocks[0].address, Some(&[range(0, 1024)])).unwrap();
    let report = process.regions().shrink(&Shrink::default()).unwrap();
    assert_eq!((report.copied, report.undefined), (mib(5), mib(7)));
    let shown = report.json();
    assert_eq!(shown["undefined"], 7 << 20);
    assert_eq!(
        (&shown["regions"][0]["undefined"], shown["warnings"].as_array().unwrap().len()),
        (&(7 << 20).into(), 0)
    );
    assert_eq!(process.regions().refill(&Refill::default()).unwrap().copied, mib(5));
    process.check(&blocks[1]);
    process.check(&Written { size: mib(1), ..blocks[0] });
    let outside = process.regions().set_live(blocks[0].address, Some(&[range(0, 1 << 20)])).unwrap_err();
    assert!(outside.to_string().contains("do not lie in it"), "{outside}");
    assert!(matches!(process.regions().set_live(Address(16), None), Err(ProcessError::InNoBlock { .. })));
    process.regions().set_live(blocks[0].address, None).unwrap();
    assert_eq!(process.regions().shrink(&Shrink::default()).unwrap().copied, mib(12));
    process.regions().refill(&Refill::default()).unwrap();
    process.end(blocks);
}

#[test]
fn a_callback_is_asked_once_a_shrink_when_nothing_runs() {
    let process = Arc::new(started(""));
    process.regions().define(RegionOptions::of("cache")).unwrap();
    process.regions().define(RegionOptions::of("other")).unwrap();
    let blocks = [process.written_in("cache", 0, mib(8), 1), process.written_in("other", 0, mib(4), 2)];
    let (asked, inside) = (Arc::new(AtomicU32::new(0)), Arc::downgrade(&process));
    let count = asked.clone();
    let call: LiveCallback = Arc::new(move || {
        // It may ask of regions: no lock is held.
        let process = inside.upgrade()?;
        assert_eq!(
            (process.regions().gate().view().uses, process.regions().views().unwrap().is_empty()),
            (0, false)
        );
        let round = u64::from(count.fetch_add(1, Ordering::SeqCst));
        Some(vec![range(0, 1024 * (round + 1))])
    });
    process.regions().ask_live(blocks[0].address, call).unwrap();
    assert_eq!(process.regions().shrink(&shrink_of(&["other"])).unwrap().copied, mib(4));
    assert_eq!(asked.load(Ordering::SeqCst), 0, "its memory stayed");
    process.regions().refill(&Refill::default()).unwrap();
    for round in 1..4 {
        let report = process.regions().shrink(&shrink_of(&["cache"])).unwrap();
        assert_eq!((report.copied, report.warnings.len()), (mib(round), 0));
        process.regions().refill(&Refill::default()).unwrap();
    }
    assert_eq!(asked.load(Ordering::SeqCst), 3);
    process.check(&Written { size: mib(1), ..blocks[0] });
    // With its block it goes: the next one there is its own.
    process.free(blocks[0].address).unwrap();
    let next = process.written_in("cache", 0, mib(8), 3);
    assert_eq!(process.regions().shrink(&shrink_of(&["cache"])).unwrap().copied, mib(8));
    assert_eq!(asked.load(Ordering::SeqCst), 3);
    process.regions().refill(&Refill::default()).unwrap();
    process.check(&next);
    Arc::into_inner(process).unwrap().end([next, blocks[1]]);
}

#[test]
fn a_callback_that_panics_is_told_as_that() {
    let process = started("");
    process.regions().define(RegionOptions::of("cache")).unwrap();
    let blocks = [1, 2].map(|seed| process.written_in("cache", 0, mib(4), seed));
    for block in &blocks {
        process.regions().ask_live(block.address, Arc::new(|| panic!("as the test wants it"))).unwrap();
    }
    let report = process.regions().shrink(&Shrink::default()).unwrap();
    let [first, second] = &*report.warnings else { panic!("{:?}", report.warnings) };
    assert!(
        first.contains("its callback panicked") && second.contains("one before it panicked"),
        "{first}; {second}"
    );
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn where_a_callback_does_not_tell_all_is_copied() {
    let process = started("tiers.drain_timeout_ms = 300\n");
    process.regions().define(RegionOptions::of("cache")).unwrap();
    let block = process.written_in("cache", 0, mib(4), 1);
    let (done, wait) = mpsc::channel::<()>();
    let wait = parking_lot::Mutex::new(wait);
    let calls: [(LiveCallback, &str); 3] = [
        (Arc::new(|| None), "callback failed"),
        (Arc::new(|| Some(vec![range(0, 5000)])), "do not lie in it"),
        (
            Arc::new(move || {
                let _ = wait.lock().recv();
                Some(Vec::new())
            }),
            "did not answer within 0.3 s",
        ),
    ];
    for (call, why) in calls {
        process.regions().ask_live(block.address, call).unwrap();
        let report = process.regions().shrink(&Shrink::default()).unwrap();
        assert_eq!((report.copied, report.undefined), (mib(4), Bytes::ZERO), "{why}");
        assert!(matches!(&*report.warnings, [warning] if warning.contains(why)), "{:?}", report.warnings);
        process.regions().refill(&Refill::default()).unwrap();
        process.check(&block);
    }
    drop(done);
    process.end([block]);
}
