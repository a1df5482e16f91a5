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
