//! Reader of torch's own history: the pickle that `torch.cuda.memory._dump_snapshot` writes after
//! `torch.cuda.memory._record_memory_history`.
//!
//! The pickle is a dict. `device_traces` has a list of entries for each device, each a dict with `action`, `addr`, `size`, `stream` and
//! `time_us`; `segments` is the state at the dump. The history may begin in the middle of the program, because its ring buffer wrapped or
//! recording began late. Some blocks are therefore freed without an allocation, or are live in `segments` without any entry. They are
//! allocated at the beginning of the trace, in the order of their addresses.

use std::collections::BTreeMap;

use rustc_hash::FxHashSet;

use super::build::Builder;
use super::error::SnapshotFault;
use super::pickle::{Pickle, Value};

struct Segment {
    device: u32,
    address: u64,
    stream: u64,
    blocks: Vec<Block>,
}

struct Block {
    address: Option<u64>,
    size: u64,
    requested_size: Option<u64>,
    state: State,
}

enum State {
    Live,
    /// Freed by the program, still in use on another stream.
    Pending,
    Free,
}

struct Entry<'a> {
    action: &'a [u8],
    addr: Option<u64>,
    size: Option<u64>,
    stream: Option<u64>,
    time_us: Option<u64>,
}

/// Block that was allocated before the history begins.
struct Earlier {
    bytes: u64,
    stream: u64,
    /// The free was requested before the history begins, and does not complete within it.
    requested: bool,
}

/// Reads a snapshot's history of one device; `None` selects the device with the most entries.
pub(super) fn read(bytes: &[u8], device: Option<u32>) -> Result<Builder, SnapshotFault> {
    let pickle = Pickle::read(bytes).map_err(|source| SnapshotFault::Pickle { source })?;
    let root = Dict { pickle: &pickle, value: pickle.root(), name: "snapshot" };
    let histories = root.list("device_traces")?.unwrap_or_default();
    let (device, history) = choose(&pickle, histories, device)?;
    let entries: Vec<Entry<'_>> = history
        .iter()
        .map(|&value| entry(Dict { pickle: &pickle, value, name: "entry" }))
        .collect::<Result<_, _>>()?;
    let mut segments = Vec::new();
    for &value in root.list("segments")?.unwrap_or_default() {
        segments.push(segment(Dict { pickle: &pickle, value, name: "segment" })?);
    }
    segments.retain(|segment| segment.device == device);
    convert(&entries, &segments)
}

/// Dict of the snapshot, with its name for messages.
#[derive(Clone, Copy)]
struct Dict<'p, 'a> {
    pickle: &'p Pickle<'a>,
    value: Value,
    name: &'static str,
}

impl<'p, 'a> Dict<'p, 'a> {
    fn field(self, key: &'static str) -> Result<Value, SnapshotFault> {
        let shape = SnapshotFault::Shape { found: self.name, expected: "a dict" };
        self.pickle.field(self.value, key).ok_or(shape)
    }

    fn number(self, key: &'static str) -> Result<Option<u64>, SnapshotFault> {
        let shape = SnapshotFault::Shape { found: key, expected: "a number that is not negative" };
        match self.field(key)? {
            Value::None => Ok(None),
            Value::Number(number) => u64::try_from(number).map(Some).map_err(|_| shape),
            _ => Err(shape),
        }
    }

    fn text(self, key: &'static str) -> Result<&'a [u8], SnapshotFault> {
        let shape = SnapshotFault::Shape { found: key, expected: "text" };
        self.pickle.text(self.field(key)?).ok_or(shape)
    }

    fn list(self, key: &'static str) -> Result<Option<&'p [Value]>, SnapshotFault> {
        let shape = SnapshotFault::Shape { found: key, expected: "a list" };
        match self.field(key)? {
            Value::None => Ok(None),
            value => self.pickle.list(value).map(Some).ok_or(shape),
        }
    }
}

fn entry<'a>(dict: Dict<'_, 'a>) -> Result<Entry<'a>, SnapshotFault> {
    Ok(Entry {
        action: dict.text("action")?,
        addr: dict.number("addr")?,
        size: dict.number("size")?,
        stream: dict.number("stream")?,
        time_us: dict.number("time_us")?,
    })
}

fn segment(dict: Dict<'_, '_>) -> Result<Segment, SnapshotFault> {
    let mut blocks = Vec::new();
    for &value in dict.list("blocks")?.unwrap_or_default() {
        let dict = Dict { value, name: "block", ..dict };
        let state = match dict.text("state")? {
            b"active_allocated" => State::Live,
            b"active_pending_free" | b"active_awaiting_free" => State::Pending,
            _ => State::Free,
        };
        blocks.push(Block {
            address: dict.number("address")?,
            size: dict.number("size")?.unwrap_or(0),
            requested_size: dict.number("requested_size")?,
            state,
        });
    }
    Ok(Segment {
        device: dict.number("device")?.and_then(|device| u32::try_from(device).ok()).unwrap_or(0),
        address: dict.number("address")?.unwrap_or(0),
        stream: dict.number("stream")?.unwrap_or(0),
        blocks,
    })
}

fn choose<'p>(
    pickle: &'p Pickle<'_>,
    histories: &[Value],
    device: Option<u32>,
) -> Result<(u32, &'p [Value]), SnapshotFault> {
    let mut present = Vec::new();
    for (index, &history) in (0_u32..).zip(histories) {
        let shape = SnapshotFault::Shape { found: "device_traces", expected: "a list of lists" };
        let history = pickle.list(history).ok_or(shape)?;
        if !history.is_empty() {
            present.push((index, history));
        }
    }
    // Of equal ones, the first.
    let longest = present.iter().reduce(|best, next| if next.1.len() > best.1.len() { next } else { best });
    let chosen = match device {
        None => longest.ok_or(SnapshotFault::NoHistory)?,
        Some(device) => present.iter().find(|&&(index, _)| index == device).ok_or_else(|| {
            SnapshotFault::NoSuchDevice { device, present: present.iter().map(|&(index, _)| index).collect() }
        })?,
    };
    Ok(*chosen)
}

fn convert(history: &[Entry<'_>], segments: &[Segment]) -> Result<Builder, SnapshotFault> {
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
                // Recording was paused: the frees in between are lost, and their blocks are not live.
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

/// Returns the blocks that were allocated before the history begins, by address.
fn earlier(history: &[Entry<'_>], segments: &[Segment]) -> Result<BTreeMap<u64, Earlier>, SnapshotFault> {
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
            let requested = match block.state {
                State::Live => false,
                State::Pending => true,
                State::Free => continue,
            };
            let bytes = block.requested_size.unwrap_or(block.size);
            if bytes > 0 && !named.contains(&at) {
                found.insert(at, Earlier { bytes, stream: segment.stream, requested });
            }
        }
    }
    Ok(found)
}

/// Action of an entry.
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
    /// Internal operation of the allocator, or a mark.
    Other,
}

impl Action {
    fn of(number: u32, entry: &Entry<'_>) -> Result<Action, SnapshotFault> {
        let fields = |action: &'static str| {
            let missing = |field| SnapshotFault::MissingField { entry: number, action, field };
            let address = entry.addr.ok_or_else(|| missing("addr"))?;
            let bytes = entry.size.ok_or_else(|| missing("size"))?;
            Ok((address, bytes, entry.stream.unwrap_or(0)))
        };
        Ok(match entry.action {
            b"alloc" => {
                let (address, bytes, stream) = fields("alloc")?;
                Action::Allocate { address, bytes, stream }
            }
            b"free_requested" => {
                let (address, bytes, stream) = fields("free_requested")?;
                Action::FreeRequested { address, bytes, stream }
            }
            b"free_completed" => {
                let (address, bytes, stream) = fields("free_completed")?;
                Action::FreeCompleted { address, bytes, stream }
            }
            b"segment_alloc" | b"segment_free" | b"segment_map" | b"segment_unmap" | b"snapshot" | b"oom"
            | b"user_defined" => Action::Other,
            unknown => {
                return Err(SnapshotFault::UnknownAction {
                    entry: number,
                    action: String::from_utf8_lossy(unknown).into_owned(),
                });
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use glake_units::Bytes;
    use serde::Serialize;

    use super::super::{BlockId, Event, StreamIndex, Trace};

    const FIXTURE: &[u8] = include_bytes!("../../tests/snapshot.pickle");

    fn open(bytes: &[u8], device: Option<u32>) -> Result<Trace, String> {
        Trace::from_bytes(Path::new("s.pickle"), bytes, device).map_err(|error| error.to_string())
    }

    fn pickle(value: impl Serialize) -> Vec<u8> {
        serde_pickle::to_vec(&value, serde_pickle::SerOptions::new()).unwrap()
    }

    /// Builds a snapshot of one device with the given entries: action, address, size.
    fn history(entries: &[(&str, i64, i64)]) -> Vec<u8> {
        #[derive(Serialize)]
        struct Row<'a> {
            action: &'a str,
            addr: i64,
            size: i64,
            time_us: u32,
        }
        let rows: Vec<_> =
            entries.iter().map(|&(action, addr, size)| Row { action, addr, size, time_us: 7 }).collect();
        pickle(BTreeMap::from([("device_traces", vec![rows])]))
    }

    #[test]
    fn reads_a_dump_with_blocks_older_than_its_history() {
        let trace = open(FIXTURE, None).unwrap();
        assert_eq!((trace.name(), trace.allocations(), trace.events().len()), ("s", 6, 11));
        let sizes: Vec<u64> = (0..6).map(|block| trace.size_of(BlockId(block)).get()).collect();
        let mib = 1 << 20;
        assert_eq!(sizes, [6 * mib, 3 * mib - 12, mib, 700, 5 * mib + 100, 4096]);
        // The third block was waiting for another stream when the history began.
        assert_eq!(trace.events()[3], Event::FreeRequested { block: BlockId(2), at_us: 0 });
        // The fifth block was on the side stream; its free completed 18 us after the request.
        assert!(matches!(trace.events()[7], Event::Allocate { stream: StreamIndex(1), at_us: 9, .. }));
        assert_eq!(trace.events()[8], Event::FreeRequested { block: BlockId(4), at_us: 12 });
        assert_eq!(trace.events()[10], Event::FreeCompleted { block: BlockId(4), at_us: 30 });
        assert_eq!(trace.line_of(10), Some(7), "the entry of the history");
        assert_eq!(trace.peaks().active, Bytes::mib(10));
    }

    #[test]
    fn a_device_may_be_chosen() {
        assert_eq!(open(FIXTURE, Some(1)).unwrap().allocations(), 1);
        let refused = open(FIXTURE, Some(4)).unwrap_err();
        assert!(refused.contains("device 4 has no history") && refused.contains("[0, 1]"), "{refused}");
    }

    #[test]
    fn recording_may_stand_still() {
        let trace = open(&history(&[("alloc", 512, 9), ("alloc", 512, 8)]), None).unwrap();
        assert_eq!((trace.allocations(), trace.events().len()), (2, 4), "the first was freed in between");
    }

    #[test]
    fn other_shapes_are_refused_in_one_line() {
        let cases: &[(Vec<u8>, &str)] = &[
            (FIXTURE[..FIXTURE.len() / 2].to_vec(), "not a readable pickle"),
            (pickle([1, 2, 3]), "the snapshot is not a dict"),
            (pickle(BTreeMap::from([("segments", [0; 0])])), "no history"),
            (history(&[]), "no history"),
            (history(&[("teleport", 0, 1)]), "entry 0: action \"teleport\" is not known"),
            (history(&[("alloc", 0, -1)]), "the size is not a number that is not negative"),
            (history(&[("alloc", 0, 0)]), "entry 0: block 0 has no bytes"),
            (
                history(&[("alloc", 1, 5), ("free_completed", 1, 5), ("free_completed", 1, 5)]),
                "entry 2: block 1",
            ),
            (
                pickle(BTreeMap::from([("device_traces", [[BTreeMap::from([("action", "alloc")])]])])),
                "without addr",
            ),
        ];
        for (bytes, expected) in cases {
            let refused = open(bytes, None).unwrap_err();
            assert!(refused.contains(expected) && !refused.contains('\n'), "{refused}");
        }
    }
}
