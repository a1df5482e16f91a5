//! Who uses what, what is being closed and what is closed: pure.
//!
//! ```text
//! use       enter ──► running ──leave──►          enter ──closing, closed──► an obstacle
//! closing   close ──► waits for the uses that were there ──► moves ──► end             no new use meanwhile
//! closed    tags of which some memory is evicted, until all of it is back
//! ```
//!
//! Invariants: while a closing moves ([`GateState::uses_before`] is 0) no use that it touches runs; a use is admitted only where
//! none of its tags is closed or being closed.

use std::collections::{BTreeMap, BTreeSet};

use super::tags::Tags;

/// Names a use that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UseId(pub u64);

/// Names a closing that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ClosingId(u64);

/// What keeps a use from beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// Something of it is being closed: it waits.
    Closing,
    /// These of its tags are closed, and nobody is closing any.
    Closed(Vec<String>),
}

#[derive(Clone, Debug, Default)]
pub(super) struct GateState {
    last: u64,
    uses: BTreeMap<UseId, Tags>,
    closings: BTreeMap<ClosingId, Tags>,
    closed: BTreeSet<String>,
}

impl GateState {
    /// What keeps a use of these tags from beginning now.
    pub(super) fn obstacle(&self, tags: &Tags) -> Option<Obstacle> {
        if self.closings.values().any(|closing| tags.uses_any_of(closing)) {
            return Some(Obstacle::Closing);
        }
        let closed: Vec<String> = self.closed.iter().filter(|tag| tags.use_of(tag)).cloned().collect();
        (!closed.is_empty()).then_some(Obstacle::Closed(closed))
    }

    /// Begins a use, where nothing keeps it from that.
    pub(super) fn begin(&mut self, tags: &Tags) -> Result<UseId, Obstacle> {
        if let Some(obstacle) = self.obstacle(tags) {
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

    /// The closing is over. What is closed by then was said by [`GateState::set`].
    pub(super) fn end(&mut self, id: ClosingId) {
        self.closings.remove(&id);
    }

    /// Says whether some memory of a tag is evicted.
    pub(super) fn set(&mut self, tag: &str, closed: bool) {
        if !closed {
            self.closed.remove(tag);
        } else if !self.closed.contains(tag) {
            self.closed.insert(tag.to_owned());
        }
    }

    pub(super) fn uses(&self) -> usize {
        self.uses.len()
    }

    pub(super) fn closings(&self) -> impl Iterator<Item = &Tags> {
        self.closings.values()
    }

    pub(super) fn closed(&self) -> &BTreeSet<String> {
        &self.closed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Enter(Tags),
        Leave(usize),
        Close(Tags),
        /// Goes on where the uses are gone, and leaves these closed.
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
            2 => (0..4_usize, any::<bool>()).prop_map(|(which, away)| Op::Move(which, away)),
            1 => (0..4_usize).prop_map(Op::GiveUp),
            1 => (0..4_u8).prop_map(Op::Open),
        ]
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
        fn no_use_runs_while_its_tags_are_closed(ops in prop::collection::vec(op(), 1..80)) {
            let mut gate = GateState::default();
            let mut uses: Vec<(UseId, Tags)> = Vec::new();
            let mut closings: Vec<(ClosingId, Tags)> = Vec::new();
            let mut away: BTreeSet<&str> = BTreeSet::new();
            for op in ops {
                match op {
                    Op::Enter(tags) => {
                        let being = closings.iter().any(|(_, closing)| {
                            NAMES.iter().any(|name| closes(closing, name) && touches(&tags, name))
                        });
                        let gone = NAMES.iter().any(|name| away.contains(name) && touches(&tags, name));
                        match gate.begin(&tags) {
                            Ok(id) => {
                                prop_assert!(!being && !gone);
                                uses.push((id, tags));
                            }
                            Err(Obstacle::Closing) => prop_assert!(being),
                            Err(Obstacle::Closed(named)) => {
                                prop_assert!(!being && gone);
                                prop_assert!(named.iter().all(|name| away.contains(name.as_str())));
                            }
                        }
                    }
                    Op::Leave(which) if which < uses.len() => {
                        prop_assert!(gate.end_use(uses[which].0));
                        prop_assert!(!gate.end_use(uses.remove(which).0));
                    }
                    Op::Close(tags) => closings.push((gate.close(tags.clone()), tags)),
                    Op::Move(which, leaves_away) if which < closings.len() => {
                        if gate.uses_before(closings[which].0) > 0 {
                            continue;
                        }
                        let (id, tags) = closings.remove(which);
                        for name in NAMES.iter().filter(|name| closes(&tags, name)) {
                            // What is moved now, no use touches.
                            prop_assert!(uses.iter().all(|(_, used)| !touches(used, name)));
                            gate.set(name, leaves_away);
                            if leaves_away { away.insert(name) } else { away.remove(name) };
                        }
                        gate.end(id);
                    }
                    Op::GiveUp(which) if which < closings.len() => gate.end(closings.remove(which).0),
                    Op::Open(which) => {
                        let name = NAMES[usize::from(which)];
                        gate.set(name, false);
                        away.remove(name);
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
            NAMES.iter().for_each(|name| gate.set(name, false));
            prop_assert!(gate.begin(&Tags::All).is_ok());
        }
    }
}
