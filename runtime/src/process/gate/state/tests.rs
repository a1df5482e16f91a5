//! The state alone, in every order of what uses and closings do.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Op {
    Enter(Tags),
    Leave(usize),
    Close(Tags),
    /// Goes on where the uses are gone, and evicts these or not.
    Move(usize, bool),
    GiveUp(usize),
    Open(u8),
    /// A thread of a use comes to a safe point, or goes on from one.
    Safepoint(usize),
    GoOn(usize),
    Join(usize),
    /// As `Safepoint`, but it votes.
    Arrive(usize),
    /// It is asked, and says so.
    Vote(usize, bool),
}

fn tags() -> impl Strategy<Value = Tags> {
    prop_oneof![
        Just(Tags::All),
        prop::collection::btree_set(prop::sample::select(vec!["a", "b", "c", "default"]), 1..3)
            .prop_map(|tags| Tags::These(tags.into_iter().map(str::to_owned).collect())),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => tags().prop_map(Op::Enter),
        2 => (0..9_usize).prop_map(Op::Leave),
        1 => tags().prop_map(Op::Close),
        2 => (0..4_usize, any::<bool>()).prop_map(|(which, evicts)| Op::Move(which, evicts)),
        1 => (0..4_usize).prop_map(Op::GiveUp),
        1 => (0..4_u8).prop_map(Op::Open),
        3 => (0..9_usize).prop_map(Op::Safepoint),
        2 => (0..9_usize).prop_map(Op::GoOn),
        1 => (0..9_usize).prop_map(Op::Join),
        2 => (0..9_usize).prop_map(Op::Arrive),
        2 => (0..9_usize, any::<bool>()).prop_map(|(which, yes)| Op::Vote(which, yes)),
    ]
}

/// What is evicted of the model's memory.
#[derive(Debug, Default)]
struct Memory(Mutex<BTreeSet<&'static str>>);

impl Evicted for Memory {
    fn evicted(&self, tags: &Tags) -> Vec<String> {
        self.0.lock().iter().filter(|name| tags.use_of(name)).map(|name| (*name).to_owned()).collect()
    }
}

impl Memory {
    fn set(&self, name: &'static str, evicted: bool) {
        let mut all = self.0.lock();
        if evicted {
            all.insert(name)
        } else {
            all.remove(name)
        };
    }

    fn has(&self, name: &str) -> bool {
        self.0.lock().contains(name)
    }
}

const NAMES: [&str; 4] = ["a", "b", "c", "default"];

/// Whether work under `tags` touches the memory of `name`, said once more.
fn touches(tags: &Tags, name: &str) -> bool {
    match tags {
        Tags::All => true,
        Tags::These(tags) => tags.contains(name) || name == "default",
    }
}

fn closes(tags: &Tags, name: &str) -> bool {
    match tags {
        Tags::All => true,
        Tags::These(tags) => tags.contains(name),
    }
}

/// A use of the model.
struct Used {
    id: UseId,
    tags: Tags,
    threads: usize,
    arrived: usize,
    votes: bool,
    released: bool,
}

impl Used {
    fn is_parked(&self) -> bool {
        self.arrived >= self.threads && !self.released
    }

    fn go_on(&mut self) {
        self.arrived -= 1;
        let waits = self.arrived > 0;
        self.votes &= waits;
        self.released &= waits;
    }
}

proptest! {
    #[test]
    fn no_use_runs_while_its_memory_is_evicted(ops in prop::collection::vec(op(), 1..80)) {
        let (mut gate, now) = (GateState::default(), Instant::now());
        let mut uses: Vec<Used> = Vec::new();
        let mut closings: Vec<(ClosingId, Tags)> = Vec::new();
        let memory = Memory::default();
        let is_closing = |closings: &[(ClosingId, Tags)], tags: &Tags| {
            let mut each = closings.iter();
            each.any(|(_, closing)| NAMES.iter().any(|name| closes(closing, name) && touches(tags, name)))
        };
        let is_gone = |tags: &Tags| NAMES.iter().any(|name| memory.has(name) && touches(tags, name));
        for op in ops {
            match op {
                Op::Enter(tags) => {
                    let (closing, gone) = (is_closing(&closings, &tags), is_gone(&tags));
                    let comes_first = |used: &Used| {
                        used.is_parked() && !is_closing(&closings, &used.tags) && !is_gone(&used.tags)
                    };
                    let waits = uses.iter().any(comes_first);
                    match gate.begin(&tags, &memory, true) {
                        Ok(id) => {
                            prop_assert!(!closing && !gone && !waits);
                            uses.push(Used { id, tags, threads: 1, arrived: 0, votes: false, released: false });
                        }
                        Err(Obstacle::Closing) => prop_assert!(closing),
                        Err(Obstacle::Parked) => prop_assert!(!closing && !gone && waits),
                        Err(Obstacle::Evicted(named)) => {
                            prop_assert!(!closing && gone);
                            prop_assert!(named.iter().all(|name| memory.has(name)));
                        }
                    }
                }
                Op::Leave(which) if which < uses.len() => {
                    prop_assert!(gate.end_use(uses[which].id));
                    let ended = uses.remove(which).id;
                    prop_assert!(!gate.end_use(ended) && gate.can_go_on(ended, &memory));
                }
                Op::Safepoint(which) if which < uses.len() && !uses[which].is_parked() => {
                    let used = &mut uses[which];
                    let stops = gate.arrive(used.id, now);
                    prop_assert_eq!(stops, is_closing(&closings, &used.tags));
                    used.arrived += usize::from(stops);
                }
                Op::GoOn(which) if which < uses.len() && uses[which].arrived > 0 => {
                    let used = &mut uses[which];
                    let goes = gate.can_go_on(used.id, &memory);
                    let is_back = !is_closing(&closings, &used.tags) && !is_gone(&used.tags);
                    prop_assert_eq!(goes, used.released || is_back);
                    if goes {
                        gate.go_on(used.id, now);
                        used.go_on();
                    }
                }
                Op::Join(which) if which < uses.len() => {
                    let used = &mut uses[which];
                    let joins = !used.is_parked();
                    prop_assert_eq!(gate.join(used.id), Some(joins));
                    used.threads += usize::from(joins);
                }
                Op::Arrive(which) if which < uses.len() && !uses[which].is_parked() => {
                    let used = &mut uses[which];
                    let stops = gate.arrive_to_vote(used.id, now);
                    prop_assert_eq!(stops, is_closing(&closings, &used.tags));
                    used.arrived += usize::from(stops);
                    used.votes |= stops;
                }
                Op::Vote(which, yes) if which < uses.len() => {
                    let used = &mut uses[which];
                    let asked = gate.ballot(used.id) == Ballot::Asked;
                    let heard = if yes { gate.agree(used.id) } else { gate.refuse(used.id, now) };
                    prop_assert_eq!(heard, used.votes && (asked || !yes));
                    match (heard, yes) {
                        (true, true) => used.votes = false,
                        (true, false) => used.go_on(),
                        (false, _) => {}
                    }
                }
                Op::Close(tags) => {
                    // As the gate does.
                    for used in &mut uses {
                        let is_back = !is_closing(&closings, &used.tags) && !is_gone(&used.tags);
                        used.released |= used.is_parked() && !used.votes && is_back;
                    }
                    gate.release(&memory);
                    closings.push((gate.close(tags.clone()), tags));
                }
                Op::Move(which, evicts) if which < closings.len() => {
                    if gate.running(closings[which].0) > 0 || gate.open_votes(closings[which].0) > 0 {
                        continue;
                    }
                    let (id, tags) = closings.remove(which);
                    for name in NAMES.iter().filter(|name| closes(&tags, name)) {
                        // What is moved now, no use touches that runs.
                        let stays = |used: &Used| used.is_parked() && !used.votes || !touches(&used.tags, name);
                        prop_assert!(uses.iter().all(stays));
                        memory.set(name, evicts);
                    }
                    gate.end(id);
                }
                Op::GiveUp(which) if which < closings.len() => gate.end(closings.remove(which).0),
                Op::Open(which) => {
                    let name = NAMES[usize::from(which)];
                    memory.set(name, false);
                }
                _ => {}
            }
            prop_assert_eq!(gate.uses(), uses.len());
            prop_assert_eq!(gate.parked(), uses.iter().filter(|used| used.is_parked()).count());
            for (id, tags) in &closings {
                let touched = uses.iter().filter(|used| {
                    NAMES.iter().any(|name| closes(tags, name) && touches(&used.tags, name))
                });
                let (parked, running): (Vec<&Used>, Vec<&Used>) = touched.partition(|used| used.is_parked());
                prop_assert_eq!((gate.running(*id), gate.parked_for(*id)), (running.len(), parked.len()));
            }
        }
        // With everything given up and open again, those that were parked go on, and everybody gets in.
        closings.into_iter().for_each(|(id, _)| gate.end(id));
        NAMES.iter().for_each(|name| memory.set(name, false));
        for used in uses {
            for _ in 0..used.arrived {
                prop_assert!(gate.can_go_on(used.id, &memory));
                gate.go_on(used.id, now);
            }
        }
        prop_assert!(gate.parked() == 0 && gate.begin(&Tags::All, &memory, true).is_ok());
    }
}

#[test]
fn memory_is_idle_while_no_use_of_it_runs_and_nothing_of_it_leaves() {
    let (mut gate, memory, now) = (GateState::default(), Memory::default(), Instant::now());
    assert!(gate.is_idle("a") && gate.is_all_idle() && gate.last_use_of("a") == 0);
    let id = gate.begin(&Tags::of(&["a", "b"]), &memory, true).unwrap();
    let begun = gate.last_use_of("a");
    assert!(!gate.is_idle("a") && gate.is_idle("c") && !gate.is_all_idle() && begun > 0);
    assert_eq!(gate.last_use_of("c"), 0);
    let closing = gate.close(Tags::of(&["b"]));
    assert!(gate.arrive(id, now) && gate.running(closing) == 0);
    assert!(!gate.is_idle("a") && !gate.is_idle("b"), "what it is parked for is under way");
    memory.set("b", true);
    gate.end(closing);
    assert!(gate.is_idle("a") && gate.is_all_idle() && gate.last_use_of("a") == begun);
    memory.set("b", false);
    gate.go_on(id, now);
    assert!(!gate.is_idle("a") && gate.last_use_of("a") > begun, "it may write again");
    gate.end_use(id);
    assert!(gate.is_idle("a"));
    let closing = gate.close(Tags::All);
    assert!(!gate.is_idle("a") && !gate.is_all_idle());
    gate.end(closing);
}

#[test]
fn a_use_is_parked_when_all_its_threads_have_arrived_and_runs_for_a_while_after() {
    let (mut gate, memory, now) = (GateState::default(), Memory::default(), Instant::now());
    let later = now + std::time::Duration::from_millis(300);
    let id = gate.begin(&Tags::All, &memory, true).unwrap();
    assert!(!gate.arrive(id, now), "nobody waits");
    assert_eq!(gate.join(id), Some(true));
    let closing = gate.close(Tags::All);
    assert!(gate.arrive(id, now) && gate.running(closing) == 1, "one of two");
    assert!(gate.arrive(id, now) && gate.running(closing) == 0 && gate.parked_for(closing) == 1);
    assert_eq!(gate.join(id), Some(false));
    assert!(!gate.can_go_on(id, &memory));
    memory.set("a", true);
    gate.end(closing);
    assert!(!gate.can_go_on(id, &memory), "some of it is evicted");
    memory.set("a", false);
    assert_eq!(gate.begin(&Tags::All, &memory, true), Err(Obstacle::Parked), "who was parked comes first");
    gate.go_on(id, later);
    gate.go_on(id, later);
    let closing = gate.close(Tags::All);
    assert!(!gate.arrive(id, now), "it has just come back");
    assert!(gate.arrive(id, later) && gate.leave(id) && gate.running(closing) == 0, "the other has left");
    gate.hold_off(closing, later + (later - now));
    gate.end(closing);
    gate.go_on(id, later + (later - now));
    gate.close(Tags::All);
    assert!(!gate.arrive(id, later), "it could not be parked a moment ago");
    assert_eq!((gate.join(UseId(99)), gate.leave(UseId(99))), (None, false));
}

#[test]
fn a_use_that_votes_is_asked_and_may_go_on_instead() {
    let (mut gate, memory, now) = (GateState::default(), Memory::default(), Instant::now());
    let later = now + std::time::Duration::from_secs(5);
    let (id, other) = (UseId(1), UseId(99));
    assert_eq!(gate.begin(&Tags::All, &memory, true), Ok(id));
    assert!(!gate.wants(id, now) && !gate.arrive_to_vote(id, now) && gate.ballot(id) == Ballot::Over);
    let closing = gate.close(Tags::All);
    assert!(gate.wants(id, now) && !gate.wants(other, now) && gate.arrive_to_vote(id, now));
    assert_eq!((gate.running(closing), gate.ballot(id), gate.agree(id)), (0, Ballot::NotYet, false));
    assert_eq!((gate.open_votes(closing), gate.ballot(id)), (1, Ballot::Asked));
    // Against it.
    assert!(gate.refuse(id, later) && !gate.refuse(id, later) && gate.running(closing) == 1);
    assert!(!gate.wants(id, now), "it is not parked for a while");
    gate.end(closing);
    // For it, and once it has agreed it stays parked.
    let closing = gate.close(Tags::All);
    assert!(gate.arrive_to_vote(id, later) && gate.open_votes(closing) == 1 && gate.agree(id));
    assert_eq!((gate.open_votes(closing), gate.running(closing), gate.parked_for(closing)), (0, 0, 1));
    assert!(!gate.agree(id) && !gate.refuse(id, later), "one vote");
    // Who closes next meanwhile asks nobody.
    let next = gate.close(Tags::All);
    assert_eq!((gate.open_votes(next), gate.running(next)), (0, 0));
    gate.end(closing);
    gate.end(next);
    // Its memory is back: it goes on, though somebody closes before its thread is awake.
    gate.release(&memory);
    let next = gate.close(Tags::All);
    assert!(gate.running(next) == 1 && gate.can_go_on(id, &memory));
    gate.go_on(id, later);
    assert_eq!(gate.running(next), 1);
    gate.end(next);
    // Nobody hears it any more.
    let closing = gate.close(Tags::All);
    assert!(gate.arrive_to_vote(id, later) && gate.open_votes(closing) == 1);
    gate.stop_asking(closing);
    assert!(!gate.agree(id) && gate.ballot(id) == Ballot::NotYet);
    gate.end(closing);
    assert!(gate.ballot(id) == Ballot::Over && gate.can_go_on(id, &memory));
    gate.go_on(id, later);
    assert!(!gate.refuse(id, later), "a vote ends with the wait");
}
