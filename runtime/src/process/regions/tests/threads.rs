//! Threads beside moves.

use super::*;

#[test]
fn one_region_comes_in_while_another_goes_out() {
    let process = started("pool.limit = \"64MiB\"");
    for tag in ["a", "b"] {
        process.regions().define(RegionOptions::of(tag)).unwrap();
    }
    let a: Vec<Written> = (0..5).map(|seed| process.written_in("a", 0, mib(8), seed)).collect();
    process.regions().shrink(&shrink_of(&["a"])).unwrap();
    let b: Vec<Written> = (10..15).map(|seed| process.written_in("b", 0, mib(8), seed)).collect();
    for (out, back, blocks) in [("b", "a", &a), ("a", "b", &b), ("b", "a", &a)] {
        std::thread::scope(|scope| {
            let gone = scope.spawn(|| process.regions().shrink(&shrink_of(&[out])).unwrap());
            while process.regions().gate().view().closing.is_empty() && !gone.is_finished() {
                std::thread::yield_now();
            }
            process.regions().refill(&refill_of(&[back])).unwrap();
            assert!(gone.join().unwrap().freed >= mib(40));
        });
        blocks.iter().for_each(|block| process.check(block));
    }
    a.iter().chain(&b).for_each(|block| process.free(block.address).unwrap());
    process.end([]);
}

#[test]
fn threads_have_their_own_regions() {
    let process = started("");
    process.regions().define(RegionOptions::of("a")).unwrap();
    process.regions().define(RegionOptions::of("a")).unwrap();
    let error =
        process.regions().define(options("a", Policy::Discard, CopyPolicy::Retain)).unwrap_err().to_string();
    assert!(
        error.contains(
            "is there as keep with host_copy drop, and was asked for as discard with host_copy retain"
        ),
        "{error}"
    );
    for reserved in ["", "default", "graph (0, 1)"] {
        assert!(matches!(
            process.regions().define(RegionOptions::of(reserved)),
            Err(ref error) if error.says("a region cannot be called")
        ));
    }
    assert!(process.regions().enter("b").unwrap_err().to_string().contains("'a' are there; define it first"));
    assert!(matches!(process.regions().leave(), Err(ref error) if error.says("this thread is in no region")));
    process.regions().define(RegionOptions::of("b")).unwrap();
    process.regions().enter("a").unwrap();
    process.regions().enter("b").unwrap();
    let tag = |written: &Written| process.regions().tag_of(written.address);
    let inner = process.written(0, mib(1), 1);
    let elsewhere = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                let outside = process.written(0, mib(1), 2);
                process.regions().enter("a").unwrap();
                (outside, process.written(0, mib(1), 3))
            })
            .join()
            .unwrap()
    });
    process.regions().leave().unwrap();
    let outer = process.written(0, mib(1), 4);
    process.regions().leave().unwrap();
    assert!(process.flags.is_quiet(), "a thread that ends leaves");
    let found = [tag(&inner), tag(&elsewhere.0), tag(&elsewhere.1), tag(&outer)];
    assert_eq!(found.map(|tag| tag.unwrap_or_default()), ["b", "", "a", "a"]);
    process.end([inner, elsewhere.0, elsewhere.1, outer]);
}

/// Random parts leave and come back, while threads allocate in regions of their own that nobody names.
#[test]
fn random_cycles_beside_threads_that_allocate() {
    let process = started("pool.limit = \"512MiB\"");
    let tags = ["a", "b", "c"];
    for tag in tags.iter().chain(&["w0", "w1"]) {
        process.regions().define(RegionOptions::of(*tag)).unwrap();
    }
    let blocks: Vec<Written> = (0..18_u64)
        .zip(tags.iter().cycle())
        .map(|(i, tag)| process.written_in(tag, i64::from(i % 4 == 1), mib(1 + i % 5), i))
        .collect();
    let over = AtomicBool::new(false);
    let kept = std::thread::scope(|scope| {
        let workers: Vec<_> = ["w0", "w1"]
            .into_iter()
            .enumerate()
            .map(|(worker, tag)| {
                let (process, over) = (&process, &over);
                scope.spawn(move || {
                    let mut own: Vec<Written> = Vec::new();
                    for round in 0.. {
                        if over.load(Ordering::Relaxed) {
                            break;
                        }
                        let seed = 1000 + worker as u64 * 100_000 + round;
                        own.push(process.written_in(tag, (round % 2) as i64, mib(1 + round % 3), seed));
                        if own.len() > 5 {
                            let old = own.remove(0);
                            process.check(&old);
                            process.free(old.address).unwrap();
                        }
                    }
                    own
                })
            })
            .collect();
        let mut random = fastrand::Rng::with_seed(5);
        for _ in 0..120 {
            let some: Vec<&str> = tags.iter().copied().filter(|_| random.usize(..2) == 0).collect();
            let some = if some.is_empty() { vec!["a"] } else { some };
            let bytes = (random.usize(..2) == 0).then(|| mib(1 + random.usize(..30) as u64));
            match random.usize(..3) {
                0 => drop(process.regions().shrink(&Shrink { bytes, ..shrink_of(&some) }).unwrap()),
                1 => drop(process.regions().refill(&Refill { bytes, ..refill_of(&some) }).unwrap()),
                _ => {
                    let used =
                        process.regions().begin_use(&Tags::of(&some), WhenClosed::Refill, None).unwrap();
                    for block in &blocks {
                        if process.regions().tag_of(block.address).is_some_and(|tag| some.contains(&&*tag)) {
                            process.check(block);
                        }
                    }
                    process.regions().gate().end_use(used).unwrap();
                }
            }
            // No call that moves these is under way: the gate says of them what their extents say.
            let views = process.regions().views().unwrap();
            let evicted = views.into_iter().filter(|view| view.evicted > Bytes::ZERO).map(|view| view.tag);
            let evicted: std::collections::BTreeSet<String> = evicted.collect();
            assert!(process.regions().gate().view().closed.iter().eq(&evicted), "{evicted:?}");
        }
        over.store(true, Ordering::Relaxed);
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect::<Vec<_>>()
    });
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().chain(&kept).for_each(|block| process.check(block));
    process.end(blocks.into_iter().chain(kept));
}
