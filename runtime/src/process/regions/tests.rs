//! Regions of a process of simulated devices, from the outside.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use glake_device::{Address, DeviceId, Stream};
use glake_tiers::{CopyPolicy, Place, Policy, RegionOptions, SkipReason};
use glake_units::Bytes;

use super::super::{PoolId, Process, ProcessError, Tags, WhenClosed};
use super::*;
use crate::config::{Environment, Sources};

const STREAM: Stream = Stream(0);
const SMALL: &str = "tiers = { extent = \"4MiB\", host_arena = \"16MiB\", host_spare = 0, drain_timeout_ms = 60000 }\n\
                     transfer.calibrations = \"\"\n";

pub(super) fn started(settings: &str) -> Process {
    let environment = Environment::from_iter([("GLAKE_DEVICE", "sim:h200x4")]);
    let sources = Sources { environment, ..Sources::default() };
    let sources = sources.with_overrides("test", SMALL).unwrap().with_overrides("test", settings).unwrap();
    Process::start(sources.load().unwrap()).unwrap()
}

fn mib(n: u64) -> Bytes {
    Bytes::mib(n)
}

fn options(tag: &str, policy: Policy, host_copy: CopyPolicy) -> RegionOptions {
    RegionOptions { policy, host_copy, ..RegionOptions::of(tag) }
}

/// A block whose bytes tell its seed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Written {
    device: i64,
    pub(super) address: Address,
    size: Bytes,
    seed: u64,
}

fn bytes(size: Bytes, seed: u64) -> Vec<u8> {
    let word = |place: u64| (place ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..size.get() / 8).flat_map(word).collect()
}

impl Process {
    pub(super) fn written(&self, device: i64, size: Bytes, seed: u64) -> Written {
        let address = self.malloc(device, size, STREAM).unwrap();
        let pool = &self.device(device).unwrap().started().unwrap().pool;
        pool.write(address, &bytes(size, seed)).unwrap();
        Written { device, address, size, seed }
    }

    pub(super) fn written_in(&self, tag: &str, device: i64, size: Bytes, seed: u64) -> Written {
        self.enter_region(tag).unwrap();
        let written = self.written(device, size, seed);
        self.leave_region().unwrap();
        written
    }

    pub(super) fn check(&self, written: &Written) {
        let pool = &self.device(written.device).unwrap().started().unwrap().pool;
        let mut found = vec![0; usize::try_from(written.size.get()).unwrap()];
        pool.read(written.address, &mut found).unwrap();
        assert!(found == bytes(written.size, written.seed), "{written:?}");
    }

    fn reserved(&self, device: i64) -> Bytes {
        Bytes::new(self.stats(device).unwrap().all.reserved_bytes.current.unsigned_abs())
    }

    fn view(&self, tag: &str, device: u32) -> RegionView {
        let views = self.regions().unwrap();
        views.into_iter().find(|view| view.tag == tag && view.device == Some(DeviceId(device))).unwrap()
    }

    /// Everything is freed and given back.
    pub(super) fn end(self, blocks: impl IntoIterator<Item = Written>) {
        blocks.into_iter().for_each(|block| self.free(block.address).unwrap());
        self.refill(&Refill::default()).unwrap();
        self.trim(None, Bytes::ZERO).unwrap();
        for device in 0..4 {
            assert_eq!(self.reserved(device), Bytes::ZERO, "of device {device}");
        }
        assert_eq!(self.gate().view().closed, Vec::<String>::new());
        assert!(self.marks.is_plain());
        for host in self.regions.stores.host_statistics() {
            assert_eq!((host.in_use, host.retained), (Bytes::ZERO, Bytes::ZERO));
        }
    }
}

fn of(tags: &[&str]) -> Option<Vec<String>> {
    Some(tags.iter().map(|tag| (*tag).to_owned()).collect())
}

fn shrink_of(tags: &[&str]) -> Shrink {
    Shrink { tags: of(tags), ..Shrink::default() }
}

fn refill_of(tags: &[&str]) -> Refill {
    Refill { tags: of(tags), ..Refill::default() }
}

#[test]
fn a_region_leaves_two_devices_and_comes_back() {
    let process = started("");
    process.define_region(RegionOptions::of("weights")).unwrap();
    let mut blocks: Vec<Written> =
        (0..6).map(|i| process.written_in("weights", i % 2, mib(5), i as u64)).collect();
    let other = process.written(0, mib(7), 99);
    let before = [process.reserved(0), process.reserved(1)];
    let tags: Vec<Option<String>> =
        blocks.iter().chain([&other]).map(|block| process.region_of(block.address)).collect();
    assert!(tags[..6].iter().all(|tag| tag.as_deref() == Some("weights")) && tags[6].is_none());

    let report = process.shrink(&shrink_of(&["weights"])).unwrap();
    assert_eq!((report.copied, report.left, report.regions.len()), (mib(30), Bytes::ZERO, 2));
    assert!(report.freed >= mib(30) && report.regions.iter().all(|moved| moved.skipped.is_empty()));
    assert!(report.predicted_refill > Duration::ZERO);
    assert_eq!(
        before[0]
            .saturating_sub(process.reserved(0))
            .saturating_add(before[1].saturating_sub(process.reserved(1))),
        report.freed
    );
    assert_eq!(process.gate().view().closed, ["weights"]);
    let view = process.view("weights", 1);
    assert_eq!((view.resident, view.live, view.place()), (Bytes::ZERO, mib(15), Some(Place::Host)));
    assert!(view.away >= mib(15) && view.predicted_refill > Duration::ZERO);
    process.check(&other);
    let snapshot = process.snapshot();
    let away = |tag: &str| {
        let regions = snapshot["allocator_settings"]["glake_regions"].as_array().unwrap();
        regions
            .iter()
            .filter(|region| region["tag"] == tag)
            .filter_map(|region| region["away"].as_u64())
            .sum::<u64>()
    };
    assert!(away("weights") >= 30 << 20 && away("default") == 0);
    process.free(blocks.remove(0).address).unwrap();
    process.trim(None, Bytes::ZERO).unwrap();
    let again = process.shrink(&shrink_of(&["weights"])).unwrap();
    assert_eq!((again.freed, again.copied), (Bytes::ZERO, Bytes::ZERO));

    let report = process.refill(&Refill::default()).unwrap();
    assert!(report.copied >= mib(25) && report.away.is_zero(), "{report:?}");
    assert!(process.gate().view().closed.is_empty());
    blocks.iter().chain([&other]).for_each(|block| process.check(block));
    process.end(blocks.into_iter().chain([other]));
}

#[test]
fn what_costs_least_goes_first() {
    let process = started("");
    process.define_region(RegionOptions::of("keep")).unwrap();
    process.define_region(options("sealed", Policy::Sealed, CopyPolicy::Retain)).unwrap();
    process.define_region(options("cache", Policy::Discard, CopyPolicy::Drop)).unwrap();
    let blocks = ["keep", "sealed"].map(|tag| process.written_in(tag, 0, mib(16), tag.len() as u64));
    let cache = [1, 2, 3, 4].map(|seed| process.written_in("cache", 0, mib(4), seed));
    let rest = process.written(0, mib(16), 7);
    process.seal_region("sealed", false).unwrap();
    assert!(process.seal_region("keep", false).is_err());
    let by = |bytes| process.shrink(&Shrink { bytes: Some(bytes), ..Shrink::default() }).unwrap();
    let tags =
        |report: &ShrinkReport| report.regions.iter().map(|moved| moved.tag.clone()).collect::<Vec<_>>();
    let first = by(mib(10));
    assert_eq!((tags(&first), first.copied), (vec!["cache".to_owned()], Bytes::ZERO));
    assert!(first.freed >= mib(10) && first.left > Bytes::ZERO);
    assert_eq!(process.gate().view().closed, ["cache"]);
    let second = by(mib(24));
    assert_eq!(tags(&second), ["cache", "sealed", "keep"]);
    let all = process.shrink(&Shrink::default()).unwrap();
    assert_eq!(all.left, Bytes::ZERO);
    assert_eq!(process.reserved(0), Bytes::ZERO);
    assert_eq!(process.gate().view().closed, ["cache", "default", "keep", "sealed"]);
    process.order_regions(&["keep".to_owned()]).unwrap();
    let one = process.refill(&Refill { bytes: Some(mib(16)), ..Refill::default() }).unwrap();
    assert!(one.regions.iter().all(|moved| moved.tag == "keep"), "{one:?}");
    process.refill(&Refill::default()).unwrap();
    [&blocks[0], &blocks[1], &rest].into_iter().for_each(|block| process.check(block));
    let sealed = process.shrink(&shrink_of(&["sealed"])).unwrap();
    assert_eq!(sealed.copied, Bytes::ZERO, "its copy was kept");
    process.refill(&Refill::default()).unwrap();
    process.check(&blocks[1]);
    process.unseal_region("sealed").unwrap();
    process.end(blocks.into_iter().chain(cache).chain([rest]));
}

#[test]
fn what_is_touched_comes_back_first() {
    let process = started("");
    process.define_region(RegionOptions::of("a")).unwrap();
    let mut blocks = vec![process.written_in("a", 0, mib(9), 1), process.written_in("a", 1, mib(9), 2)];
    process.shrink(&Shrink::default()).unwrap();
    blocks.push(process.written_in("a", 0, mib(2), 3));
    process.check(&blocks[0]);
    assert!(process.view("a", 1).away > Bytes::ZERO, "of the device that was touched");
    assert_eq!(process.gate().view().closed, ["a"]);
    process.bring_back(Address(blocks[1].address.0 + 4096)).unwrap();
    process.check(&blocks[1]);
    assert!(process.gate().view().closed.is_empty());
    process.bring_back(Address(0x1000)).unwrap();
    process.shrink(&Shrink::default()).unwrap();
    process.wait_region("a", 1, STREAM).unwrap();
    process.check(&blocks[1]);
    assert!(matches!(process.wait_region("b", 1, STREAM), Err(ProcessError::UnknownTag { .. })));
    process.end(blocks);
}

#[test]
fn graphs_pools_leave_whole() {
    let process = started("");
    process.begin_pool(0, PoolId(0, 5), None).unwrap();
    let kept = process.written(0, mib(6), 1);
    let freed = process.written(0, mib(6), 2);
    process.end_pool(0, PoolId(0, 5)).unwrap();
    process.free(freed.address).unwrap();
    let report = process.shrink(&Shrink::default()).unwrap();
    let graph = report.regions.iter().find(|moved| moved.tag == "graph (0, 5)").unwrap();
    assert!(graph.copied >= mib(12) && graph.copied == graph.memory, "{graph:?}");
    assert_eq!(process.reserved(0), Bytes::ZERO);
    process.refill(&Refill::default()).unwrap();
    process.check(&kept);
    process.check(&freed);
    process.release_pool(0, PoolId(0, 5)).unwrap();
    process.end([kept]);
}

#[test]
fn uses_keep_memory_and_what_is_away_keeps_uses_out() {
    let process = started("");
    process.define_region(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(9), 1);
    let a = Tags::of(&["a"]);
    let running = process.enter_gate(&a, WhenClosed::Refuse, None).unwrap();
    let short = Shrink { timeout: Some(Duration::from_millis(20)), ..shrink_of(&["a"]) };
    assert!(matches!(process.shrink(&short), Err(ProcessError::StillUsed { uses: 1, .. })));
    process.check(&block);
    std::thread::scope(|scope| {
        let shrunk = scope.spawn(|| process.shrink(&shrink_of(&["a"])).unwrap());
        while process.gate().view().closing.is_empty() {
            std::thread::yield_now();
        }
        assert!(matches!(process.enter_gate(&a, WhenClosed::Refuse, None), Err(ProcessError::Closed { .. })));
        process.check(&block);
        process.gate().leave(running).unwrap();
        assert!(shrunk.join().unwrap().freed >= mib(9));
    });
    assert!(matches!(process.enter_gate(&a, WhenClosed::Refuse, None), Err(ProcessError::Closed { .. })));
    let soon = Some(Duration::from_millis(20));
    assert!(matches!(process.enter_gate(&a, WhenClosed::Hold, soon), Err(ProcessError::HeldTooLong { .. })));
    let running = process.enter_gate(&a, WhenClosed::Refill, None).unwrap();
    process.check(&block);
    process.gate().leave(running).unwrap();
    process.end([block]);
}

#[test]
fn hooks_come_before_and_after() {
    let process = started("");
    let block = process.written(0, mib(9), 1);
    let (answer, told) = (Arc::new(AtomicU32::new(3)), mpsc::channel());
    let hook = |answer: Arc<AtomicU32>| -> Hook {
        let sender = told.0.clone();
        Arc::new(move |event: &str| {
            sender.send(event.to_owned()).unwrap();
            let answer = answer.load(Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(if answer == 9 { 200 } else { 0 }));
            i32::try_from(answer % 9).unwrap()
        })
    };
    process.set_hooks(
        Some(hook(answer.clone())),
        Some(hook(Arc::default())),
        Some(Duration::from_millis(100)),
    );
    let error = process.shrink(&Shrink::default()).unwrap_err().to_string();
    assert!(error.contains("the hook before refused with 3"), "{error}");
    answer.store(9, Ordering::SeqCst);
    assert!(matches!(
        process.shrink(&Shrink::default()),
        Err(ProcessError::HookTimedOut { when: "before", .. })
    ));
    process.check(&block);
    assert_eq!(told.1.try_iter().count(), 2);
    answer.store(0, Ordering::SeqCst);
    process.shrink(&Shrink::default()).unwrap();
    process.refill(&Refill::default()).unwrap();
    let events: Vec<String> = told.1.try_iter().collect();
    assert!(events[0].contains("\"event\":\"shrink\"") && events[0].contains("\"when\":\"before\""));
    assert!(events[1].contains("\"freed\":") && events[3].contains("\"mapped\":"), "{events:?}");
    process.set_hooks(None, None, None);
    process.end([block]);
}

/// A hook that waits until it is let go on, and how often it was called.
fn held(process: &Process) -> (Arc<parking_lot::Mutex<()>>, Arc<AtomicU32>) {
    let (gate, calls) = (Arc::new(parking_lot::Mutex::new(())), Arc::new(AtomicU32::new(0)));
    let hook: Hook = Arc::new({
        let (gate, calls) = (gate.clone(), calls.clone());
        move |_: &str| {
            calls.fetch_add(1, Ordering::SeqCst);
            drop(gate.lock());
            0
        }
    });
    process.set_hooks(Some(hook), None, None);
    (gate, calls)
}

#[test]
fn a_timeout_bounds_a_refill_and_the_refill_goes_on() {
    let soon = Duration::from_millis(20);
    let process = started("");
    process.define_region(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(9), 1);
    let a = Tags::of(&["a"]);
    for explicit in [false, true] {
        process.shrink(&shrink_of(&["a"])).unwrap();
        let (gate, calls) = held(&process);
        let shut = gate.lock();
        if explicit {
            let refill = Refill { timeout: Some(soon), ..refill_of(&["a"]) };
            let error = process.refill(&refill).unwrap_err();
            assert!(matches!(error, ProcessError::StillComing { .. }), "{error}");
            assert!(error.to_string().contains("goes on in the background"), "{error}");
        } else {
            for _ in 0..3 {
                let entered = process.enter_gate(&a, WhenClosed::Refill, Some(soon));
                assert!(matches!(entered, Err(ProcessError::HeldTooLong { .. })), "{entered:?}");
            }
        }
        drop(shut);
        let entered = process.enter_gate(&a, WhenClosed::Hold, None).unwrap();
        assert_eq!(calls.load(Ordering::SeqCst), 1, "all wait for one refill");
        process.check(&block);
        process.gate().leave(entered).unwrap();
        process.set_hooks(None, None, None);
    }
    process.shrink(&shrink_of(&["a"])).unwrap();
    let enough = Some(Duration::from_secs(60));
    let entered = process.enter_gate(&a, WhenClosed::Refill, enough).unwrap();
    process.check(&block);
    process.gate().leave(entered).unwrap();
    process.shrink(&shrink_of(&["a"])).unwrap();
    assert!(process.refill(&Refill { timeout: enough, ..refill_of(&["a"]) }).unwrap().copied >= mib(9));
    assert!(process.refill(&Refill { timeout: enough, ..refill_of(&["x"]) }).is_err());
    process.end([block]);
}

#[test]
fn no_refill_outlasts_its_process() {
    let process = started("");
    let block = process.written(0, mib(9), 1);
    process.shrink(&Shrink::default()).unwrap();
    let (gate, calls) = held(&process);
    let shut = gate.lock();
    let soon = Some(Duration::from_millis(20));
    for tags in [Tags::All, Tags::of(&["a"])] {
        assert!(process.enter_gate(&tags, WhenClosed::Refill, soon).is_err());
    }
    while calls.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    let regions = Arc::downgrade(&process.regions);
    std::thread::scope(|scope| {
        let stopped = scope.spawn(|| process.stop());
        drop(shut);
        stopped.join().unwrap();
    });
    process.check(&block);
    assert!(matches!(
        process.enter_gate(&Tags::of(&["b"]), WhenClosed::Refill, soon).map(|id| process.gate().leave(id)),
        Ok(Ok(()))
    ));
    drop(process);
    assert!(regions.upgrade().is_none());
}

#[test]
fn somebody_took_the_space() {
    let process = started("pool.limit = \"64MiB\"");
    process.define_region(RegionOptions::of("a")).unwrap();
    let blocks: Vec<Written> = (0..4).map(|seed| process.written_in("a", 0, mib(8), seed)).collect();
    process.shrink(&shrink_of(&["a"])).unwrap();
    let taken = process.written(0, mib(48), 9);
    let error = process.refill(&Refill::default()).unwrap_err();
    assert!(
        matches!(&error, ProcessError::NoRoom { tag, away, .. } if tag == "a" && !away.is_zero()),
        "{error}"
    );
    assert!(
        error.to_string().contains("End what took the memory, or shrink other regions, then refill again"),
        "{error}"
    );
    for timeout in [None, Some(Duration::from_secs(60))] {
        let entered = process.enter_gate(&Tags::All, WhenClosed::Refill, timeout);
        assert!(matches!(entered, Err(ProcessError::NoRoom { .. })), "{entered:?}");
    }
    assert_eq!(process.gate().view().closed, ["a"]);
    process.check(&taken);
    process.free(taken.address).unwrap();
    process.refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn one_region_comes_in_while_another_goes_out() {
    let process = started("pool.limit = \"64MiB\"");
    for tag in ["a", "b"] {
        process.define_region(RegionOptions::of(tag)).unwrap();
    }
    let a: Vec<Written> = (0..5).map(|seed| process.written_in("a", 0, mib(8), seed)).collect();
    process.shrink(&shrink_of(&["a"])).unwrap();
    let b: Vec<Written> = (10..15).map(|seed| process.written_in("b", 0, mib(8), seed)).collect();
    for (out, back, blocks) in [("b", "a", &a), ("a", "b", &b), ("b", "a", &a)] {
        std::thread::scope(|scope| {
            let gone = scope.spawn(|| process.shrink(&shrink_of(&[out])).unwrap());
            while process.gate().view().closing.is_empty() && !gone.is_finished() {
                std::thread::yield_now();
            }
            process.refill(&refill_of(&[back])).unwrap();
            assert!(gone.join().unwrap().freed >= mib(40));
        });
        blocks.iter().for_each(|block| process.check(block));
    }
    a.iter().chain(&b).for_each(|block| process.free(block.address).unwrap());
    process.end([]);
}

#[test]
fn a_full_host_leaves_the_rest_where_it_is() {
    let process = started("tiers.host_budget = \"16MiB\"");
    process.define_region(RegionOptions::of("a")).unwrap();
    let mut blocks: Vec<Written> = (0..8).map(|seed| process.written_in("a", 0, mib(4), seed)).collect();
    let error = process.shrink(&Shrink::default()).unwrap_err();
    assert!(
        matches!(&error, ProcessError::Partly { freed, copied, regions, source }
            if *freed == mib(16) && freed == copied && regions[0].memory == *freed && matches!(**source, ProcessError::Region(_))),
        "{error}"
    );
    let text = error.to_string();
    assert!(text.starts_with("16.00 MiB went back") && text.contains("raise the budget"), "{text}");
    assert_eq!(process.gate().view().closed, ["a"]);
    for block in blocks.drain(..5) {
        process.free(block.address).unwrap();
    }
    assert_eq!(process.shrink(&Shrink::default()).unwrap().left, Bytes::ZERO);
    process.refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn a_shrink_by_bytes_that_fails_tells_what_went_before() {
    let process = started("");
    for tag in ["a", "b"] {
        process.define_region(RegionOptions::of(tag)).unwrap();
    }
    let blocks =
        [("a", 1), ("a", 2), ("b", 3), ("b", 4)].map(|(tag, seed)| process.written_in(tag, 0, mib(4), seed));
    process.pin(blocks[0].address, true).unwrap();
    let used = process.enter_gate(&Tags::of(&["b"]), WhenClosed::Refuse, None).unwrap();
    let ask = Shrink { bytes: Some(mib(8)), timeout: Some(Duration::from_millis(20)), ..Shrink::default() };
    let error = process.shrink(&ask).unwrap_err();
    let ProcessError::Partly { freed, copied, regions, source } = &error else { panic!("{error}") };
    assert_eq!((*freed, *copied), (mib(4), mib(4)));
    assert!(regions.len() == 1 && regions[0].skipped[0].reason == SkipReason::Pinned, "{regions:?}");
    assert!(matches!(**source, ProcessError::StillUsed { uses: 1, .. }), "{error}");
    process.gate().leave(used).unwrap();
    process.pin(blocks[0].address, false).unwrap();
    assert!(process.shrink(&ask).unwrap().freed >= mib(8));
    process.refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

/// Whoever touches a region may hold what a hook waits for.
#[test]
fn hooks_are_told_of_what_is_touched_and_not_waited_for() {
    let process = started("");
    process.define_region(RegionOptions::of("a")).unwrap();
    let mut blocks = vec![process.written_in("a", 1, mib(9), 1)];
    process.shrink(&Shrink::default()).unwrap();
    let (sender, told) = mpsc::channel();
    let held = Arc::new(parking_lot::Mutex::new(()));
    let hook: Hook = Arc::new({
        let held = held.clone();
        move |event: &str| {
            drop(held.lock());
            sender.send(serde_json::from_str::<serde_json::Value>(event).unwrap()).unwrap();
            7
        }
    });
    process.set_hooks(Some(hook.clone()), Some(hook), None);
    let lock = held.lock();
    blocks.push(process.written_in("a", 1, mib(2), 2));
    blocks.iter().for_each(|block| process.check(block));
    drop(lock);
    for when in ["before", "after"] {
        let event = told.recv().unwrap();
        assert_eq!((&event["event"], &event["when"]), (&"refill".into(), &when.into()), "{event}");
        assert_eq!((&event["touched"], &event["device"]), (&true.into(), &1.into()), "{event}");
        assert_eq!(event["tags"], serde_json::json!(["a"]));
        assert_eq!(
            event["report"]["copied"].as_u64().is_some_and(|copied| copied >= 9 << 20),
            when == "after"
        );
    }
    process.set_hooks(None, None, None);
    process.shrink(&shrink_of(&["a"])).unwrap();
    process.bring_back(blocks[0].address).unwrap();
    assert!(told.try_recv().is_err());
    process.end(blocks);
}

#[test]
fn a_region_of_two_devices_is_in_two_places() {
    let process = started("");
    process.define_region(RegionOptions::of("a")).unwrap();
    let blocks = [0, 1].map(|device| process.written_in("a", device, mib(8), device as u64));
    let some = Shrink { bytes: Some(mib(8)), ..shrink_of(&["a"]) };
    let first = process.shrink(&some).unwrap();
    assert_eq!((first.regions.len(), first.regions[0].place), (1, Some(Place::Host)));
    let peer = Place::Peer(DeviceId(3));
    let rest = process.shrink(&Shrink { tier: "peer:3".parse().unwrap(), ..shrink_of(&["a"]) }).unwrap();
    let moved = rest.regions.iter().find(|moved| moved.device == DeviceId(1)).unwrap();
    assert_eq!((moved.place, moved.copied), (Some(peer), mib(8)));
    assert_eq!(rest.json()["regions"][0]["place"], "peer:3");
    for (device, place) in [(0, Place::Host), (1, peer)] {
        let view = process.view("a", device);
        assert_eq!((view.place(), view.places.len()), (Some(place), 1), "{view:?}");
        assert_eq!(view.places[0].1, view.away);
    }
    assert_eq!(process.view("a", 1).json()["places"]["peer:3"], process.view("a", 1).away.get());
    process.bring_back(blocks[0].address).unwrap();
    assert_eq!((process.view("a", 0).place(), process.view("a", 1).place()), (None, Some(peer)));
    process.refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn it_goes_on_in_the_background() {
    let process = started("tiers.host_prepare = \"16MiB\"");
    process.define_region(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(9), 1);
    process.shrink(&Shrink::default()).unwrap();
    let report = process.refill(&Refill { wait: false, ..Refill::default() }).unwrap();
    assert_eq!(report, RefillReport::default());
    let use_of_a =
        process.enter_gate(&Tags::of(&["a"]), WhenClosed::Hold, Some(Duration::from_secs(60))).unwrap();
    process.check(&block);
    process.gate().leave(use_of_a).unwrap();
    process.refill(&Refill::default()).unwrap();
    process.stop();
    process.refill(&Refill { wait: false, ..Refill::default() }).unwrap();
    process.end([block]);
}

#[test]
fn threads_have_their_own_regions() {
    let process = started("");
    process.define_region(RegionOptions::of("a")).unwrap();
    process.define_region(RegionOptions::of("a")).unwrap();
    let error =
        process.define_region(options("a", Policy::Discard, CopyPolicy::Retain)).unwrap_err().to_string();
    assert!(
        error.contains(
            "is there as keep with host_copy drop, and was asked for as discard with host_copy retain"
        ),
        "{error}"
    );
    for reserved in ["", "default", "graph (0, 1)"] {
        assert!(matches!(
            process.define_region(RegionOptions::of(reserved)),
            Err(ProcessError::ReservedTag { .. })
        ));
    }
    assert!(process.enter_region("b").unwrap_err().to_string().contains("'a' are there; define it first"));
    assert!(matches!(process.leave_region(), Err(ProcessError::InNoRegion)));
    process.define_region(RegionOptions::of("b")).unwrap();
    process.enter_region("a").unwrap();
    process.enter_region("b").unwrap();
    let tag = |written: &Written| process.region_of(written.address);
    let inner = process.written(0, mib(1), 1);
    let elsewhere = std::thread::scope(|scope| {
        scope
            .spawn(|| {
                let outside = process.written(0, mib(1), 2);
                process.enter_region("a").unwrap();
                (outside, process.written(0, mib(1), 3))
            })
            .join()
            .unwrap()
    });
    process.leave_region().unwrap();
    let outer = process.written(0, mib(1), 4);
    process.leave_region().unwrap();
    assert!(process.marks.is_plain(), "a thread that ends leaves");
    let found = [tag(&inner), tag(&elsewhere.0), tag(&elsewhere.1), tag(&outer)];
    assert_eq!(found.map(|tag| tag.unwrap_or_default()), ["b", "", "a", "a"]);
    process.end([inner, elsewhere.0, elsewhere.1, outer]);
}

/// Random parts leave and come back, while threads allocate in regions of their own that nobody names.
#[test]
fn random_cycles_beside_threads_that_allocate() {
    let process = started("pool.limit = \"512MiB\"");
    let tags = ["a", "b", "c"];
    for tag in tags.iter().chain(&["w0", "w1"]) {
        process.define_region(RegionOptions::of(*tag)).unwrap();
    }
    let blocks: Vec<Written> = (0..18_u64)
        .zip(tags.iter().cycle())
        .map(|(i, tag)| process.written_in(tag, i64::from(i % 4 == 1), mib(1 + i % 5), i))
        .collect();
    let over = AtomicBool::new(false);
    let kept = std::thread::scope(|scope| {
        let workers: Vec<_> = ["w0", "w1"]
            .into_iter()
            .enumerate()
            .map(|(worker, tag)| {
                let (process, over) = (&process, &over);
                scope.spawn(move || {
                    let mut own: Vec<Written> = Vec::new();
                    for round in 0.. {
                        if over.load(Ordering::Relaxed) {
                            break;
                        }
                        let seed = 1000 + worker as u64 * 100_000 + round;
                        own.push(process.written_in(tag, (round % 2) as i64, mib(1 + round % 3), seed));
                        if own.len() > 5 {
                            let old = own.remove(0);
                            process.check(&old);
                            process.free(old.address).unwrap();
                        }
                    }
                    own
                })
            })
            .collect();
        let mut random = crate::random::SplitMix::new(5);
        for _ in 0..120 {
            let some: Vec<&str> = tags.iter().copied().filter(|_| random.below(2) == 0).collect();
            let some = if some.is_empty() { vec!["a"] } else { some };
            let bytes = (random.below(2) == 0).then(|| mib(1 + random.below(30) as u64));
            match random.below(3) {
                0 => drop(process.shrink(&Shrink { bytes, ..shrink_of(&some) }).unwrap()),
                1 => drop(process.refill(&Refill { bytes, ..refill_of(&some) }).unwrap()),
                _ => {
                    let used = process.enter_gate(&Tags::of(&some), WhenClosed::Refill, None).unwrap();
                    for block in &blocks {
                        if process.region_of(block.address).is_some_and(|tag| some.contains(&&*tag)) {
                            process.check(block);
                        }
                    }
                    process.gate().leave(used).unwrap();
                }
            }
        }
        over.store(true, Ordering::Relaxed);
        workers.into_iter().flat_map(|worker| worker.join().unwrap()).collect::<Vec<_>>()
    });
    process.refill(&Refill::default()).unwrap();
    blocks.iter().chain(&kept).for_each(|block| process.check(block));
    process.end(blocks.into_iter().chain(kept));
}

#[test]
fn everybody_who_holds_memory_is_named() {
    let process = started("transfer.relays = true");
    process.define_region(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(9), 1);
    let held = |process: &Process, holder: &str| -> Bytes {
        let left = process.left().unwrap();
        left.iter().filter(|left| left.holder.contains(holder)).map(|left| left.bytes).sum()
    };
    assert_eq!(held(&process, "pool: 'a'"), process.reserved(0));
    let report = process.shrink(&Shrink::default()).unwrap();
    assert_eq!(held(&process, "pool: 'a'"), Bytes::ZERO);
    assert_eq!(held(&process, "bytes that are away"), mib(9));
    assert!(!report.gpu.iter().any(|left| left.holder.contains("pool: ")), "{report:?}");
    process.refill(&Refill::default()).unwrap();
    process.end([block]);
}

#[test]
fn what_was_imported_stays_and_is_named() {
    let (process, other) = (started(""), started(""));
    process.define_region(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 1, mib(9), 1);
    let shared = other.written(1, mib(5), 2);
    let (handle, _) = other.share(shared.address).unwrap();
    let base = process.open_shared(&handle, 1).unwrap();
    assert_eq!(process.shrink(&shrink_of(&["a"])).unwrap().skipped, []);
    let report = process.shrink(&Shrink::default()).unwrap();
    let [imported] = &*report.skipped else { panic!("{report:?}") };
    assert_eq!((imported.device, imported.address), (DeviceId(1), base));
    assert_eq!(imported.reason, SkipReason::Imported);
    assert!(imported.size >= mib(5) && report.json()["skipped"][0]["reason"] == "imported");
    process.close_shared(base).unwrap();
    assert_eq!(process.shrink(&Shrink::default()).unwrap().skipped, []);
    process.refill(&Refill::default()).unwrap();
    process.check(&block);
    process.end([block]);
    other.end([shared]);
}

#[test]
fn bytes_go_to_another_gpu_and_to_files_and_are_compared() {
    let folder = std::env::temp_dir().join(format!("glake-regions-{}", std::process::id()));
    let process = started(&format!("tiers.files = {folder:?}\ntiers.verify = true"));
    process.define_region(RegionOptions::of("a")).unwrap();
    let blocks = [process.written_in("a", 0, mib(9), 1), process.written_in("a", 1, mib(5), 2)];
    for (tier, place) in
        [("peer", None), ("peer:3", Some(Place::Peer(DeviceId(3)))), ("file", Some(Place::File))]
    {
        let ask = Shrink { tier: tier.parse().unwrap(), ..shrink_of(&["a"]) };
        let report = process.shrink(&ask).unwrap();
        assert_eq!((report.copied, report.left), (mib(14), Bytes::ZERO), "{tier}");
        let view = process.view("a", 0);
        assert!(view.resident.is_zero() && place.is_none_or(|place| view.place() == Some(place)), "{view:?}");
        process.refill(&Refill::default()).unwrap();
        blocks.iter().for_each(|block| process.check(block));
    }
    process.end(blocks);
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_is_pinned_stays_and_is_named() {
    let process = started("");
    process.define_region(options("a", Policy::Sealed, CopyPolicy::Drop)).unwrap();
    let blocks = [process.written_in("a", 0, mib(8), 1), process.written_in("a", 0, mib(8), 2)];
    process.pin(Address(blocks[0].address.0 + 5), true).unwrap();
    process.seal_region("a", true).unwrap();
    let report = process.shrink(&shrink_of(&["a"])).unwrap();
    assert!(report.left >= mib(8) && report.freed >= mib(8), "{report:?}");
    assert!(!report.regions[0].skipped.is_empty());
    assert!(report.json()["regions"][0]["skipped"][0]["reason"] == "pinned", "{}", report.json());
    process.refill(&Refill::default()).unwrap();
    process.unseal_region("a").unwrap();
    process.pin(blocks[0].address, false).unwrap();
    assert!(process.pin(blocks[0].address, false).is_err() && process.pin(Address(1), true).is_err());
    assert_eq!(process.shrink(&shrink_of(&["a"])).unwrap().left, Bytes::ZERO);
    process.refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn what_is_not_there_is_refused_before_anything_moves() {
    let process = started("");
    let block = process.written(0, mib(3), 1);
    let to = |tier: &str| process.shrink(&Shrink { tier: tier.parse().unwrap(), ..Shrink::default() });
    assert!(matches!(to("file"), Err(ProcessError::NoFiles)));
    assert!(matches!(to("peer:9"), Err(ProcessError::NoSuchDevice { .. })));
    assert!(matches!(to("peer:0"), Err(ProcessError::NoPeer { .. })));
    assert!(matches!(process.shrink(&shrink_of(&["x"])), Err(ProcessError::UnknownTag { .. })));
    assert!(matches!(process.refill(&refill_of(&["x"])), Err(ProcessError::UnknownTag { .. })));
    process.check(&block);
    process.end([block]);
}
