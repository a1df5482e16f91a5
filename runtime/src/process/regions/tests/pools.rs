//! Private pools that leave: with owners, and what is left of them once these have given them up.

use super::*;

const POOL: PoolId = PoolId(4, 0);
const TAG: &str = "graph (4, 0)";

/// Blocks in a pool of tensors: one that is freed, one that is not.
fn pooled(process: &Process) -> (Written, Written) {
    process.pools().create(0, POOL).unwrap();
    process.pools().begin(0, POOL, None).unwrap();
    let blocks = (process.written(0, mib(5), 1), process.written(0, mib(7), 2));
    process.pools().end(0, POOL).unwrap();
    // What `begin` added.
    process.pools().release(0, POOL).unwrap();
    blocks
}

fn tags(process: &Process) -> Vec<String> {
    process.regions().views().unwrap().into_iter().map(|view| view.tag).collect()
}

/// Whoever restores a checkpoint touches the pool's memory, as an allocation does.
#[test]
fn a_checkpoint_is_restored_while_its_pool_is_away() {
    let process = started("");
    process.pools().begin(0, POOL, None).unwrap();
    let blocks = [process.written(0, mib(5), 1), process.written(0, mib(7), 2)];
    process.pools().end(0, POOL).unwrap();
    let checkpoint = process.pools().checkpoint(0, POOL).unwrap();
    process.free(blocks[1].address).unwrap();
    process.regions().shrink(&Shrink::default()).unwrap();
    process.restore(&checkpoint).unwrap();
    // A graph's bytes are kept, those of what was free too.
    blocks.iter().for_each(|block| process.check(block));
    process.pools().release(0, POOL).unwrap();
    process.end(blocks);
}

#[test]
fn a_pool_that_is_given_up_keeps_nothing_from_leaving() {
    for is_away in [false, true] {
        let process = started("");
        let outside = process.written(0, mib(9), 3);
        let (freed, lives) = pooled(&process);
        process.free(freed.address).unwrap();
        if is_away {
            process.regions().shrink(&Shrink::default()).unwrap();
        }
        process.pools().release(0, POOL).unwrap();
        for _ in 0..2 {
            let report = process.regions().shrink(&Shrink::default()).unwrap();
            assert_eq!((report.resident, process.reserved(0)), (Bytes::ZERO, Bytes::ZERO));
            assert_eq!(process.view(TAG, 0).live, mib(7));
            process.regions().refill(&Refill::default()).unwrap();
            process.check(&lives);
            process.check(&outside);
        }
        process.regions().shrink(&Shrink::default()).unwrap();
        process.free(lives.address).unwrap();
        process.regions().refill(&Refill::default()).unwrap();
        process.check(&outside);
        assert_eq!(tags(&process), ["default"], "nothing is left of it");
        process.end([outside]);
    }
}

#[test]
fn a_pool_without_live_blocks_is_given_back_by_the_next_shrink_and_forgotten() {
    let process = started("");
    for _ in 0..3 {
        let (one, other) = pooled(&process);
        process.free(one.address).unwrap();
        process.free(other.address).unwrap();
        // Looked for while it is there.
        assert_eq!(process.view(TAG, 0).live, Bytes::ZERO);
        process.pools().release(0, POOL).unwrap();
        assert!(process.reserved(0) >= mib(12));
        let report = process.regions().shrink(&Shrink::default()).unwrap();
        assert_eq!((report.resident, process.reserved(0)), (Bytes::ZERO, Bytes::ZERO));
        process.regions().refill(&Refill::default()).unwrap();
        assert_eq!(tags(&process), ["default"], "nothing is left of it");
    }
    process.end([]);
}

/// What one region meets keeps none of the others from leaving.
#[test]
fn a_region_that_cannot_leave_keeps_no_other_from_it() {
    let process = started("tiers.host_budget = \"16MiB\"");
    process.regions().define(RegionOptions::of("large")).unwrap();
    let large: Vec<Written> = (0..8).map(|seed| process.written_in("large", 0, mib(4), seed)).collect();
    let (freed, other) = pooled(&process);
    process.free(freed.address).unwrap();
    process.free(other.address).unwrap();
    process.pools().release(0, POOL).unwrap();
    let cached = process.written(0, mib(20), 9);
    process.free(cached.address).unwrap();
    for _ in 0..2 {
        let error = process.regions().shrink(&Shrink::default()).unwrap_err();
        assert!(error.to_string().contains("raise the budget"), "{error}");
        assert_eq!(process.reserved(0), mib(16), "what has no copy to make is gone");
    }
    process.regions().refill(&Refill::default()).unwrap();
    large.iter().for_each(|block| process.check(block));
    process.end(large);
}

/// Regions without definitions and without memory are forgotten once there are many; one with a live block, a sealed one and one with a
/// definition stay, and so does the memory of a block. Private pools' tags go too.
#[test]
fn regions_without_definitions_and_memory_are_forgotten() {
    let process = started("");
    let regions = process.regions();
    let define = |tag: &str| regions.define(RegionOptions::of(tag)).unwrap();
    define("kept");
    let kept = process.written_in("kept", 0, mib(2), 1);
    regions.define(options("sealed", Policy::Sealed, CopyPolicy::Drop)).unwrap();
    regions.seal("sealed", false).unwrap();
    for tag in ["kept", "sealed"] {
        regions.release(tag).unwrap();
        assert!(
            matches!(regions.release(tag), Err(ref error) if error.says("was released as often as it was defined"))
        );
    }
    define("held");
    define("twice");
    define("twice");
    regions.release("twice").unwrap();
    for number in 0..2000 {
        let tag = format!("of a request {number}");
        define(&tag);
        if number % 4 == 0 {
            let block = process.written_in(&tag, 0, Bytes::kib(64), 2);
            process.free(block.address).unwrap();
        }
        regions.release(&tag).unwrap();
    }
    assert!(regions.views().unwrap().len() < 600, "{}", regions.views().unwrap().len());
    let reserved = process.reserved(0);
    assert!(reserved < mib(2 * 300), "{reserved} for 500 regions of 2 MiB");
    assert!(matches!(regions.enter("of a request 0"), Err(ref error) if error.says("there is no region")));
    let again = process.written_in("kept", 0, mib(2), 3);
    assert_eq!(regions.tag_of(again.address).as_deref(), Some("kept"));
    for tag in ["held", "twice", "sealed"] {
        regions
            .define(RegionOptions {
                policy: if tag == "sealed" { Policy::Sealed } else { Policy::Keep },
                ..RegionOptions::of(tag)
            })
            .unwrap();
    }
    process.check(&kept);
    for number in 1..=600 {
        process.pools().create(0, PoolId(0, number)).unwrap();
        regions.views().unwrap();
        process.pools().release(0, PoolId(0, number)).unwrap();
    }
    assert!(regions.views().unwrap().len() < 900, "{}", regions.views().unwrap().len());
    process.end([kept, again]);
}

#[test]
fn a_fixed_pool_stays_from_before_it_exists_until_it_is_unfixed() {
    let process = started("");
    process.pools().fix(POOL, true).unwrap();
    let (freed, lives) = pooled(&process);
    let outside = process.written(0, mib(9), 3);
    process.free(freed.address).unwrap();
    let held = process.reserved(0);
    let report = process.regions().shrink(&Shrink::default()).unwrap();
    assert!(report.freed >= mib(9) && report.freed < held, "{report:?}");
    assert!(process.reserved(0) >= mib(12), "its free memory stays too");
    let skipped = report.regions.iter().flat_map(|moved| &moved.skipped);
    let skipped = skipped.filter(|skipped| skipped.reason == SkipReason::Fixed);
    assert!(skipped.map(|skipped| skipped.size).sum::<Bytes>() >= mib(12), "{report:?}");
    process.check(&lives);
    assert!(process.regions().decommit(lives.address, mib(7)).unwrap().is_zero());
    process.pools().fix(POOL, true).unwrap();
    process.pools().fix(POOL, false).unwrap();
    assert!(process.regions().shrink(&Shrink::default()).unwrap().freed.is_zero(), "fixed once more");
    process.pools().fix(POOL, false).unwrap();
    assert!(process.regions().shrink(&Shrink::default()).unwrap().freed >= mib(7));
    let away = process.pools().fix(POOL, true).unwrap_err();
    assert!(away.to_string().contains("refill its region"), "{away}");
    assert!(process.pools().fix(POOL, false).unwrap_err().says("is not fixed"));
    process.regions().refill(&Refill::default()).unwrap();
    [&lives, &outside].into_iter().for_each(|block| process.check(block));
    process.pools().release(0, POOL).unwrap();
    process.end([lives, outside]);
}

#[test]
fn a_forgotten_tag_is_one_without_memory() {
    let process = started("");
    let regions = process.regions();
    regions.define(RegionOptions::of("kv")).unwrap();
    let block = process.written_in("kv", 0, mib(2), 1);
    use_of(&process, "kv").unwrap();
    process.free(block.address).unwrap();
    regions.release("kv").unwrap();
    for number in 0..1000 {
        let tag = format!("of a request {number}");
        regions.define(RegionOptions::of(&tag)).unwrap();
        regions.release(&tag).unwrap();
    }
    assert!(regions.enter("kv").is_err(), "it is forgotten");
    use_of(&process, "kv").unwrap();
    assert_eq!(regions.shrink(&shrink_of(&["kv"])).unwrap().freed, Bytes::ZERO);
    assert_eq!(regions.refill(&refill_of(&["kv"])).unwrap().copied, Bytes::ZERO);
    let unknown = use_of(&process, "kw").unwrap_err().to_string();
    assert!(unknown.contains(" more are there") && unknown.len() < 400, "{unknown}");
    process.end([]);
}

fn use_of(process: &Process, tag: &str) -> crate::process::Result<()> {
    let begun = process.regions().begin_use(&Tags::of(&[tag]), WhenClosed::Refill, None)?;
    process.regions().gate().end_use(begun)?;
    Ok(())
}
