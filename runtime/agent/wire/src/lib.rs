//! Messages between the node agent and its workers: docs/PROTOCOL.md as types for both ends.
//!
//! ```text
//! message ─► Conversation ─► frame: u32 LE length, JSON {v, seq, ack, op, …} ─► Unix stream
//!            numbered, kept until acknowledged          Frames, Descriptors        one a worker
//! ActivityPage ─► a sealed memfd, given once in hello: read only when somebody must choose
//! CountersPage ─► a sealed memfd, found under /proc/PID/fd: read by whoever watches the process, without an agent
//! ```
//!
//! Nothing here knows what a message does, and nothing waits: sockets are the caller's.

mod activity;
mod conversation;
mod counters;
mod descriptors;
#[cfg(test)]
mod earlier;
mod frame;
mod message;
mod operator;
mod page;
mod snapshot;
mod socket;

pub use activity::{Activity, ActivityPage, ActivityView, PAGE_GPUS};
pub use conversation::{Conversation, Received};
pub use counters::{COUNTERS_WORDS, Counters, CountersView, GpuCounters};
pub use descriptors::{receive, send};
pub use frame::{Envelope, FrameError, Frames, MOST_BYTES, VERSION, frame};
pub use message::{Denied, Hello, Holder, Holding, Occupancy, Peer, Tier, ToAgent, ToWorker, Welcome};
pub use operator::{Answer, Ask, DecisionRow, Request, VictimRow, WorkerRow};
pub use page::PageError;
pub use snapshot::{
    GpuRow, LEAST_INTERVAL_MS, LoggedDecision, NeedRow, OperationKind, OperationRow, ProcessRow, RequestKind,
    RequestPhase, RequestRow, Snapshot, WatchedWorker, WorkerGpuRow,
};
pub use socket::{SocketError, check_folder, check_server, default_path, find_socket};
