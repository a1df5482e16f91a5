//! Reader of torch's own history: the pickle that `torch.cuda.memory._dump_snapshot` writes after
//! `torch.cuda.memory._record_memory_history`.
//!
//! The pickle is a dict. `device_traces` has a list of entries for each device, each a dict with `action`, `addr`, `size`, `stream` and
//! `time_us`; `segments` is the state at the dump. The history may begin in the middle of the program, because its ring buffer wrapped or
//! recording began late. Some blocks are therefore freed without an allocation, or are live in `segments` without any entry. They are
//! allocated at the beginning of the trace, in the order of their addresses.

use std::collections::BTreeMap;
use std::io::BufRead;

use rustc_hash::FxHashSet;

use super::Stop;
use super::bounds::Budget;
use super::error::{Fault, SnapshotFault};
use super::pickle::{Pickle, Value};
use super::recording::Builder;

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

/// Number of blocks that segments may have beyond the number of dicts: lists of a pickle may name one dict several times.
const REPEATED: usize = 1 << 16;

/// Memory of an address in a set, and of an older block.
const PER_ADDRESS: usize = 24;
const PER_EARLIER: usize = 64;

/// Reads a snapshot's history of one device; `None` selects the device with the most entries.
pub(super) fn read(
    from: &mut dyn BufRead,
    mut budget: Budget,
    device: Option<u32>,
) -> Result<Builder, Stop<SnapshotFault>> {
    let pickle = Pickle::read(from, &mut budget)
        .map_err(|stop| stop.map(|source| SnapshotFault::Pickle { source }))?;
    convert(&pickle, budget, device).map_err(Stop::Fault)
}

/// Dict of the snapshot, with its name for messages.
#[derive(Clone, Copy)]
struct Dict<'p> {
    pickle: &'p Pickle,
    value: Value,
    name: &'static str,
}

impl<'p> Dict<'p> {
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

    fn text(self, key: &'static str) -> Result<&'p [u8], SnapshotFault> {
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

fn entry(dict: Dict<'_>) -> Result<Entry<'_>, SnapshotFault> {
    Ok(Entry {
        action: dict.text("action")?,
        addr: dict.number("addr")?,
        size: dict.number("size")?,
        stream: dict.number("stream")?,
        time_us: dict.number("time_us")?,
    })
}

fn choose<'p>(
    pickle: &'p Pickle,
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

fn convert(pickle: &Pickle, mut budget: Budget, device: Option<u32>) -> Result<Builder, SnapshotFault> {
    let root = Dict { pickle, value: pickle.root(), name: "snapshot" };
    let histories = root.list("device_traces")?.unwrap_or_default();
    let (device, history) = choose(pickle, histories, device)?;
    let history = History { pickle, entries: history };
    let earlier = earlier(&history, root.list("segments")?.unwrap_or_default(), device, &mut budget)?;
    let start_us = history.start_us()?;
    let mut build = Builder::new(budget);
    for (address, block) in earlier {
        build
            .allocate(0, address, block.bytes, block.stream, 0)
            .and_then(|()| if block.requested { build.free_requested(0, address, 0) } else { Ok(()) })
            .map_err(|fault| SnapshotFault::Entry { entry: 0, fault })?;
    }
    for entry in history.iter() {
        let (number, entry) = entry?;
        let at_us = entry.time_us.map_or(0, |time| time.saturating_sub(start_us));
        let done = match Action::of(number, &entry)? {
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

/// Entries of a device's history.
struct History<'p> {
    pickle: &'p Pickle,
    entries: &'p [Value],
}

impl<'p> History<'p> {
    /// Returns the entries with their indexes, from 0.
    fn iter(&self) -> impl Iterator<Item = Result<(u32, Entry<'p>), SnapshotFault>> {
        let pickle = self.pickle;
        let entries = (0_u32..).zip(self.entries);
        entries.map(move |(number, &value)| Ok((number, entry(Dict { pickle, value, name: "entry" })?)))
    }

    /// Returns the time of the first entry that has one.
    fn start_us(&self) -> Result<u64, SnapshotFault> {
        for entry in self.iter() {
            if let Some(time) = entry?.1.time_us {
                return Ok(time);
            }
        }
        Ok(0)
    }
}

/// Returns the blocks that were allocated before the history begins, by address.
fn earlier(
    history: &History<'_>,
    segments: &[Value],
    device: u32,
    budget: &mut Budget,
) -> Result<BTreeMap<u64, Earlier>, SnapshotFault> {
    let over = |number, over| SnapshotFault::Entry { entry: number, fault: Fault::OverBudget(over) };
    let mut found = BTreeMap::new();
    let mut named = FxHashSet::default();
    for entry in history.iter() {
        let (number, entry) = entry?;
        match Action::of(number, &entry)? {
            Action::Allocate { address, .. } => {
                if named.insert(address) {
                    budget.charge(PER_ADDRESS).map_err(|error| over(number, error))?;
                }
            }
            Action::FreeRequested { address, bytes, stream }
            | Action::FreeCompleted { address, bytes, stream } => {
                if named.insert(address) {
                    budget.charge(PER_ADDRESS + PER_EARLIER).map_err(|error| over(number, error))?;
                    found.insert(address, Earlier { bytes, stream, requested: false });
                }
            }
            Action::Other => {}
        }
    }
    let bound = history.pickle.dicts() + REPEATED;
    let mut left = bound;
    for &value in segments {
        let segment = Dict { pickle: history.pickle, value, name: "segment" };
        let of = segment.number("device")?.and_then(|device| u32::try_from(device).ok()).unwrap_or(0);
        if of != device {
            continue;
        }
        let blocks = segment.list("blocks")?.unwrap_or_default();
        left = left.checked_sub(blocks.len()).ok_or(SnapshotFault::RepeatedBlocks { bound })?;
        let stream = segment.number("stream")?.unwrap_or(0);
        let mut address = segment.number("address")?.unwrap_or(0);
        for &value in blocks {
            let block = Dict { value, name: "block", ..segment };
            let size = block.number("size")?.unwrap_or(0);
            let at = block.number("address")?.unwrap_or(address);
            address = at.saturating_add(size);
            let requested = match block.text("state")? {
                b"active_allocated" => false,
                // Freed by the program, still in use on another stream.
                b"active_pending_free" | b"active_awaiting_free" => true,
                _ => continue,
            };
            let bytes = block.number("requested_size")?.unwrap_or(size);
            if bytes > 0 && !named.contains(&at) {
                budget.charge(PER_EARLIER).map_err(|error| over(0, error))?;
                found.insert(at, Earlier { bytes, stream, requested });
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
            (history(&[("teleport", 0, 1)]), "entry 0: action \"teleport\" is unknown"),
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
