//! Who joins, and how it stands with a join that does not succeed.

use super::*;

#[test]
fn a_silent_agent_bounds_nobody() {
    let socket = Socket::new();
    let variables = [("GLAKE_AGENT", socket.text()), ("GLAKE_DEVICE", &*socket.gpus())];
    // The default.
    let process = worker("lease.grow_timeout_ms = 2000", &variables);
    let begin = Instant::now();
    let mut blocks = vec![process.malloc(0, mib(4), STREAM).unwrap()];
    let mut failed = None;
    while begin.elapsed() < Duration::from_secs(20) && failed.is_none() {
        match process.malloc(0, mib(24), STREAM) {
            Ok(block) => blocks.push(block),
            Err(error) => failed = Some(format!("after {:?}: {error}", begin.elapsed())),
        }
        std::thread::sleep(Duration::from_millis(300));
    }
    process.agent().leave();
    blocks.into_iter().for_each(|block| process.free(block).unwrap());
    assert_eq!(failed, None);
}

#[test]
fn a_disabled_process_joins_nobody() {
    let socket = Socket::new();
    let variables =
        [("GLAKE_AGENT", socket.text()), ("GLAKE_DEVICE", &*socket.gpus()), ("GLAKE_DISABLE", "1")];
    let process = worker("", &variables);
    process.agent().join(Some("chat"), Some(&socket.path)).unwrap();
    assert!(!process.agent().joins_by_itself());
    let block = process.malloc(0, mib(4), STREAM).unwrap();
    assert!(!process.agent().is_joined());
    process.free(block).unwrap();
}

#[test]
fn a_join_that_fails_leaves_the_programs_own_lease() {
    let socket = Socket::new();
    let process = worker("lease.grow_timeout_ms = 0", &[]);
    process.leases().set(0, Some(mib(32))).unwrap();
    process.malloc(0, mib(64), STREAM).unwrap_err();
    std::thread::scope(|scope| {
        let joined = scope.spawn(|| process.agent().join(Some("chat"), Some(&socket.path)));
        let mut agent = socket.accept();
        agent.send(&Envelope::unnumbered(refused("no room", false)));
        joined.join().unwrap().unwrap_err();
    });
    assert_eq!(process.lease(), Some(mib(32)));
    process.malloc(0, mib(64), STREAM).unwrap_err();
}

#[test]
fn a_refusal_whose_reason_passes_is_tried_again() {
    let socket = Socket::new();
    let process = worker("", &[]);
    let block = process.block("weights", mib(12));
    std::thread::scope(|scope| {
        let joined = scope.spawn(|| process.agent().join(Some("chat"), Some(&socket.path)));
        for _ in 0..3 {
            let mut agent = socket.accept();
            agent.send(&Envelope::unnumbered(refused("chat is here already", true)));
        }
        let mut agent = socket.welcome(EPOCH);
        joined.join().unwrap().unwrap();
        assert!(matches!(agent.hear("what it holds"), ToAgent::Changed { .. }));
    });
    assert_eq!(process.lease(), Some(mib(12)));
    process.agent().leave();
    process.free(block).unwrap();
}

/// Whatever its reason is: the memory that others have was granted to them.
#[test]
fn a_worker_that_the_next_agent_refuses_stays_within_its_lease_until_one_takes_it() {
    for passes in [false, true] {
        let mut socket = Socket::new();
        let (process, block, agent) = joined(&socket, "lease.grow_timeout_ms = 0");
        socket.close();
        drop(agent);
        socket.open();
        for _ in 0..2 {
            let mut next = socket.accept();
            assert_eq!(next.hello.holdings[0].lease, mib(12));
            next.send(&Envelope::unnumbered(refused("no room", passes)));
            until("it is told", || next.is_closed().then_some(()));
            assert_eq!((process.agent().is_joined(), process.lease()), (true, Some(mib(12))));
            process.malloc(0, mib(64), STREAM).unwrap_err();
        }
        let mut next = socket.welcome(EPOCH + 1);
        next.grant(mib(64));
        until("the grant", || (process.lease() == Some(mib(76))).then_some(()));
        process.agent().leave();
        process.free(block).unwrap();
    }
}

#[test]
fn a_worker_that_joins_after_its_uses_is_known_to_be_idle() {
    let socket = Socket::new();
    let process = worker("", &[]);
    let block = process.block("weights", mib(12));
    (0..3).for_each(|_| use_all(&process).unwrap());
    let agent = join(&process, &socket);
    let page = agent.activity();
    process.agent().leave();
    process.free(block).unwrap();
    assert_eq!((page.uses, page.begun), (0, 3), "(uses, begun)");
}

#[test]
fn a_program_that_joins_with_memory_has_loaded_and_one_without_has_not() {
    let socket = Socket::new();
    let process = worker("", &[]);
    let mut agent = join(&process, &socket);
    assert_eq!(agent.activity().begun, 0, "it holds nothing yet");
    agent.grant(mib(64));
    let block = process.block("weights", mib(12));
    agent.shrink(mib(64));
    let failed = agent.hear_until("an answer", |said| match said {
        ToAgent::Failed { what, why, holdings } => Some((what.clone(), why.clone(), holdings[0].clone())),
        _ => None,
    });
    assert!(failed.0 == "shrink" && failed.1.contains("loads"), "{failed:?}");
    // What was granted and not made goes back all the same.
    assert_eq!((failed.2.lease, failed.2.resident), (mib(12), mib(12)));
    assert!(process.has(block, mib(12), 7));
    process.agent().join(Some("chat"), None).unwrap_err();
    process.agent().join(Some("chat"), Some(&socket.path)).unwrap();
    assert_eq!(agent.activity().begun, 1);
    agent.shrink(mib(12));
    assert_eq!(agent.shrunk().1, mib(12));
    process.agent().leave();
    process.regions().refill(&Refill::default()).unwrap();
    process.free(block).unwrap();
}

#[test]
fn who_is_joined_is_bounded() {
    for round in 0..30 {
        let socket = Socket::new();
        let process = worker("tiers.extent = \"2MiB\"\nlease.grow_timeout_ms = 0", &[]);
        process.malloc(0, mib(4), STREAM).unwrap();
        let stop = std::sync::atomic::AtomicBool::new(false);
        let bounded = std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(std::sync::atomic::Ordering::SeqCst) {
                        if process.malloc(0, mib(2), STREAM).is_err() {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                });
            }
            let joined = scope.spawn(|| process.agent().join(Some("chat"), Some(&socket.path)));
            let mut agents = Vec::new();
            while !joined.is_finished() {
                if let Some(stream) = socket.connection() {
                    let mut agent = Agent::greeted(stream);
                    agent.welcome_as(EPOCH);
                    agents.push(agent);
                }
            }
            let outcome = joined.join().unwrap().map_err(|error| error.to_string());
            let state = (agents.len(), outcome, process.agent().is_joined(), process.lease().is_some());
            stop.store(true, std::sync::atomic::Ordering::SeqCst);
            state
        });
        process.agent().leave();
        eprintln!("{round}: {bounded:?}");
        assert!(bounded.1.is_err() || (bounded.2 && bounded.3), "round {round}: {bounded:?}");
    }
}
