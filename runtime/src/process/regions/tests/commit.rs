//! Parts of live blocks without memory, in a process whose regions leave and come back.

use super::*;

#[test]
fn what_is_decommitted_is_others_memory_until_it_is_committed() {
    let process = started("pool.limit = \"40MiB\"\nlease.grow_timeout_ms = 10");
    process.regions().define(RegionOptions::of("cache")).unwrap();
    let cache = process.written_in("cache", 0, mib(32), 1);
    let other = process.written(0, mib(4), 2);
    assert!(process.malloc(0, mib(16), STREAM).is_err());
    let half = Address(cache.address.0 + mib(16).get());
    assert_eq!(process.regions().decommit(half, mib(16)).unwrap(), mib(16));
    let view = process.view("cache", 0);
    assert_eq!(
        (view.resident, view.evicted, view.decommitted, view.live),
        (mib(16), Bytes::ZERO, mib(16), mib(32))
    );
    assert!(process.regions().gate().view().closed.is_empty(), "uses go on");
    let taken = process.written(0, mib(16), 3);
    // All memory leaves and comes back, and it is passed over.
    let report = process.regions().shrink(&Shrink::default()).unwrap();
    assert_eq!(report.copied, mib(36));
    let refilled = process.regions().refill(&Refill::default()).unwrap();
    assert_eq!((refilled.copied, process.view("cache", 0).decommitted), (mib(36), mib(16)));
    [&other, &taken].into_iter().for_each(|block| process.check(block));
    let full = process.regions().commit(half, mib(16)).unwrap_err();
    assert!(
        matches!(full, ProcessError::Region(ref error) if error.to_string().contains("at most 40.00 MiB")),
        "{full}"
    );
    process.free(taken.address).unwrap();
    let made = process.view("cache", 0).resident.saturating_sub(mib(16));
    assert_eq!(process.regions().commit(half, mib(16)).unwrap(), mib(16).saturating_sub(made));
    let pool = &process.device(0).unwrap().started().unwrap().pool;
    pool.write(cache.address, &bytes(cache.size, cache.seed)).unwrap();
    // What was shrunk comes back before more of it is committed.
    process.regions().decommit(half, mib(16)).unwrap();
    process.regions().shrink(&Shrink::default()).unwrap();
    assert_eq!(process.regions().commit(half, mib(16)).unwrap(), mib(16));
    assert!(process.regions().gate().view().closed.iter().all(|tag| tag != "cache"));
    pool.write(half, &bytes(cache.size, cache.seed)[mib(16).get().try_into().unwrap()..]).unwrap();
    process.regions().refill(&Refill::default()).unwrap();
    [&cache, &other].into_iter().for_each(|block| process.check(block));
    let nobodys = process.regions().decommit(Address(0x1000), mib(1)).unwrap_err();
    assert!(matches!(nobodys, ProcessError::InNoBlock { .. }), "{nobodys}");
    process.end([cache, other]);
}
