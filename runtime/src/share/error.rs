//! Why a block is not shared.

use glake_device::Address;
use glake_tiers::PoolError;

/// Why a block cannot be shared, or what was shared cannot be opened.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// The pool does not give the block's memory out.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The block was freed while it was being shared.
    #[error("the block at {block} was freed while it was being shared: share it before it is freed")]
    Freed {
        /// Where it began.
        block: Address,
    },
    /// This process was forked from the one that the exporter is of.
    #[error("a forked process cannot share blocks of its parent: start processes by spawn or forkserver")]
    Forked,
    /// There is no socket or thread to share by.
    #[error("blocks cannot be shared: {source}")]
    NoSocket {
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
    /// The bytes are no share handle, or not all of one.
    #[error("{length} bytes are not a share handle: {reason}; pass on all bytes that sharing gave")]
    Malformed {
        /// How many bytes were given.
        length: usize,
        /// What is wrong with them.
        reason: &'static str,
    },
    /// Another version of GLake made the handle.
    #[error(
        "the share handle is of version {found}, this is version {known}: use one version of GLake in all processes"
    )]
    OtherVersion {
        /// What the handle says.
        found: u8,
        /// What is known here.
        known: u8,
    },
    /// The process that shared the block does not live any more, or ended sharing.
    #[error(
        "process {pid}, which shared the block, is gone or shares nothing any more; it must live until all have opened it"
    )]
    Gone {
        /// Which it was.
        pid: u32,
    },
    /// The process lives, and does not share this block any more.
    #[error("process {pid} does not share this block any more: it was freed before it was opened")]
    Forgotten {
        /// Which process.
        pid: u32,
    },
    /// The process could not give the block's memory out.
    #[error("process {pid} could not give the block's memory out: its log says why (glake::share)")]
    NotGiven {
        /// Which process.
        pid: u32,
    },
    /// The process shares with its own user only.
    #[error("process {pid} belongs to another user: blocks are shared with processes of the same user only")]
    Refused {
        /// Which process.
        pid: u32,
    },
    /// The process lives and does not answer.
    #[error("process {pid}, which shared the block, did not answer in {seconds} s: is it stopped?")]
    NoAnswer {
        /// Which process.
        pid: u32,
        /// How long was waited.
        seconds: u64,
    },
    /// This process has no file descriptor left to receive the block's memory by.
    #[error(
        "this process has no file descriptor left to open the block by, of {limit} files that it may open: raise the limit (ulimit -n)"
    )]
    TooManyFiles {
        /// The limit of open files.
        limit: u64,
    },
    /// The process that shared the block has no file descriptor left to send its memory by.
    #[error(
        "process {pid}, which shared the block, has no file descriptor left to send it by, of {limit} files that it may open: raise its limit \
         (ulimit -n)"
    )]
    TooManyFilesThere {
        /// Which process.
        pid: u32,
        /// Its limit of open files.
        limit: u32,
    },
    /// The process serves others and hung up on this one time and again.
    #[error("process {pid}, which shared the block, has too many to send it to, and hung up: try again")]
    Crowded {
        /// Which process.
        pid: u32,
    },
    /// The connection to the process broke.
    #[error("process {pid}, which shared the block: {source}")]
    Broken {
        /// Which process.
        pid: u32,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
}

impl ShareError {
    /// Whether the same attempt may succeed once others are done with theirs.
    pub(super) fn may_pass(&self) -> bool {
        matches!(
            self,
            ShareError::TooManyFiles { .. }
                | ShareError::TooManyFilesThere { .. }
                | ShareError::Crowded { .. }
        )
    }
}
