//! What is refused, and what is left then.

use super::*;

#[test]
fn somebody_took_the_space() {
    let process = started("pool.limit = \"64MiB\"");
    process.regions().define(RegionOptions::of("a")).unwrap();
    let blocks: Vec<Written> = (0..4).map(|seed| process.written_in("a", 0, mib(8), seed)).collect();
    process.regions().shrink(&shrink_of(&["a"])).unwrap();
    let taken = process.written(0, mib(48), 9);
    let error = process.regions().refill(&Refill::default()).unwrap_err();
    assert!(
        matches!(&error, ProcessError::NoRoom { tag, evicted, .. } if tag == "a" && !evicted.is_zero()),
        "{error}"
    );
    assert!(
        error
            .to_string()
            .contains("End the process that took the memory, or shrink other regions, then refill again"),
        "{error}"
    );
    for timeout in [None, Some(Duration::from_secs(60))] {
        let entered = process.regions().begin_use(&Tags::All, WhenClosed::Refill, timeout);
        assert!(matches!(entered, Err(ProcessError::NoRoom { .. })), "{entered:?}");
    }
    assert_eq!(process.regions().gate().view().closed, ["a"]);
    process.check(&taken);
    process.free(taken.address).unwrap();
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn a_full_host_leaves_the_rest_where_it_is() {
    let process = started("tiers.host_budget = \"16MiB\"");
    process.regions().define(RegionOptions::of("a")).unwrap();
    let mut blocks: Vec<Written> = (0..8).map(|seed| process.written_in("a", 0, mib(4), seed)).collect();
    let error = process.regions().shrink(&Shrink::default()).unwrap_err();
    assert!(
        matches!(&error, ProcessError::Partly { freed, copied, regions, source }
            if *freed == mib(16) && freed == copied && regions[0].memory == *freed && matches!(**source, ProcessError::Region(_))),
        "{error}"
    );
    let text = error.to_string();
    assert!(text.starts_with("16.00 MiB went back") && text.contains("raise the budget"), "{text}");
    assert_eq!(process.regions().gate().view().closed, ["a"]);
    for block in blocks.drain(..5) {
        process.free(block.address).unwrap();
    }
    assert_eq!(process.regions().shrink(&Shrink::default()).unwrap().resident, Bytes::ZERO);
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn what_lies_in_no_region_is_always_there() {
    for used in [false, true] {
        let process = started("");
        let blocks: Vec<Written> = used.then(|| process.written(0, mib(3), 1)).into_iter().collect();
        let refilled = process.regions().refill(&refill_of(&["default"])).unwrap();
        assert_eq!((refilled.mapped, refilled.evicted), (Bytes::ZERO, Bytes::ZERO));
        process.regions().set_order(&["default".to_owned()]).unwrap();
        process.end(blocks);
        let process = started("");
        assert_eq!(process.regions().shrink(&shrink_of(&["default"])).unwrap().freed, Bytes::ZERO);
        process.end([]);
    }
}

#[test]
fn a_seal_is_there_before_any_memory_is() {
    let process = started("");
    process.regions().define(options("sealed", Policy::Sealed, CopyPolicy::Retain)).unwrap();
    process.regions().define(options("keep", Policy::Keep, CopyPolicy::Drop)).unwrap();
    let refused = process.regions().seal("keep", false);
    assert!(
        matches!(refused, Err(ProcessError::Region(glake_tiers::RegionError::NotSealable { .. }))),
        "{refused:?}"
    );
    let in_sealed = |device| {
        process.regions().enter("sealed").unwrap();
        let block = process.malloc(device, mib(3), STREAM);
        process.regions().leave().unwrap();
        block
    };
    for strict in [false, true] {
        process.regions().seal("sealed", strict).unwrap();
        process.regions().prepare("sealed").unwrap();
        let refused = in_sealed(0);
        assert!(refused.is_err(), "{refused:?}");
        process.regions().unseal("sealed").unwrap();
        process.free(in_sealed(0).unwrap()).unwrap();
    }
    // Where it has memory on another GPU.
    process.regions().seal("sealed", false).unwrap();
    assert!(in_sealed(1).is_err());
    process.end([]);
}

#[test]
fn what_is_not_there_is_refused_before_anything_moves() {
    let process = started("");
    let block = process.written(0, mib(3), 1);
    let to =
        |tier: &str| process.regions().shrink(&Shrink { tier: tier.parse().unwrap(), ..Shrink::default() });
    assert!(matches!(to("file"), Err(ref error) if error.says("nothing can go to files here")));
    assert!(matches!(to("peer:9"), Err(ProcessError::NoSuchDevice { .. })));
    assert!(matches!(to("peer:0"), Err(ref error) if error.says("cannot go to another GPU here")));
    assert!(
        matches!(process.regions().shrink(&shrink_of(&["x"])), Err(ref error) if error.says("there is no region"))
    );
    assert!(
        matches!(process.regions().refill(&refill_of(&["x"])), Err(ref error) if error.says("there is no region"))
    );
    process.check(&block);
    process.end([block]);
}
