//! A worker's life with an agent: it joins, shrinks, wants, is granted, refilled, parked, and its copies go to files.

use super::*;

#[test]
fn a_worker_joins_wants_is_granted_and_shrinks() {
    let socket = Socket::new();
    let process = worker("", &[]);
    let block = process.block("weights", mib(12));
    let (mut agent, joined) = std::thread::scope(|scope| {
        let joined = scope.spawn(|| process.agent().join(Some("chat"), Some(&socket.path)));
        (socket.welcome(5), joined.join().unwrap())
    });
    joined.unwrap();
    let hello = agent.hello.clone();
    assert_eq!((&*hello.name, hello.peer.pid, hello.ranks), ("chat", std::process::id(), 1));
    assert!(!hello.starting && !hello.wants && hello.epoch == 0 && hello.gang.is_none());
    let held = &hello.holdings[0];
    assert_eq!((&*held.gpu, held.device, held.lease, held.resident), ("0", 0, mib(12), mib(12)));
    assert_eq!((held.evicted, held.room, held.dirty, held.fixed), (mib(0), mib(0), mib(12), mib(0)));
    assert_eq!(agent.activity().made[0], mib(12).get());

    agent.shrink(mib(8));
    let (held, returned) = agent.shrunk();
    assert_eq!((held.lease, held.resident, held.evicted, returned), (mib(4), mib(4), mib(8), mib(8)));
    assert_eq!((held.room, held.growth, held.hosted), (mib(0), mib(16), mib(8)));
    assert_eq!(process.lease(), Some(mib(4)));

    std::thread::scope(|scope| {
        let used = scope.spawn(|| process.regions().begin_use(&Tags::All, WhenClosed::Refill, None));
        let held = agent.wanted();
        assert_eq!((held.evicted, held.room, held.growth), (mib(8), mib(0), mib(16)));
        for _ in 0..6 {
            agent.grant(mib(4));
        }
        agent.say(ToWorker::Admit);
        let held = agent.refilled();
        assert_eq!((held.resident, held.evicted, held.growth), (mib(12), mib(0), mib(0)));
        // It has what it needs before all that is granted may have come; the shrink below counts all.
        assert!((mib(16)..=mib(28)).contains(&held.lease), "{}", held.lease);
        let id = used.join().unwrap().unwrap();
        assert!(process.has(block, mib(12), 7));
        let busy = agent.activity();
        assert_eq!((busy.uses, busy.begun, busy.parks), (1, 1, false));
        process.regions().gate().end_use(id).unwrap();
        let idle = agent.activity();
        assert!(idle.uses == 0 && idle.idle_since_ns > 0);
    });
    // What is leased and not made goes first, and copies nothing.
    agent.shrink(mib(16));
    let (held, returned) = agent.shrunk();
    assert_eq!((held.lease, held.resident, held.evicted, returned), (mib(12), mib(12), mib(0), mib(16)));
    process.agent().leave();
    assert!(matches!(agent.hear("bye"), ToAgent::Bye));
    assert_eq!(process.lease(), None);
    process.free(block).unwrap();
}

#[test]
fn copies_go_to_files_while_nobody_needs_them() {
    let (socket, folder) = (Socket::new(), tempfile::tempdir().unwrap());
    let files = format!("tiers.files = {:?}", folder.path().join("extents"));
    let (process, block, mut agent) = joined(&socket, &files);
    let hosted = |agent: &mut Agent, expected: Bytes| {
        agent.hear_until("changed", |said| match said {
            ToAgent::Changed { holdings } => (holdings[0].hosted == expected).then(|| {
                let Holding { evicted, in_files, in_peers, .. } = &holdings[0];
                assert_eq!((*in_files, *in_peers), (Some(evicted.saturating_sub(expected)), Some(mib(0))));
                *evicted
            }),
            _ => None,
        })
    };
    agent.shrink(mib(12));
    assert_eq!(agent.shrunk().0.hosted, mib(12));
    // At least so much: whole extents.
    agent.say(ToWorker::Demote { bytes: mib(3) });
    assert_eq!(hosted(&mut agent, mib(8)), mib(12));
    agent.say(ToWorker::Demote { bytes: mib(900) });
    assert_eq!(hosted(&mut agent, mib(0)), mib(12));
    agent.say(ToWorker::Demote { bytes: mib(1) });
    hosted(&mut agent, mib(0));
    agent.say(ToWorker::Refill);
    agent.wanted();
    agent.grant(mib(28));
    assert_eq!(agent.refilled().evicted, mib(0));
    assert!(process.has(block, mib(12), 7));
    process.agent().leave();
    process.free(block).unwrap();
}

#[test]
fn what_waits_to_come_back_is_not_written_to_files() {
    let (socket, folder) = (Socket::new(), tempfile::tempdir().unwrap());
    let files = format!("tiers.files = {:?}", folder.path().join("extents"));
    let (process, block, mut agent) = joined(&socket, &files);
    agent.shrink(mib(12));
    agent.shrunk();
    std::thread::scope(|scope| {
        let refill = scope.spawn(|| process.regions().refill(&Refill::default()));
        agent.wanted();
        agent.say(ToWorker::Demote { bytes: mib(12) });
        let hosted = agent.hear_until("changed", |said| match said {
            ToAgent::Changed { holdings } => Some(holdings[0].hosted),
            _ => None,
        });
        assert_eq!(hosted, mib(12));
        agent.grant(mib(28));
        refill.join().unwrap().unwrap();
    });
    assert!(process.has(block, mib(12), 7));
    process.agent().leave();
    process.free(block).unwrap();
}
