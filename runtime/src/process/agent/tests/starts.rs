//! A process that joins by itself when its first pool starts.

use super::*;

/// The agent answers hello with this while the worker makes its first block.
fn started(socket: &Socket, wait: bool) -> (Process, Agent) {
    let process = worker("", &[("GLAKE_AGENT", socket.text()), ("GLAKE_DEVICE", &socket.gpus())]);
    assert!(!process.agent().is_joined(), "not before a pool starts");
    let agent = std::thread::scope(|scope| {
        let made = scope.spawn(|| process.malloc(0, mib(1), STREAM));
        let mut agent = socket.accept();
        let hello = agent.hello.clone();
        assert!(
            hello.starting && hello.holdings[0].gpu == "0" && hello.holdings[0].lease.is_zero(),
            "{hello:?}"
        );
        agent.welcome(Welcome { epoch: 2, received: 0, worker: 1, wait });
        if wait {
            std::thread::sleep(Duration::from_millis(50));
            assert!(!made.is_finished(), "it waits for the agent");
            agent.say(ToWorker::Deny {
                why: glake_wire::Denied::Incomplete,
                retry_after_ms: Some(10),
                gpus: Vec::new(),
            });
            agent.hear_until("want", |said| matches!(said, ToAgent::Want { .. }).then_some(()));
            agent.grant(mib(64));
            agent.say(ToWorker::Admit);
        } else {
            agent.hear_until("grow", |said| matches!(said, ToAgent::Grow { .. }).then_some(()));
            agent.grant(mib(64));
        }
        process.free(made.join().unwrap().unwrap()).unwrap();
        agent
    });
    (process, agent)
}

#[test]
fn it_waits_where_the_agent_says_so_and_is_over_with_the_first_use() {
    for wait in [false, true] {
        let socket = Socket::new();
        let (process, mut agent) = started(&socket, wait);
        let id = process.regions().begin_use(&Tags::All, WhenClosed::Refuse, None).unwrap();
        assert_eq!(agent.refilled().lease, mib(64));
        process.regions().gate().end_use(id).unwrap();
        process.agent().leave();
    }
}

#[test]
fn it_is_over_with_a_seal_an_explicit_join_or_when_nothing_new_is_made() {
    for how in 0..3 {
        let socket = Socket::new();
        let (process, mut agent) = started(&socket, false);
        match how {
            0 => {
                process
                    .regions()
                    .define(RegionOptions { policy: Policy::Sealed, ..RegionOptions::of("w") })
                    .unwrap();
                process.regions().seal("w", false).unwrap();
            }
            1 => process.agent().join(None, None).unwrap(),
            _ => {}
        }
        agent.refilled();
        process.agent().leave();
    }
}

#[test]
fn without_an_agent_it_goes_on_and_joins_later() {
    let mut socket = Socket::new();
    socket.close();
    let process = worker("", &[("GLAKE_AGENT", socket.text()), ("GLAKE_DEVICE", &socket.gpus())]);
    let block = process.malloc(0, mib(8), STREAM).unwrap();
    assert_eq!(process.lease(), None);
    socket.open();
    let agent = socket.welcome(1);
    // It has not said yet that it holds what it will.
    assert!(agent.hello.starting && agent.hello.holdings[0].lease >= mib(8));
    until("the lease", || process.lease().map(|_| ()));
    // A pool that starts later is told.
    let mut agent = agent;
    std::thread::scope(|scope| {
        let made = scope.spawn(|| process.malloc(1, mib(4), STREAM));
        agent.hear_until("the other GPU", |said| match said {
            ToAgent::Changed { holdings } => holdings.iter().find(|held| held.gpu == "1").map(|_| ()),
            _ => None,
        });
        agent.say(ToWorker::Grant { gpu: "1".to_owned(), bytes: mib(64) });
        process.free(made.join().unwrap().unwrap()).unwrap();
    });
    process.agent().leave();
    process.free(block).unwrap();
}

/// `GLAKE_AGENT` names a socket that nobody serves: the pool starts, and a join that the program asks for says so.
#[test]
fn a_join_fails_while_the_agent_that_the_environment_names_is_not_there() {
    let mut socket = Socket::new();
    socket.close();
    let process = worker("", &[("GLAKE_AGENT", socket.text()), ("GLAKE_DEVICE", &socket.gpus())]);
    let block = process.malloc(0, mib(8), STREAM).unwrap();
    for _ in 0..2 {
        let error = process.agent().join(None, None).unwrap_err().to_string();
        assert!(error.contains(socket.text()), "{error}");
        assert!(!process.agent().is_joined() && process.lease().is_none());
    }
    // It may be called otherwise, as it is nothing to anybody yet.
    process.agent().join(Some("chat"), None).unwrap_err();
    socket.open();
    let mut agent = join(&process, &socket);
    assert_eq!(agent.hello.name, "chat");
    assert!(process.lease().is_some_and(|lease| lease >= mib(8)));
    process.agent().join(None, None).unwrap();
    process.agent().join(Some("code"), None).unwrap_err();
    process.agent().leave();
    agent.hear_until("bye", |said| matches!(said, ToAgent::Bye).then_some(()));
    process.free(block).unwrap();
}

#[test]
fn gpus_that_are_simulated_for_one_process_alone_are_no_agents() {
    let socket = Socket::new();
    let process = worker("", &[("GLAKE_AGENT", socket.text())]);
    let block = process.malloc(0, mib(8), STREAM).unwrap();
    let connections = socket.listener.as_ref().unwrap();
    connections.set_nonblocking(true).unwrap();
    assert_eq!(connections.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    process.free(block).unwrap();
}

#[test]
fn a_socket_that_is_no_path_from_the_root_is_a_mistake() {
    let sources = Sources {
        environment: Environment::from_iter([("GLAKE_AGENT", "agent.sock")]),
        ..Sources::default()
    };
    let error = sources.load().unwrap_err().to_string();
    assert!(error.contains("GLAKE_AGENT") && error.contains("from the root"), "{error}");
    let none = Sources { environment: Environment::from_iter([("GLAKE_AGENT", "")]), ..Sources::default() };
    none.load().unwrap();
}
