//! A connection to an agent's socket: frames in both directions. Only [`Connection::poll`] waits.

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use glake_wire::{
    Envelope, FrameError, Frames, Hello, ToAgent, ToWorker, Welcome, check_folder, check_server, frame,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::process::AgentError;

/// Timeout for the agent's answer to hello.
pub(super) const ANSWER: Duration = Duration::from_secs(5);
/// Bytes of one read.
const PIECE: usize = 16 << 10;
/// Maximum number of reads before the messages are handled.
const PIECES: usize = 16;

/// Connection to an agent, until it is lost.
#[derive(Debug)]
pub(super) struct Connection {
    socket: OwnedFd,
    frames: Frames,
    out: VecDeque<u8>,
    /// Descriptor to send with the next bytes.
    descriptor: Option<OwnedFd>,
    /// Whether the other end has closed the connection.
    has_ended: bool,
}

/// Silence of an agent that owes an acknowledgement: an agent that runs sends one at once.
#[derive(Debug, Default)]
pub(super) struct Silence {
    since: Option<Instant>,
}

impl Silence {
    /// Returns the end of the agent's time, if it `owes` an answer; an agent that was `heard` now has all of it again.
    pub(super) fn until(&mut self, owes: bool, heard: bool, now: Instant) -> Option<Instant> {
        self.since = owes.then(|| self.since.filter(|_| !heard).unwrap_or(now));
        self.since.map(|since| since + ANSWER)
    }
}

/// Error of a write: the connection is lost.
#[derive(Debug)]
pub(super) struct Lost;

impl Connection {
    /// Connects to the socket at `path` after checking that it can be trusted.
    ///
    /// # Errors
    /// [`AgentError::Socket`], [`AgentError::NotThere`], [`AgentError::Os`].
    pub(super) fn open(path: &Path) -> Result<Connection, AgentError> {
        check_folder(path)?;
        let not_there = |source: Errno| AgentError::NotThere { path: path.to_owned(), source: source.into() };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|source| AgentError::Os { what: "a socket", source: source.into() })?;
        let address = SocketAddrUnix::new(path).map_err(not_there)?;
        match connect(&socket, &address) {
            // Its queue of connections is full.
            Err(Errno::AGAIN) => return Err(AgentError::Silent { path: path.to_owned(), seconds: 0 }),
            connected => connected.map_err(not_there)?,
        }
        check_server(path, &socket)?;
        Ok(Connection {
            socket,
            frames: Frames::default(),
            out: VecDeque::new(),
            descriptor: None,
            has_ended: false,
        })
    }

    pub(super) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    /// Sends hello and waits for the answer; `is_over` cancels the wait.
    ///
    /// # Errors
    /// The [`AgentError`] for any answer other than a welcome.
    pub(super) fn greet(
        &mut self,
        path: &Path,
        hello: Hello,
        page: Option<OwnedFd>,
        wake: &OwnedFd,
        is_over: impl Fn() -> bool,
    ) -> Result<Welcome, AgentError> {
        let garbled = |source| AgentError::Garbled { path: path.to_owned(), source };
        self.descriptor = page;
        self.push(&frame(&Envelope::unnumbered(ToAgent::Hello(hello))).map_err(garbled)?);
        let until = Instant::now() + ANSWER;
        loop {
            let pushed = self.write();
            self.read();
            if let Some(answer) = self.take().map_err(garbled)? {
                return match answer.message {
                    ToWorker::Welcome(welcome) => Ok(welcome),
                    ToWorker::Refused { why, passes } => {
                        Err(AgentError::Refused { path: path.to_owned(), why, passes })
                    }
                    _ => Err(AgentError::NoWelcome { path: path.to_owned() }),
                };
            }
            if is_over() {
                return Err(AgentError::Ending);
            }
            if pushed.is_err() || self.has_ended {
                return Err(AgentError::Closed { path: path.to_owned() });
            }
            if Instant::now() >= until {
                return Err(AgentError::Silent { path: path.to_owned(), seconds: ANSWER.as_secs() });
            }
            self.poll(wake, Some(until));
        }
    }

    /// Appends a frame to the send buffer.
    pub(super) fn push(&mut self, frame: &[u8]) {
        self.out.extend(frame);
    }

    /// Sends as much of the buffer as the socket accepts now.
    ///
    /// # Errors
    /// [`Lost`] if the other end no longer reads. Earlier messages from it may still be readable.
    pub(super) fn write(&mut self) -> Result<(), Lost> {
        while !self.out.is_empty() {
            let bytes = self.out.make_contiguous();
            match glake_wire::send(&self.socket, bytes, self.descriptor.as_ref().map(|fd| fd.as_fd())) {
                Ok(sent) => {
                    self.out.drain(..sent);
                    self.descriptor = None;
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(_) => return Err(Lost),
            }
        }
        Ok(())
    }

    /// Reads the bytes that are available, up to a bound.
    pub(super) fn read(&mut self) {
        let mut bytes = [0; PIECE];
        for _ in 0..PIECES {
            if self.has_ended {
                return;
            }
            match glake_wire::receive(&self.socket, &mut bytes) {
                Ok((0, _)) => self.has_ended = true,
                Ok((length, _)) => self.frames.push(bytes.get(..length).unwrap_or_default()),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Err(_) => self.has_ended = true,
            }
        }
    }

    /// Takes the next message from the bytes read so far.
    ///
    /// # Errors
    /// [`FrameError`].
    pub(super) fn take(&mut self) -> Result<Option<Envelope<ToWorker>>, FrameError> {
        self.frames.take()
    }

    /// Returns whether the other end has closed the connection and all its bytes were read.
    pub(super) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Waits until the socket is readable or writable, `wake` is signalled, or `until` has passed.
    pub(super) fn poll(&self, wake: &OwnedFd, until: Option<Instant>) {
        let events = if self.out.is_empty() { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT };
        wait(&mut [PollFd::new(&self.socket, events), PollFd::new(wake, PollFlags::IN)], until);
        drain(wake);
    }
}

/// Waits until `wake` is signalled or `until` has passed.
pub(super) fn pause(wake: &OwnedFd, until: Instant) {
    wait(&mut [PollFd::new(wake, PollFlags::IN)], Some(until));
    drain(wake);
}

fn wait(polled: &mut [PollFd<'_>], until: Option<Instant>) {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let left = left.map(|left| Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: left.subsec_nanos().into(),
    });
    // Whatever the result of poll, all sources are checked again.
    let _ = poll(polled, left.as_ref());
}

fn drain(wake: &OwnedFd) {
    let _ = rustix::io::read(wake.as_fd(), &mut [0_u8; 8]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_owes_an_answer_is_silent_after_its_time() {
        let (mut silence, now, second) = (Silence::default(), Instant::now(), Duration::from_secs(1));
        assert_eq!(silence.until(false, false, now), None);
        assert_eq!(silence.until(true, false, now + second), Some(now + second + ANSWER));
        assert_eq!(silence.until(true, false, now + 3 * second), Some(now + second + ANSWER));
        assert_eq!(silence.until(true, true, now + 4 * second), Some(now + 4 * second + ANSWER));
        assert_eq!(silence.until(false, true, now + 5 * second), None);
        assert_eq!(silence.until(true, false, now + 60 * second), Some(now + 60 * second + ANSWER));
    }
}
