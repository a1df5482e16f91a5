//! Shrinks and refills under a lease: what is made never passes it, whatever fails, and every byte of it is accounted for.

use glake_device::{Fault, Injected, Verb, When};
use proptest::prelude::*;

use super::*;
use crate::{Credits, LeaseEvent, LeaseObserver, LeaseOptions};

const ALL: Bytes = Bytes::MAX;

/// What was told, in order.
#[derive(Debug, Default)]
struct Told(Mutex<Vec<(LeaseEvent, Bytes)>>);

impl Told {
    fn returned(&self) -> Bytes {
        let told = self.0.lock();
        told.iter().filter(|(event, _)| *event == LeaseEvent::Returned).map(|(_, bytes)| *bytes).sum()
    }
}

impl LeaseObserver for Told {
    fn is_listening(&self) -> bool {
        true
    }

    fn told(&self, event: LeaseEvent, _: DeviceId, bytes: Bytes) {
        if event != LeaseEvent::Waiting {
            self.0.lock().push((event, bytes));
        }
    }
}

/// Waits for grants, as a process does.
#[derive(Debug)]
struct Waits(Credits);

impl WaitPolicy for Waits {
    fn wait(&self, refused: &PoolError) -> bool {
        self.0.wait(refused, &|| false)
    }
}

fn leased() -> (Fixture, Arc<Lease>, Arc<Told>) {
    let told = Arc::new(Told::default());
    let (grow_timeout, growth) = (Duration::from_millis(1), EXTENT);
    let lease = Lease::new(GPU, LeaseOptions { grow_timeout, growth, observer: Some(told.clone()) });
    (fixture_under(Some(lease.clone()), Policy::Keep, CopyPolicy::Drop, Bytes::MAX), lease, told)
}

impl Fixture {
    fn refill_by_credits(&self, lease: &Arc<Lease>, timeout: Duration) -> Result<Refilled> {
        let context = TransferContext { mover: &self.mover, checks: None, fill: false };
        self.region.refill(ALL, context, &Waits(lease.credits(timeout)))
    }
}

#[test]
fn a_shrink_gives_its_lease_back_and_a_refill_comes_as_it_is_granted() {
    let (mut fixture, lease, told) = leased();
    for _ in 0..8 {
        fixture.add(EXTENT);
    }
    lease.set(Some(Bytes::mib(20)));
    assert_eq!(lease.view().made, Bytes::mib(16));
    fixture.shrink().unwrap();
    lease.tell_returned(true);
    assert_eq!((told.returned(), lease.view().leased), (Bytes::mib(16), Some(Bytes::mib(4))));
    lease.give_back_unused();
    lease.tell_returned(true);
    assert_eq!((told.returned(), lease.view().leased), (Bytes::mib(20), Some(Bytes::ZERO)));
    lease.want(fixture.region.sizes().1);
    assert_eq!(
        told.0.lock().last(),
        Some(&(LeaseEvent::Want, Bytes::mib(18))),
        "what is evicted, and growth"
    );
    std::thread::scope(|scope| {
        let granting = scope.spawn(|| {
            for granted in 1..=9 {
                std::thread::sleep(Duration::from_millis(2));
                assert!(fixture.used() < Bytes::mib(2 * granted), "no more than was granted");
                assert!(lease.grant(EXTENT));
            }
        });
        let report = fixture.refill_by_credits(&lease, Duration::from_secs(20)).unwrap();
        assert_eq!(report.mapped, Bytes::mib(16));
        granting.join().unwrap();
    });
    fixture.assert_bytes();
    // Growth up to what was reserved waits for nobody.
    let before = told.0.lock().len();
    fixture.add(EXTENT);
    assert_eq!(told.0.lock().len(), before);
    assert!(lease.view().waits > 0);
    fixture.end();
}

#[test]
fn a_refill_whose_grants_stop_says_so_and_goes_on_later() {
    let (mut fixture, lease, _) = leased();
    for _ in 0..6 {
        fixture.add(EXTENT);
    }
    fixture.shrink().unwrap();
    lease.set(Some(Bytes::mib(5)));
    for deny in [false, true] {
        let credits = Waits(lease.credits(Duration::from_millis(if deny { 20_000 } else { 5 })));
        if deny {
            assert!(lease.grant(Bytes::ZERO), "there is none to wait for");
        }
        let context = TransferContext { mover: &fixture.mover, checks: None, fill: false };
        let RegionError::Stopped { source, resident, .. } =
            fixture.region.refill(ALL, context, &credits).unwrap_err()
        else {
            panic!("it did not stop")
        };
        assert_eq!(resident, Bytes::mib(4));
        let text = source.to_string();
        assert!(text.contains("lease of 5.00 MiB") && text.contains("a larger lease"), "{text}");
        fixture.assert_sound();
    }
    // Without a lease it comes back at once.
    lease.set(None);
    fixture.refill().unwrap();
    fixture.assert_bytes();
    fixture.end();
}

/// The driver has not got what was leased: memory of others is on its way back.
#[test]
fn a_refill_waits_for_the_driver_where_the_lease_allows() {
    let (mut fixture, lease, _) = leased();
    for _ in 0..4 {
        fixture.add(EXTENT);
    }
    fixture.shrink().unwrap();
    lease.set(Some(Bytes::mib(32)));
    let full = Fault { verb: Some(Verb::Create), when: When::Nth(2), error: Injected::OutOfMemory };
    fixture.faults.set(&[full]);
    fixture.refill_by_credits(&lease, Duration::from_secs(20)).unwrap();
    fixture.faults.set(&[Fault { when: When::From(1), ..full }]);
    fixture.shrink().unwrap();
    fixture.refill_by_credits(&lease, Duration::from_millis(30)).unwrap_err();
    fixture.faults.set(&[]);
    lease.set(None);
    fixture.refill().unwrap();
    fixture.assert_bytes();
    fixture.end();
}

#[derive(Clone, Debug)]
enum Op {
    Malloc { kib: u64, elsewhere: bool },
    Free { which: usize },
    Shrink { mib: u64, fault: Option<u64> },
    Refill { fault: Option<u64> },
    Set { mib: u64 },
    Grant { mib: u64 },
    Take { mib: u64 },
    GiveBackUnused,
    Settle,
    Trim,
}

fn op() -> impl Strategy<Value = Op> {
    let fault = || prop::option::weighted(0.3, 1..40u64);
    prop_oneof![
        6 => (prop_oneof![1..1024u64, 1025..3000u64, 2000..7000u64], prop::bool::weighted(0.2))
            .prop_map(|(kib, elsewhere)| Op::Malloc { kib, elsewhere }),
        4 => any::<usize>().prop_map(|which| Op::Free { which }),
        3 => (prop_oneof![1..24u64, Just(1 << 20)], fault()).prop_map(|(mib, fault)| Op::Shrink { mib, fault }),
        3 => fault().prop_map(|fault| Op::Refill { fault }),
        1 => (0..50u64).prop_map(|mib| Op::Set { mib }),
        4 => (0..12u64).prop_map(|mib| Op::Grant { mib }),
        3 => (0..12u64).prop_map(|mib| Op::Take { mib }),
        1 => Just(Op::GiveBackUnused),
        1 => Just(Op::Settle),
        1 => Just(Op::Trim),
    ]
}

fn run(program: Vec<Op>) {
    let (mut fixture, lease, told) = leased();
    let mut elsewhere: Vec<(Block, u8)> = Vec::new();
    let mut leased = Bytes::mib(16);
    lease.set(Some(leased));
    for (step, op) in program.into_iter().enumerate() {
        let seed = u8::try_from(step % 250).unwrap();
        let before = lease.view().made;
        match op {
            Op::Malloc { kib, elsewhere: other }
                if fixture.has_room(&[fixture.region.domain], Bytes::kib(kib)) =>
            {
                let domain =
                    if other { glake_stitch::Allocator::default_domain() } else { fixture.region.domain };
                match fixture.pool.malloc_in(domain, Bytes::kib(kib), fixture.here) {
                    Ok(block) => {
                        fixture.pool.write(block.address, &pattern(seed, block.size)).unwrap();
                        if other { &mut elsewhere } else { &mut fixture.live }.push((block, seed));
                    }
                    Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                }
            }
            Op::Free { which } if !fixture.live.is_empty() => fixture.free(which % fixture.live.len()),
            Op::Malloc { .. } | Op::Free { .. } => {}
            Op::Shrink { mib, fault } => {
                random::set(&fixture, fault);
                let shrunk = fixture.shrink_by(Bytes::mib(mib));
                fixture.faults.set(&[]);
                assert!(shrunk.is_ok() || fault.is_some(), "{shrunk:?}");
            }
            Op::Refill { fault } => {
                random::set(&fixture, fault);
                _ = fixture.refill_by_credits(&lease, Duration::from_micros(100));
                fixture.faults.set(&[]);
            }
            Op::Set { mib } => {
                lease.tell_returned(true);
                told.0.lock().clear();
                leased = Bytes::mib(mib);
                lease.set(Some(leased));
            }
            Op::Grant { mib } => {
                assert!(lease.grant(Bytes::mib(mib)));
                leased = leased.saturating_add(Bytes::mib(mib));
            }
            Op::Take { mib } => {
                let taken = fixture.pool.take_lease(Bytes::mib(mib)).unwrap();
                assert!(taken <= Bytes::mib(mib));
                leased = leased.saturating_sub(taken);
            }
            Op::GiveBackUnused => lease.give_back_unused(),
            Op::Settle => fixture.pool.settle().unwrap(),
            Op::Trim => _ = fixture.pool.trim(Bytes::ZERO).unwrap(),
        }
        fixture.assert_sound();
        lease.tell_returned(true);
        let view = lease.view();
        assert_eq!(view.leased, leased.checked_sub(told.returned()), "set, granted, taken and returned");
        assert_eq!(view.made, fixture.used(), "every physical byte is counted");
        assert!(view.leased >= Some(view.made) || view.made <= before, "{view:?} after {before}");
    }
    for (block, seed) in elsewhere {
        let mut bytes = vec![0; usize::try_from(block.size.get()).unwrap()];
        fixture.pool.read(block.address, &mut bytes).unwrap();
        assert!(bytes == pattern(seed, block.size), "{block:?} of another domain");
        fixture.pool.free(block.address).unwrap();
    }
    fixture.pool.settle().unwrap();
    lease.set(None);
    fixture.refill().unwrap();
    fixture.assert_bytes();
    fixture.end();
    assert_eq!(lease.view().made, Bytes::ZERO);
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 500, ..ProptestConfig::default() })]

    #[test]
    fn random_programs_stay_within_their_lease(program in prop::collection::vec(op(), 1..40)) {
        run(program);
    }
}

#[test]
fn a_program_that_asks_for_more_than_the_gpu_has() {
    let one = [
        Op::Grant { mib: 8 },
        Op::Malloc { kib: 6000, elsewhere: false },
        Op::Shrink { mib: 1 << 20, fault: None },
    ];
    run(std::iter::repeat_n(one, 16).flatten().collect());
}

#[test]
fn what_is_denied_before_it_is_waited_for_is_not_waited_for() {
    let (mut fixture, lease, _told) = leased();
    let begin = std::time::Instant::now();
    let long = Duration::from_secs(60);
    fixture.add(EXTENT);
    lease.set(Some(EXTENT));
    fixture.shrink().unwrap();
    lease.give_back_unused();
    lease.want(EXTENT);
    assert!(lease.grant(Bytes::ZERO));
    fixture.refill_by_credits(&lease, long).unwrap_err();
    // Who wants anew is not denied by that.
    lease.want(EXTENT);
    lease.deny_growth();
    assert!(lease.grant(ALL));
    fixture.refill_by_credits(&lease, long).unwrap();
    assert!(begin.elapsed() < long);
}

/// A policy that answers "grow" with the most that it gives, whole.
#[derive(Debug, Default)]
struct SetsMost(Mutex<Option<std::sync::Weak<Lease>>>, std::sync::atomic::AtomicU64);

impl LeaseObserver for SetsMost {
    fn is_listening(&self) -> bool {
        true
    }

    fn told(&self, event: LeaseEvent, _: DeviceId, _: Bytes) {
        if event == LeaseEvent::Grow {
            let told = self.1.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            // So that the test ends.
            if told > 3_000_000 {
                return;
            }
            let lease = self.0.lock().as_ref().and_then(std::sync::Weak::upgrade).unwrap();
            lease.set(Some(Bytes::mib(4)));
        }
    }
}

#[test]
fn a_refill_with_a_watcher_that_sets_the_most_it_gives() {
    let told = Arc::new(SetsMost::default());
    let (grow_timeout, growth) = (Duration::from_millis(20), EXTENT);
    let lease = Lease::new(GPU, LeaseOptions { grow_timeout, growth, observer: Some(told.clone()) });
    *told.0.lock() = Some(Arc::downgrade(&lease));
    let mut fixture = fixture_under(Some(lease.clone()), Policy::Keep, CopyPolicy::Drop, Bytes::MAX);
    for _ in 0..4 {
        fixture.add(EXTENT);
    }
    lease.set(Some(Bytes::mib(8)));
    fixture.shrink().unwrap();
    lease.give_back_unused();
    lease.want(Bytes::mib(8));
    lease.grant(Bytes::mib(10));
    assert_eq!(lease.take_unused(Bytes::MAX), Bytes::mib(10));
    let begin = std::time::Instant::now();
    fixture.refill_by_credits(&lease, Duration::from_millis(20)).unwrap_err();
    let times = told.1.load(std::sync::atomic::Ordering::SeqCst);
    assert!(times < 10, "told {times} times within {:?}", begin.elapsed());
}

#[test]
fn each_refill_that_gets_nothing_asks_for_itself() {
    let (mut fixture, lease, told) = leased();
    for _ in 0..4 {
        fixture.add(EXTENT);
    }
    fixture.shrink().unwrap();
    let asked = || told.0.lock().iter().filter(|(event, _)| *event == LeaseEvent::Grow).count();
    // Nothing is granted, and each one gives up.
    lease.set(Some(EXTENT));
    for times in 1..4 {
        fixture.refill_by_credits(&lease, Duration::from_millis(10)).unwrap_err();
        assert_eq!(asked(), times);
    }
    lease.set(None);
    fixture.refill().unwrap();
    fixture.end();
}

/// A watcher that grants at once; what it grants another thread takes before who asked has looked.
#[derive(Debug, Default)]
struct GrantsStolen(Mutex<Option<std::sync::Weak<Lease>>>, Mutex<Vec<Bytes>>);

impl LeaseObserver for GrantsStolen {
    fn is_listening(&self) -> bool {
        true
    }

    fn told(&self, event: LeaseEvent, _: DeviceId, bytes: Bytes) {
        if event == LeaseEvent::Grow {
            let lease = self.0.lock().as_ref().and_then(std::sync::Weak::upgrade).unwrap();
            lease.grant(bytes);
            let mut told = self.1.lock();
            told.push(bytes);
            if told.len() == 1 {
                // Another thread's allocation, at this moment.
                assert_eq!(lease.take_unused(bytes), bytes);
            }
        }
    }
}

#[test]
fn what_was_granted_at_once_and_taken_by_another_is_asked_anew() {
    let told = Arc::new(GrantsStolen::default());
    let (grow_timeout, growth) = (Duration::from_millis(500), EXTENT);
    let lease = Lease::new(GPU, LeaseOptions { grow_timeout, growth, observer: Some(told.clone()) });
    *told.0.lock() = Some(Arc::downgrade(&lease));
    let fixture = fixture_under(Some(lease.clone()), Policy::Keep, CopyPolicy::Drop, Bytes::MAX);
    lease.set(Some(Bytes::mib(4)));
    let outcome = fixture.pool.malloc(Bytes::mib(8), fixture.here);
    assert!(outcome.is_ok(), "{outcome:?} {:?}", told.1.lock());
}

#[test]
fn a_request_whose_watcher_sets_the_most_it_gives_ends_in_time() {
    let told = Arc::new(SetsMost::default());
    let (grow_timeout, growth) = (Duration::from_millis(50), EXTENT);
    let lease = Lease::new(GPU, LeaseOptions { grow_timeout, growth, observer: Some(told.clone()) });
    *told.0.lock() = Some(Arc::downgrade(&lease));
    let fixture = fixture_under(Some(lease.clone()), Policy::Keep, CopyPolicy::Drop, Bytes::MAX);
    lease.set(Some(Bytes::mib(4)));
    let begin = std::time::Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            // One change while it waits, whatever it is.
            lease.set(Some(Bytes::mib(4)));
        });
        fixture.pool.malloc(Bytes::mib(8), fixture.here).unwrap_err();
    });
    let times = told.1.load(std::sync::atomic::Ordering::SeqCst);
    assert!(
        times < 10,
        "told {times} times within {:?}; it was to end after {grow_timeout:?}",
        begin.elapsed()
    );
}
