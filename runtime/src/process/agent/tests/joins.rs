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
fn a_join_that_fails_leaves_the_programs_own_lease() {
    let socket = Socket::new();
    let process = worker("lease.grow_timeout_ms = 0", &[]);
    process.leases().set(0, Some(mib(32))).unwrap();
    process.malloc(0, mib(64), STREAM).unwrap_err();
    std::thread::scope(|scope| {
        let joined = scope.spawn(|| process.agent().join(Some("chat"), Some(&socket.path)));
        let mut agent = socket.accept();
        agent.send(&Envelope::unnumbered(ToWorker::Refused { why: "no room".to_owned() }));
        joined.join().unwrap().unwrap_err();
    });
    assert_eq!(process.lease(), Some(mib(32)));
    process.malloc(0, mib(64), STREAM).unwrap_err();
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
