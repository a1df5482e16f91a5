//! Agents that misbehave, and workers that leave, join twice, or have nobody to speak to.

use glake_wire::Holder;

use super::*;
use crate::process::{AgentError, OnLease};

fn agent_error(result: Result<(), ProcessError>) -> AgentError {
    match result {
        Err(ProcessError::Agent(error)) => *error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_cannot_join_is_told_why_and_has_no_lease() {
    let mut socket = Socket::new();
    let process = worker("", &[]);
    let block = process.block("weights", mib(4));
    let join = |name: &str, path: &std::path::Path| process.agent().join(Some(name), Some(path));
    assert!(matches!(agent_error(join("a b", &socket.path)), AgentError::BadName { .. }));
    assert!(matches!(agent_error(join("a", "agent.sock".as_ref())), AgentError::Socket(_)));
    assert!(matches!(agent_error(join("a", &socket.path.with_extension("none"))), AgentError::Socket(_)));
    let answered = |answer: &(dyn Fn(&mut Agent) + Sync)| {
        std::thread::scope(|scope| {
            let joined = scope.spawn(|| agent_error(join("a", &socket.path)));
            let mut agent = socket.accept();
            answer(&mut agent);
            drop(agent);
            joined.join().unwrap()
        })
    };
    let refused = answered(&|agent| {
        agent.send(&Envelope::unnumbered(refused("no room: stop a worker", false)));
    });
    assert!(refused.to_string().ends_with("no room: stop a worker"), "{refused}");
    assert!(matches!(answered(&|_| ()), AgentError::Closed { .. }));
    assert!(matches!(answered(&|agent| agent.write(&u32::MAX.to_le_bytes())), AgentError::Garbled { .. }));
    let half = answered(&|agent| agent.write(&[9, 0, 0, 0, b'{']));
    assert!(matches!(half, AgentError::Closed { .. }), "{half}");
    let early = answered(&|agent| agent.say(ToWorker::Admit));
    assert!(matches!(early, AgentError::NoWelcome { .. }), "{early}");
    assert_eq!((process.lease(), process.agent().is_joined()), (None, false));
    // Nobody listens any more.
    socket.listener = None;
    let gone = agent_error(join("a", &socket.path));
    assert!(
        matches!(gone, AgentError::NotThere { .. }) && gone.to_string().contains("glake serve"),
        "{gone}"
    );
    process.agent().leave();
    process.free(block).unwrap();
}

/// A use that waits for its memory gets it although the agent is stopped, and the agent hears of it once it goes on.
#[test]
fn soak_a_stopped_agent_stops_no_use() {
    if std::env::var_os("GLAKE_SOAK").is_none() {
        eprintln!("skipped: it takes 15 s (make soak)");
        return;
    }
    let socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "lease.refill_timeout_ms = 30000\nlease.growth = 0");
    agent.shrink(mib(12));
    assert_eq!(agent.shrunk().1, mib(12));
    let begin = Instant::now();
    use_all(&process).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    assert!(process.has(block, mib(12), 7));
    let next = until("a hello with the memory", || {
        let next = Agent::greeted(socket.connection()?);
        (next.hello.epoch == 0).then_some(next)
    });
    assert_eq!((next.hello.holdings[0].lease, next.hello.holdings[0].resident), (mib(12), mib(12)));
    process.agent().leave();
    process.free(block).unwrap();
}

#[test]
fn a_stopped_agent_that_answers_nothing_is_given_up() {
    let socket = Socket::new();
    let process = worker("", &[]);
    let begin = Instant::now();
    let error = agent_error(process.agent().join(Some("a"), Some(&socket.path)));
    assert!(matches!(error, AgentError::Silent { .. }), "{error}");
    assert!(begin.elapsed() >= Duration::from_secs(5) && process.lease().is_none());
}

#[test]
fn to_join_again_as_the_same_is_no_error() {
    let mut socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "");
    process.agent().join(None, Some(&socket.path)).unwrap();
    process.agent().join(Some("chat"), Some(&socket.path)).unwrap();
    assert!(matches!(
        agent_error(process.agent().join(Some("other"), Some(&socket.path))),
        AgentError::Joined { .. }
    ));
    let elsewhere = agent_error(process.agent().join(None, Some("/elsewhere/agent.sock".as_ref())));
    assert!(elsewhere.to_string().contains("glake.leave"), "{elsewhere}");
    // Leases are the agent's.
    for refused in [process.leases().set(0, None), process.leases().grant(0, mib(1))] {
        assert!(matches!(agent_error(refused), AgentError::LeasesAreTheAgents));
    }
    process.agent().leave();
    agent.hear_until("bye", |said| matches!(said, ToAgent::Bye).then_some(()));
    process.agent().leave();
    process.leases().set(0, Some(mib(64))).unwrap();
    process.leases().set(0, None).unwrap();
    // And once more, as another.
    socket.close();
    socket.open();
    std::thread::scope(|scope| {
        let again = scope.spawn(|| process.agent().join(Some("other"), Some(&socket.path)));
        let agent = socket.welcome(9);
        again.join().unwrap().unwrap();
        assert_eq!((&*agent.hello.name, agent.hello.epoch), ("other", 0));
        process.agent().leave();
    });
    process.free(block).unwrap();
}

#[test]
fn repeated_and_stale_frames_change_nothing() {
    let socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "");
    agent.grant(mib(4));
    let grant = ToWorker::Grant { gpu: "0".to_owned(), bytes: mib(4) };
    for seq in [1, 0, 1] {
        agent.send(&Envelope { v: 1, seq, ack: 0, message: grant.clone() });
    }
    // One of a GPU that is not here, and one of a later version.
    agent.say(ToWorker::Grant { gpu: "77".to_owned(), bytes: mib(4) });
    agent.say(ToWorker::Unknown);
    agent.grant(mib(8));
    until("the grants", || (process.lease() == Some(mib(24))).then_some(()));
    // A gap: the connection begins anew, and what was missing comes.
    let missing = agent.conversation.received();
    agent.send(&Envelope { v: 1, seq: 99, ack: missing, message: grant });
    until("the end", || agent.is_closed().then_some(()));
    let mut again = socket.accept();
    assert_eq!((again.hello.epoch, again.hello.received, again.hello.holdings[0].lease), (3, 4, mib(24)));
    again.conversation = agent.conversation;
    again.conversation.resume(again.hello.received);
    again.conversation.push(ToWorker::Grant { gpu: "0".to_owned(), bytes: mib(1) });
    again.welcome(Welcome { epoch: 3, received: again.conversation.received(), worker: 1, wait: false });
    again.flush();
    until("the last grant", || (process.lease() == Some(mib(25))).then_some(()));
    process.agent().leave();
    process.free(block).unwrap();
}

#[test]
fn garbled_frames_begin_a_connection_anew() {
    let socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "");
    let framed = |json: &[u8]| [&u32::try_from(json.len()).unwrap().to_le_bytes()[..], json].concat();
    let deep = format!("{{\"v\":1,\"seq\":1,\"ack\":0,\"op\":\"admit\",\"x\":{}", "[".repeat(30_000));
    let cases: [Vec<u8>; 4] = [
        u32::MAX.to_le_bytes().to_vec(),
        framed(b"nonsense"),
        framed(deep.as_bytes()),
        framed(b"{\"v\":2,\"seq\":1,\"ack\":0,\"op\":\"admit\"}"),
    ];
    for bytes in cases {
        agent.write(&bytes);
        until("the end", || agent.is_closed().then_some(()));
        agent = socket.welcome(3);
        assert_eq!(agent.hello.holdings[0].lease, mib(12));
    }
    // Half a frame, and the end: as if it had not been there.
    agent.write(&[200, 0, 0, 0, b'{']);
    drop(agent);
    let mut agent = socket.welcome(3);
    agent.shrink(mib(4));
    let (held, returned) = agent.shrunk();
    assert!(returned >= mib(4) && held.lease == mib(12).saturating_sub(returned), "{held:?}");
    process.agent().leave();
    process.free(block).unwrap();
}

#[test]
fn a_grant_that_came_before_the_end_of_its_agent_counts() {
    let mut socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "");
    for _ in 0..100 {
        agent.grant(mib(1));
    }
    drop(agent);
    socket.close();
    until("the grants", || (process.lease() == Some(mib(112))).then_some(()));
    assert!(process.agent().is_joined());
    // Without an agent the program goes on under its lease, and hears how it stands.
    let (more, above) = (process.malloc(0, mib(32), STREAM).unwrap(), process.malloc(0, mib(400), STREAM));
    assert!(above.unwrap_err().to_string().contains("The lease is what stops it"));
    socket.open();
    let agent = socket.welcome(4);
    assert_eq!((agent.hello.epoch, agent.hello.received), (3, 100));
    assert_eq!((agent.hello.holdings[0].lease, agent.hello.holdings[0].resident), (mib(112), mib(44)));
    process.agent().leave();
    [block, more].into_iter().for_each(|block| process.free(block).unwrap());
}

#[test]
fn growth_is_asked_for_granted_and_denied() {
    let socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "lease.grow_timeout_ms = 3000");
    let told = Arc::new(parking_lot::Mutex::new(0));
    let into = told.clone();
    let watch: OnLease = Arc::new(move |_, _, _| *into.lock() += 1);
    process.leases().watch(Some(watch));
    std::thread::scope(|scope| {
        let grows = scope.spawn(|| process.malloc(0, mib(16), STREAM));
        let grow = agent.hear_until("grow", |said| match said {
            ToAgent::Grow { gpu, bytes, within_ms } => Some((gpu.clone(), *bytes, *within_ms)),
            _ => None,
        });
        // The agent's answer comes before the request's own time is over.
        assert_eq!(grow, ("0".to_owned(), mib(16), 2800));
        agent.grant(mib(16));
        process.free(grows.join().unwrap().unwrap()).unwrap();
        let begin = Instant::now();
        let grows = scope.spawn(|| process.malloc(0, mib(64), STREAM));
        agent.hear_until("grow", |said| matches!(said, ToAgent::Grow { .. }).then_some(()));
        let holders = vec![Holder { name: "chat".to_owned(), lease: mib(4096) }];
        let (gpu, why) = ("0".to_owned(), Some(glake_wire::Denied::TooLarge));
        agent.say(ToWorker::DenyGrowth { gpu, bytes: mib(64), holders, budget: mib(8192), why });
        let text = grows.join().unwrap().unwrap_err().to_string();
        assert!(
            text.contains("The node agent was asked for 64.00 MiB more and denied it")
                && text.contains("8.00 GiB for its workers, leased to chat (4.00 GiB)")
                && text.contains("[node] budget")
                && begin.elapsed() < Duration::from_secs(3),
            "{text}"
        );
        // Who was named then is not named when nobody answers.
        let grows = scope.spawn(|| process.malloc(0, mib(64), STREAM));
        agent.hear_until("grow", |said| matches!(said, ToAgent::Grow { .. }).then_some(()));
        let text = grows.join().unwrap().unwrap_err().to_string();
        assert!(text.contains("has not answered within") && !text.contains("chat"), "{text}");
    });
    assert!(*told.lock() > 0, "a watcher of the program's hears it too");
    process.leases().watch(None);
    process.agent().leave();
    process.free(block).unwrap();
}

#[test]
fn a_want_that_is_denied_fails_or_is_asked_again() {
    let socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "");
    agent.shrink(mib(12));
    agent.shrunk();
    std::thread::scope(|scope| {
        let begin = Instant::now();
        let refill = scope.spawn(|| process.regions().refill(&Refill::default()));
        agent.wanted();
        agent.say(ToWorker::Deny {
            why: glake_wire::Denied::TooLarge,
            retry_after_ms: None,
            gpus: Vec::new(),
        });
        let error = refill.join().unwrap().unwrap_err();
        assert!(begin.elapsed() < LONG, "it does not wait for its time to be over");
        let text = error.to_string();
        let denied = "The node agent denied it: all that the other workers could give is not enough; raise [node] budget";
        assert!(
            text.contains("lease of") && text.contains(denied) && !text.contains("End the process"),
            "{text}"
        );
        let refill = scope.spawn(|| process.regions().refill(&Refill::default()));
        agent.wanted();
        agent.say(ToWorker::Deny {
            why: glake_wire::Denied::Incomplete,
            retry_after_ms: Some(30),
            gpus: Vec::new(),
        });
        agent.wanted();
        agent.grant(mib(28));
        refill.join().unwrap().unwrap();
        assert_eq!(agent.refilled().evicted, mib(0));
    });
    // The agent's own wish.
    agent.shrink(mib(28));
    agent.shrunk();
    agent.say(ToWorker::Refill);
    agent.wanted();
    agent.grant(mib(28));
    assert_eq!(agent.refilled().evicted, mib(0));
    agent.say(ToWorker::Refill);
    agent.refilled();
    agent.say(ToWorker::Demote { bytes: mib(1) });
    agent.hear_until("changed", |said| matches!(said, ToAgent::Changed { .. }).then_some(()));
    process.agent().leave();
    process.free(block).unwrap();
}

#[test]
fn who_leaves_while_a_want_is_open_waits_no_more() {
    let socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "");
    agent.shrink(mib(12));
    agent.shrunk();
    std::thread::scope(|scope| {
        let refill = scope.spawn(|| process.regions().refill(&Refill::default()));
        agent.wanted();
        let left = scope.spawn(|| process.agent().leave());
        agent.hear_until("bye", |said| matches!(said, ToAgent::Bye).then_some(()));
        left.join().unwrap();
        refill.join().unwrap().unwrap();
    });
    assert!(process.has(block, mib(12), 7));
    process.free(block).unwrap();
}

#[test]
fn what_is_in_use_stays_until_it_is_parked_or_over() {
    let socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "");
    let id = process.regions().begin_use(&Tags::All, WhenClosed::Refuse, None).unwrap();
    let failed = |agent: &mut Agent, which: &str| {
        agent.hear_until("failed", |said| match said {
            ToAgent::Failed { what, why, holdings } => {
                assert!(what == which && why.contains("use"), "{said:?}");
                assert_eq!(holdings[0].resident, mib(12));
                Some(())
            }
            ToAgent::Shrunk { .. } | ToAgent::Parked => panic!("{said:?}"),
            _ => None,
        });
    };
    let (gpu, tier) = ("0".to_owned(), Tier::Host);
    agent.say(ToWorker::Shrink { gpu, bytes: mib(4), tier, within_ms: 30, more: false });
    failed(&mut agent, "shrink");
    agent.say(ToWorker::Park { within_ms: 30 });
    failed(&mut agent, "park");
    // What is no longer wanted is given up at once.
    agent.say(ToWorker::Park { within_ms: 50_000 });
    let begin = Instant::now();
    agent.say(ToWorker::Unpark);
    failed(&mut agent, "park");
    assert!(begin.elapsed() < Duration::from_secs(45), "{:?}", begin.elapsed());
    process.regions().gate().end_use(id).unwrap();
    agent.say(ToWorker::Park { within_ms: 50_000 });
    agent.hear_until("parked", |said| matches!(said, ToAgent::Parked).then_some(()));
    let refused = process.regions().begin_use(&Tags::All, WhenClosed::Refuse, None).unwrap_err();
    assert!(matches!(refused, ProcessError::Closed { .. }), "{refused}");
    agent.say(ToWorker::Unpark);
    let id = until("the gate", || process.regions().begin_use(&Tags::All, WhenClosed::Refuse, None).ok());
    process.regions().gate().end_use(id).unwrap();
    // One that is forgotten ends by itself.
    agent.say(ToWorker::Park { within_ms: 300 });
    agent.hear_until("parked", |said| matches!(said, ToAgent::Parked).then_some(()));
    let id = process.regions().begin_use(&Tags::All, WhenClosed::Hold, Some(LONG)).unwrap();
    process.regions().gate().end_use(id).unwrap();
    agent.say(ToWorker::Shrink {
        gpu: "9".to_owned(),
        bytes: mib(4),
        tier: Tier::Host,
        within_ms: 1000,
        more: false,
    });
    agent.hear_until("failed", |said| match said {
        ToAgent::Failed { why, .. } => why.contains("GPU 9").then_some(()),
        _ => None,
    });
    process.agent().leave();
    process.free(block).unwrap();
}

#[test]
fn without_an_agent_for_long_enough_a_worker_helps_itself() {
    let mut socket = Socket::new();
    let (process, block, mut agent) = joined(&socket, "");
    agent.shrink(mib(12));
    agent.shrunk();
    drop(agent);
    socket.close();
    let begin = Instant::now();
    process.regions().refill(&Refill::default()).unwrap();
    assert!(begin.elapsed() >= Duration::from_secs(9), "{:?}", begin.elapsed());
    assert!(process.has(block, mib(12), 7));
    socket.open();
    let agent = socket.welcome(8);
    assert_eq!(agent.hello.holdings[0].lease, mib(28), "it tells the truth");
    process.agent().leave();
    process.free(block).unwrap();
}
