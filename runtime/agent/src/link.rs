//! Connections: the greeting, a worker's frames in both directions, the answers to operators, and the client side of operators.

use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use glake_arbiter::WorkerId;
use glake_wire::{
    ActivityView, Answer, Ask, Envelope, FrameError, Frames, Hello, PageError, SocketError, ToAgent,
    ToWorker, check_folder, check_server, frame, receive, send,
};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::agent::ConnectionError;
use crate::daemon::{Daemon, Link};
use crate::supervisor::Progress;
use crate::{Agent, Identity};

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
    Operator { ask: Ask, connection: Connection },
}

/// Reads the first frame, and answers a worker's hello. Returns `None` if the connection is over.
pub(crate) async fn greet(daemon: &Rc<Daemon>, stream: UnixStream) -> Option<Visitor> {
    let mut connection = Connection { stream, frames: Frames::default(), unsent: Vec::new() };
    let mut page = None;
    loop {
        let came = connection.receive().await.ok()?;
        page = page.or(came?);
        // A frame that is no operator's request must be a worker's hello.
        if let Ok(Some(Envelope { message: ask, .. })) = connection.frames.take::<Ask>() {
            let who = Identity::of(&connection.stream);
            return match who {
                Ok(_) => Some(Visitor::Operator { ask, connection }),
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
    match daemon.tell(|agent, now| agent.hello(who, hello, now)) {
        Ok((id, welcome)) => {
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
            Visitor::Operator { ask, mut connection } => {
                // A peer that has stopped reading is no error.
                let _ = answer(&daemon, ask, &mut connection).await;
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

    /// Sends all bytes.
    pub(crate) async fn say(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        self.unsent.extend(bytes);
        loop {
            self.flush()?;
            if self.unsent.is_empty() {
                return Ok(());
            }
            self.stream.writable().await?;
        }
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
        let why = why.to_string();
        // A worker with a temporary refusal retries every two seconds.
        match passes {
            true => tracing::info!(target: "glake::agent", %why, "a connection is refused for now"),
            false => tracing::warn!(target: "glake::agent", %why, "a connection is refused"),
        }
        if let Ok(bytes) = frame(&Envelope::unnumbered(ToWorker::Refused { why, passes })) {
            let _ = self.say(bytes).await;
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

fn is_for_now(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// Timeout of the agent's last answer, to a client that does not read.
const LAST_ANSWER: Duration = Duration::from_secs(1);
/// Maximum size of a text in one frame.
const PART: usize = 16 << 10;

/// Answers a request completely.
pub(crate) async fn answer(daemon: &Rc<Daemon>, ask: Ask, connection: &mut Connection) -> io::Result<()> {
    let is_last = ask == Ask::StopAll;
    let answers = match ask {
        Ask::StopAll => {
            // Goes on without the client.
            let stopped = daemon.stop_all().await;
            match stopped {
                Ok(()) => whole(daemon.ask(Agent::rows).into_iter().map(Answer::Row)),
                Err(why) => vec![Answer::Error { why }],
            }
        }
        Ask::Ps => {
            daemon.look();
            let mut rows = daemon.ask(Agent::rows);
            rows.extend(daemon.child_rows());
            rows.sort_by(|a, b| a.worker.cmp(&b.worker));
            whole(rows.into_iter().map(Answer::Row))
        }
        Ask::Explain => whole(daemon.ask(Agent::decisions).into_iter().map(Answer::Decision)),
        Ask::Metrics => {
            daemon.look();
            let text: Vec<char> = daemon.ask(crate::metrics::text).chars().collect();
            whole(text.chunks(PART).map(|part| Answer::Text { text: part.iter().collect() }))
        }
        Ask::Shrink { worker } => {
            let done = tokio::select! {
                done = shrink(daemon, &worker) => done,
                () = connection.closed() => return Ok(()),
            };
            vec![told(done)]
        }
        Ask::Refill { worker } => {
            let done = tokio::select! {
                done = refill(daemon, &worker) => done,
                () = connection.closed() => return Ok(()),
            };
            vec![told(done)]
        }
        Ask::Start { worker } => {
            let done = tokio::select! {
                done = daemon.start_worker(&worker) => done,
                () = connection.closed() => return Ok(()),
            };
            vec![told(done)]
        }
        Ask::Stop { worker } => {
            let done = tokio::select! {
                done = daemon.stop_worker(&worker) => done,
                () = connection.closed() => return Ok(()),
            };
            vec![told(done)]
        }
    };
    let said = async {
        for answer in answers {
            let bytes = frame(&Envelope::unnumbered(answer)).map_err(io::Error::other)?;
            connection.say(bytes).await?;
        }
        Ok(())
    };
    let said = if is_last { timeout(LAST_ANSWER, said).await.unwrap_or(Ok(())) } else { said.await };
    if is_last {
        daemon.end();
    }
    said
}

fn whole(answers: impl Iterator<Item = Answer>) -> Vec<Answer> {
    answers.chain([Answer::End]).collect()
}

fn told(done: Result<(), String>) -> Answer {
    done.map_or_else(|why| Answer::Error { why }, |()| Answer::End)
}

async fn shrink(daemon: &Rc<Daemon>, name: &str) -> Result<(), String> {
    let id = daemon.ask(|agent| agent.find(name))?;
    loop {
        let change = daemon.change();
        if daemon.ask(|agent| agent.may_shrink(id))? {
            break;
        }
        change.await;
    }
    daemon.look();
    daemon.tell(|agent, now| agent.ask_to_shrink(id, now));
    finish(daemon, id, name, Agent::shrink_progress).await
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
    /// The agent ended before it had answered.
    #[error("the agent ended before it had answered")]
    CommandResult,
    /// The agent refused the request, with its reason.
    #[error("{0}")]
    Refused(String),
}

/// Sends a request to the agent at a socket and waits for the complete answer.
///
/// # Errors
/// [`ClientError`].
pub fn ask(path: &Path, ask: Ask) -> Result<Vec<Answer>, ClientError> {
    match check_folder(path) {
        Err(SocketError::Os { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Err(ClientError::Nobody(path.to_owned()));
        }
        checked => checked?,
    }
    let mut socket = std::os::unix::net::UnixStream::connect(path).map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => ClientError::Nobody(path.to_owned()),
        _ => ClientError::Os(error),
    })?;
    check_server(path, &socket)?;
    socket.write_all(&frame(&Envelope::unnumbered(ask))?)?;
    let (mut frames, mut bytes, mut answers) = (Frames::default(), vec![0; 64 << 10], Vec::new());
    loop {
        while let Some(Envelope { message, .. }) = frames.take::<Answer>()? {
            match message {
                Answer::End => return Ok(answers),
                Answer::Error { why } | Answer::Refused { why } => return Err(ClientError::Refused(why)),
                answer => answers.push(answer),
            }
        }
        match socket.read(&mut bytes)? {
            0 => return Err(ClientError::CommandResult),
            length => frames.push(&bytes[..length]),
        }
    }
}
