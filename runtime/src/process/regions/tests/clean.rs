//! Regions that are cleaned while nobody uses them.

use std::time::Instant;

use super::*;

const CLEAN: &str = "tiers.clean_after_ms = 20";

fn clean_options(tag: &str) -> RegionOptions {
    RegionOptions { clean: true, ..RegionOptions::of(tag) }
}

impl Process {
    fn clean_now(&self, tag: &str) -> Bytes {
        self.view(tag, 0).clean.unwrap().clean
    }

    fn wait_until(&self, what: &str, so: impl Fn(&Process) -> bool) {
        let begin = Instant::now();
        while !so(self) {
            assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn use_of<T>(&self, tag: &str, work: impl FnOnce() -> T) -> T {
        let id = self.regions().begin_use(&Tags::of(&[tag]), WhenClosed::Refill, None).unwrap();
        let done = work();
        self.regions().gate().end_use(id).unwrap();
        done
    }

    /// Written while its region is in use: else it might be copied before that.
    fn furnished(&self, tag: &str, size: Bytes, seed: u64) -> Written {
        self.use_of(tag, || self.written_in(tag, 0, size, seed))
    }
}

#[test]
fn an_idle_region_is_clean_and_leaves_without_a_copy() {
    let process = started(CLEAN);
    process.regions().define(clean_options("weights")).unwrap();
    process.regions().define(options("cache", Policy::Keep, CopyPolicy::Drop)).unwrap();
    let blocks = vec![
        process.furnished("weights", mib(8), 1),
        process.furnished("weights", mib(3), 2),
        process.furnished("cache", mib(4), 3),
    ];
    process.wait_until("it is clean", |process| process.clean_now("weights") == mib(11));
    assert!(process.view("cache", 0).clean.is_none());
    assert!(process.reserved(0) >= mib(15), "it stays on its GPU");
    let report = process.regions().shrink(&Shrink::default()).unwrap();
    assert_eq!((report.clean, report.copied), (mib(11), mib(4)));
    assert_eq!(report.json()["clean"], mib(11).get());
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    assert_eq!(process.view("weights", 0).clean.unwrap().released, mib(11));
    process.end(blocks);
}

#[test]
fn a_use_voids_what_is_clean_and_another_regions_use_does_not() {
    let process = started(CLEAN);
    process.regions().define(clean_options("weights")).unwrap();
    process.regions().define(clean_options("cache")).unwrap();
    let blocks = vec![process.furnished("weights", mib(8), 1), process.furnished("cache", mib(4), 2)];
    let both =
        |process: &Process| process.clean_now("weights") == mib(8) && process.clean_now("cache") == mib(4);
    process.wait_until("both are clean", both);
    process.use_of("cache", || {
        assert_eq!(process.clean_now("cache"), Bytes::ZERO, "at once");
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(process.clean_now("cache"), Bytes::ZERO, "while it is in use nothing is cleaned");
    });
    assert_eq!(process.clean_now("weights"), mib(8));
    process.wait_until("the cache is clean again", both);
    let counts = process.view("cache", 0).clean.unwrap();
    assert_eq!((counts.voided, counts.copied), (mib(4), mib(4)), "the same bytes are not copied twice");
    // While a use runs nothing is cleaned, and a shrink after it counts on nothing from before.
    process.use_of("weights", || std::thread::sleep(Duration::from_millis(100)));
    let report = process.regions().shrink(&shrink_of(&["weights"])).unwrap();
    assert_eq!(report.copied.saturating_add(report.clean), mib(8));
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn what_is_written_outside_of_uses_is_found() {
    let process = started(CLEAN);
    process.regions().define(clean_options("weights")).unwrap();
    let mut block = process.furnished("weights", mib(8), 1);
    process.wait_until("it is clean", |process| process.clean_now("weights") == mib(8));
    block.seed = 9;
    let pool = &process.device(0).unwrap().started().unwrap().pool;
    while pool.write(block.address, &bytes(block.size, block.seed)).is_err() {}
    let report = process.regions().shrink(&Shrink::default()).unwrap();
    assert_eq!((report.clean, report.copied), (Bytes::ZERO, mib(8)));
    process.regions().refill(&Refill::default()).unwrap();
    process.check(&block);
    process.end(vec![block]);
}

#[test]
fn the_cleaner_ends_with_the_process() {
    let process = started("tiers.clean_after_ms = 0");
    process.regions().define(clean_options("weights")).unwrap();
    let block = process.written_in("weights", 0, mib(64), 1);
    process.stop();
    let cleaned = process.clean_now("weights");
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(process.clean_now("weights"), cleaned);
    process.check(&block);
}

#[test]
fn an_allocation_and_a_copy_void_at_once() {
    let process = started("tiers.clean_after_ms = 200");
    process.regions().define(clean_options("weights")).unwrap();
    let mut blocks = vec![process.furnished("weights", mib(8), 1), process.furnished("weights", mib(8), 2)];
    let is_clean = |process: &Process| process.clean_now("weights") == mib(16);
    process.wait_until("it is clean", is_clean);
    // As every copy of the engine's and the driver's does that is asked of this library.
    process.regions.set().written(blocks[0].address).unwrap();
    assert_eq!(process.clean_now("weights"), mib(8));
    process.wait_until("it is clean again", is_clean);
    process.regions.set().touched(blocks[0].address).unwrap();
    assert_eq!(process.clean_now("weights"), mib(16), "a read voids nothing");
    // The same place, so that its extent looks as before.
    let freed = blocks.remove(0);
    process.free(freed.address).unwrap();
    let next = process.written_in("weights", 0, mib(8), 3);
    assert_eq!((next.address, process.clean_now("weights")), (freed.address, mib(8)));
    blocks.push(next);
    process.regions().shrink(&Shrink::default()).unwrap();
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn clean_copies_go_first_where_host_memory_is_short() {
    let process = started(&format!("{CLEAN}\ntiers.host_budget = \"16MiB\""));
    process.regions().define(clean_options("weights")).unwrap();
    process.regions().define(options("cache", Policy::Keep, CopyPolicy::Drop)).unwrap();
    let blocks = vec![process.furnished("weights", mib(12), 1), process.furnished("cache", mib(12), 2)];
    process.wait_until("it is clean", |process| process.clean_now("weights") == mib(12));
    assert_eq!(process.regions().shrink(&shrink_of(&["cache"])).unwrap().copied, mib(12));
    assert!(!process.view("weights", 0).clean.unwrap().reclaimed.is_zero());
    process.check(&blocks[0]);
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn cleaning_makes_no_memory_of_a_gpu_and_changes_no_lease() {
    let process = started(CLEAN);
    process.regions().define(clean_options("weights")).unwrap();
    let block = process.furnished("weights", mib(8), 1);
    process.leases().set(0, Some(mib(8))).unwrap();
    let reserved = process.reserved(0);
    process.wait_until("it is clean", |process| process.clean_now("weights") == mib(8));
    assert_eq!((process.reserved(0), process.leases().view(0).unwrap().leased), (reserved, Some(mib(8))));
    process.leases().set(0, None).unwrap();
    process.end(vec![block]);
}

#[test]
fn while_a_capture_may_be_open_nothing_is_done() {
    let process = started(CLEAN);
    process.regions().define(clean_options("weights")).unwrap();
    let block = process.furnished("weights", mib(8), 1);
    let pool = PoolId(0, 7);
    process.pools().begin(0, pool, None).unwrap();
    let cleaned = process.clean_now("weights");
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(process.clean_now("weights"), cleaned);
    process.pools().end(0, pool).unwrap();
    process.pools().release(0, pool).unwrap();
    process.wait_until("it is clean", |process| process.clean_now("weights") == mib(8));
    process.end(vec![block]);
}

/// What stays of a parked use's memory is idle once what it was parked for is over; as soon as the use goes on it is not.
#[test]
fn memory_of_a_parked_use_is_idle_until_the_use_goes_on() {
    let process = started_with_quantum(CLEAN, 0);
    process.regions().define(clean_options("weights")).unwrap();
    process.regions().define(options("cache", Policy::Keep, CopyPolicy::Drop)).unwrap();
    let blocks = vec![process.furnished("weights", mib(8), 1), process.furnished("cache", mib(4), 2)];
    let gate = process.regions().gate();
    let id = process.regions().begin_use(&Tags::of(&["weights", "cache"]), WhenClosed::Refuse, None).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let parked = scope.spawn(|| {
            while !gate.safepoint(id) && !over.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            process.clean_now("weights")
        });
        process.regions().shrink(&shrink_of(&["cache"])).unwrap();
        let begin = Instant::now();
        while process.clean_now("weights") != mib(8) && begin.elapsed() < Duration::from_secs(30) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let while_parked = process.clean_now("weights");
        process.regions().refill(&Refill::default()).unwrap();
        over.store(true, Ordering::SeqCst);
        assert_eq!((while_parked, parked.join().unwrap()), (mib(8), Bytes::ZERO));
    });
    gate.end_use(id).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn host_memory_is_pinned_in_the_background_once_no_use_runs() {
    let process = started(CLEAN);
    process.regions().define(options("weights", Policy::Keep, CopyPolicy::Prepare)).unwrap();
    process.regions().define(options("more", Policy::Keep, CopyPolicy::Prepare)).unwrap();
    let pinned = |process: &Process| -> Bytes {
        process.regions.set().stores.host_statistics().iter().map(|host| host.pinned).sum()
    };
    let blocks = process.use_of("default", || {
        let blocks =
            vec![process.written_in("weights", 0, mib(16), 1), process.written_in("more", 0, mib(16), 2)];
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(pinned(&process), Bytes::ZERO, "a use runs");
        blocks
    });
    process.wait_until("it is pinned", |process| pinned(process) >= mib(32));
    let before = pinned(&process);
    process.regions().shrink(&Shrink::default()).unwrap();
    assert_eq!(pinned(&process), before, "the first shrink pins nothing");
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

#[test]
fn there_is_a_thread_only_where_a_region_needs_it() {
    let process = started(CLEAN);
    let is_running = || process.regions().cleaner.is_running();
    process.regions().define(options("plain", Policy::Sealed, CopyPolicy::Retain)).unwrap();
    process.regions().define(RegionOptions { policy: Policy::Discard, ..clean_options("given up") }).unwrap();
    assert!(!is_running() && !process.flags.is_any_cleaned());
    process.regions().define(options("prepared", Policy::Keep, CopyPolicy::Prepare)).unwrap();
    assert!(is_running() && !process.flags.is_any_cleaned());
    process.regions().define(clean_options("clean")).unwrap();
    assert!(process.flags.is_any_cleaned() && process.flags.is_quiet());
    process.stop();
    assert!(!is_running());
    process.regions().define(clean_options("late")).unwrap();
    assert!(!is_running(), "nothing begins once the process ends");
}
