//! Errors of sharing blocks.

use glake_device::Address;
use glake_tiers::PoolError;

/// Error of sharing a block or of opening a shared one.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    /// The pool cannot export the block's memory.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The block was freed while it was being shared.
    #[error("the block at {block} was freed while it was being shared: share it before it is freed")]
    Freed {
        /// Start address of the block.
        block: Address,
    },
    /// This process was forked from the exporter's process.
    #[error("a forked process cannot share blocks of its parent: start processes by spawn or forkserver")]
    Forked,
    /// No socket or thread for sharing is available.
    #[error("blocks cannot be shared: {source}")]
    NoSocket {
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
    /// The bytes are not a complete share handle.
    #[error("{length} bytes are not a share handle: {reason}; pass on all bytes that sharing gave")]
    Malformed {
        /// Number of bytes given.
        length: usize,
        /// Defect of the bytes.
        reason: &'static str,
    },
    /// Another version of GLake created the handle.
    #[error(
        "the share handle is of version {found}, this is version {known}: use one version of GLake in all processes"
    )]
    OtherVersion {
        /// Version of the handle.
        found: u8,
        /// Version of this library.
        known: u8,
    },
    /// The exporting process has ended, or has stopped sharing.
    #[error(
        "process {pid}, which shared the block, is gone or shares nothing any more; it must live until all have opened it"
    )]
    Gone {
        /// Id of the exporting process.
        pid: u32,
    },
    /// The exporting process lives, but no longer shares this block.
    #[error("process {pid} does not share this block any more: it was freed before it was opened")]
    Forgotten {
        /// Id of the exporting process.
        pid: u32,
    },
    /// The exporting process could not export the block's memory.
    #[error("process {pid} could not give the block's memory out: its log says why (glake::share)")]
    NotGiven {
        /// Id of the exporting process.
        pid: u32,
    },
    /// The exporting process belongs to another user.
    #[error("process {pid} belongs to another user: blocks are shared with processes of the same user only")]
    Refused {
        /// Id of the exporting process.
        pid: u32,
    },
    /// The exporting process lives but does not answer.
    #[error("process {pid}, which shared the block, did not answer in {seconds} s: is it stopped?")]
    NoAnswer {
        /// Id of the exporting process.
        pid: u32,
        /// Timeout that expired, in seconds.
        seconds: u64,
    },
    /// This process has no file descriptor left to receive the block's memory.
    #[error(
        "this process has no file descriptor left to open the block by, of {limit} files that it may open: raise the limit (ulimit -n)"
    )]
    TooManyFiles {
        /// Limit of open files.
        limit: u64,
    },
    /// The exporting process has no file descriptor left to send the block's memory.
    #[error(
        "process {pid}, which shared the block, has no file descriptor left to send it by, of {limit} files that it may open: raise its limit \
         (ulimit -n)"
    )]
    TooManyFilesThere {
        /// Id of the exporting process.
        pid: u32,
        /// Limit of open files of that process.
        limit: u32,
    },
    /// The exporting process is overloaded and closed the connection repeatedly.
    #[error("process {pid}, which shared the block, has too many to send it to, and hung up: try again")]
    Crowded {
        /// Id of the exporting process.
        pid: u32,
    },
    /// The connection to the exporting process broke.
    #[error("process {pid}, which shared the block: {source}")]
    Broken {
        /// Id of the exporting process.
        pid: u32,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
}

impl ShareError {
    /// Returns whether a retry may succeed once other clients are done.
    pub(super) fn may_pass(&self) -> bool {
        matches!(
            self,
            ShareError::TooManyFiles { .. }
                | ShareError::TooManyFilesThere { .. }
                | ShareError::Crowded { .. }
        )
    }
}
