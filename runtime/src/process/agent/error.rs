//! Why an agent is not joined.

use std::path::PathBuf;

use glake_wire::{FrameError, PageError, SocketError};

/// Why an agent is not joined; a variant is what the caller can do about it.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Its socket is not used.
    #[error(transparent)]
    Socket(#[from] SocketError),
    /// Nobody serves the socket.
    #[error("no agent answers at {}: {source}; start it (glake serve), or name its socket (GLAKE_AGENT=PATH)", .path.display())]
    NotThere {
        /// Where.
        path: PathBuf,
        /// What the operating system says.
        source: std::io::Error,
    },
    /// It says nothing.
    #[error("the agent at {} did not answer within {seconds} s: look at its log (glake serve)", .path.display())]
    Silent {
        /// Where.
        path: PathBuf,
        /// How long it was waited for.
        seconds: u64,
    },
    /// It went away before it had answered.
    #[error("the agent at {} closed the connection before it answered: look at its log (glake serve)", .path.display())]
    Closed {
        /// Where.
        path: PathBuf,
    },
    /// It does not want this worker.
    #[error("the agent at {} refuses this worker: {why}", .path.display())]
    Refused {
        /// Where.
        path: PathBuf,
        /// Why, and what to do.
        why: String,
        /// Whether the reason may be gone at the next attempt.
        passes: bool,
    },
    /// What it says is no answer.
    #[error("the agent at {} does not speak as an agent does: {source}; are both of the same release?", .path.display())]
    Garbled {
        /// Where.
        path: PathBuf,
        /// What is wrong.
        source: FrameError,
    },
    /// What it says is an answer to nothing.
    #[error("the agent at {} says something else before its welcome; are both of the same release?", .path.display())]
    NoWelcome {
        /// Where.
        path: PathBuf,
    },
    /// The name cannot be one.
    #[error("a worker cannot be called {name:?}: a name has 1 to 64 of the characters A-Z a-z 0-9 . _ -")]
    BadName {
        /// What was given.
        name: String,
    },
    /// Another agent, or another name.
    #[error("this process has joined the agent at {} as {name} already: leave it first (glake.leave, glake_leave)", .path.display())]
    Joined {
        /// The agent that it is with.
        path: PathBuf,
        /// What it is called there.
        name: String,
    },
    /// The lease is the agent's.
    #[error(
        "leases are the agent's while this process is with one: leave it first (glake.leave, glake_leave)"
    )]
    LeasesAreTheAgents,
    /// Its memory is in use though no use has begun.
    #[error(
        "the process loads what it will hold: nothing is taken of it before its first use or glake.join (glake_join)"
    )]
    Loading,
    /// The process ends.
    #[error("the process is exiting: it joins no agent any more")]
    Ending,
    /// No thread, or no descriptor for it.
    #[error("the operating system does not give what a worker needs ({what}): {source}")]
    Os {
        /// A thread, a descriptor.
        what: &'static str,
        /// What it says.
        source: std::io::Error,
    },
    /// There is no activity page.
    #[error(transparent)]
    Page(#[from] PageError),
}

impl AgentError {
    /// Whether the caller is to do something else, whatever the agent does.
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

    /// Whether it may go by itself, so that trying again makes sense.
    pub(super) fn may_pass(&self) -> bool {
        !matches!(self, AgentError::Refused { passes: false, .. } | AgentError::Ending)
    }

    /// Whether an agent is there that may welcome the worker soon.
    pub(super) fn is_brief(&self) -> bool {
        matches!(self, AgentError::Refused { passes: true, .. })
    }
}
