//! Errors of reading a trace. Every message is one line, and names the file and, if known, the line.

use std::io;
use std::path::PathBuf;

use glake_units::Bytes;

use super::bounds::OverBudget;
use super::pickle::PickleFault;

/// Reason why a trace cannot be read.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("{}: cannot be read: {source}", path.display())]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The compressed file ends in the middle: copy it again.
    #[error("{}: the gzip data ends in the middle: the file is truncated, copy or record it again", path.display())]
    Truncated {
        /// Path of the file.
        path: PathBuf,
    },
    /// The compressed file is damaged.
    #[error("{}: the gzip data is corrupt ({source}): copy or record it again", path.display())]
    Corrupt {
        /// Path of the file.
        path: PathBuf,
        /// Error of the decompressor.
        source: io::Error,
    },
    /// The content of a compressed file, or of a pipe, is larger than the size of the file justifies.
    #[error(
        "{}: its content is larger than {bound}, the bound for a file of its size: if it is a recording of real work, write \
         it to a file without compression first",
        path.display()
    )]
    Unpacked {
        /// Path of the file.
        path: PathBuf,
        /// Bound of the content.
        bound: Bytes,
    },
    /// The file has no events.
    #[error(
        "{}: no events: expected a trace (lines such as \"a 0 512 0 17\") or a torch snapshot with history",
        path.display()
    )]
    Empty {
        /// Path of the file.
        path: PathBuf,
    },
    /// A line is invalid.
    #[error("{}:{line}: {fault}", path.display())]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: u32,
        /// Fault of the line.
        fault: Fault,
    },
    /// A torch snapshot that cannot be replayed.
    #[error("{}: {fault}", path.display())]
    Snapshot {
        /// Path of the file.
        path: PathBuf,
        /// Fault of the snapshot.
        fault: SnapshotFault,
    },
}

/// Fault of a single event.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The line is not an event.
    #[error(
        "{found:?} is not an event: expected \"a id bytes stream t_us\", \"r id t_us\", \"f id t_us\" or \
         \"s id stream t_us\""
    )]
    NotAnEvent {
        /// The line, or its beginning.
        found: String,
    },
    /// The trace has a version newer than this program.
    #[error("trace {version} is not supported: versions v1 and v2 are")]
    UnknownVersion {
        /// Version named by the header.
        version: String,
    },
    /// A field is missing.
    #[error("the {field} is missing")]
    Missing {
        /// Name of the field.
        field: &'static str,
    },
    /// Text follows a complete event.
    #[error("{found:?} follows a complete event")]
    Trailing {
        /// Text after the event.
        found: String,
    },
    /// A field is below zero.
    #[error("the {field} is negative: {found}")]
    Negative {
        /// Name of the field.
        field: &'static str,
        /// Text of the field.
        found: String,
    },
    /// A field is not a number.
    #[error("the {field} is not a number: {found:?}")]
    NotANumber {
        /// Name of the field.
        field: &'static str,
        /// Text of the field.
        found: String,
    },
    /// A size exceeds any device's memory.
    #[error("the {field} is too large: {found}")]
    TooLarge {
        /// Name of the field.
        field: &'static str,
        /// Text of the field.
        found: String,
    },
    /// A block has zero bytes: no allocator is asked for one.
    #[error("block {id} has no bytes")]
    NoBytes {
        /// ID of the block in the trace.
        id: u64,
    },
    /// A live block is allocated again.
    #[error("block {id} is allocated while it is live")]
    AllocatedTwice {
        /// ID of the block in the trace.
        id: u64,
    },
    /// An event names a block that was never allocated.
    #[error("block {id} is unknown: it was never allocated")]
    UnknownBlock {
        /// ID of the block in the trace.
        id: u64,
    },
    /// An event names a block that is free.
    #[error("block {id} is freed twice")]
    DoubleFree {
        /// ID of the block in the trace.
        id: u64,
    },
    /// A stream is recorded on a block after its free.
    #[error("a stream is recorded on block {id} after its free")]
    RecordedAfterFree {
        /// ID of the block in the trace.
        id: u64,
    },
    /// The trace has more streams, blocks or events than supported.
    #[error("there are more than {limit} {what}")]
    TooMany {
        /// Name of the counted items.
        what: &'static str,
        /// Maximum number of them.
        limit: u64,
    },
    /// The blocks that are live at once are larger than any GPU's memory together.
    #[error("block {id} makes the live blocks larger than {limit} together, more than a GPU can address")]
    TooMuchLive {
        /// ID of the block in the trace.
        id: u64,
        /// Maximum size of the live blocks.
        limit: Bytes,
    },
    /// The events up to this one need too much memory.
    #[error(transparent)]
    OverBudget(#[from] OverBudget),
}

/// Fault of a torch snapshot.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotFault {
    /// The file is not a readable pickle.
    #[error(
        "not a readable pickle ({source}): expected the file that torch.cuda.memory._dump_snapshot writes"
    )]
    Pickle {
        /// Fault of the pickle.
        source: PickleFault,
    },
    /// Part of the snapshot differs from the format that torch writes.
    #[error("the {found} is not {expected}: not a snapshot of a supported torch version")]
    Shape {
        /// Name of the part.
        found: &'static str,
        /// Expected form of the part.
        expected: &'static str,
    },
    /// The file is a container that is neither a trace nor a pickle.
    #[error(
        "{found} is not supported: give a trace, or the file that torch.cuda.memory._dump_snapshot writes"
    )]
    Container {
        /// Kind of the container.
        found: &'static str,
    },
    /// The snapshot was recorded without history.
    #[error(
        "the snapshot has no history: call torch.cuda.memory._record_memory_history() before the work, then dump"
    )]
    NoHistory,
    /// The requested device has no history.
    #[error("device {device} has no history; devices with history: {present:?}")]
    NoSuchDevice {
        /// Requested device index.
        device: u32,
        /// Devices with a history.
        present: Vec<u32>,
    },
    /// The action is unknown: the snapshot is of a newer torch.
    #[error("entry {entry}: action {action:?} is unknown: the snapshot is of a newer torch")]
    UnknownAction {
        /// Index in the device's history, from 0.
        entry: u32,
        /// Name of the action.
        action: String,
    },
    /// The segments name the same blocks repeatedly.
    #[error(
        "its segments have more than {bound} blocks, but the pickle does not have so many: they name the same blocks \
         repeatedly, which torch does not write"
    )]
    RepeatedBlocks {
        /// Bound of the number of blocks.
        bound: usize,
    },
    /// An entry lacks a field that its action needs.
    #[error("entry {entry}: {action} without {field}")]
    MissingField {
        /// Index in the device's history, from 0.
        entry: u32,
        /// Name of the action.
        action: &'static str,
        /// Name of the missing field.
        field: &'static str,
    },
    /// An entry is invalid.
    #[error("entry {entry}: {fault}")]
    Entry {
        /// Index in the device's history, from 0.
        entry: u32,
        /// Fault of the entry.
        fault: Fault,
    },
}
