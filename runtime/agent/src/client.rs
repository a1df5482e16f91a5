//! Client of operators: one question, and its answer.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use glake_wire::{Answer, Ask, Envelope, FrameError, Frames, SocketError, check_folder, check_server, frame};

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
    #[error("the agent's answer: {0}")]
    Frame(#[from] FrameError),
    /// The connection failed.
    #[error("the agent's answer did not come: {0}")]
    Os(#[from] io::Error),
    /// The agent ended before it had answered.
    #[error("the agent ended before it had answered")]
    Ended,
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
    let mut socket = UnixStream::connect(path).map_err(|error| match error.kind() {
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
            0 => return Err(ClientError::Ended),
            length => frames.push(&bytes[..length]),
        }
    }
}
