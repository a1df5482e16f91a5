//! Tests of the gate under many thread schedules. A missed wake-up is a deadlock, which the scheduler detects.
//!
//! Run with `cargo nextest run --locked --workspace schedules`; `GLAKE_SCHEDULES` sets the number of schedules of each test.

use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use shuttle::thread;

use super::*;
use crate::sync::schedules;

/// Evicted tags, readable without any lock of the gate.
#[derive(Debug, Default)]
struct Evictions([AtomicBool; 2]);

impl Evicted for Evictions {
    fn evicted(&self, tags: &Tags) -> Vec<String> {
        let evicted = NAMES.iter().zip(&self.0).filter(|(_, evicted)| evicted.load(Ordering::SeqCst));
        evicted.filter(|(name, _)| tags.use_of(name)).map(|(name, _)| (*name).to_owned()).collect()
    }
}

/// Uses and moves of each tag, to check that they exclude each other.
struct Memory {
    evictions: Arc<Evictions>,
    gate: Gate,
    moving: [AtomicBool; 2],
    using: [AtomicUsize; 2],
}

impl Default for Memory {
    fn default() -> Self {
        let evictions = Arc::<Evictions>::default();
        Memory {
            gate: Gate::new(evictions.clone(), Duration::ZERO, Arc::default()),
            evictions,
            moving: Default::default(),
            using: Default::default(),
        }
    }
}

const NAMES: [&str; 2] = ["weights", "cache"];

impl Memory {
    fn set(&self, which: usize, evicted: bool) {
        self.evictions.0[which].store(evicted, Ordering::SeqCst);
        self.gate.changed();
    }

    fn touch(&self, which: usize) {
        self.using[which].fetch_add(1, Ordering::SeqCst);
        assert!(!self.moving[which].load(Ordering::SeqCst), "a use met a move");
        thread::yield_now();
        assert!(!self.moving[which].load(Ordering::SeqCst), "a move met a use");
        self.using[which].fetch_sub(1, Ordering::SeqCst);
    }

    /// Runs a use that waits for evicted memory or refills it, as `when` says.
    fn use_of(&self, which: usize, when: WhenClosed) {
        let tags = Tags::of(&[NAMES[which]]);
        loop {
            match self.gate.admit(&tags, when, None).unwrap() {
                Admission::Admitted(id) => {
                    self.touch(which);
                    self.gate.end_use(id).unwrap();
                    return;
                }
                Admission::Evicted(evicted) => {
                    let is_evicted = |which: &usize| evicted.iter().any(|tag| tag == NAMES[*which]);
                    (0..NAMES.len()).filter(is_evicted).for_each(|which| self.set(which, false));
                }
            }
        }
    }

    /// Runs a shrink followed by its refill.
    fn shrink(&self, tags: &Tags, which: &[usize]) {
        let closing = self.gate.close(tags, None).unwrap();
        for &which in which {
            self.moving[which].store(true, Ordering::SeqCst);
            assert_eq!(self.using[which].load(Ordering::SeqCst), 0, "it closed over a use");
            self.set(which, true);
            self.moving[which].store(false, Ordering::SeqCst);
        }
        drop(closing);
        thread::yield_now();
        which.iter().for_each(|&which| self.set(which, false));
    }
}

#[test]
fn uses_and_moves_never_meet_and_nobody_sleeps_for_ever() {
    schedules(|| {
        let memory = Arc::new(Memory::default());
        let mut threads = Vec::new();
        for which in 0..2 {
            for when in [WhenClosed::Hold, WhenClosed::Refill] {
                let memory = memory.clone();
                threads.push(thread::spawn(move || memory.use_of(which, when)));
            }
        }
        let one = memory.clone();
        threads.push(thread::spawn(move || one.shrink(&Tags::of(&[NAMES[0]]), &[0])));
        let all = memory.clone();
        threads.push(thread::spawn(move || all.shrink(&Tags::All, &[0, 1])));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(memory.gate.view(), GateView { uses: 0, parked: 0, closing: vec![], closed: vec![] });
    });
}

#[test]
fn a_close_that_gives_up_leaves_the_gate_as_it_was() {
    schedules(|| {
        let memory = Arc::new(Memory::default());
        let user = memory.clone();
        let user = thread::spawn(move || user.use_of(0, WhenClosed::Hold));
        let closer = memory.clone();
        let closer = thread::spawn(move || match closer.gate.close(&Tags::All, Some(Duration::ZERO)) {
            Ok(closing) => {
                assert_eq!(closer.using[0].load(Ordering::SeqCst), 0);
                drop(closing);
            }
            Err(error) => assert!(matches!(error, ProcessError::StillUsed { .. }), "{error}"),
        });
        user.join().unwrap();
        closer.join().unwrap();
        assert_eq!(memory.gate.view(), GateView { uses: 0, parked: 0, closing: vec![], closed: vec![] });
    });
}

/// A use with two threads at safe points, shrinks of its memory and their refills: no wait hangs, and no work runs on moving memory.
#[test]
fn parked_uses_go_on_and_meet_no_move() {
    schedules(|| {
        let memory = Arc::new(Memory::default());
        let id = match memory.gate.admit(&Tags::of(&[NAMES[0]]), WhenClosed::Hold, None).unwrap() {
            Admission::Admitted(id) => id,
            Admission::Evicted(tags) => panic!("{tags:?} is evicted"),
        };
        assert!(memory.gate.join_use(id).unwrap());
        let beside = memory.clone();
        let beside = thread::spawn(move || {
            for _ in 0..2 {
                beside.touch(0);
                beside.gate.safepoint(id);
            }
            beside.touch(0);
            beside.gate.leave_use(id).unwrap();
        });
        let mut threads = Vec::new();
        let (one, all, other) = (memory.clone(), memory.clone(), memory.clone());
        threads.push(thread::spawn(move || one.shrink(&Tags::of(&[NAMES[0]]), &[0])));
        threads.push(thread::spawn(move || all.shrink(&Tags::All, &[0, 1])));
        threads.push(thread::spawn(move || other.use_of(0, WhenClosed::Refill)));
        for _ in 0..2 {
            memory.touch(0);
            memory.gate.safepoint(id);
        }
        // A use ends when all its threads have left it: here the other one, which may be waiting for this one to arrive.
        memory.gate.leave_use(id).unwrap();
        beside.join().unwrap();
        memory.gate.end_use(id).unwrap();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(memory.gate.view(), GateView { uses: 0, parked: 0, closing: vec![], closed: vec![] });
    });
}

/// Two uses vote as the ranks of a process group, one for the move and one for or against it. Nothing moves before both have agreed, and no
/// wait hangs.
#[test]
fn who_votes_is_asked_before_anything_moves() {
    for yes in [true, false] {
        schedules(move || {
            let memory = Arc::new(Memory::default());
            let mut threads = Vec::new();
            for (which, yes) in [(0, true), (1, yes)] {
                let memory = memory.clone();
                let Ok(Admission::Admitted(id)) =
                    memory.gate.admit(&Tags::of(&[NAMES[which]]), WhenClosed::Hold, None)
                else {
                    panic!("it is not admitted")
                };
                threads.push(thread::spawn(move || {
                    while !memory.gate.arrive_to_vote(id) {
                        memory.touch(which);
                        thread::yield_now();
                    }
                    while memory.gate.ballot(id, Duration::ZERO) == Ballot::NotYet {
                        thread::yield_now();
                    }
                    if !memory.gate.vote(id, yes) || yes {
                        memory.gate.go_on(id, None);
                    }
                    memory.touch(which);
                    memory.gate.end_use(id).unwrap();
                }));
            }
            let closing = memory.gate.close(&Tags::All, None).unwrap();
            let agreed = closing.is_agreed();
            if agreed {
                for which in 0..2 {
                    memory.moving[which].store(true, Ordering::SeqCst);
                    assert_eq!(memory.using[which].load(Ordering::SeqCst), 0, "it moves what is in use");
                    memory.set(which, true);
                    memory.moving[which].store(false, Ordering::SeqCst);
                }
            }
            drop(closing);
            (0..2).for_each(|which| memory.set(which, false));
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            // The use that votes no may have ended before its state is read.
            assert!(agreed || !yes);
            assert_eq!(memory.gate.view(), GateView { uses: 0, parked: 0, closing: vec![], closed: vec![] });
        });
    }
}
