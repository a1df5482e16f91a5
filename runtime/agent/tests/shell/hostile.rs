//! Tests of hostile peers: a peer can break only its own connection.

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use glake_units::Bytes;
use glake_wire::{
    ActivityPage, Ask, Denied, Envelope, Frames, Hello, Holder, Peer, Request, ToAgent, ToWorker, frame, send,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

use crate::processes::{LIMIT, Node, socket};
use crate::puppet::own;

fn connect(node: &Node) -> UnixStream {
    let stream = UnixStream::connect(socket(node.folder.path())).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
}

/// Reads the answers until the agent closes the connection.
fn answer(mut stream: UnixStream) -> Option<ToWorker> {
    let (mut frames, mut bytes) = (Frames::default(), Vec::new());
    // A connection reset is an end too.
    let _ = stream.read_to_end(&mut bytes);
    frames.push(&bytes);
    frames.take::<ToWorker>().unwrap().map(|envelope| envelope.message)
}

fn refusal(stream: UnixStream) -> String {
    match answer(stream) {
        Some(ToWorker::Refused { why, .. }) => why,
        other => panic!("{other:?}"),
    }
}

/// Checks that a worker can join and get its memory.
fn works(node: &Node) {
    let mut worker = node.joined("good 10GiB");
    worker.tell("want");
    worker.hear("resident").unwrap();
    worker.kill();
    node.until("it is gone", <[_]>::is_empty);
}

fn greet(node: &Node, hello: Hello) -> UnixStream {
    let stream = connect(node);
    let bytes = frame(&Envelope::unnumbered(ToAgent::Hello(hello))).unwrap();
    let page = ActivityPage::new().unwrap();
    assert_eq!(send(&stream, &bytes, Some(page.as_fd())).unwrap(), bytes.len());
    stream
}

#[test]
fn malformed_frames_are_errors() {
    let node = Node::new(Bytes::gib(24));
    let framed = |json: &[u8]| [&u32::try_from(json.len()).unwrap().to_le_bytes()[..], json].concat();
    for bytes in [
        u32::MAX.to_le_bytes().to_vec(),
        framed(b"{"),
        framed(b"\xff\xfe"),
        framed("[".repeat(60_000).as_bytes()),
        framed(b"{\"v\":9,\"seq\":0,\"ack\":0,\"op\":\"hello\"}"),
        framed(b"{\"v\":1,\"seq\":1,\"ack\":0,\"op\":\"want\"}"),
    ] {
        let mut stream = connect(&node);
        stream.write_all(&bytes).unwrap();
        assert!(!refusal(stream).is_empty());
    }
    // Half a frame, then the connection closes.
    let mut stream = connect(&node);
    stream.write_all(&framed(b"{\"v\":1}")[..6]).unwrap();
    drop(stream);
    works(&node);
}

#[test]
fn messages_after_hello_are_received() {
    let node = Node::new(Bytes::gib(24));
    let hello = Hello { name: "odd".to_owned(), peer: own(), ranks: 1, ..Hello::default() };
    let numbered = |seq, message| frame(&Envelope { v: 1, seq, ack: 0, message }).unwrap();
    let wild = Bytes::new(u64::MAX);
    let after: [Vec<Vec<u8>>; 5] = [
        // A gap in the sequence numbers.
        vec![numbered(3, ToAgent::Parked)],
        vec![frame(&Envelope::unnumbered(ToAgent::Hello(hello.clone()))).unwrap()],
        vec![b"\xff\xff\xff\xff".to_vec()],
        // Unsolicited answers, unknown GPUs and impossible sizes are ignored, and the connection stays open.
        vec![
            numbered(1, ToAgent::Parked),
            numbered(2, ToAgent::Shrunk { holdings: Vec::new() }),
            numbered(3, ToAgent::Returned { gpu: "9".to_owned(), bytes: wild }),
            numbered(4, ToAgent::Returned { gpu: "0".to_owned(), bytes: wild }),
            numbered(5, ToAgent::Grow { gpu: "9".to_owned(), bytes: wild, within_ms: u64::MAX }),
            numbered(6, ToAgent::Grow { gpu: "0".to_owned(), bytes: wild, within_ms: u64::MAX }),
            numbered(7, ToAgent::Want { deadline_ms: Some(u64::MAX) }),
            numbered(9, ToAgent::Bye),
        ],
        vec![numbered(1, ToAgent::Bye)],
    ];
    for frames in after {
        let mut stream = greet(&node, hello.clone());
        frames.iter().for_each(|bytes| stream.write_all(bytes).unwrap());
        assert!(matches!(answer(stream), Some(ToWorker::Welcome(_))));
    }
    node.until("it has left", <[_]>::is_empty);
    works(&node);
}

#[test]
fn a_denied_growth_names_the_holders() {
    let node = Node::new(Bytes::gib(24));
    let mut large = node.joined("large 20GiB");
    large.tell("want");
    large.hear("resident").unwrap();
    let mut stream =
        greet(&node, Hello { name: "odd".to_owned(), peer: own(), ranks: 1, ..Hello::default() });
    let grow = ToAgent::Grow { gpu: "0".to_owned(), bytes: Bytes::gib(30), within_ms: 5000 };
    stream.write_all(&frame(&Envelope { v: 1, seq: 1, ack: 0, message: grow }).unwrap()).unwrap();
    let (mut frames, mut bytes) = (Frames::default(), [0; 4096]);
    let (holders, budget, why) = loop {
        match frames.take::<ToWorker>().unwrap().map(|envelope| envelope.message) {
            Some(ToWorker::DenyGrowth { holders, budget, why, .. }) => break (holders, budget, why),
            Some(_) => {}
            None => {
                let count = stream.read(&mut bytes).unwrap();
                assert!(count > 0, "it is denied");
                frames.push(&bytes[..count]);
            }
        }
    };
    assert_eq!(holders[0], Holder { name: "large".to_owned(), lease: Bytes::gib(20) });
    assert_eq!((budget, why), (Bytes::gib(24).saturating_sub(Bytes::mib(512)), Some(Denied::TooLarge)));
    large.kill();
}

#[test]
fn a_wrong_start_time_is_refused() {
    let node = Node::new(Bytes::gib(24));
    let hello = Hello { name: "x".to_owned(), peer: own(), ranks: 1, ..Hello::default() };
    let reused = greet(&node, Hello { peer: Peer { start: 1, ..own() }, ..hello.clone() });
    assert!(refusal(reused).contains("another has its number"));
    let name = greet(&node, Hello { name: "../x".to_owned(), ..hello.clone() });
    assert!(refusal(name).contains("a name is 1 to 64 of"));
    let gpu = glake_wire::Holding { gpu: "7".to_owned(), ..glake_wire::Holding::default() };
    let gpu = greet(&node, Hello { holdings: vec![gpu], ..hello.clone() });
    assert_eq!(refusal(gpu), "worker \"x\" uses GPU 7, and this agent knows 0");
    // Processes of other pods may claim equal numbers: only the number from the kernel counts.
    let pods = greet(&node, Hello { peer: Peer { pid: 1, ..own() }, ..hello.clone() });
    let mut worker = node.joined("y 1GiB");
    let twice = greet(&node, Hello { name: "z".to_owned(), ..hello });
    assert!(refusal(twice).contains("joined as \"x\" and now says \"z\""));
    assert_eq!(node.ps().len(), 2);
    worker.kill();
    drop(pods);
}

#[test]
fn a_flooding_connection_does_not_block_others() {
    let node = Node::new(Bytes::gib(24));
    let hello = Hello { name: "loud".to_owned(), peer: own(), ranks: 1, ..Hello::default() };
    let stream = greet(&node, hello);
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let frames = frame(&Envelope::unnumbered(ToAgent::Ack)).unwrap().repeat(1000);
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                (&stream).write_all(&frames).unwrap();
            }
        });
        let mut worker = node.joined("good 10GiB");
        worker.tell("want");
        worker.hear("resident").unwrap();
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// The worker's goodbye was lost with its connection.
#[test]
fn a_rejoining_worker_counts_with_its_new_report() {
    let node = Node::new(Bytes::gib(24));
    let holding = |gib| glake_wire::Holding {
        gpu: "0".to_owned(),
        lease: Bytes::gib(gib),
        resident: Bytes::gib(gib),
        ..glake_wire::Holding::default()
    };
    let hello = Hello { name: "x".to_owned(), peer: own(), ranks: 1, ..Hello::default() };
    for gib in [10, 1] {
        let stream = greet(&node, Hello { holdings: vec![holding(gib)], ..hello.clone() });
        let rows =
            node.until("it has joined", |rows| rows.first().is_some_and(|row| row.leased == Bytes::gib(gib)));
        assert_eq!(rows.len(), 1);
        drop(stream);
    }
}

#[test]
fn another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: this process may start no process of another user");
    }
    let node = Node::new(Bytes::gib(24));
    let path = socket(node.folder.path());
    // The folder already keeps other users out.
    for (what, mode) in [(node.folder.path(), 0o755), (path.parent().unwrap(), 0o755), (&path, 0o666)] {
        std::fs::set_permissions(what, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let script = "import socket, struct, sys\n\
        s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n\
        j = b'{\"v\":1,\"seq\":0,\"ack\":0,\"op\":\"ps\"}'\n\
        s.sendall(struct.pack('<I', len(j)) + j)\n\
        print(s.recv(4096)[4:].decode())\n";
    let mut command = Command::new("python3");
    std::os::unix::process::CommandExt::uid(&mut command, 1234);
    let said = command.args(["-c", script]).arg(&path).stderr(Stdio::inherit()).output().unwrap();
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.contains("it runs as user 1234: this agent serves user 0"), "{said}");
}

#[test]
fn ten_thousand_connections() {
    let node = Node::new(Bytes::gib(24));
    let mut open = Vec::new();
    for number in 0..10_000 {
        let stream = connect(&node);
        // Most close immediately; some stay silent.
        if number % 20 == 0 {
            open.push(stream);
        }
    }
    works(&node);
}

#[test]
fn the_agent_survives_a_shortage_of_descriptors() {
    let mut node = Node::new(Bytes::gib(24));
    node.restart_under(&["sh", "-c", "ulimit -n 32; exec \"$0\" \"$@\""]);
    let mut first = node.joined("first 10GiB");
    let silent: Vec<UnixStream> = (0..60).map(|_| connect(&node)).collect();
    first.tell("want");
    first.hear("resident").unwrap();
    // Silent connections are closed after a timeout, and workers can join again.
    let second = node.worker("second 10GiB");
    second.hear("joined").unwrap();
    drop(silent);
    node.check();
}

#[test]
fn a_full_disk_does_not_block_grants() {
    let mut node = Node::new(Bytes::gib(24));
    node.agent.kill();
    std::os::unix::fs::symlink("/dev/full", node.folder.path().join("glake/agent.sock.journal.new")).unwrap();
    node.restart();
    let mut worker = node.joined("model 10GiB");
    worker.tell("want");
    worker.hear("resident").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(node.ps().len(), 1);
}

/// Clients of an agent that is stopped, or whose queue of connections nobody serves, end with an error that says what to do.
#[test]
fn a_stopped_agent_holds_no_client() {
    let node = Node::new(Bytes::gib(24));
    node.agent.signal(rustix::process::Signal::STOP);
    let (folder, begin) = (tempfile::tempdir().unwrap(), Instant::now());
    let full = folder.path().join("agent.sock");
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(&full).unwrap()).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _first = UnixStream::connect(&full).unwrap();
    let path = socket(node.folder.path());
    std::thread::scope(|scope| {
        let short = |ask| Request::from(ask).within(Duration::from_millis(300));
        let (path, full) = (&path, &full);
        let pid = node.agent.child.id();
        let asks = [Ask::Ps, Ask::Explain, Ask::Metrics].map(|ask| {
            scope.spawn(move || glake_agent::ask(path, short(ask), |_| {}).unwrap_err().to_string())
        });
        let queued =
            scope.spawn(move || glake_agent::ask(full, short(Ask::Ps), |_| {}).unwrap_err().to_string());
        for ask in asks {
            let why = ask.join().unwrap();
            assert!(why.contains(&format!("continue it (kill -CONT {pid})")), "{why}");
        }
        let why = queued.join().unwrap();
        assert!(why.contains("its queue of connections has been full for 0.3 s"), "{why}");
    });
    assert!(begin.elapsed() < LIMIT / 2, "{:?}", begin.elapsed());
}
