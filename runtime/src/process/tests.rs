//! A process of simulated devices, from the outside.

mod captures;
mod endpoint;
mod shares;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::{DriverError, PointerKind};
use glake_meter::Meter as _;
use glake_sim::{SimMeter, load};

use super::*;
use crate::config::{Environment, Sources};
use crate::metrics::DeviceStats;

fn started(settings: &str) -> Process {
    let environment = Environment::from_iter([("GLAKE_DEVICE", "sim:h200x4")]);
    let sources = Sources { environment, ..Sources::default() }.with_overrides("test", settings).unwrap();
    Process::start(sources.load().unwrap()).unwrap()
}

fn mib(n: u64) -> Bytes {
    Bytes::mib(n)
}

const STREAM: Stream = Stream(0);

#[test]
fn the_simulator_is_never_taken_unasked() {
    let config = Sources::default().load().unwrap();
    if let Err(error) = Process::start(config) {
        let text = error.to_string();
        assert!(text.starts_with("no CUDA driver: ") && text.contains("torch programs need a GPU"), "{text}");
    }
}

#[test]
fn pools_start_when_their_device_is_used() {
    let process = started("");
    assert_eq!((process.name(), process.device_count()), ("sim:h200x4", 4));
    assert_eq!(process.reports().stats(3).unwrap(), DeviceStats::default());
    assert!(process.devices.iter().all(|memory| memory.started().is_none()));
    let address = process.malloc(3, mib(5), STREAM).unwrap();
    assert_eq!(process.find(address).unwrap().device, DeviceId(3));
    assert_eq!(process.devices.iter().filter(|memory| memory.started().is_some()).count(), 1);
    process.free(address).unwrap();
    assert!(matches!(process.free(address), Err(ProcessError::UnknownAddress { .. })));
    assert!(matches!(
        process.malloc(4, mib(1), STREAM),
        Err(ProcessError::NoSuchDevice { device: 4, count: 4 })
    ));
}

#[test]
fn a_fraction_holds_before_and_after_the_start_and_never_lifts_a_limit() {
    let process = started("pool.limit = \"1GiB\"");
    process.set_fraction(0, 0.001).unwrap();
    assert!(process.malloc(0, mib(200), STREAM).is_err());
    assert!(process.malloc(0, mib(100), STREAM).is_ok());
    process.set_fraction(0, 1.0).unwrap();
    assert!(process.malloc(0, mib(800), STREAM).is_ok());
    assert!(process.malloc(0, mib(200), STREAM).is_err());
    for wrong in [-1.0, 1.5, f64::NAN] {
        assert!(
            matches!(process.set_fraction(0, wrong), Err(ref error) if error.says("a memory fraction of"))
        );
    }
}

#[test]
fn a_refusal_is_told_in_torch_s_words_and_to_who_watches() {
    let process = started("pool.limit = \"64MiB\"");
    let told = Arc::new(AtomicU64::new(0));
    let note = told.clone();
    process.observers().on_shortage(Some(Arc::new(move |shortage| {
        note.fetch_add(shortage.wanted.get(), Ordering::Relaxed);
    })));
    process.observers().keep_history(true, 10, false);
    let error = process.malloc(0, mib(80), STREAM).unwrap_err();
    assert!(
        error.to_string().starts_with("CUDA out of memory. Tried to allocate 80.00 MiB. GPU 0 has"),
        "{error}"
    );
    process.observers().on_shortage(None);
    assert!(process.malloc(0, Bytes::MAX, STREAM).is_err());
    assert_eq!(told.load(Ordering::Relaxed), 80 << 20);
    let snapshot = process.reports().snapshot();
    let trace = &snapshot["device_traces"][0];
    assert_eq!((&trace[0]["action"], &trace[0]["size"]), (&"oom".into(), &(80_u64 << 20).into()));
    assert!(trace[0]["device_free"].as_u64() > Some(1 << 30));
}

#[test]
fn what_no_device_holds_is_refused_and_counted_as_any_shortage() {
    let process = started("");
    // There is a free block, which is no answer.
    let block = process.malloc(0, mib(10), STREAM).unwrap();
    process.free(block).unwrap();
    let memory = process.device(0).unwrap().info.memory.get();
    let sizes = [memory + 1, u64::MAX - 1024, u64::MAX - 511, u64::MAX - 1, u64::MAX];
    for (before, size) in (0..).zip(sizes) {
        assert_eq!(process.reports().stats(0).unwrap().counters.num_ooms, before);
        let error = process.malloc(0, Bytes::new(size), STREAM).unwrap_err();
        assert!(matches!(error, ProcessError::OutOfMemory(_)), "{size}: {error}");
        assert!(!error.to_string().contains("waited for all pending work"), "{error}");
    }
    assert_eq!(process.reports().stats(0).unwrap().counters.num_ooms, 5);
}

#[test]
fn a_private_pool_is_its_own_and_goes_with_its_last_owner() {
    let process = started("");
    let id = PoolId(0, 9);
    let own = process.streams.of(&*process.driver, DeviceId(0), STREAM).unwrap().raw;
    process.pools().begin(0, id, Some(Arc::new(move |stream| stream == own))).unwrap();
    let inside = process.malloc(0, mib(10), STREAM).unwrap();
    process.pools().end(0, id).unwrap();
    let outside = process.malloc(0, mib(10), STREAM).unwrap();
    let mut live = Vec::new();
    process.pools().blocks(0, id, |address, size| live.push((address, size))).unwrap();
    assert_eq!(live, [(inside, mib(10))]);
    let views = process.reports().segments(0).unwrap();
    let whose = |address| {
        let of = |view: &&SegmentView| view.blocks.iter().any(|block| block.live && block.address == address);
        views.iter().find(of).unwrap().pool
    };
    assert_eq!((whose(inside), whose(outside)), (id, PoolId::default()));
    process.free(inside).unwrap();
    assert_eq!(process.pools().owners(0, id).unwrap(), 1);
    process.pools().release(0, id).unwrap();
    assert_eq!(process.pools().owners(0, id).unwrap(), 0);
    process.free(outside).unwrap();
    process.trim(None, Bytes::ZERO).unwrap();
    assert_eq!(process.reports().stats(0).unwrap().all.reserved_bytes.current, 0);
}

/// A hold is there from the begin on; an allocation on a stream that captures nothing shows that none is needed.
#[test]
fn points_are_held_for_a_capture_only() {
    let process = started("");
    let held = |process: &Process| {
        let block = process.malloc(1, mib(10), STREAM).unwrap();
        process.free(block).unwrap();
        matches!(
            process.devices[1].started().unwrap().pool.settle(),
            Err(PoolError::Driver(DriverError::Capturing { .. }))
        )
    };
    assert!(!held(&process));
    let only_other: Filter = Arc::new(|stream| stream == Stream::LEGACY);
    process.pools().begin(0, PoolId(1, 0), Some(only_other)).unwrap();
    assert!(held(&process), "on every device: peers' work is covered too");
    process.trim(None, Bytes::ZERO).unwrap();
    let routed = process.malloc(0, mib(10), Stream::LEGACY).unwrap();
    assert!(!held(&process));
    process.free(routed).unwrap();
    process.pools().end(0, PoolId(1, 0)).unwrap();
    process.pools().begin(0, PoolId(1, 0), None).unwrap();
    assert!(held(&process));
    process.pools().end(0, PoolId(1, 0)).unwrap();
    assert!(!held(&process));
}

#[test]
fn a_snapshot_covers_every_byte_that_is_reserved() {
    let process = started("");
    process.observers().keep_history(true, 100, false);
    let blocks: Vec<_> = [300, 3 << 20, 40 << 20, 700_000]
        .map(|size| process.malloc(0, Bytes::new(size), STREAM).unwrap())
        .into();
    process.free(blocks[1]).unwrap();
    let snapshot = process.reports().snapshot();
    let segments = snapshot["segments"].as_array().unwrap();
    let total = |key: &str| segments.iter().filter_map(|segment| segment[key].as_u64()).sum::<u64>();
    let stats = process.reports().stats(0).unwrap().all;
    assert_eq!(total("total_size"), stats.reserved_bytes.current.unsigned_abs());
    assert_eq!(total("allocated_size"), stats.allocated_bytes.current.unsigned_abs());
    assert_eq!(total("requested_size"), stats.requested_bytes.current.unsigned_abs());
    for segment in segments {
        let mut at = segment["address"].as_u64().unwrap();
        for block in segment["blocks"].as_array().unwrap() {
            assert_eq!(block["address"].as_u64().unwrap(), at);
            at += block["size"].as_u64().unwrap();
        }
        assert_eq!(at, segment["address"].as_u64().unwrap() + segment["total_size"].as_u64().unwrap());
    }
    let names = |trace: &serde_json::Value| -> Vec<String> {
        trace.as_array().unwrap().iter().map(|entry| entry["action"].as_str().unwrap().to_owned()).collect()
    };
    let traces = snapshot["device_traces"].as_array().unwrap();
    assert_eq!(traces.len(), 4);
    assert_eq!(
        names(&traces[0]),
        [
            "segment_map",
            "alloc",
            "segment_map",
            "alloc",
            "segment_map",
            "alloc",
            "alloc",
            "free_requested",
            "free_completed",
            "snapshot"
        ]
    );
}

#[test]
fn statistics_have_every_key_of_torch() {
    let process = started("");
    process.malloc(0, mib(3), STREAM).unwrap();
    let stats = process.reports().stats(0).unwrap().json();
    let kinds = "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes \
                 inactive_split_bytes requested_bytes";
    for kind in kinds.split_whitespace() {
        for pool in ["all", "small_pool", "large_pool"] {
            for metric in ["current", "peak", "allocated", "freed"] {
                let key = format!("{kind}.{pool}.{metric}");
                assert!(stats[&key].is_i64() || stats[&key].is_u64(), "{key}");
            }
        }
    }
    assert_eq!(stats["requested_bytes.large_pool.current"], 3 << 20);
    assert_eq!((&stats["max_split_size"], &stats["oversize_segments.peak"]), (&(-1).into(), &0.into()));
    assert!(stats["glake.extent_maps"].as_u64() > Some(0));
}

#[test]
fn a_peer_may_touch_what_there_is_and_what_comes() {
    let process = started("");
    let before = process.malloc(1, mib(20), STREAM).unwrap();
    process.sharing().enable_peer(0, 1).unwrap();
    process.sharing().enable_peer(0, 1).unwrap();
    process.sharing().enable_peer(2, 3).unwrap();
    let after = process.malloc(1, mib(200), STREAM).unwrap();
    for address in [before, after] {
        process.driver.read_now(DeviceId(0), address, &mut [0; 4]).unwrap();
    }
    assert!(process.sharing().enable_peer(0, 9).is_err() && process.sharing().enable_peer(-1, 0).is_err());
}

#[test]
fn a_stopped_process_still_serves() {
    let process = started("");
    let block = process.malloc(0, mib(20), STREAM).unwrap();
    process.stop();
    process.free(block).unwrap();
    let again = process.malloc(0, mib(20), STREAM).unwrap();
    assert_eq!(again, block);
    process.stop();
}

/// The other process is a thread here: what it opens is the same memory at another address.
#[test]
fn a_block_is_shared_until_it_is_freed() {
    let process = started("");
    let block = process.malloc(0, mib(40), STREAM).unwrap();
    let inside = Address(block.0 + 12_345);
    let (handle, offset) = process.sharing().share(inside).unwrap();
    assert_eq!(process.sharing().share(block).unwrap().0, handle);
    let base = process.sharing().open(&handle, 0).unwrap();
    assert_eq!(process.sharing().open(&handle, 0).unwrap(), base);
    let there = Address(base.0 + offset.get());
    process.devices[0].started().unwrap().pool.write(inside, b"seen").unwrap();
    let read = |device| {
        let mut bytes = [0; 4];
        process.driver.read_now(DeviceId(device), there, &mut bytes).map(|()| bytes)
    };
    assert_eq!(&read(0).unwrap(), b"seen");
    process.sharing().enable_peer(2, 0).unwrap();
    assert_eq!(&read(2).unwrap(), b"seen");
    process.sharing().close(base).unwrap();
    assert!(read(0).is_ok());
    process.pools().begin(0, PoolId(0, 1), None).unwrap();
    process.sharing().close(base).unwrap();
    assert!(read(0).is_ok(), "a capture may be open");
    assert!(
        matches!(process.sharing().close(base), Err(ref error) if error.says("no memory of another process is open"))
    );
    process.pools().end(0, PoolId(0, 1)).unwrap();
    process.trim(None, Bytes::ZERO).unwrap();
    assert!(read(0).is_err());
    process.free(block).unwrap();
    assert!(matches!(process.sharing().open(&handle, 0), Err(ProcessError::Share(_))));
    assert!(matches!(process.sharing().share(block), Err(ProcessError::InNoBlock { .. })));
}

#[test]
fn a_private_pool_keeps_what_is_free_until_it_is_trimmed_by_name() {
    let process = started("");
    let id = PoolId(0, 3);
    let reserved = || process.reports().stats(0).unwrap().all.reserved_bytes.current;
    process.pools().begin(0, id, None).unwrap();
    let block = process.malloc(0, mib(40), STREAM).unwrap();
    process.pools().end(0, id).unwrap();
    process.free(block).unwrap();
    process.trim(None, Bytes::ZERO).unwrap();
    assert!(reserved() >= 40 << 20);
    assert!(process.pools().trim(0, id).unwrap() >= mib(40));
    assert_eq!(reserved(), 0);
    process.pools().release(0, id).unwrap();
    assert!(matches!(process.pools().trim(0, id), Err(ref error) if error.says("has no private pool")));
}

#[test]
fn a_pool_that_was_made_by_name_is_stitched() {
    let process = started("");
    let id = PoolId(0, 4);
    process.pools().create(0, id).unwrap();
    process.pools().begin(0, id, None).unwrap();
    let blocks: Vec<_> = (0..8).map(|_| process.malloc(0, mib(64), STREAM).unwrap()).collect();
    blocks.iter().step_by(2).for_each(|&block| process.free(block).unwrap());
    let before = process.reports().stats(0).unwrap();
    process.malloc(0, mib(192), STREAM).unwrap();
    let after = process.reports().stats(0).unwrap();
    assert_eq!(after.all.reserved_bytes.current, before.all.reserved_bytes.current);
    process.pools().end(0, id).unwrap();
}

#[test]
fn mappings_are_told_while_somebody_watches() {
    let process = started("");
    let mapped = Arc::new(AtomicU64::new(0));
    let note = mapped.clone();
    process.observers().on_mapping(Some(Arc::new(move |device, mapped, _, size| {
        assert_eq!(device, DeviceId(2));
        let signed = if mapped { size.get() } else { size.get().wrapping_neg() };
        note.fetch_add(signed, Ordering::Relaxed);
    })));
    let block = process.malloc(2, mib(100), STREAM).unwrap();
    assert_eq!(
        mapped.load(Ordering::Relaxed),
        process.reports().stats(2).unwrap().all.reserved_bytes.current as u64
    );
    process.free(block).unwrap();
    process.trim(Some(2), Bytes::ZERO).unwrap();
    assert_eq!(mapped.load(Ordering::Relaxed), 0);
    process.observers().on_mapping(None);
    process.malloc(2, mib(100), STREAM).unwrap();
    assert_eq!(mapped.load(Ordering::Relaxed), 0);
    assert_eq!(process.reports().stats(2).unwrap().own.completion_lags, 2);
}

fn ready(process: &Process) {
    let begin = std::time::Instant::now();
    while !process.copies().statistics().ready {
        assert!(begin.elapsed().as_secs() < 60, "{:?}", process.copies().statistics());
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

fn reach_of(process: &Process, address: Address) -> Vec<u32> {
    let end = process.copies().ends.end_of(address, mib(2)).unwrap().unwrap();
    assert!(matches!(end.kind, PointerKind::Device { mapped: true, .. }));
    end.reach.iter().map(|device| device.0).collect()
}

#[test]
fn pools_are_opened_to_relays_whenever_they_start() {
    let process = started("transfer.exclude = [2]\ntransfer.shared_gpus = true");
    let early = process.malloc(0, mib(4), STREAM).unwrap();
    assert_eq!(reach_of(&process, early), [0]);
    process.copies().multi_path(true).unwrap();
    ready(&process);
    let late = process.malloc(1, mib(4), STREAM).unwrap();
    assert_eq!(reach_of(&process, early), [0, 1, 3]);
    assert_eq!(reach_of(&process, late), [0, 1, 3]);
    let stats = process.copies().statistics();
    assert_eq!(stats.relays, [0, 1, 3]);
    assert_eq!(stats.relay_costs.len(), 3);
    process.copies().multi_path(false).unwrap();
    assert!(!process.copies().has_relays().unwrap());
    let without = process.malloc(2, mib(4), STREAM).unwrap();
    assert_eq!(reach_of(&process, without), [2]);
    process.copies().multi_path(true).unwrap();
    assert!(process.copies().has_relays().unwrap());
    for address in [early, late, without] {
        process.free(address).unwrap();
    }
    process.stop();
    assert!(!process.copies().has_relays().unwrap());
}

#[test]
fn relays_start_with_the_first_copy_where_they_are_on() {
    let process = started("transfer.multi_path = \"always\"\ntransfer.local_ranks = 4");
    let block = process.malloc(0, mib(4), STREAM).unwrap();
    assert_eq!(reach_of(&process, block), [0, 1, 2, 3]);
    assert!(!process.copies().statistics().ready);
    process.copies().has_relays().unwrap();
    ready(&process);
    let off = started("transfer.multi_path = \"never\"");
    let error = off.copies().multi_path(true).unwrap_err().to_string();
    assert!(error.contains("transfer.multi_path is \"never\"; set"), "{error}");
    off.copies().multi_path(false).unwrap();
    assert!(!off.copies().has_relays().unwrap());
}

#[test]
fn handles_are_for_one_wait() {
    let process = started("");
    let handle = process.copies().mark(STREAM).unwrap();
    while !process.copies().is_done(handle).unwrap() {}
    process.copies().wait(handle).unwrap();
    assert!(matches!(process.copies().wait(handle), Err(ref error) if error.says("no copy has the handle")));
    assert!(
        matches!(process.copies().is_done(handle), Err(ref error) if error.says("no copy has the handle"))
    );
    assert!(process.copies().is_done(0).unwrap());
    process.copies().wait(0).unwrap();
    assert!(process.copies().mark(Stream(0x1234)).is_err());
}

#[test]
fn a_handle_is_ended_by_one_wait_or_dropped() {
    let process = started("");
    for round in 0..100 {
        let handle = process.copies().mark(STREAM).unwrap();
        if round % 2 == 0 { process.copies().drop(handle) } else { process.copies().wait(handle) }.unwrap();
        assert_eq!(process.copies().pending.len(), 0);
        for answer in [process.copies().drop(handle), process.copies().wait(handle)] {
            assert!(matches!(answer, Err(ref error) if error.says("no copy has the handle")));
        }
    }
    process.copies().drop(0).unwrap();
}

/// What is logged while something is done, at the level that nobody changed.
fn logged(work: impl FnOnce()) -> String {
    #[derive(Clone, Default)]
    struct Lines(Arc<parking_lot::Mutex<Vec<u8>>>);
    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let (lines, filter) = (Lines::default(), Config::default().log.filter);
    let writer = lines.clone();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false);
    tracing::subscriber::with_default(log.with_writer(move || writer.clone()).finish(), work);
    let bytes = lines.0.lock().clone();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn ranks_that_keep_relays_off_are_told_of_once_by_default() {
    let told = |settings: &'static str| {
        logged(|| drop(started(settings))).matches("copies take one link each").count()
    };
    assert_eq!(told("transfer.multi_path = true\ntransfer.local_ranks = 4"), 1);
    assert_eq!(told("transfer.local_ranks = 4"), 0, "nobody asked for relays");
    assert_eq!(told("transfer.multi_path = \"always\"\ntransfer.local_ranks = 4"), 0);
}

/// Two processes of one folder, as two programs would be.
#[test]
fn who_names_a_folder_shares_its_gpus() {
    let made = tempfile::tempdir().unwrap();
    let folder = made.path().join("gpus");
    let device = format!("sim:h200x4@{}", folder.display());
    let environment = || Environment::from_iter([("GLAKE_DEVICE", device.as_str())]);
    let start =
        || Process::start(Sources { environment: environment(), ..Sources::default() }.load().unwrap());
    let (one, two) = (start().unwrap(), start().unwrap());
    assert_eq!(one.name(), device);
    let most = Bytes::gib(80);
    let address = one.malloc(0, most, STREAM).unwrap();
    let error = two.malloc(0, most, STREAM).unwrap_err().to_string();
    assert!(error.contains("out of memory"), "{error}");
    two.malloc(1, most, STREAM).unwrap();

    let meter = SimMeter::open(&folder, &load("h200x4").unwrap()).unwrap();
    let own = || meter.read("0").unwrap().of_process(std::process::id());
    assert!(own() >= most && own() <= most.saturating_add(Bytes::gib(3)), "with contexts of both: {}", own());
    one.free(address).unwrap();
    one.trim(Some(0), Bytes::ZERO).unwrap();
    assert!(own() <= Bytes::gib(3), "{}", own());
    two.malloc(0, most, STREAM).unwrap();
}
