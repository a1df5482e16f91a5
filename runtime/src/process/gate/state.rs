//! Who uses what, and what is being closed: pure. What is closed is no state of the gate's: it is what is evicted, which the regions
//! know ([`Evicted`]).
//!
//! ```text
//! use       enter ──► running ──leave──►          enter ──closing, evicted──► an obstacle
//! closing   close ──► waits for the uses that were there ──► moves ──► end             no new use meanwhile
//! ```
//!
//! Invariants: while a closing moves ([`GateState::uses_before`] is 0) no use that it touches runs; a use is admitted only where
//! none of its tags is being closed and nothing of them is evicted.

use std::collections::BTreeMap;
use std::fmt;

use super::tags::Tags;

/// Names a use that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UseId(pub u64);

/// Names a closing that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ClosingId(u64);

/// Who knows which memory is evicted. Asked under the gate's lock: it answers without a lock that anybody holds who calls the gate.
pub(in super::super) trait Evicted: fmt::Debug + Send + Sync {
    /// The tags of which some memory is evicted, of those that work under `tags` touches.
    fn evicted(&self, tags: &Tags) -> Vec<String>;
}

/// What keeps a use from beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// Something of it is being closed: it waits.
    Closing,
    /// Some memory of these of its tags is evicted, and nobody is closing any.
    Evicted(Vec<String>),
}

#[derive(Clone, Debug, Default)]
pub(super) struct GateState {
    last: u64,
    uses: BTreeMap<UseId, Tags>,
    closings: BTreeMap<ClosingId, Tags>,
}

impl GateState {
    /// What keeps a use of these tags from beginning now.
    pub(super) fn obstacle(&self, tags: &Tags, memory: &dyn Evicted) -> Option<Obstacle> {
        if self.closings.values().any(|closing| tags.uses_any_of(closing)) {
            return Some(Obstacle::Closing);
        }
        let evicted = memory.evicted(tags);
        (!evicted.is_empty()).then_some(Obstacle::Evicted(evicted))
    }

    /// Begins a use, where nothing keeps it from that.
    pub(super) fn begin(&mut self, tags: &Tags, memory: &dyn Evicted) -> Result<UseId, Obstacle> {
        if let Some(obstacle) = self.obstacle(tags, memory) {
            return Err(obstacle);
        }
        self.last += 1;
        let id = UseId(self.last);
        self.uses.insert(id, tags.clone());
        Ok(id)
    }

    /// Whether there was such a use.
    pub(super) fn end_use(&mut self, id: UseId) -> bool {
        self.uses.remove(&id).is_some()
    }

    pub(super) fn close(&mut self, tags: Tags) -> ClosingId {
        self.last += 1;
        let id = ClosingId(self.last);
        self.closings.insert(id, tags);
        id
    }

    /// How many uses run of what a closing closes: all began before it.
    pub(super) fn uses_before(&self, id: ClosingId) -> usize {
        let Some(closing) = self.closings.get(&id) else { return 0 };
        self.uses.values().filter(|tags| tags.uses_any_of(closing)).count()
    }

    /// The closing is over. What it evicted is evicted by then.
    pub(super) fn end(&mut self, id: ClosingId) {
        self.closings.remove(&id);
    }

    pub(super) fn uses(&self) -> usize {
        self.uses.len()
    }

    pub(super) fn closings(&self) -> impl Iterator<Item = &Tags> {
        self.closings.values()
    }
}

#[cfg(test)]
mod tests {
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

    proptest! {
        #[test]
        fn no_use_runs_while_its_memory_is_evicted(ops in prop::collection::vec(op(), 1..80)) {
            let mut gate = GateState::default();
            let mut uses: Vec<(UseId, Tags)> = Vec::new();
            let mut closings: Vec<(ClosingId, Tags)> = Vec::new();
            let memory = Memory::default();
            for op in ops {
                match op {
                    Op::Enter(tags) => {
                        let being = closings.iter().any(|(_, closing)| {
                            NAMES.iter().any(|name| closes(closing, name) && touches(&tags, name))
                        });
                        let gone = NAMES.iter().any(|name| memory.has(name) && touches(&tags, name));
                        match gate.begin(&tags, &memory) {
                            Ok(id) => {
                                prop_assert!(!being && !gone);
                                uses.push((id, tags));
                            }
                            Err(Obstacle::Closing) => prop_assert!(being),
                            Err(Obstacle::Evicted(named)) => {
                                prop_assert!(!being && gone);
                                prop_assert!(named.iter().all(|name| memory.has(name)));
                            }
                        }
                    }
                    Op::Leave(which) if which < uses.len() => {
                        prop_assert!(gate.end_use(uses[which].0));
                        prop_assert!(!gate.end_use(uses.remove(which).0));
                    }
                    Op::Close(tags) => closings.push((gate.close(tags.clone()), tags)),
                    Op::Move(which, evicts) if which < closings.len() => {
                        if gate.uses_before(closings[which].0) > 0 {
                            continue;
                        }
                        let (id, tags) = closings.remove(which);
                        for name in NAMES.iter().filter(|name| closes(&tags, name)) {
                            // What is moved now, no use touches.
                            prop_assert!(uses.iter().all(|(_, used)| !touches(used, name)));
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
                for (id, tags) in &closings {
                    let own = uses.iter().filter(|(_, used)| {
                        NAMES.iter().any(|name| closes(tags, name) && touches(used, name))
                    });
                    prop_assert_eq!(gate.uses_before(*id), own.count());
                }
            }
            // With everything given up and opened again, everybody gets in.
            closings.into_iter().for_each(|(id, _)| gate.end(id));
            NAMES.iter().for_each(|name| memory.set(name, false));
            prop_assert!(gate.begin(&Tags::All, &memory).is_ok());
        }
    }
}
