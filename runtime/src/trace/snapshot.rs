//! Torch's own history: the pickle that `torch.cuda.memory._dump_snapshot` writes after
//! `torch.cuda.memory._record_memory_history`.
//!
//! The pickle is a dict. `device_traces` has a list of entries a device, each a dict with `action`, `addr`, `size`,
//! `stream` and `time_us`; `segments` is the state at the dump. The history may begin in the middle of the program
//! (its ring buffer wraps, or recording began late): blocks that it frees without having allocated them, and blocks
//! that `segments` shows live although the history never names them, are allocated at its beginning, in the order of
//! their addresses.

use std::collections::BTreeMap;

use rustc_hash::FxHashSet;
use serde::Deserialize;

use super::build::Builder;
use super::error::SnapshotFault;

#[derive(Deserialize)]
struct Snapshot {
    #[serde(default)]
    segments: Vec<Segment>,
    device_traces: Option<Vec<Vec<Entry>>>,
}

#[derive(Deserialize)]
struct Segment {
    #[serde(default)]
    device: u32,
    address: u64,
    #[serde(default)]
    stream: u64,
    #[serde(default)]
    blocks: Vec<Block>,
}

#[derive(Deserialize)]
struct Block {
    address: Option<u64>,
    size: u64,
    requested_size: Option<u64>,
    state: String,
}

#[derive(Deserialize)]
struct Entry {
    action: String,
    addr: Option<u64>,
    size: Option<u64>,
    stream: Option<u64>,
    time_us: Option<u64>,
}

/// A block that was allocated before the history begins.
struct Earlier {
    bytes: u64,
    stream: u64,
    /// Given back before the history begins too, and not completed within it.
    requested: bool,
}

/// Reads a snapshot's history of one device: this one, or the one with the most entries.
pub(super) fn read(bytes: &[u8], device: Option<u32>) -> Result<Builder, SnapshotFault> {
    let snapshot: Snapshot = serde_pickle::from_slice(bytes, serde_pickle::DeOptions::new())
        .map_err(|source| SnapshotFault::Pickle { source })?;
    let histories = snapshot.device_traces.unwrap_or_default();
    let (device, history) = choose(&histories, device)?;
    let segments: Vec<&Segment> =
        snapshot.segments.iter().filter(|segment| segment.device == device).collect();
    convert(history, &segments)
}

fn choose(histories: &[Vec<Entry>], device: Option<u32>) -> Result<(u32, &[Entry]), SnapshotFault> {
    let present = || (0_u32..).zip(histories).filter(|(_, history)| !history.is_empty());
    // The first of those with the most entries.
    let longest = present()
        .reduce(|best, next| if next.1.len() > best.1.len() { next } else { best })
        .ok_or(SnapshotFault::NoHistory)?;
    let (index, history) = match device {
        None => longest,
        Some(device) => present().find(|&(index, _)| index == device).ok_or_else(|| {
            SnapshotFault::NoSuchDevice { device, present: present().map(|(index, _)| index).collect() }
        })?,
    };
    Ok((index, history))
}

fn convert(history: &[Entry], segments: &[&Segment]) -> Result<Builder, SnapshotFault> {
    let start_us = history.iter().find_map(|entry| entry.time_us).unwrap_or(0);
    let mut build = Builder::with_capacity(history.len());
    for (address, block) in earlier(history, segments)? {
        build
            .allocate(0, address, block.bytes, block.stream, 0)
            .and_then(|()| if block.requested { build.free_requested(0, address, 0) } else { Ok(()) })
            .map_err(|fault| SnapshotFault::Entry { entry: 0, fault })?;
    }
    for (number, entry) in (0_u32..).zip(history) {
        let at_us = entry.time_us.map_or(0, |time| time.saturating_sub(start_us));
        let done = match Action::of(number, entry)? {
            Action::Allocate { address, bytes, stream } => {
                // Recording stood still for a while: the frees between are lost, their blocks are not live.
                let lost = if build.is_held(address) {
                    build.free_completed(number, address, at_us)
                } else {
                    Ok(())
                };
                lost.and_then(|()| build.allocate(number, address, bytes, stream, at_us))
            }
            Action::FreeRequested { address, .. } => build.free_requested(number, address, at_us),
            Action::FreeCompleted { address, .. } => build.free_completed(number, address, at_us),
            Action::Other => Ok(()),
        };
        done.map_err(|fault| SnapshotFault::Entry { entry: number, fault })?;
    }
    Ok(build)
}

/// The blocks that were allocated before the history begins, by address.
fn earlier(history: &[Entry], segments: &[&Segment]) -> Result<BTreeMap<u64, Earlier>, SnapshotFault> {
    let mut found = BTreeMap::new();
    let mut named = FxHashSet::default();
    for (number, entry) in (0_u32..).zip(history) {
        match Action::of(number, entry)? {
            Action::Allocate { address, .. } => {
                named.insert(address);
            }
            Action::FreeRequested { address, bytes, stream }
            | Action::FreeCompleted { address, bytes, stream } => {
                if named.insert(address) {
                    found.insert(address, Earlier { bytes, stream, requested: false });
                }
            }
            Action::Other => {}
        }
    }
    for segment in segments {
        let mut address = segment.address;
        for block in &segment.blocks {
            let at = block.address.unwrap_or(address);
            address = at.saturating_add(block.size);
            let requested = match block.state.as_str() {
                "active_allocated" => false,
                "active_pending_free" | "active_awaiting_free" => true,
                _ => continue,
            };
            let bytes = block.requested_size.unwrap_or(block.size);
            if bytes > 0 && !named.contains(&at) {
                found.insert(at, Earlier { bytes, stream: segment.stream, requested });
            }
        }
    }
    Ok(found)
}

/// What an entry says.
enum Action {
    Allocate {
        address: u64,
        bytes: u64,
        stream: u64,
    },
    FreeRequested {
        address: u64,
        bytes: u64,
        stream: u64,
    },
    FreeCompleted {
        address: u64,
        bytes: u64,
        stream: u64,
    },
    /// The allocator's own doing, or a mark.
    Other,
}

impl Action {
    fn of(number: u32, entry: &Entry) -> Result<Action, SnapshotFault> {
        let fields = |action: &'static str| {
            let missing = |field| SnapshotFault::MissingField { entry: number, action, field };
            let address = entry.addr.ok_or_else(|| missing("addr"))?;
            let bytes = entry.size.ok_or_else(|| missing("size"))?;
            Ok((address, bytes, entry.stream.unwrap_or(0)))
        };
        Ok(match entry.action.as_str() {
            "alloc" => {
                let (address, bytes, stream) = fields("alloc")?;
                Action::Allocate { address, bytes, stream }
            }
            "free_requested" => {
                let (address, bytes, stream) = fields("free_requested")?;
                Action::FreeRequested { address, bytes, stream }
            }
            "free_completed" => {
                let (address, bytes, stream) = fields("free_completed")?;
                Action::FreeCompleted { address, bytes, stream }
            }
            "segment_alloc" | "segment_free" | "segment_map" | "segment_unmap" | "snapshot" | "oom"
            | "user_defined" => Action::Other,
            unknown => {
                return Err(SnapshotFault::UnknownAction { entry: number, action: unknown.to_owned() });
            }
        })
    }
}
