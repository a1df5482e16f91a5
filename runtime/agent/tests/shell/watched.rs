//! Tests of clients that watch an agent.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use glake_agent::{ClientError, Watch};
use glake_units::Bytes;
use glake_wire::{Answer, Ask, Envelope, Frames, OperationKind, RequestPhase, Snapshot, frame};

use crate::processes::{LIMIT, Node, socket};

const EVERY: Duration = Duration::from_millis(100);

fn watch(node: &Node) -> Watch {
    Watch::connect(&socket(node.folder.path()), EVERY).unwrap()
}

#[track_caller]
fn next(watch: &mut Watch) -> Snapshot {
    watch.next(LIMIT).unwrap().expect("a snapshot within the time of a test")
}

/// Waits for a snapshot with the property.
#[track_caller]
fn until(watch: &mut Watch, what: &str, so: impl Fn(&Snapshot) -> bool) -> Snapshot {
    let end = Instant::now() + LIMIT;
    loop {
        let snapshot = next(watch);
        if so(&snapshot) {
            return snapshot;
        }
        assert!(Instant::now() < end, "{what}: {snapshot:#?}");
    }
}

#[test]
fn a_watcher_sees_who_has_what_who_waits_and_what_was_decided() {
    let node = Node::new(Bytes::gib(14));
    let mut watch = watch(&node);
    let first = next(&mut watch);
    assert_eq!((first.pid, first.missed), (node.agent.child.id(), 0));
    let gpu = &first.gpus[0];
    assert_eq!(
        (gpu.used, gpu.total, gpu.limit),
        (Some(Bytes::ZERO), Bytes::gib(80), Bytes::mib(14 * 1024 - 512))
    );
    let mut workers = ["first", "second"].map(|name| node.joined(&format!("{name} 10GiB")));
    workers[0].tell("want");
    workers[0].hear("resident").unwrap();
    // An uninterruptible use keeps the second one waiting.
    workers[0].tell("use");
    let stranger = std::process::Command::new("sleep").arg("60").spawn();
    let mut stranger = stranger.unwrap();
    crate::meter::write(&node.folder.path().join("meter"), stranger.id(), Bytes::gib(1));
    workers[0].signal(rustix::process::Signal::STOP);
    workers[1].tell("want");
    let waits =
        until(&mut watch, "the second one waits", |of| of.requests.iter().any(|of| of.worker == "second"));
    let request = &waits.requests[0];
    assert!(request.phase != RequestPhase::Filling && !request.why.is_empty(), "{request:?}");
    assert_eq!(request.needs[0].bytes, Bytes::gib(10));
    let others = until(&mut watch, "the stranger is seen", |of| !of.gpus[0].others.is_empty());
    let gpu = &others.gpus[0];
    assert_eq!((gpu.others[0].name.as_deref(), gpu.unmanaged), (Some("sleep"), Bytes::gib(1)), "{gpu:?}");
    let used = others.workers.iter().flat_map(|of| &of.gpus).filter_map(|of| of.used);
    assert_eq!(gpu.used, Some(used.chain([gpu.unmanaged]).sum()), "{others:#?}");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    workers[0].signal(rustix::process::Signal::CONT);
    workers[0].tell("end");
    workers[1].hear("resident").unwrap();
    let mut decided = Vec::new();
    let end = Instant::now() + LIMIT;
    while !decided.iter().any(|outcome| outcome == "refilled") {
        assert!(Instant::now() < end, "{decided:?}");
        decided.extend(
            next(&mut watch)
                .decisions
                .into_iter()
                .filter(|of| of.row.worker == "second")
                .map(|of| of.row.outcome),
        );
    }
    // Each outcome is sent once.
    assert!(next(&mut watch).decisions.is_empty());
    let again = Watch::connect(&socket(node.folder.path()), EVERY).unwrap().next(LIMIT).unwrap().unwrap();
    assert!(again.decisions.iter().any(|of| of.row.worker == "second" && of.row.outcome == "refilled"));
}

#[test]
fn a_stopped_victim_is_seen_as_the_giver() {
    let node = Node::new(Bytes::gib(14));
    let mut watch = watch(&node);
    let mut workers = ["first", "second"].map(|name| node.joined(&format!("{name} 10GiB")));
    node.visit(&mut workers[0], "first");
    workers[0].signal(rustix::process::Signal::STOP);
    workers[1].tell("want");
    let given = until(&mut watch, "it gives", |of| of.requests.first().is_some_and(|of| of.giver_count == 1));
    let request = &given.requests[0];
    assert_eq!((request.phase, &*request.givers), (RequestPhase::Granting, &["first".to_owned()][..]));
    assert_eq!(request.why, "memory of first leaves for it");
    let operation = given.workers[0].operation.clone().unwrap();
    assert_eq!((operation.what, operation.whom.as_deref()), (OperationKind::Shrinking, Some("second")));
    assert!(operation.bytes > Bytes::ZERO && operation.done.is_zero(), "{operation:?}");
    workers[0].signal(rustix::process::Signal::CONT);
    workers[1].hear("resident").unwrap();
    until(&mut watch, "nobody waits", |of| of.requests.is_empty());
}

/// A client that never reads costs nobody else anything, and gets the newest snapshot once it does.
#[test]
fn two_hundred_watchers_and_one_that_never_reads() {
    // One snapshot is more than the kernel keeps for a client.
    let idle =
        |number| format!("[[worker]]\nname = \"{number:0>60}\"\ncommand = [\"true\"]\nstart = \"request\"\n");
    let node = Node::with(Bytes::gib(24), 512, &(0..150).map(idle).collect::<String>());
    let mut slow = UnixStream::connect(socket(node.folder.path())).unwrap();
    slow.set_read_timeout(Some(LIMIT)).unwrap();
    slow.write_all(&frame(&Envelope::unnumbered(Ask::Watch { every_ms: 100 })).unwrap()).unwrap();
    let begin = Instant::now();
    let mut watchers: Vec<Watch> = (0..200).map(|_| watch(&node)).collect();
    let mut numbers = BTreeSet::new();
    for _ in 0..2 {
        numbers.extend(watchers.iter_mut().map(|watch| next(watch).number));
    }
    // All watchers get the same readings: at most one for each tenth of a second.
    let most = begin.elapsed().as_millis() / 100 + 2;
    assert!(numbers.len() as u128 <= most, "{} readings, at most {most}", numbers.len());
    // A worker is served as before.
    let mut worker = node.joined("good 10GiB");
    worker.tell("want");
    worker.hear("resident").unwrap();
    let last =
        until(&mut watchers[0], "it has joined", |of| of.workers.iter().any(|of| of.row.worker == "good"));
    assert_eq!(last.workers.len(), 151);
    let (mut frames, mut bytes, mut heard) = (Frames::default(), vec![0; 64 << 10], Vec::<Snapshot>::new());
    while heard.len() < 2 || heard.last().is_some_and(|of| of.more) {
        match frames.take::<Answer>().unwrap().map(|envelope| envelope.message) {
            Some(Answer::Snapshot(part)) => match heard.last_mut().filter(|of| of.more) {
                Some(begun) => begun.append(part),
                None => heard.push(part),
            },
            Some(other) => panic!("{other:?}"),
            None => {
                let count = slow.read(&mut bytes).unwrap();
                assert!(count > 0, "the agent has given it up");
                frames.push(&bytes[..count]);
            }
        }
    }
    assert!(
        heard[1].missed >= 1 && heard[1].number >= last.number,
        "{} {} {}",
        heard[1].missed,
        heard[1].number,
        last.number
    );
    drop(watchers);
    let status = std::fs::read_to_string(format!("/proc/{}/status", node.agent.child.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak < 96 << 10, "{peak} KiB");
}

#[test]
fn the_end_of_the_agent_ends_a_watch_and_too_many_watchers_are_refused() {
    let mut node = Node::new(Bytes::gib(24));
    let mut watchers: Vec<Watch> = (0..256).map(|_| watch(&node)).collect();
    watchers.iter_mut().for_each(|watch| drop(next(watch)));
    let error = watch(&node).next(LIMIT).unwrap_err();
    assert!(matches!(&error, ClientError::Refused(why) if why.starts_with("256 clients watch")), "{error}");
    // Another one has its place.
    drop(watchers.pop());
    let end = Instant::now() + LIMIT;
    while watch(&node).next(LIMIT).is_err() {
        assert!(Instant::now() < end);
    }
    node.agent.kill();
    let over = loop {
        if let Err(error) = watchers[0].next(LIMIT) {
            break error;
        }
    };
    assert!(matches!(over, ClientError::CommandResult | ClientError::Os(_)), "{over}");
    assert!(matches!(Watch::connect(&socket(node.folder.path()), EVERY), Err(ClientError::Nobody(_))));
}

#[test]
fn odd_requests_to_watch_break_only_their_own_connection() {
    let node = Node::new(Bytes::gib(24));
    let mut watched = watch(&node);
    let framed =
        |json: &str| [&u32::try_from(json.len()).unwrap().to_le_bytes()[..], json.as_bytes()].concat();
    let ask = |fields: &str| framed(&format!("{{\"v\":1,\"seq\":0,\"ack\":0,\"op\":\"watch\"{fields}}}"));
    let served = [",\"every_ms\":0", ",\"every_ms\":18446744073709551615", ",\"every_ms\":1,\"colour\":[{}]"];
    for fields in served {
        let mut stream = UnixStream::connect(socket(node.folder.path())).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(&ask(fields)).unwrap();
        let mut length = [0; 4];
        stream.read_exact(&mut length).unwrap();
        let mut json = vec![0; u32::from_le_bytes(length) as usize];
        stream.read_exact(&mut json).unwrap();
        assert!(String::from_utf8(json).unwrap().contains("\"op\":\"snapshot\""), "{fields}");
        // What a watcher says is not heard.
        let _ = stream.write_all(&[0xff; 100_000]);
    }
    let refused = [
        "",
        ",\"every_ms\":null",
        ",\"every_ms\":-1",
        ",\"every_ms\":\"1\"",
        ",\"every_ms\":1e99",
        ",\"every_ms\":[]",
    ];
    for fields in refused {
        let mut stream = UnixStream::connect(socket(node.folder.path())).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(&ask(fields)).unwrap();
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        assert!(String::from_utf8_lossy(&said).contains("\"op\":\"refused\""), "{fields}");
    }
    assert!(next(&mut watched).workers.is_empty());
    drop(node.joined("good 10GiB"));
}

/// Neither a watcher that has left nor one that does not read keeps the agent awake.
#[test]
fn without_a_waiting_watcher_nothing_wakes_the_agent() {
    let node = Node::new(Bytes::gib(24));
    let mut worker = node.joined("model 10GiB");
    worker.tell("want");
    worker.hear("resident").unwrap();
    let mut watched = watch(&node);
    next(&mut watched);
    let before = node.wakes();
    next(&mut watched);
    assert!(node.wakes() > before);
    drop(watched);
    // What is under way ends; then no time is too long.
    std::thread::sleep(Duration::from_millis(500));
    let before = node.wakes();
    std::thread::sleep(Duration::from_secs(if std::env::var_os("GLAKE_SOAK").is_some() { 20 } else { 1 }));
    assert_eq!(node.wakes(), before);
}

#[test]
fn a_removed_socket_is_back_at_once() {
    let node = Node::new(Bytes::gib(24));
    let path = socket(node.folder.path());
    for moved in [false, true] {
        let begin = Instant::now();
        match moved {
            true => std::fs::rename(&path, path.with_extension("moved")).unwrap(),
            false => std::fs::remove_file(&path).unwrap(),
        }
        while !path.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        // Looks at an interval would take 15 s.
        assert!(begin.elapsed() < Duration::from_secs(7), "{:?}", begin.elapsed());
        drop(node.joined("good 10GiB"));
    }
}
