//! Errors of joining an agent.

use std::path::PathBuf;

use glake_wire::{FrameError, PageError, SocketError};

/// Error of joining an agent. Each variant calls for a different reaction of the caller.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The socket cannot be trusted or has no usable path.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// No agent serves the socket.
    #[error("no agent answers at {}: {source}; start it (glake serve), or name its socket (GLAKE_AGENT=PATH)", .path.display())]
    NotThere {
        /// Path of the agent's socket.
        path: PathBuf,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The agent did not answer in time.
    #[error("the agent at {} did not answer within {seconds} s: look at its log (glake serve)", .path.display())]
    Silent {
        /// Path of the agent's socket.
        path: PathBuf,
        /// Timeout that expired, in seconds.
        seconds: u64,
    },
    /// The agent closed the connection before it answered.
    #[error("the agent at {} closed the connection before it answered: look at its log (glake serve)", .path.display())]
    Closed {
        /// Path of the agent's socket.
        path: PathBuf,
    },
    /// The agent refuses this worker.
    #[error("the agent at {} refuses this worker: {why}", .path.display())]
    Refused {
        /// Path of the agent's socket.
        path: PathBuf,
        /// Reason and remedy in the agent's words.
        why: String,
        /// Whether the reason may be gone at the next attempt.
        passes: bool,
    },
    /// The agent's answer cannot be decoded.
    #[error("the agent at {} does not speak as an agent does: {source}; are both of the same release?", .path.display())]
    Garbled {
        /// Path of the agent's socket.
        path: PathBuf,
        /// Error of the decoder.
        source: FrameError,
    },
    /// The agent's first message is not an answer to hello.
    #[error("the agent at {} says something else before its welcome; are both of the same release?", .path.display())]
    NoWelcome {
        /// Path of the agent's socket.
        path: PathBuf,
    },
    /// The worker's name has characters or a length that are not allowed.
    #[error("a worker cannot be called {name:?}: a name has 1 to 64 of the characters A-Z a-z 0-9 . _ -")]
    BadName {
        /// Name that was requested.
        name: String,
    },
    /// The process has joined another agent, or the same one under another name.
    #[error("this process has joined the agent at {} as {name} already: leave it first (glake.leave, glake_leave)", .path.display())]
    Joined {
        /// Socket of the joined agent.
        path: PathBuf,
        /// Name of the worker at that agent.
        name: String,
    },
    /// The program cannot set a lease that the agent controls.
    #[error(
        "leases are the agent's while this process is with one: leave it first (glake.leave, glake_leave)"
    )]
    LeasesAreTheAgents,
    /// The program still loads: its memory may be in use although no use has begun.
    #[error(
        "the process loads what it will hold: nothing is taken of it before its first use or glake.join (glake_join)"
    )]
    Loading,
    /// The process is ending.
    #[error("the process is exiting: it joins no agent any more")]
    Ending,
    /// The operating system provides no thread or descriptor.
    #[error("the operating system does not give what a worker needs ({what}): {source}")]
    Os {
        /// Resource that was requested: a thread or a descriptor.
        what: &'static str,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The activity page cannot be created.
    #[error(transparent)]
    Page(#[from] PageError),
}

impl AgentError {
    /// Returns whether the caller must change its request, whatever the agent does.
    pub fn is_misuse(&self) -> bool {
        use AgentError as E;
        matches!(
            self,
            E::BadName { .. }
                | E::Joined { .. }
                | E::LeasesAreTheAgents
                | E::Socket(SocketError::Relative { .. })
        )
    }

    /// Returns whether the error may pass by itself, so that a retry makes sense.
    pub(super) fn may_pass(&self) -> bool {
        !matches!(self, AgentError::Refused { passes: false, .. } | AgentError::Ending)
    }

    /// Returns whether an agent runs there and may welcome the worker soon.
    pub(super) fn is_brief(&self) -> bool {
        matches!(self, AgentError::Refused { passes: true, .. })
    }
}
