//! Uses and closings of many threads.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;

/// What is evicted.
#[derive(Debug, Default)]
struct Memory(Mutex<BTreeSet<String>>);

impl Evicted for Memory {
    fn evicted(&self, tags: &Tags) -> Vec<String> {
        self.0.lock().iter().filter(|tag| tags.use_of(tag)).cloned().collect()
    }
}

/// A gate, and the memory that it asks about.
#[derive(Debug)]
struct Gated {
    memory: Arc<Memory>,
    gate: Gate,
}

impl std::ops::Deref for Gated {
    type Target = Gate;

    fn deref(&self) -> &Gate {
        &self.gate
    }
}

impl Gated {
    fn new() -> Gated {
        let memory = Arc::<Memory>::default();
        Gated { gate: Gate::new(memory.clone(), Duration::ZERO, Arc::default()), memory }
    }

    fn set(&self, tag: &str, evicted: bool) {
        let mut all = self.memory.0.lock();
        if evicted {
            all.insert(tag.to_owned())
        } else {
            all.remove(tag)
        };
        drop(all);
        self.gate.changed();
    }
}

const SOON: Option<Duration> = Some(Duration::from_millis(20));
const NEVER: Option<Duration> = None;

fn admitted(gate: &Gate, tags: &Tags) -> UseId {
    match gate.admit(tags, WhenClosed::Refuse, NEVER).unwrap() {
        Admission::Admitted(id) => id,
        Admission::Evicted(tags) => panic!("{tags:?} are evicted"),
    }
}

#[test]
fn a_timeout_opens_the_gate_again() {
    let gate = Gated::new();
    let (weights, cache) = (Tags::of(&["weights"]), Tags::of(&["cache"]));
    let running = admitted(&gate, &weights);
    let error = gate.close(&weights, SOON).unwrap_err();
    assert!(matches!(error, ProcessError::StillUsed { uses: 1, .. }), "{error}");
    assert!(error.to_string().contains("1 use of 'weights' was still running after"), "{error}");
    gate.end_use(admitted(&gate, &weights)).unwrap();
    drop(gate.close(&cache, SOON).unwrap());
    assert!(gate.close(&Tags::of(&[DEFAULT]), SOON).is_err(), "every use touches what is in no region");
    gate.end_use(running).unwrap();
    assert!(matches!(gate.end_use(running), Err(ref error) if error.says("no use has the number")));
    assert_eq!(gate.view(), GateView { uses: 0, parked: 0, closing: vec![], closed: vec![] });
}

#[test]
fn what_is_closed_is_refused_held_or_to_be_refilled() {
    let gate = Gated::new();
    let weights = Tags::of(&["weights"]);
    {
        let closing = gate.close(&Tags::All, SOON).unwrap();
        assert_eq!(gate.view().closing, [Tags::All]);
        assert!(matches!(gate.admit(&weights, WhenClosed::Refuse, NEVER), Err(ProcessError::Closed { .. })));
        assert!(matches!(
            gate.admit(&weights, WhenClosed::Refill, SOON),
            Err(ProcessError::HeldTooLong { .. })
        ));
        gate.set("weights", true);
        drop(closing);
    }
    assert!(matches!(gate.admit(&weights, WhenClosed::Refuse, NEVER), Err(ProcessError::Closed { .. })));
    assert!(matches!(gate.admit(&weights, WhenClosed::Hold, SOON), Err(ProcessError::HeldTooLong { .. })));
    let evicted = gate.admit(&Tags::All, WhenClosed::Refill, NEVER).unwrap();
    assert!(matches!(evicted, Admission::Evicted(tags) if tags == ["weights"]));
    gate.end_use(admitted(&gate, &Tags::of(&["cache"]))).unwrap();
    std::thread::scope(|scope| {
        let held = scope.spawn(|| gate.admit(&weights, WhenClosed::Hold, NEVER));
        gate.set("weights", false);
        assert!(matches!(held.join().unwrap().unwrap(), Admission::Admitted(_)));
    });
}

#[test]
fn who_waits_is_no_use() {
    let gate = Gated::new();
    let weights = Tags::of(&["weights"]);
    gate.set("weights", true);
    assert!(matches!(gate.wait(&weights, WhenClosed::Refuse, NEVER), Err(ProcessError::Closed { .. })));
    assert!(matches!(gate.wait(&weights, WhenClosed::Hold, SOON), Err(ProcessError::HeldTooLong { .. })));
    let evicted = gate.wait(&weights, WhenClosed::Refill, NEVER).unwrap();
    assert!(matches!(evicted, Admission::Evicted(tags) if tags == ["weights"]));
    std::thread::scope(|scope| {
        let held = scope.spawn(|| gate.wait(&weights, WhenClosed::Hold, NEVER));
        gate.set("weights", false);
        assert!(matches!(held.join().unwrap().unwrap(), Admission::Admitted(())));
    });
    assert_eq!(gate.view().uses, 0);
}

/// Nobody sleeps through a change, and no use meets a move.
#[test]
fn uses_and_moves_of_many_threads_never_meet() {
    let gate = Gated::new();
    let moving = [const { AtomicBool::new(false) }; 2];
    let using = [const { AtomicUsize::new(0) }; 2];
    let tags = [Tags::of(&["0"]), Tags::of(&["1"])];
    std::thread::scope(|scope| {
        for worker in 0..4_usize {
            let (gate, moving, using, tags) = (&gate, &moving, &using, &tags);
            scope.spawn(move || {
                for round in 0..300 {
                    let which = (worker + round) % 2;
                    match gate.admit(&tags[which], WhenClosed::Refill, NEVER).unwrap() {
                        Admission::Admitted(id) => {
                            using[which].fetch_add(1, Ordering::SeqCst);
                            assert!(!moving[which].load(Ordering::SeqCst));
                            using[which].fetch_sub(1, Ordering::SeqCst);
                            gate.end_use(id).unwrap();
                        }
                        Admission::Evicted(evicted) => evicted.iter().for_each(|tag| gate.set(tag, false)),
                    }
                }
            });
        }
        for which in 0..2_usize {
            let (gate, moving, using, tags) = (&gate, &moving, &using, &tags);
            scope.spawn(move || {
                for round in 0..100 {
                    let _closing = gate.close(&tags[which], NEVER).unwrap();
                    moving[which].store(true, Ordering::SeqCst);
                    assert_eq!(using[which].load(Ordering::SeqCst), 0);
                    gate.set(&which.to_string(), round % 3 != 0);
                    moving[which].store(false, Ordering::SeqCst);
                }
            });
        }
    });
    assert_eq!(gate.view().uses, 0);
}

/// Uses that come while what is parked can go on: they let it go first, but not for ever, for its threads may be gone.
#[test]
fn parked_uses_go_first_for_a_moment() {
    let gate = Gated::new();
    let weights = Tags::of(&["weights"]);
    let parked = admitted(&gate, &weights);
    let closing = std::thread::scope(|scope| {
        let closing = scope.spawn(|| gate.close(&weights, NEVER).unwrap());
        while !gate.arrive(parked) {
            std::thread::yield_now();
        }
        closing.join().unwrap()
    });
    gate.set("weights", true);
    drop(closing);
    assert!(!gate.go_on(parked, SOON));
    std::thread::scope(|scope| {
        // It has waited for longer than it lets others go first.
        let held = scope.spawn(|| {
            let answer = gate.admit(&weights, WhenClosed::Hold, NEVER).unwrap();
            (answer, Instant::now())
        });
        std::thread::sleep(PARKED_FIRST * 2);
        let back = Instant::now();
        gate.set("weights", false);
        let (answer, when) = held.join().unwrap();
        assert!(matches!(answer, Admission::Admitted(_)));
        assert!(when - back >= PARKED_FIRST, "{:?}", when - back);
    });
    let begin = Instant::now();
    gate.admit(&weights, WhenClosed::Hold, SOON).unwrap();
    assert!(begin.elapsed() >= Duration::from_millis(20), "it waited no longer than it was told to");
    let begin = Instant::now();
    gate.admit(&weights, WhenClosed::Refuse, NEVER).unwrap();
    assert!(begin.elapsed() < PARKED_FIRST, "who is to be refused is not made to wait");
    assert!(gate.go_on(parked, NEVER));
    gate.admit(&weights, WhenClosed::Hold, Some(Duration::ZERO)).unwrap();
}
