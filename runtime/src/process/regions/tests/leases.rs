//! Regions under a lease: what is wanted, what is given back, and who waits how long.

use std::time::Instant;

use glake_tiers::LeaseEvent::{self, Grow, Returned, Waiting, Want};
use parking_lot::Mutex;

use super::*;

const LEASED: &str = "lease = { growth = \"16MiB\", grow_timeout_ms = 30, refill_timeout_ms = 60000 }\n";

type Told = Arc<Mutex<Vec<(LeaseEvent, i64)>>>;

impl Process {
    /// What is told, in MiB.
    fn watched(&self) -> Told {
        let told = Told::default();
        let into = told.clone();
        self.leases().watch(Some(Arc::new(move |event, _, bytes: Bytes| {
            if event != Waiting {
                into.lock().push((event, i64::try_from(bytes.get() >> 20).unwrap()));
            }
        })));
        told
    }

    /// Blocks of an extent each.
    fn many(&self, blocks: u64) -> Vec<Written> {
        self.regions().define(options("weights", Policy::Keep, CopyPolicy::Drop)).unwrap();
        (0..blocks).map(|seed| self.written_in("weights", 0, mib(4), seed)).collect()
    }

    fn leased(&self) -> Option<Bytes> {
        self.leases().view(0).unwrap().leased
    }
}

fn sum(told: &Told, of: LeaseEvent) -> i64 {
    told.lock().iter().filter(|(event, _)| *event == of).map(|(_, mib)| *mib).sum()
}

#[test]
fn a_wake_wants_what_is_away_and_growth_and_everything_goes_back() {
    let process = started(LEASED);
    let told = process.watched();
    process.regions().define(options("weights", Policy::Keep, CopyPolicy::Drop)).unwrap();
    process.leases().set(0, Some(mib(64))).unwrap();
    let blocks = [
        process.written_in("weights", 0, mib(12), 1),
        process.written_in("weights", 0, mib(4), 2),
        process.written(0, mib(16), 3),
    ];
    process.regions().shrink(&shrink_of(&["weights"])).unwrap();
    assert_eq!((sum(&told, Returned), process.leased()), (16, Some(mib(48))));
    process.regions().shrink(&Shrink::default()).unwrap();
    assert_eq!((sum(&told, Returned), process.leased()), (64, Some(Bytes::ZERO)), "what was not made too");
    told.lock().clear();
    let refill = std::thread::scope(|scope| {
        let refill = scope.spawn(|| process.regions().refill(&Refill::default()));
        while sum(&told, Want) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(*told.lock(), [(Want, 48)]);
        for _ in 0..24 {
            std::thread::sleep(Duration::from_millis(1));
            process.leases().grant(0, mib(2)).unwrap();
        }
        refill.join().unwrap()
    });
    refill.unwrap();
    blocks.iter().for_each(|block| process.check(block));
    // Growth up to what was reserved for it asks nobody; beyond it does.
    let small = process.malloc(0, mib(1), STREAM).unwrap();
    assert_eq!(told.lock().len(), 1);
    let refused = process.malloc(0, mib(16), STREAM).unwrap_err();
    assert_eq!(told.lock()[1], (Grow, 2));
    let text = refused.to_string();
    assert!(matches!(refused, ProcessError::OutOfMemory(_)) && text.contains("glake.lease.grant"), "{text}");
    assert!(text.starts_with("CUDA out of memory. Tried to allocate 16.00 MiB."), "{text}");
    let stats = process.reports().stats(0).unwrap();
    assert_eq!((stats.own.lease_bytes, stats.own.made_bytes), (48 << 20, 34 << 20));
    assert!(stats.own.lease_waits >= 2 && stats.own.lease_wait_us >= 30_000);
    process.free(small).unwrap();
    assert_eq!(process.leases().take(0, mib(100)).unwrap(), mib(16), "what is free");
    process.leases().set(0, None).unwrap();
    process.end(blocks);
}

#[test]
fn a_refill_whose_grants_stop_gives_back_what_it_brought() {
    let process = started("lease = { growth = 0, grow_timeout_ms = 5, refill_timeout_ms = 20 }\n");
    let told = process.watched();
    let blocks = process.many(12);
    process.leases().set(0, Some(mib(48))).unwrap();
    process.regions().shrink(&Shrink::default()).unwrap();
    for granted in [0, 20] {
        told.lock().clear();
        process.leases().grant(0, mib(granted)).unwrap();
        let begin = Instant::now();
        let error = process.regions().refill(&Refill::default()).unwrap_err();
        assert!(begin.elapsed() >= Duration::from_millis(20));
        let text = error.to_string();
        assert!(text.contains("lease of") && text.contains("The lease is too small: raise it"), "{text}");
        assert_eq!(process.reserved(0), Bytes::ZERO, "it keeps nothing from others");
        assert_eq!(sum(&told, Returned), i64::try_from(granted).unwrap());
    }
    process.leases().set(0, Some(mib(48))).unwrap();
    process.regions().refill(&Refill::default()).unwrap();
    blocks.iter().for_each(|block| process.check(block));
    process.end(blocks);
}

/// Who is in use waits no longer than growth does: it may hold what others wait for.
#[test]
fn what_a_use_touches_waits_no_longer_than_growth() {
    let process = started(LEASED);
    let _told = process.watched();
    process.regions().define(options("weights", Policy::Keep, CopyPolicy::Drop)).unwrap();
    process.regions().define(options("other", Policy::Keep, CopyPolicy::Drop)).unwrap();
    let blocks = [process.written_in("weights", 0, mib(12), 1), process.written_in("other", 0, mib(4), 2)];
    process.leases().set(0, Some(mib(16))).unwrap();
    process.regions().shrink(&shrink_of(&["weights"])).unwrap();
    let id = process.regions().begin_use(&Tags::of(&["other"]), WhenClosed::Refuse, None).unwrap();
    let error = process.regions().bring_back(blocks[0].address).unwrap_err();
    assert!(matches!(error, ProcessError::NoRoom { .. }), "{error}");
    process.regions().gate().end_use(id).unwrap();
    process.leases().set(0, None).unwrap();
    process.regions().bring_back(blocks[0].address).unwrap();
    process.check(&blocks[0]);
    process.end(blocks);
}

/// The shrink has to get the turn that the refill has, which has its turn again after it; the end of the process is not kept waiting.
#[test]
fn a_refill_that_waits_lets_a_shrink_of_its_region_pass_and_waits_on() {
    for end in [false, true] {
        let process = started(LEASED);
        let told = process.watched();
        let blocks = process.many(8);
        process.leases().set(0, Some(mib(32))).unwrap();
        process.regions().shrink(&Shrink::default()).unwrap();
        process.leases().grant(0, mib(16)).unwrap();
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let refill = scope.spawn(|| process.regions().refill(&Refill::default()));
            while sum(&told, Want) == 0 || process.view("weights", 0).resident < mib(16) {
                std::thread::yield_now();
            }
            if end {
                process.stop();
                refill.join().unwrap().unwrap_err();
                return;
            }
            for _ in 0..3 {
                assert_eq!(process.regions().shrink(&Shrink::default()).unwrap().freed, mib(16));
                assert!(!refill.is_finished());
                process.leases().grant(0, mib(16)).unwrap();
                while process.view("weights", 0).resident < mib(16) {
                    std::thread::yield_now();
                }
            }
            process.leases().grant(0, mib(16)).unwrap();
            assert_eq!(refill.join().unwrap().unwrap().evicted, Bytes::ZERO);
        });
        assert!(begin.elapsed() < Duration::from_secs(30));
        if !end {
            blocks.iter().for_each(|block| process.check(block));
            process.end(blocks);
        }
    }
}

#[test]
fn there_is_no_lease_until_one_is_set() {
    let process = started("");
    assert_eq!((process.leased(), process.reports().stats(0).unwrap().own.lease_bytes), (None, 0));
    assert!(
        matches!(process.leases().grant(0, mib(1)), Err(ref error) if error.says("has no lease to add to"))
    );
    assert!(matches!(process.leases().set(9, None), Err(ProcessError::NoSuchDevice { .. })));
    // It is there before its pool.
    process.leases().set(0, Some(mib(8))).unwrap();
    assert_eq!(process.leases().take(0, mib(2)).unwrap(), mib(2));
    process.malloc(0, mib(16), STREAM).unwrap_err();
    process.leases().grant(0, mib(10)).unwrap();
    let address = process.malloc(0, mib(16), STREAM).unwrap();
    process.free(address).unwrap();
    process.end([]);
}
