//! Uses that are parked at safe points while their memory leaves, and come back to it.

use glake_device::Driver;
use glake_device::owned::OwnedStream;

use super::*;
use crate::process::fixture::Parts;
use crate::process::{Ballot, Gate, UseId};

const GPU: DeviceId = DeviceId(0);

/// Ends what runs beside a test, however the test ends: a scope waits for its threads also where an assertion has failed.
pub(super) struct Ending<'t> {
    pub(super) regions: &'t Regions,
    pub(super) over: &'t AtomicBool,
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        if std::thread::panicking() {
            // What is parked goes on.
            let _ = self.regions.refill(&Refill::default());
        }
    }
}

/// Waits at a safe point, once somebody asks for that.
fn parks(gate: &Gate, id: UseId, over: &AtomicBool) {
    while !over.load(Ordering::SeqCst) && !gate.safepoint(id) {}
}

/// Steps of one use, each of which reads its memory, with a safe point after each; how often it was parked.
fn steps(process: &Process, id: UseId, blocks: &[Written], over: &AtomicBool) -> u32 {
    let mut parks = 0;
    while !over.load(Ordering::SeqCst) {
        blocks.iter().for_each(|block| process.check(block));
        parks += u32::from(process.regions().gate().safepoint(id));
    }
    parks
}

#[test]
fn a_parked_use_goes_on_with_the_same_bytes_at_the_same_addresses() {
    let process = started_with_quantum("", 0);
    for tag in ["a", "b"] {
        process.regions().define(RegionOptions::of(tag)).unwrap();
    }
    let blocks = [process.written_in("a", 0, mib(9), 1), process.written_in("b", 0, mib(6), 2)];
    let gate = process.regions().gate();
    let id = process.regions().begin_use(&Tags::of(&["a", "b"]), WhenClosed::Refuse, None).unwrap();
    assert!(gate.join_use(id).unwrap());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let ending = Ending { regions: process.regions(), over: &over };
        let both = [0, 1].map(|_| scope.spawn(|| steps(&process, id, &blocks, &over)));
        for round in 0..20 {
            // By bytes, more than one region: what is parked for the first stays parked for the second.
            let ask = match round % 3 {
                0 => Shrink::default(),
                1 => shrink_of(&["b"]),
                _ => Shrink { bytes: Some(mib(12)), ..Shrink::default() },
            };
            assert!(process.regions().shrink(&ask).unwrap().freed >= mib(6));
            let view = gate.view();
            assert_eq!((view.uses, view.parked), (1, 1));
            assert!(!gate.join_use(id).unwrap(), "a thread that comes now is not inside");
            process.regions().refill(&Refill::default()).unwrap();
        }
        drop(ending);
        let parks: Vec<u32> = both.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert!(parks.iter().all(|parks| *parks > 0), "{parks:?}");
    });
    gate.end_use(id).unwrap();
    process.end(blocks);
}

#[test]
fn it_runs_for_its_quantum_before_it_is_parked_again() {
    let process = started_with_quantum("", 200);
    process.regions().define(RegionOptions::of("a")).unwrap();
    let blocks = [process.written_in("a", 0, mib(4), 1)];
    let id = process.regions().begin_use(&Tags::of(&["a"]), WhenClosed::Refuse, None).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending { regions: process.regions(), over: &over };
        scope.spawn(|| steps(&process, id, &blocks, &over));
        process.regions().shrink(&shrink_of(&["a"])).unwrap();
        process.regions().refill(&Refill::default()).unwrap();
        let short = Shrink { timeout: Some(Duration::from_millis(20)), ..shrink_of(&["a"]) };
        assert!(matches!(process.regions().shrink(&short), Err(ProcessError::StillUsed { .. })));
        process.regions().shrink(&shrink_of(&["a"])).unwrap();
        process.regions().refill(&Refill::default()).unwrap();
    });
    process.regions().gate().end_use(id).unwrap();
    process.end(blocks);
}

/// As a collective that waits for another rank, which waits for the thread that is parked.
#[test]
fn where_the_work_does_not_end_uses_go_on_and_nothing_moves() {
    let parts = Parts::new();
    let driver: Arc<dyn Driver> = parts.sim.clone();
    let (regions, stream) = (&parts.regions, OwnedStream::new(&driver, GPU).unwrap());
    let (flag, block) = (parts.block(0, mib(1)), parts.block(0, mib(4)));
    let pool = &parts.registry.device(0).unwrap().started().unwrap().pool;
    pool.write(flag, &[0; 4]).unwrap();
    pool.write(block, &bytes(mib(4), 5)).unwrap();
    let reserved = pool.reserved();
    let id = regions.begin_use(&Tags::All, WhenClosed::Refuse, None).unwrap();
    parts.sim.enqueue_wait(GPU, stream.id(), flag, 1).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending { regions, over: &over };
        let parked = scope.spawn(|| parks(regions.gate(), id, &over));
        let error = regions.shrink(&Shrink::default()).unwrap_err();
        assert!(error.says("was still running on a GPU"), "{error}");
        assert!(error.to_string().contains("shrink again later"), "{error}");
        parked.join().unwrap();
    });
    assert_eq!(pool.reserved(), reserved);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending { regions, over: &over };
        // It is not parked again in vain at once.
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                assert!(!regions.gate().safepoint(id));
            }
        });
        let short = Shrink { timeout: Some(Duration::from_millis(50)), ..Shrink::default() };
        assert!(matches!(regions.shrink(&short), Err(ProcessError::StillUsed { uses: 1, .. })));
    });
    pool.write(flag, &1_u32.to_le_bytes()).unwrap();
    regions.gate().end_use(id).unwrap();
    assert!(regions.shrink(&Shrink::default()).unwrap().freed >= mib(4));
    regions.refill(&Refill::default()).unwrap();
    let mut found = vec![0; usize::try_from(mib(4).get()).unwrap()];
    pool.read(block, &mut found).unwrap();
    assert!(pattern::matches(&found, 5));
    pool.free(flag).unwrap();
    pool.free(block).unwrap();
}

/// A use of all memory that votes at its next safe point, once it is asked; whether it was heard.
fn votes(gate: &Gate, id: UseId, yes: bool, over: &AtomicBool, asked: impl FnOnce()) -> bool {
    while !gate.arrive_to_vote(id) {
        if over.load(Ordering::SeqCst) {
            return false;
        }
        std::thread::yield_now();
    }
    let ballot = loop {
        match gate.ballot(id, Duration::from_millis(5)) {
            Ballot::NotYet if !over.load(Ordering::SeqCst) => {}
            ballot => break ballot,
        }
    };
    asked();
    let heard = gate.vote(id, yes);
    assert!(ballot == Ballot::Asked || !yes || !heard);
    if yes {
        gate.go_on(id, None);
    }
    heard
}

#[test]
fn who_votes_is_asked_before_anything_moves() {
    let process = started_with_quantum("", 0);
    process.regions().define(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(9), 1);
    let (gate, reserved) = (process.regions().gate(), process.reserved(0));
    let id = process.regions().begin_use(&Tags::All, WhenClosed::Refuse, None).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending { regions: process.regions(), over: &over };
        let nothing_moved = || assert_eq!(process.reserved(0), reserved);
        let voted = scope.spawn({
            let over = &over;
            move || votes(gate, id, true, over, nothing_moved)
        });
        assert!(process.regions().shrink(&Shrink::default()).unwrap().freed >= mib(9));
        assert_eq!(gate.view().parked, 1);
        process.regions().refill(&Refill::default()).unwrap();
        assert!(voted.join().unwrap());
    });
    process.check(&block);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending { regions: process.regions(), over: &over };
        let voted = scope.spawn(|| votes(gate, id, false, &over, || ()));
        let error = process.regions().shrink(&Shrink::default()).unwrap_err();
        assert!(error.says("agreed to be parked"), "{error}");
        assert!(voted.join().unwrap());
    });
    assert_eq!((process.reserved(0), gate.view().parked), (reserved, 0));
    // It runs, and is not parked for a while.
    let short = Shrink { timeout: Some(Duration::from_millis(20)), ..Shrink::default() };
    assert!(matches!(process.regions().shrink(&short), Err(ProcessError::StillUsed { .. })));
    process.check(&block);
    gate.end_use(id).unwrap();
    process.end([block]);
}

/// Also where the vote comes before anybody asks, when whoever moves the memory has just heard that the use is parked.
#[test]
fn nothing_moves_of_who_votes_against_it_at_whatever_moment() {
    let process = started_with_quantum("", 0);
    process.regions().define(RegionOptions::of("a")).unwrap();
    let block = process.written_in("a", 0, mib(9), 1);
    let (gate, reserved) = (process.regions().gate(), process.reserved(0));
    let short = Shrink { timeout: Some(Duration::from_millis(5)), ..Shrink::default() };
    for round in 0..200 {
        let id = process.regions().begin_use(&Tags::All, WhenClosed::Refuse, None).unwrap();
        std::thread::scope(|scope| {
            let shrunk = scope.spawn(|| process.regions().shrink(&short));
            while !shrunk.is_finished() {
                if gate.arrive_to_vote(id) {
                    (0..round * 10).for_each(|_| std::hint::spin_loop());
                    assert!(gate.vote(id, false), "it has agreed to nothing");
                }
            }
            let error = shrunk.join().unwrap().unwrap_err();
            let refused =
                error.says("agreed to be parked") || matches!(error, ProcessError::StillUsed { .. });
            assert!(refused, "round {round}: {error}");
        });
        assert_eq!(process.reserved(0), reserved, "round {round}");
        gate.end_use(id).unwrap();
    }
    process.check(&block);
    process.end([block]);
}

/// The other ranks hear of it: the vote is asked for no more.
#[test]
fn who_votes_is_not_asked_where_the_work_does_not_end() {
    let parts = Parts::new();
    let driver: Arc<dyn Driver> = parts.sim.clone();
    let (regions, stream) = (&parts.regions, OwnedStream::new(&driver, GPU).unwrap());
    let flag = parts.block(0, mib(1));
    let pool = &parts.registry.device(0).unwrap().started().unwrap().pool;
    pool.write(flag, &[0; 4]).unwrap();
    let id = regions.begin_use(&Tags::All, WhenClosed::Refuse, None).unwrap();
    parts.sim.enqueue_wait(GPU, stream.id(), flag, 1).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending { regions, over: &over };
        let voted = scope.spawn(|| {
            let gate = regions.gate();
            let goes_on = || !over.load(Ordering::SeqCst);
            while goes_on() && !gate.arrive_to_vote(id) {}
            while goes_on() && gate.ballot(id, Duration::from_millis(5)) == Ballot::NotYet {}
            (gate.ballot(id, Duration::ZERO), gate.vote(id, true), gate.vote(id, false))
        });
        assert!(
            matches!(regions.shrink(&Shrink::default()), Err(ref error) if error.says("was still running on a GPU"))
        );
        assert_eq!(voted.join().unwrap(), (Ballot::Over, false, true));
    });
    pool.write(flag, &1_u32.to_le_bytes()).unwrap();
    regions.gate().end_use(id).unwrap();
    pool.free(flag).unwrap();
}

/// What other ranks map, and what is registered with a network card, is written to while its owner is parked.
#[test]
fn what_others_have_stays_while_its_use_is_parked() {
    let (process, other) = (started_with_quantum("", 0), started(""));
    for tag in ["a", "registered"] {
        process.regions().define(RegionOptions::of(tag)).unwrap();
    }
    let goes = process.written_in("a", 0, mib(9), 1);
    let exported = process.written_in("a", 0, mib(4), 2);
    let fixed = process.written_in("registered", 0, mib(4), 3);
    let theirs = other.written(0, mib(4), 4);
    let (handle, _) = process.sharing().share(exported.address).unwrap();
    let mapped = other.sharing().open(&handle, 0).unwrap();
    let (handle, _) = other.sharing().share(theirs.address).unwrap();
    let imported = process.sharing().open(&handle, 0).unwrap();
    process.regions().fix(fixed.address, true).unwrap();
    let gate = process.regions().gate();
    let id = process.regions().begin_use(&Tags::All, WhenClosed::Refuse, None).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ending = Ending { regions: process.regions(), over: &over };
        let parked = scope.spawn(|| parks(gate, id, &over));
        let report = process.regions().shrink(&Shrink::default()).unwrap();
        assert!(report.freed >= mib(8), "{report:?}");
        let mut reasons: Vec<SkipReason> = report.skipped.iter().map(|skipped| skipped.reason).collect();
        reasons.extend(
            report.regions.iter().flat_map(|moved| moved.skipped.iter().map(|skipped| skipped.reason)),
        );
        for reason in [SkipReason::Fixed, SkipReason::Exported, SkipReason::Imported] {
            assert!(reasons.contains(&reason), "{reason:?}: {report:?}");
        }
        // All of it has its bytes, at the same addresses, while its owner is parked.
        process.check(&fixed);
        process.check(&exported);
        process.regions().refill(&Refill::default()).unwrap();
        parked.join().unwrap();
    });
    [&goes, &exported, &fixed].into_iter().for_each(|block| process.check(block));
    gate.end_use(id).unwrap();
    process.regions().fix(fixed.address, false).unwrap();
    process.sharing().close(imported).unwrap();
    other.sharing().close(mapped).unwrap();
    other.end([theirs]);
    process.end([goes, exported, fixed]);
}
