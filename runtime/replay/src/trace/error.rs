//! Why a trace cannot be read. Every message is one line, and names the file and, where there is one, the line.

use std::io;
use std::path::PathBuf;

use super::pickle::PickleFault;

/// Why a trace cannot be read.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file cannot be opened or read.
    #[error("{}: cannot be read: {source}", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The compressed file ends in the middle: copy it again.
    #[error("{}: the gzip data ends in the middle: the file is truncated, copy or record it again", path.display())]
    Truncated {
        /// Which file.
        path: PathBuf,
    },
    /// The compressed file is damaged.
    #[error("{}: the gzip data is corrupt ({source}): copy or record it again", path.display())]
    Corrupt {
        /// Which file.
        path: PathBuf,
        /// What the decompressor says.
        source: io::Error,
    },
    /// There is not a single event.
    #[error(
        "{}: no events: expected a trace (lines such as \"a 0 512 0 17\") or a torch snapshot with history",
        path.display()
    )]
    Empty {
        /// Which file.
        path: PathBuf,
    },
    /// A line that cannot be.
    #[error("{}:{line}: {fault}", path.display())]
    Line {
        /// Which file.
        path: PathBuf,
        /// Which line, from 1.
        line: u32,
        /// What is wrong with it.
        fault: Fault,
    },
    /// A torch snapshot that cannot be replayed.
    #[error("{}: {fault}", path.display())]
    Snapshot {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        fault: SnapshotFault,
    },
}

/// What is wrong with one event.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// Not an event at all.
    #[error(
        "{found:?} is not an event: expected \"a id bytes stream t_us\", \"r id t_us\", \"f id t_us\" or \
         \"s id stream t_us\""
    )]
    NotAnEvent {
        /// The line, or its beginning.
        found: String,
    },
    /// A trace of a version that did not exist when this was built.
    #[error("trace {version} is not known here: versions v1 and v2 are")]
    UnknownVersion {
        /// The version that the header names.
        version: String,
    },
    /// A field is missing.
    #[error("the {field} is missing")]
    Missing {
        /// Which field.
        field: &'static str,
    },
    /// There are more fields than the event has.
    #[error("{found:?} follows a complete event")]
    Trailing {
        /// What follows.
        found: String,
    },
    /// A field below zero.
    #[error("the {field} is negative: {found}")]
    Negative {
        /// Which field.
        field: &'static str,
        /// What it is.
        found: String,
    },
    /// A field that is not a number.
    #[error("the {field} is not a number: {found:?}")]
    NotANumber {
        /// Which field.
        field: &'static str,
        /// What it is.
        found: String,
    },
    /// A size that no device has.
    #[error("the {field} is too large: {found}")]
    TooLarge {
        /// Which field.
        field: &'static str,
        /// What it is.
        found: String,
    },
    /// A block of no bytes: an allocator is never asked for one.
    #[error("block {id} has no bytes")]
    NoBytes {
        /// The id as the trace has it.
        id: u64,
    },
    /// A live block is allocated again.
    #[error("block {id} is allocated while it is live")]
    AllocatedTwice {
        /// The id as the trace has it.
        id: u64,
    },
    /// Something happens to a block that was never allocated.
    #[error("block {id} is unknown: it was never allocated")]
    UnknownBlock {
        /// The id as the trace has it.
        id: u64,
    },
    /// Something happens to a block that is free.
    #[error("block {id} is freed twice")]
    DoubleFree {
        /// The id as the trace has it.
        id: u64,
    },
    /// A stream is recorded on a block that was given back.
    #[error("a stream is recorded on block {id} after its free")]
    RecordedAfterFree {
        /// The id as the trace has it.
        id: u64,
    },
    /// More streams, blocks or events than are counted here.
    #[error("there are more than {limit} {what}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many are counted.
        limit: u64,
    },
}

/// What is wrong with a torch snapshot.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotFault {
    /// Not a pickle that can be read.
    #[error(
        "not a readable pickle ({source}): expected the file that torch.cuda.memory._dump_snapshot writes"
    )]
    Pickle {
        /// What the reader says.
        source: PickleFault,
    },
    /// Something in it is not what torch writes there.
    #[error("the {found} is not {expected}: not a snapshot of a torch that is known here")]
    Shape {
        /// What was looked at.
        found: &'static str,
        /// What it should be.
        expected: &'static str,
    },
    /// A container that is neither a trace nor a pickle.
    #[error(
        "{found} is not read here: give a trace, or the file that torch.cuda.memory._dump_snapshot writes"
    )]
    Container {
        /// What it is.
        found: &'static str,
    },
    /// Recorded without history.
    #[error(
        "the snapshot has no history: call torch.cuda.memory._record_memory_history() before the work, then dump"
    )]
    NoHistory,
    /// The device that was asked for has no history.
    #[error("device {device} has no history; devices with history: {present:?}")]
    NoSuchDevice {
        /// What was asked for.
        device: u32,
        /// What there is.
        present: Vec<u32>,
    },
    /// An action that did not exist when this was built.
    #[error("entry {entry}: action {action:?} is not known here: the snapshot is of a newer torch")]
    UnknownAction {
        /// Which entry of the device's history, from 0.
        entry: u32,
        /// What it says.
        action: String,
    },
    /// An entry without a field that its action needs.
    #[error("entry {entry}: {action} without {field}")]
    MissingField {
        /// Which entry of the device's history, from 0.
        entry: u32,
        /// Its action.
        action: &'static str,
        /// What is missing.
        field: &'static str,
    },
    /// An entry that cannot be.
    #[error("entry {entry}: {fault}")]
    Entry {
        /// Which entry of the device's history, from 0.
        entry: u32,
        /// What is wrong with it.
        fault: Fault,
    },
}
