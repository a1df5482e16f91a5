//! Uses, hooks and timeouts: who waits for whom.

use super::*;

#[test]
fn uses_keep_memory_and_what_is_away_keeps_uses_out() {
    let process = started("");
    process.regions().define(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(9), 1);
    let a = Tags::of(&["a"]);
    let running = process.regions().begin_use(&a, WhenClosed::Refuse, None).unwrap();
    let short = Shrink { timeout: Some(Duration::from_millis(20)), ..shrink_of(&["a"]) };
    assert!(matches!(process.regions().shrink(&short), Err(ProcessError::StillUsed { uses: 1, .. })));
    process.check(&block);
    std::thread::scope(|scope| {
        let shrunk = scope.spawn(|| process.regions().shrink(&shrink_of(&["a"])).unwrap());
        while process.regions().gate().view().closing.is_empty() {
            std::thread::yield_now();
        }
        assert!(matches!(
            process.regions().begin_use(&a, WhenClosed::Refuse, None),
            Err(ProcessError::Closed { .. })
        ));
        process.check(&block);
        process.regions().gate().end_use(running).unwrap();
        assert!(shrunk.join().unwrap().freed >= mib(9));
    });
    assert!(matches!(
        process.regions().begin_use(&a, WhenClosed::Refuse, None),
        Err(ProcessError::Closed { .. })
    ));
    let soon = Some(Duration::from_millis(20));
    assert!(matches!(
        process.regions().begin_use(&a, WhenClosed::Hold, soon),
        Err(ProcessError::HeldTooLong { .. })
    ));
    let running = process.regions().begin_use(&a, WhenClosed::Refill, None).unwrap();
    process.check(&block);
    process.regions().gate().end_use(running).unwrap();
    process.end([block]);
}

#[test]
fn hooks_come_before_and_after() {
    let process = started("");
    let block = process.written(0, mib(9), 1);
    let (answer, told) = (Arc::new(AtomicU32::new(3)), mpsc::channel());
    let hook = |answer: Arc<AtomicU32>| -> Hook {
        let sender = told.0.clone();
        Arc::new(move |event: &str| {
            sender.send(event.to_owned()).unwrap();
            let answer = answer.load(Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(if answer == 9 { 200 } else { 0 }));
            i32::try_from(answer % 9).unwrap()
        })
    };
    process.regions().set_hooks(
        Some(hook(answer.clone())),
        Some(hook(Arc::default())),
        Some(Duration::from_millis(100)),
    );
    let error = process.regions().shrink(&Shrink::default()).unwrap_err().to_string();
    assert!(error.contains("the hook before refused with 3"), "{error}");
    answer.store(9, Ordering::SeqCst);
    assert!(matches!(
        process.regions().shrink(&Shrink::default()),
        Err(ref error) if error.says("the hook before took longer than")
    ));
    process.check(&block);
    assert_eq!(told.1.try_iter().count(), 2);
    answer.store(0, Ordering::SeqCst);
    process.regions().shrink(&Shrink::default()).unwrap();
    process.regions().refill(&Refill::default()).unwrap();
    let events: Vec<String> = told.1.try_iter().collect();
    assert!(events[0].contains("\"event\":\"shrink\"") && events[0].contains("\"when\":\"before\""));
    assert!(events[1].contains("\"freed\":") && events[3].contains("\"mapped\":"), "{events:?}");
    process.regions().set_hooks(None, None, None);
    process.end([block]);
}

#[test]
fn a_refill_that_is_given_up_is_told_as_that() {
    let process = started("");
    let block = process.written(0, mib(9), 1);
    process.regions().shrink(&Shrink::default()).unwrap();
    process.regions().stop_background();
    let refill = Refill { timeout: Some(Duration::from_secs(60)), ..Refill::default() };
    let error = process.regions().refill(&refill).unwrap_err();
    assert!(error.says("was given up"), "{error}");
    let entered = process.regions().begin_use(&Tags::All, WhenClosed::Refill, Some(Duration::from_secs(60)));
    assert!(matches!(entered, Err(ref error) if error.says("was given up")), "{entered:?}");
    process.regions().refill(&Refill::default()).unwrap();
    process.check(&block);
    process.end([block]);
}

/// A hook that waits until it is let go on, and how often it was called.
fn held(process: &Process) -> (Arc<parking_lot::Mutex<()>>, Arc<AtomicU32>) {
    let (gate, calls) = (Arc::new(parking_lot::Mutex::new(())), Arc::new(AtomicU32::new(0)));
    let hook: Hook = Arc::new({
        let (gate, calls) = (gate.clone(), calls.clone());
        move |_: &str| {
            calls.fetch_add(1, Ordering::SeqCst);
            drop(gate.lock());
            0
        }
    });
    process.regions().set_hooks(Some(hook), None, None);
    (gate, calls)
}

#[test]
fn a_timeout_bounds_a_refill_and_the_refill_goes_on() {
    let soon = Duration::from_millis(20);
    let process = started("");
    process.regions().define(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(9), 1);
    let a = Tags::of(&["a"]);
    for explicit in [false, true] {
        process.regions().shrink(&shrink_of(&["a"])).unwrap();
        let (gate, calls) = held(&process);
        let shut = gate.lock();
        if explicit {
            let refill = Refill { timeout: Some(soon), ..refill_of(&["a"]) };
            let error = process.regions().refill(&refill).unwrap_err();
            assert!(matches!(error, ProcessError::StillComing { .. }), "{error}");
            assert!(error.to_string().contains("goes on in the background"), "{error}");
        } else {
            for _ in 0..3 {
                let entered = process.regions().begin_use(&a, WhenClosed::Refill, Some(soon));
                assert!(matches!(entered, Err(ProcessError::HeldTooLong { .. })), "{entered:?}");
            }
        }
        drop(shut);
        let entered = process.regions().begin_use(&a, WhenClosed::Hold, None).unwrap();
        assert_eq!(calls.load(Ordering::SeqCst), 1, "all wait for one refill");
        process.check(&block);
        process.regions().gate().end_use(entered).unwrap();
        process.regions().set_hooks(None, None, None);
    }
    process.regions().shrink(&shrink_of(&["a"])).unwrap();
    let enough = Some(Duration::from_secs(60));
    let entered = process.regions().begin_use(&a, WhenClosed::Refill, enough).unwrap();
    process.check(&block);
    process.regions().gate().end_use(entered).unwrap();
    process.regions().shrink(&shrink_of(&["a"])).unwrap();
    assert!(
        process.regions().refill(&Refill { timeout: enough, ..refill_of(&["a"]) }).unwrap().copied >= mib(9)
    );
    assert!(process.regions().refill(&Refill { timeout: enough, ..refill_of(&["x"]) }).is_err());
    process.end([block]);
}

#[test]
fn no_refill_outlasts_its_process() {
    let process = started("");
    for tag in ["a", "b"] {
        process.regions().define(RegionOptions::of(tag)).unwrap();
    }
    let block = process.written(0, mib(9), 1);
    process.regions().shrink(&Shrink::default()).unwrap();
    let (gate, calls) = held(&process);
    let shut = gate.lock();
    let soon = Some(Duration::from_millis(20));
    for tags in [Tags::All, Tags::of(&["a"])] {
        assert!(process.regions().begin_use(&tags, WhenClosed::Refill, soon).is_err());
    }
    while calls.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    let regions = Arc::downgrade(process.regions().set());
    std::thread::scope(|scope| {
        let stopped = scope.spawn(|| process.stop());
        drop(shut);
        stopped.join().unwrap();
    });
    process.check(&block);
    assert!(matches!(
        process
            .regions()
            .begin_use(&Tags::of(&["b"]), WhenClosed::Refill, soon)
            .map(|id| process.regions().gate().end_use(id)),
        Ok(Ok(()))
    ));
    drop(process);
    assert!(regions.upgrade().is_none());
}

/// Whoever touches a region may hold what a hook waits for.
#[test]
fn hooks_are_told_of_what_is_touched_and_not_waited_for() {
    let process = started("");
    process.regions().define(RegionOptions::of("a")).unwrap();
    let mut blocks = vec![process.written_in("a", 1, mib(9), 1)];
    process.regions().shrink(&Shrink::default()).unwrap();
    let (sender, told) = mpsc::channel();
    let held = Arc::new(parking_lot::Mutex::new(()));
    let hook: Hook = Arc::new({
        let held = held.clone();
        move |event: &str| {
            drop(held.lock());
            sender.send(serde_json::from_str::<serde_json::Value>(event).unwrap()).unwrap();
            7
        }
    });
    process.regions().set_hooks(Some(hook.clone()), Some(hook), None);
    let lock = held.lock();
    blocks.push(process.written_in("a", 1, mib(2), 2));
    blocks.iter().for_each(|block| process.check(block));
    drop(lock);
    for when in ["before", "after"] {
        let event = told.recv().unwrap();
        assert_eq!((&event["event"], &event["when"]), (&"refill".into(), &when.into()), "{event}");
        assert_eq!((&event["touched"], &event["device"]), (&true.into(), &1.into()), "{event}");
        assert_eq!(event["tags"], serde_json::json!(["a"]));
        assert_eq!(
            event["report"]["copied"].as_u64().is_some_and(|copied| copied >= 9 << 20),
            when == "after"
        );
    }
    process.regions().set_hooks(None, None, None);
    process.regions().shrink(&shrink_of(&["a"])).unwrap();
    process.regions().bring_back(blocks[0].address).unwrap();
    assert!(told.try_recv().is_err());
    process.end(blocks);
}

#[test]
fn it_goes_on_in_the_background() {
    let process = started("tiers.host_prepare = \"16MiB\"");
    process.regions().define(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(9), 1);
    process.regions().shrink(&Shrink::default()).unwrap();
    let report = process.regions().refill(&Refill { wait: false, ..Refill::default() }).unwrap();
    assert_eq!(report, RefillReport::default());
    let use_of_a = process
        .regions()
        .begin_use(&Tags::of(&["a"]), WhenClosed::Hold, Some(Duration::from_secs(60)))
        .unwrap();
    process.check(&block);
    process.regions().gate().end_use(use_of_a).unwrap();
    process.regions().refill(&Refill::default()).unwrap();
    process.stop();
    process.regions().refill(&Refill { wait: false, ..Refill::default() }).unwrap();
    process.end([block]);
}

#[test]
fn a_use_names_regions_that_are_there() {
    let process = started("");
    for tag in ["cache", "weights"] {
        process.regions().define(RegionOptions::of(tag)).unwrap();
    }
    process.pools().begin(0, PoolId(0, 5), None).unwrap();
    process.pools().end(0, PoolId(0, 5)).unwrap();
    for when in [WhenClosed::Refill, WhenClosed::Hold, WhenClosed::Refuse] {
        for tags in [&["typo"][..], &["cache", "typo"], &["graph (0, 6)"]] {
            let error = process.regions().begin_use(&Tags::of(tags), when, None).unwrap_err();
            assert!(error.says("there is no region"), "{error}");
            let text = error.to_string();
            assert!(["'cache'", "'weights'"].iter().all(|tag| text.contains(tag)), "{text}");
        }
        for tags in [&["weights"][..], &["cache", "weights"], &["default"], &["graph (0, 5)"], &[]] {
            let entered = process.regions().begin_use(&Tags::of(tags), when, None).unwrap();
            process.regions().gate().end_use(entered).unwrap();
        }
    }
    assert_eq!(process.regions().gate().view().uses, 0);
}

/// Everybody gets in, whatever they do while the gate is closed, and a refill of it is no error.
fn is_open(process: &Process, tag: &str, what: &str) {
    let soon = Some(Duration::from_secs(5));
    assert_eq!(process.regions().gate().view().closed, Vec::<String>::new(), "{what}");
    for tags in [Tags::of(&[tag]), Tags::All] {
        for when in [WhenClosed::Refuse, WhenClosed::Hold, WhenClosed::Refill] {
            let entered = process.regions().begin_use(&tags, when, soon);
            let entered = entered.unwrap_or_else(|error| panic!("{what}, {tags}, {when:?}: {error}"));
            process.regions().gate().end_use(entered).unwrap();
        }
    }
    for refill in [refill_of(&[tag]), Refill::default()] {
        process.regions().refill(&refill).unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    assert!(process.flags.is_quiet(), "{what}");
}

type Forgets = (&'static str, fn(&Process, Written));

/// What is evicted keeps uses out for as long as somebody's bytes are in it.
#[test]
fn what_is_freed_while_it_is_away_keeps_nobody_out() {
    let ways: [Forgets; 3] = [
        ("freed", |process, block| process.free(block.address).unwrap()),
        ("trimmed", |process, block| {
            process.free(block.address).unwrap();
            process.trim(None, Bytes::ZERO).unwrap();
        }),
        ("refilled", |process, block| {
            process.free(block.address).unwrap();
            process.regions().refill(&refill_of(&["a"])).unwrap();
        }),
    ];
    for (what, forget) in ways {
        let process = started("");
        process.regions().define(RegionOptions::of("a")).unwrap();
        let [one, two] = [1, 2].map(|seed| process.written_in("a", 0, mib(9), seed));
        process.regions().shrink(&shrink_of(&["a"])).unwrap();
        process.free(one.address).unwrap();
        assert_eq!(process.regions().gate().view().closed, ["a"], "the other one is evicted");
        std::thread::scope(|scope| {
            let held = scope.spawn(|| {
                process.regions().begin_use(&Tags::of(&["a"]), WhenClosed::Hold, Some(Duration::from_secs(5)))
            });
            forget(&process, two);
            process.regions().gate().end_use(held.join().unwrap().unwrap()).unwrap();
        });
        is_open(&process, "a", what);
        let next = process.written_in("a", 0, mib(9), 3);
        process.check(&next);
        process.end([next]);
    }
}

#[test]
fn a_graph_that_is_dropped_while_it_is_away_keeps_nobody_out() {
    const POOL: PoolId = PoolId(0, 5);
    let ways: [Forgets; 4] = [
        ("freed, then dropped", |process, block| {
            process.free(block.address).unwrap();
            process.pools().release(0, POOL).unwrap();
        }),
        ("dropped, then freed", |process, block| {
            process.pools().release(0, POOL).unwrap();
            process.free(block.address).unwrap();
        }),
        ("dropped and trimmed", |process, block| {
            process.free(block.address).unwrap();
            process.pools().release(0, POOL).unwrap();
            process.trim(None, Bytes::ZERO).unwrap();
        }),
        ("trimmed", |process, block| {
            process.free(block.address).unwrap();
            process.pools().trim(0, POOL).unwrap();
            process.pools().release(0, POOL).unwrap();
        }),
    ];
    for (what, forget) in ways {
        let process = started("");
        process.pools().begin(0, POOL, None).unwrap();
        let block = process.written(0, mib(9), 1);
        process.pools().end(0, POOL).unwrap();
        process.regions().shrink(&shrink_of(&["graph (0, 5)"])).unwrap();
        assert_eq!(process.regions().gate().view().closed, ["graph (0, 5)"]);
        forget(&process, block);
        is_open(&process, "graph (0, 5)", what);
        process.end([]);
    }
}

/// A refill that finds nothing to bring back because the graph was dropped a moment before.
#[test]
fn a_refill_of_what_was_dropped_is_no_error() {
    let process = started("");
    process.pools().begin(0, PoolId(0, 5), None).unwrap();
    let block = process.written(0, mib(9), 1);
    process.pools().end(0, PoolId(0, 5)).unwrap();
    process.regions().shrink(&Shrink::default()).unwrap();
    process.free(block.address).unwrap();
    process.pools().release(0, PoolId(0, 5)).unwrap();
    assert_eq!(process.regions().refill(&Refill::default()).unwrap().evicted, Bytes::ZERO);
    is_open(&process, "graph (0, 5)", "refilled");
    process.end([]);
}
