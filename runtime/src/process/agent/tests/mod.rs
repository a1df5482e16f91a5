//! A process of simulated devices and an agent that does what a test says.

mod checkpoint;
mod commands;
mod faults;
mod grants;
mod growing;
mod joins;
mod loading;
mod neighbours;
mod restarts;
mod scenario;
mod served;
mod starts;

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use glake_device::{Address, Stream};
use glake_tiers::{Policy, RegionOptions};
use glake_units::Bytes;
use glake_wire::{
    ActivityView, Conversation, Envelope, Frames, Hello, Holding, MOST_BYTES, Received, Tier, ToAgent,
    ToWorker, Welcome, frame,
};
use tempfile::TempDir;

use super::super::{Process, ProcessError, Refill, Tags, WhenClosed};
use crate::config::{Config, Environment, Sources};

const STREAM: Stream = Stream(0);
/// Of the first agent that is joined.
const EPOCH: u64 = 3;
/// Whatever takes longer hangs.
const LONG: Duration = Duration::from_secs(60);
const SMALL: &str = "tiers = { extent = \"4MiB\", host_spare = 0, drain_timeout_ms = 60000 }\n\
                     transfer.calibrations = \"\"\n\
                     lease = { growth = \"16MiB\", grow_timeout_ms = 5000, refill_timeout_ms = 60000 }\n";

fn mib(n: u64) -> Bytes {
    Bytes::mib(n)
}

/// A process of one simulated GPU.
fn worker(settings: &str, variables: &[(&str, &str)]) -> Process {
    Process::start(configured(settings, variables)).unwrap()
}

/// Starts a worker without growth beside its refills whose uses may be parked again at once.
fn worker_without_quantum() -> Process {
    let mut config = configured("lease.growth = 0\n", &[]);
    config.tiers.park_quantum_ms = 0;
    Process::start(config).unwrap()
}

fn configured(settings: &str, variables: &[(&str, &str)]) -> Config {
    let variables = [&[("GLAKE_DEVICE", "sim:h200x4")], variables].concat();
    let environment = Environment::from_iter(variables);
    let sources = Sources { environment, ..Sources::default() };
    let sources = sources.with_overrides("test", SMALL).unwrap().with_overrides("test", settings).unwrap();
    let mut config = sources.load().unwrap();
    config.tiers.host_arena = mib(16);
    config
}

impl Process {
    fn block(&self, tag: &str, size: Bytes) -> Address {
        self.regions().define(RegionOptions { policy: Policy::Keep, ..RegionOptions::of(tag) }).unwrap();
        self.regions().enter(tag).unwrap();
        let address = self.malloc(0, size, STREAM).unwrap();
        self.regions().leave().unwrap();
        self.fill(address, size, 7);
        address
    }

    fn pool(&self) -> &Arc<glake_tiers::GpuPool> {
        &self.device(0).unwrap().started().unwrap().pool
    }

    fn fill(&self, address: Address, size: Bytes, byte: u8) {
        self.pool().write(address, &vec![byte; usize::try_from(size.get()).unwrap()]).unwrap();
    }

    fn has(&self, address: Address, size: Bytes, byte: u8) -> bool {
        let mut found = vec![0; usize::try_from(size.get()).unwrap()];
        self.pool().read(address, &mut found).unwrap();
        found.iter().all(|found| *found == byte)
    }

    fn lease(&self) -> Option<Bytes> {
        self.leases().view(0).unwrap().leased
    }
}

/// One that has joined, with a block of 12 MiB.
fn joined(socket: &Socket, settings: &str) -> (Process, Address, Agent) {
    let process = worker(settings, &[]);
    let block = process.block("weights", mib(12));
    let agent = join(&process, socket);
    (process, block, agent)
}

/// An agent's socket.
struct Socket {
    path: PathBuf,
    listener: Option<UnixListener>,
    folder: TempDir,
}

/// An agent's end of one connection.
struct Agent {
    stream: UnixStream,
    frames: Frames,
    conversation: Conversation<ToWorker>,
    page: Option<OwnedFd>,
    hello: Hello,
    /// What was heard and not asked for yet.
    heard: Vec<ToAgent>,
}

impl Socket {
    fn new() -> Socket {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.sock");
        let listener = Some(UnixListener::bind(&path).unwrap());
        Socket { path, listener, folder }
    }

    /// A simulated server that other processes could share.
    fn gpus(&self) -> String {
        format!("sim:h200x4@{}", self.folder.path().join("gpus").display())
    }

    fn text(&self) -> &str {
        self.path.to_str().unwrap()
    }

    /// The agent is gone, and its socket with it.
    fn close(&mut self) {
        self.listener = None;
        std::fs::remove_file(&self.path).unwrap();
    }

    fn open(&mut self) {
        self.listener = Some(UnixListener::bind(&self.path).unwrap());
    }

    /// A worker that has said hello.
    fn accept(&self) -> Agent {
        Agent::greeted(until("a connection", || self.connection()))
    }

    /// The next one, if it is there.
    fn connection(&self) -> Option<UnixStream> {
        let listener = self.listener.as_ref().unwrap();
        listener.set_nonblocking(true).unwrap();
        listener.accept().ok().map(|(stream, _)| stream)
    }

    fn welcome(&self, epoch: u64) -> Agent {
        let mut agent = self.accept();
        agent.welcome_as(epoch);
        agent
    }
}

/// Tries until it is there.
fn until<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(found) = attempt() {
            return found;
        }
        assert!(begin.elapsed() < LONG, "{what} never came");
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Agent {
    /// Of a worker that says hello.
    fn greeted(stream: UnixStream) -> Agent {
        stream.set_nonblocking(true).unwrap();
        let mut agent = Agent {
            stream,
            frames: Frames::default(),
            conversation: Conversation::default(),
            page: None,
            hello: Hello::default(),
            heard: Vec::new(),
        };
        let envelope = until("hello", || agent.read());
        let ToAgent::Hello(hello) = envelope.message else { panic!("{envelope:?}") };
        assert_eq!((envelope.seq, envelope.ack), (0, 0));
        agent.hello = hello;
        agent
    }

    fn welcome_as(&mut self, epoch: u64) {
        self.welcome(Welcome { epoch, received: 0, worker: 1, wait: false });
    }

    /// The next frame, if it is there.
    fn read(&mut self) -> Option<Envelope<ToAgent>> {
        let mut bytes = vec![0; MOST_BYTES];
        if let Ok((length, descriptor)) = glake_wire::receive(&self.stream, &mut bytes) {
            self.frames.push(&bytes[..length]);
            self.page = self.page.take().or(descriptor);
        }
        self.frames.take().unwrap()
    }

    fn send(&mut self, envelope: &Envelope<ToWorker>) {
        self.write(&frame(envelope).unwrap());
    }

    fn write(&mut self, bytes: &[u8]) {
        self.stream.set_nonblocking(false).unwrap();
        // It may have gone.
        let _ = self.stream.write_all(bytes);
        self.stream.set_nonblocking(true).unwrap();
    }

    fn welcome(&mut self, welcome: Welcome) {
        self.send(&Envelope::unnumbered(ToWorker::Welcome(welcome)));
    }

    fn say(&mut self, message: ToWorker) {
        self.conversation.push(message);
        self.flush();
    }

    fn flush(&mut self) {
        while let Some(frame) = self.conversation.next(ToWorker::Ack).unwrap() {
            self.write(&frame);
        }
    }

    /// The next message that is new, if it is there.
    fn hear_now(&mut self) -> Option<ToAgent> {
        let envelope = self.read()?;
        let received = self.conversation.receive(envelope.seq, envelope.ack);
        assert!(received != Received::Gap, "{envelope:?}");
        self.flush();
        (received == Received::New).then_some(envelope.message)
    }

    fn hear(&mut self, what: &str) -> ToAgent {
        let earlier = &mut self.heard;
        if !earlier.is_empty() {
            return earlier.remove(0);
        }
        until(what, || self.hear_now())
    }

    /// Passes over what comes before a message that is looked for.
    fn hear_until<T>(&mut self, what: &str, mut is: impl FnMut(&ToAgent) -> Option<T>) -> T {
        loop {
            if let Some(found) = is(&self.hear(what)) {
                return found;
            }
        }
    }

    fn wanted(&mut self) -> Holding {
        let mut held = None;
        self.hear_until("want", |said| match said {
            ToAgent::Changed { holdings } => {
                held = holdings.first().cloned();
                None
            }
            ToAgent::Want { deadline_ms } => {
                assert!(deadline_ms.is_some_and(|ms| ms <= 60_000));
                held.take()
            }
            _ => None,
        })
    }

    fn shrunk(&mut self) -> (Holding, Bytes) {
        let mut returned = Bytes::ZERO;
        let held = self.hear_until("shrunk", |said| match said {
            ToAgent::Returned { bytes, .. } => {
                returned = returned.saturating_add(*bytes);
                None
            }
            ToAgent::Shrunk { holdings } => holdings.first().cloned(),
            ToAgent::Failed { .. } => panic!("{said:?}"),
            _ => None,
        });
        (held, returned)
    }

    fn refilled(&mut self) -> Holding {
        self.hear_until("refilled", |said| match said {
            ToAgent::Refilled { holdings } => holdings.first().cloned(),
            ToAgent::Failed { .. } => panic!("{said:?}"),
            _ => None,
        })
    }

    fn grant(&mut self, bytes: Bytes) {
        self.say(ToWorker::Grant { gpu: "0".to_owned(), bytes });
    }

    fn shrink(&mut self, bytes: Bytes) {
        let (gpu, tier) = ("0".to_owned(), Tier::Host);
        self.say(ToWorker::Shrink { gpu, bytes, tier, within_ms: 60_000, more: false });
    }

    fn activity(&self) -> glake_wire::Activity {
        let page = self.page.as_ref().unwrap().try_clone().unwrap();
        ActivityView::new(page).unwrap().read().unwrap()
    }

    /// Whether the worker has closed the connection.
    fn is_closed(&mut self) -> bool {
        let mut byte = [0; 1];
        matches!(self.stream.read(&mut byte), Ok(0))
    }
}

fn refused(why: &str, passes: bool) -> ToWorker {
    ToWorker::Refused { why: why.to_owned(), passes }
}

/// The worker joins an agent.
fn join(process: &Process, socket: &Socket) -> Agent {
    std::thread::scope(|scope| {
        let joined = scope.spawn(|| process.agent().join(Some("chat"), Some(&socket.path)));
        let mut agent = socket.welcome(EPOCH);
        // A worker that makes memory meanwhile says hello anew.
        while !joined.is_finished() {
            if let Some(stream) = socket.connection() {
                agent = Agent::greeted(stream);
                agent.welcome_as(EPOCH);
            }
        }
        joined.join().unwrap().unwrap();
        agent
    })
}

fn use_all(process: &Process) -> Result<(), ProcessError> {
    let id = process.regions().begin_use(&Tags::All, WhenClosed::Refill, Some(LONG))?;
    process.regions().gate().end_use(id)
}

/// A use that counts its steps, with a safe point after each.
fn step(process: &Process, steps: &AtomicU64, is_over: &AtomicBool) {
    let regions = process.regions();
    let id = regions.begin_use(&Tags::All, WhenClosed::Refill, None).unwrap();
    while !is_over.load(Ordering::SeqCst) {
        regions.gate().safepoint(id);
        steps.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_micros(100));
    }
    regions.gate().end_use(id).unwrap();
}
