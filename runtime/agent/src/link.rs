//! Connections: the greeting, a worker's frames in both directions, the answers to operators, and the client side of operators.

use std::future::Future;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use glake_arbiter::WorkerId;
use glake_wire::{
    ActivityView, Answer, Ask, DecisionRow, Envelope, FrameError, Frames, Hello, PageError, Request,
    Snapshot, SocketError, ToAgent, ToWorker, check_folder, check_server, frame, receive, send,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::agent::ConnectionError;
use crate::daemon::{Daemon, Link};
use crate::host::is_stopped;
use crate::supervisor::Progress;
use crate::{Agent, Identity, watch};

const CHUNK: usize = 64 << 10;
/// Number of chunks read from one connection before the others get a turn.
const TURNS: u32 = 4;

/// Buffered frames of one connection.
pub(crate) struct Connection {
    stream: UnixStream,
    frames: Frames,
    /// Bytes that were not sent yet.
    unsent: Vec<u8>,
}

/// Connected peer after its greeting.
pub(crate) enum Visitor {
    Worker { id: WorkerId, connection: Connection, link: Rc<Link> },
    Operator { request: Request, connection: Connection },
}

/// Reads the first frame, and answers a worker's hello. Returns `None` if the connection is over.
pub(crate) async fn greet(daemon: &Rc<Daemon>, stream: UnixStream) -> Option<Visitor> {
    let mut connection = Connection { stream, frames: Frames::default(), unsent: Vec::new() };
    let mut page = None;
    loop {
        let came = connection.receive().await.ok()?;
        page = page.or(came?);
        // A frame that is no operator's request must be a worker's hello.
        if let Ok(Some(Envelope { message: request, .. })) = connection.frames.take::<Request>() {
            let who = Identity::of(&connection.stream);
            return match who {
                Ok(_) => Some(Visitor::Operator { request, connection }),
                Err(why) => connection.refuse(&why, why.passes()).await,
            };
        }
        match connection.frames.take::<ToAgent>() {
            Ok(None) => {}
            Ok(Some(Envelope { message: ToAgent::Hello(hello), .. })) => {
                return join(daemon, connection, hello, page).await;
            }
            Ok(Some(_)) => {
                let why = format!(
                    "the first frame is neither hello nor a question that this agent knows: it is of release {}",
                    env!("CARGO_PKG_VERSION")
                );
                return connection.refuse(why, false).await;
            }
            Err(error) => return connection.refuse(error, false).await,
        }
    }
}

async fn join(
    daemon: &Rc<Daemon>,
    mut connection: Connection,
    hello: Hello,
    page: Option<std::os::fd::OwnedFd>,
) -> Option<Visitor> {
    let (who, pidfd) = match Identity::of(&connection.stream) {
        Ok(found) => found,
        Err(error) => return connection.refuse(&error, error.passes()).await,
    };
    if let Err(error) = who.agrees(hello.peer) {
        return connection.refuse(&error, error.passes()).await;
    }
    let page = match page.map(ActivityView::new) {
        Some(Ok(page)) => page,
        Some(Err(error)) => return connection.refuse(&error, matches!(error, PageError::Os(_))).await,
        None => return connection.refuse("no descriptor is left for its activity page", true).await,
    };
    let name = hello.name.clone();
    daemon.look_before_hello(&hello).await;
    if connection.has_hung_up() {
        // The worker gave this connection up, and a later hello of it may have been heard already.
        return None;
    }
    let before = daemon.ask(|agent| agent.roster.of(who.peer));
    match daemon.tell(|agent, now| agent.hello(who, hello, now)) {
        Ok((id, welcome)) => {
            if let Some(before) = before.filter(|before| *before != id) {
                daemon.end_link(before);
            }
            tracing::info!(target: "glake::agent", worker = %name, pid = who.peer.pid, "a worker joined");
            daemon.watch(who.peer, pidfd);
            let link = daemon.connect(id, page);
            daemon.look_at([id]);
            let welcome = frame(&Envelope::unnumbered(ToWorker::Welcome(welcome))).ok()?;
            connection.unsent.extend(welcome);
            Some(Visitor::Worker { id, connection, link })
        }
        Err(refusal) => connection.refuse(&refusal, refusal.passes()).await,
    }
}

impl Visitor {
    pub(crate) async fn go_on(self, daemon: Rc<Daemon>) {
        match self {
            Visitor::Operator { request, mut connection } => {
                // A peer that has stopped reading is no error.
                let _ = answer(&daemon, request, &mut connection).await;
            }
            Visitor::Worker { id, mut connection, link } => {
                let over = connection.serve(&daemon, id, &link).await;
                daemon.disconnect(id, &link);
                if let Err(error) = over {
                    let name = daemon.ask(|agent| agent.name(id));
                    tracing::info!(target: "glake::agent", worker = %name, %error, "a worker's connection is closed: it keeps its memory and may reconnect");
                }
            }
        }
    }
}

impl Connection {
    /// Returns whether the other end has closed, also if not everything that it sent has been received.
    fn has_hung_up(&self) -> bool {
        let mut ends = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let polled = poll(&mut ends, Some(&Timespec::default()));
        polled.is_ok() && ends[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
    }

    /// Receives bytes and returns the descriptor sent with them. Returns `None` once the other end has closed.
    async fn receive(&mut self) -> io::Result<Option<Option<std::os::fd::OwnedFd>>> {
        loop {
            self.stream.readable().await?;
            let mut bytes = [0; 4096];
            let came = self.stream.try_io(Interest::READABLE, || Ok(receive(&self.stream, &mut bytes)?));
            match came {
                Ok((0, _)) => return Ok(None),
                Ok((length, descriptor)) => {
                    self.frames.push(&bytes[..length]);
                    return Ok(Some(descriptor));
                }
                Err(error) if is_for_now(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends as many bytes as the socket accepts now.
    fn flush(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            let sent = self.stream.try_io(Interest::WRITABLE, || Ok(send(&self.stream, &self.unsent, None)?));
            match sent {
                Ok(sent) => drop(self.unsent.drain(..sent)),
                Err(error) if is_for_now(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Sends all bytes, after earlier ones.
    pub(crate) async fn say(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        loop {
            self.flush()?;
            while self.unsent.is_empty() && !bytes.is_empty() {
                let sent = self.stream.try_io(Interest::WRITABLE, || Ok(send(&self.stream, bytes, None)?));
                match sent {
                    Ok(sent) => bytes = &bytes[sent..],
                    Err(error) if is_for_now(&error) => break,
                    Err(error) => return Err(error),
                }
            }
            if self.unsent.is_empty() && bytes.is_empty() {
                return Ok(());
            }
            self.stream.writable().await?;
        }
    }

    /// Bounds the bytes that wait in the kernel for a peer that does not read.
    pub(crate) fn set_send_buffer(&self, bytes: usize) -> io::Result<()> {
        Ok(rustix::net::sockopt::set_socket_send_buffer_size(&self.stream, bytes)?)
    }

    /// Sends bytes unless earlier ones are still unsent.
    fn offer(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        if self.unsent.is_empty() {
            self.unsent = bytes;
        }
        self.flush()
    }

    /// Waits until the other end closes.
    pub(crate) async fn closed(&mut self) {
        // No further input is expected.
        while let Ok(Some(_)) = self.receive().await {
            self.frames = Frames::default();
            tokio::task::yield_now().await;
        }
    }

    /// Refuses the peer with a reason and whether a retry can succeed, and closes the connection.
    async fn refuse(&mut self, why: impl ToString, passes: bool) -> Option<Visitor> {
        // Within a frame, whatever the peer wrote.
        let why: String = why.to_string().chars().take(4000).collect();
        // A worker with a temporary refusal retries every two seconds.
        match passes {
            true => tracing::info!(target: "glake::agent", %why, "a connection is refused for now"),
            false => tracing::warn!(target: "glake::agent", %why, "a connection is refused"),
        }
        if let Ok(bytes) = frame(&Envelope::unnumbered(ToWorker::Refused { why, passes })) {
            let _ = self.say(&bytes).await;
        }
        None
    }

    /// Exchanges frames with a worker until either end closes.
    async fn serve(&mut self, daemon: &Rc<Daemon>, id: WorkerId, link: &Rc<Link>) -> Result<(), CloseReason> {
        let mut bytes = vec![0; CHUNK];
        // Further frames may have arrived with the first.
        self.hear(daemon, id).await?;
        loop {
            if link.is_over.get() {
                return Ok(());
            }
            if self.unsent.len() < CHUNK {
                while let Some(frame) = daemon.frame(id)? {
                    self.unsent.extend(frame);
                }
            }
            self.flush()?;
            let interest = match self.unsent.is_empty() {
                true => Interest::READABLE,
                false => Interest::READABLE | Interest::WRITABLE,
            };
            let ready = tokio::select! {
                ready = self.stream.ready(interest) => ready?,
                () = link.wake.notified() => continue,
            };
            if !ready.is_readable() {
                continue;
            }
            // Read the available bytes, also after a close, but a limited number from a peer that writes continuously.
            for turn in 0.. {
                if turn == TURNS {
                    tokio::task::yield_now().await;
                    break;
                }
                let came = self.stream.try_io(Interest::READABLE, || Ok(receive(&self.stream, &mut bytes)?));
                match came {
                    Ok((0, _)) => return Ok(()),
                    Ok((length, _)) => {
                        self.frames.push(&bytes[..length]);
                        self.hear(daemon, id).await?;
                    }
                    Err(error) if is_for_now(&error) => break,
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }

    async fn hear(&mut self, daemon: &Rc<Daemon>, id: WorkerId) -> Result<(), ConnectionError> {
        while let Some(Envelope { seq, ack, message, .. }) = self.frames.take::<ToAgent>()? {
            daemon.look_before(id, &message).await;
            daemon.tell(|agent, now| agent.hear(id, seq, ack, message, now))?;
        }
        Ok(())
    }
}

/// Reason for the end of a connection.
#[derive(Debug, thiserror::Error)]
enum CloseReason {
    #[error(transparent)]
    ConnectionError(#[from] ConnectionError),
    #[error(transparent)]
    Os(#[from] io::Error),
}

pub(crate) fn is_for_now(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Interval of reports to a client that waits.
const REPORT: Duration = Duration::from_millis(500);
/// Time between two attempts to park a worker for an operator.
const AGAIN: Duration = Duration::from_secs(1);

/// Timeout of the agent's last answer, to a client that does not read.
const LAST_ANSWER: Duration = Duration::from_secs(1);

/// Answers a request completely.
pub(crate) async fn answer(
    daemon: &Rc<Daemon>,
    request: Request,
    connection: &mut Connection,
) -> io::Result<()> {
    // Ages and times count until now, also if nothing has happened.
    daemon.tell(Agent::tick);
    let is_last = matches!(request.ask, Ask::StopAll);
    let answers = match &request.ask {
        Ask::StopAll => {
            // Goes on without the client.
            let stopped = daemon.stop_all().await;
            match stopped {
                Ok(()) => whole(rows(daemon.ask(Agent::snapshot))),
                Err(why) => vec![Answer::Error { why }],
            }
        }
        Ask::Ps => {
            daemon.look();
            whole(rows(daemon.snapshot()))
        }
        Ask::Explain => {
            let (decisions, _) = daemon.ask(|agent| agent.decisions(0));
            whole(decisions.into_iter().map(|of| Answer::Decision(of.row)))
        }
        Ask::Metrics => {
            daemon.glance(watch::LONGEST_GLANCE).await;
            daemon.look();
            whole([Answer::Text { text: daemon.ask(crate::metrics::text) }].into_iter())
        }
        Ask::Watch { every_ms } => return watch::serve(daemon, *every_ms, connection).await,
        Ask::Shrink { worker } => {
            let by = Instant::now() + request.longest();
            carry_out(daemon, &request, worker, connection, shrink(daemon, worker, by)).await?
        }
        Ask::Refill { worker } => {
            carry_out(daemon, &request, worker, connection, refill(daemon, worker)).await?
        }
        Ask::Start { worker } => {
            carry_out(daemon, &request, worker, connection, daemon.start_worker(worker)).await?
        }
        Ask::Stop { worker } => {
            carry_out(daemon, &request, worker, connection, daemon.stop_worker(worker)).await?
        }
    };
    let limit = if is_last { LAST_ANSWER } else { Ask::TIMEOUT };
    let sent = async {
        for answer in answers.into_iter().flat_map(Answer::parts) {
            let bytes = frame(&Envelope::unnumbered(answer)).map_err(io::Error::other)?;
            // A client that is stopped keeps nothing here.
            timeout(limit, connection.say(&bytes)).await??;
        }
        Ok(())
    }
    .await;
    if is_last {
        daemon.end();
        return Ok(());
    }
    sent
}

/// Returns the rows of `glake ps`.
fn rows(snapshot: Snapshot) -> impl Iterator<Item = Answer> {
    snapshot.workers.into_iter().map(|worker| Answer::Row(worker.row))
}

fn whole(answers: impl Iterator<Item = Answer>) -> Vec<Answer> {
    answers.chain([Answer::End]).collect()
}

/// Carries out a command for a worker within its time, and reports what it waits for.
async fn carry_out(
    daemon: &Rc<Daemon>,
    request: &Request,
    name: &str,
    connection: &mut Connection,
    command: impl Future<Output = Result<(), String>>,
) -> io::Result<Vec<Answer>> {
    // Only a refill that starts its worker takes as long as a start.
    let is_refill = matches!(request.ask, Ask::Refill { .. }) && !daemon.is_startable(name);
    let default = if is_refill { Ask::TIMEOUT } else { request.longest() };
    let longest = request.timeout_ms.map_or(default, Duration::from_millis);
    let (until, mut command) = (Instant::now() + longest, pin!(command));
    loop {
        let done = tokio::select! {
            done = &mut command => done,
            () = connection.closed() => return Ok(Vec::new()),
            () = sleep_until(until) => Err(format!(
                "{name}: not done within {} s: {}; it goes on: look at glake ps, or give it more time (--timeout)",
                longest.as_secs_f64(),
                daemon.awaited(name)
            )),
            () = sleep(REPORT), if request.waits => {
                for waits in (Answer::Waits { why: daemon.awaited(name) }).parts() {
                    connection.offer(frame(&Envelope::unnumbered(waits)).map_err(io::Error::other)?)?;
                }
                continue;
            }
        };
        return Ok(vec![done.map_or_else(|why| Answer::Error { why }, |()| Answer::End)]);
    }
}

/// Shrinks a worker, and asks again while its uses do not stop.
async fn shrink(daemon: &Rc<Daemon>, name: &str, by: Instant) -> Result<(), String> {
    let id = daemon.ask(|agent| agent.find(name))?;
    loop {
        let change = daemon.change();
        if !daemon.ask(|agent| agent.may_shrink(id))? {
            change.await;
            continue;
        }
        daemon.look_at([id]);
        let within = by.saturating_duration_since(Instant::now());
        daemon.tell(|agent, now| agent.ask_to_shrink(id, within, now));
        match finish(daemon, id, name, Agent::shrink_progress).await {
            Err(_) if daemon.ask(|agent| agent.has_not_parked(id)) => sleep(AGAIN).await,
            over => return over,
        }
    }
}

async fn refill(daemon: &Rc<Daemon>, name: &str) -> Result<(), String> {
    if daemon.is_startable(name) {
        daemon.start_worker(name).await?;
    }
    let id = daemon.ask(|agent| agent.find(name))?;
    daemon.tell(|agent, now| agent.ask_to_refill(id, now))?;
    finish(daemon, id, name, Agent::refill_progress).await
}

async fn finish(
    daemon: &Rc<Daemon>,
    id: WorkerId,
    name: &str,
    progress: impl Fn(&Agent, WorkerId) -> Progress,
) -> Result<(), String> {
    loop {
        let change = daemon.change();
        match daemon.ask(|agent| progress(agent, id)) {
            Progress::Done => return Ok(()),
            Progress::Failed(why) => return Err(format!("{name}: {why}")),
            Progress::UnderWay => change.await,
        }
    }
}

/// Reason for a missing answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No agent serves the socket.
    #[error("no agent serves {}: start one (glake serve), or name its socket (--socket PATH, GLAKE_AGENT=PATH)", .0.display())]
    Nobody(PathBuf),
    /// The socket is not safe to use.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// The answer is malformed.
    #[error("the agent's answer is malformed: {0}")]
    Frame(#[from] FrameError),
    /// The connection failed.
    #[error("the connection failed before the agent answered: {0}")]
    Os(#[from] io::Error),
    /// The agent did not accept the connection, or did not answer, in time.
    #[error(
        "the agent of {} does not answer ({}): {}; workers keep what they have meanwhile", .path.display(), .found,
        match stopped {
            Some(pid) => format!("its process {pid} is stopped, continue it (kill -CONT {pid}) or end it and start another"),
            None => "look at its log, or end it and start another (glake serve)".to_owned(),
        }
    )]
    Silent {
        /// Path of the socket.
        path: PathBuf,
        /// Frame or answer that did not arrive, and the time waited.
        found: String,
        /// Process that serves the socket, if it is stopped.
        stopped: Option<u32>,
    },
    /// The agent ended before it had answered.
    #[error("the agent ended before it had answered")]
    CommandResult,
    /// The agent refused the request, with its reason.
    #[error("{0}")]
    Refused(String),
}

/// Sends a request to the agent at a socket and waits for the complete answer; `waits` gets what a command waits for, again and again.
///
/// # Errors
/// [`ClientError`].
pub fn ask(
    path: &Path,
    request: impl Into<Request>,
    mut waits: impl FnMut(&str),
) -> Result<Vec<Answer>, ClientError> {
    let request = request.into();
    // The agent ends a command itself.
    let grace =
        if matches!(request.ask, Ask::Ps | Ask::Explain | Ask::Metrics) { Duration::ZERO } else { GRACE };
    let until = Instant::now() + request.longest().saturating_add(grace);
    let mut socket = begin(path, &request)?;
    socket.set_read_timeout(Some(LOOK))?;
    let (mut frames, mut bytes, mut answers) = (Frames::default(), vec![0; 64 << 10], Vec::new());
    let (mut heard, mut reports) = (Instant::now(), false);
    loop {
        while let Some(Envelope { message, .. }) = frames.take::<Answer>()? {
            match message {
                Answer::End => return Ok(answers),
                Answer::Error { why } | Answer::Refused { why } => return Err(ClientError::Refused(why)),
                Answer::Waits { why } => {
                    reports = true;
                    waits(&why);
                }
                Answer::Decision(DecisionRow { taken, continues: true, .. }) => {
                    if let Some(Answer::Decision(row)) = answers.last_mut() {
                        row.taken.extend(taken);
                    }
                }
                answer => answers.push(answer),
            }
        }
        match socket.read(&mut bytes) {
            Ok(0) => return Err(ClientError::CommandResult),
            Ok(length) => {
                heard = Instant::now();
                frames.push(&bytes[..length]);
            }
            Err(error) if is_for_now(&error) => {
                let now = Instant::now();
                let (silent, stopped) = (now.saturating_duration_since(heard), stopped(&socket));
                // An agent of an earlier release sends no reports, and may be at work.
                if now >= until || silent >= SILENCE && (reports || stopped.is_some()) {
                    let found = format!("nothing came for {} s", silent.as_secs());
                    return Err(ClientError::Silent { path: path.to_owned(), found, stopped });
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Connects to an agent and sends the request.
pub(crate) fn begin(path: &Path, request: &Request) -> Result<std::os::unix::net::UnixStream, ClientError> {
    match check_folder(path) {
        Err(SocketError::Os { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Err(ClientError::Nobody(path.to_owned()));
        }
        checked => checked?,
    }
    let mut socket = connect(path, request.longest().min(SILENCE))?;
    check_server(path, &socket)?;
    socket.write_all(&frame(&Envelope::unnumbered(request))?)?;
    Ok(socket)
}

/// Silence after which an agent that is stopped, or that reported before, is given up.
const SILENCE: Duration = Duration::from_secs(5);
/// Interval of checks of an agent that has not answered yet.
const LOOK: Duration = Duration::from_millis(200);
/// Time for the end of a command whose own time is over.
const GRACE: Duration = Duration::from_secs(5);

/// Connects to a socket; waits for at most `longest` while its queue of connections is full.
fn connect(path: &Path, longest: Duration) -> Result<std::os::unix::net::UnixStream, ClientError> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with, sockopt};
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(io::Error::from)?;
    // Bounds the connection and all writes.
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(longest)).map_err(io::Error::from)?;
    let address = SocketAddrUnix::new(path).map_err(io::Error::from)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(socket.into()),
        Err(Errno::CONNREFUSED | Errno::NOENT) => Err(ClientError::Nobody(path.to_owned())),
        Err(Errno::AGAIN) => {
            let found = format!("its queue of connections has been full for {} s", longest.as_secs_f64());
            Err(ClientError::Silent { path: path.to_owned(), found, stopped: None })
        }
        Err(error) => Err(io::Error::from(error).into()),
    }
}

/// Returns the process that serves a connection, if it is stopped.
fn stopped(socket: &std::os::unix::net::UnixStream) -> Option<u32> {
    let peer = nix::sys::socket::getsockopt(socket, nix::sys::socket::sockopt::PeerCredentials).ok()?;
    u32::try_from(peer.pid()).ok().filter(|pid| is_stopped(*pid))
}
