//! Residencies against a model: the bytes themselves.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const PLACES: [Place; 4] = [Place::Host, Place::Peer(DeviceId(1)), Place::Peer(DeviceId(2)), Place::File];

/// The bytes themselves, as one number; what is not whole is 0.
#[derive(Clone, Debug)]
struct World {
    residency: Residency,
    memory: BTreeMap<Place, u32>,
    truth: u32,
}

impl World {
    fn new() -> World {
        World { residency: Residency::NEW, memory: BTreeMap::from([(Place::Gpu, 1)]), truth: 1 }
    }

    fn step(&mut self, step: Step) {
        self.residency = self.residency.after(step).unwrap();
        self.check();
    }

    /// What the machine says of memory is so.
    fn check(&self) {
        let at = |place| self.memory.get(&place).copied();
        assert_eq!(at(self.residency.authority()), Some(self.truth), "{self:?}");
        if let Some(copy) = self.residency.copy() {
            assert_eq!(at(copy), Some(self.truth), "{self:?}");
        }
        assert!(self.residency.holds_gpu() || at(Place::Gpu).is_none(), "{self:?}");
        let besides = self.memory.keys().filter(|place| **place != Place::Gpu).count();
        assert!(besides <= 1, "{self:?}");
    }

    fn put(&mut self, place: Place, bytes: u32) {
        self.memory.insert(place, bytes);
        self.check();
    }

    fn take(&mut self, place: Place) {
        self.memory.remove(&place);
        self.check();
    }

    /// Moves out; fails before the `left`-th thing that is done, with nothing, something or all of the memory gone.
    fn leave(&mut self, to: Place, left: usize) {
        let to = self.residency.copy().unwrap_or(to);
        self.step(Step::Evict(to));
        if let Residency::Evicting { to } = self.residency {
            if left > 0 {
                self.put(to, 0);
            }
            if left < 2 {
                self.step(Step::Failed);
                return self.take(to);
            }
            self.put(to, self.truth);
            self.step(Step::Copied);
        }
        match left {
            ..3 => return self.step(Step::Failed),
            3 => {
                self.put(Place::Gpu, 0);
                return self.step(Step::Failed);
            }
            4 => {
                self.take(Place::Gpu);
                return self.step(Step::Failed);
            }
            _ => self.take(Place::Gpu),
        }
        self.step(Step::Released);
    }

    /// Brings back; fails as above.
    fn enter(&mut self, left: usize) {
        self.step(Step::Refill);
        if left == 0 && !self.memory.contains_key(&Place::Gpu) {
            return self.step(Step::NotMade);
        }
        if left > 0 {
            self.put(Place::Gpu, 0);
        }
        match left {
            ..2 => return self.step(Step::Failed),
            2 => {
                self.take(Place::Gpu);
                return self.step(Step::Failed);
            }
            _ => self.put(Place::Gpu, self.truth),
        }
        if self.memory.contains_key(&Place::Nowhere) {
            self.residency = self.residency.after(Step::Arrived).unwrap();
            return self.take(Place::Nowhere);
        }
        self.step(Step::Arrived);
    }

    fn drop_copy(&mut self) {
        let copy = self.residency.copy();
        self.step(Step::DropCopy);
        if let Some(copy) = copy {
            self.take(copy);
        }
    }

    /// The bytes are given up: whatever is found later is as good. Fails as above.
    fn decommit(&mut self, left: usize) {
        let was_out = matches!(self.residency, Residency::Evicted { .. });
        let before = self.memory.keys().copied().find(|place| *place != Place::Gpu);
        self.residency = self.residency.after(Step::Evict(Place::Nowhere)).unwrap();
        self.memory.extend(before.is_none().then_some((Place::Nowhere, self.truth)));
        if let Some(before) = before {
            self.memory.remove(&before);
            self.memory.insert(Place::Nowhere, self.truth);
        }
        self.check();
        if was_out {
            return;
        }
        if left < 5 {
            return self.step(Step::Failed);
        }
        self.memory.remove(&Place::Gpu);
        self.step(Step::Released);
    }

    fn demote(&mut self, to: Place) {
        let Residency::Evicted { at } = self.residency else { return };
        // What is written so far has no state: nobody counts on it.
        self.memory.insert(to, self.truth);
        self.residency = self.residency.after(Step::Demote(to)).unwrap();
        if to != at {
            self.memory.remove(&at);
        }
        self.check();
    }

    fn write(&mut self) {
        self.drop_copy();
        self.truth += 1;
        self.put(Place::Gpu, self.truth);
    }

    /// Both directions lead to their end from here.
    fn goes_on(&self) {
        let mut out = self.clone();
        if !matches!(out.residency, Residency::Evicted { .. }) {
            out.leave(Place::File, usize::MAX);
        }
        assert!(matches!(out.residency, Residency::Evicted { .. }));
        let mut back = self.clone();
        if !matches!(back.residency, Residency::Resident { .. }) {
            back.enter(usize::MAX);
        }
        assert!(matches!(back.residency, Residency::Resident { .. }));
    }
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Leave(usize, usize),
    Enter(usize),
    Decommit(usize),
    Demote(usize),
    Write,
    DropCopy,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (0..PLACES.len(), 0..8_usize).prop_map(|(to, left)| Action::Leave(to, left)),
        4 => (0..5_usize).prop_map(Action::Enter),
        1 => (0..8_usize).prop_map(Action::Decommit),
        2 => (0..PLACES.len()).prop_map(Action::Demote),
        1 => Just(Action::Write),
        1 => Just(Action::DropCopy),
    ]
}

proptest! {
    #[test]
    fn every_failure_leaves_one_good_copy_and_both_ways_open(actions in prop::collection::vec(action(), 1..40)) {
        let mut world = World::new();
        for action in actions {
            let resident = matches!(world.residency, Residency::Resident { .. });
            let out = matches!(world.residency, Residency::Evicted { .. });
            match action {
                Action::Leave(to, left) if !out => world.leave(PLACES[to], left),
                Action::Enter(left) if !resident => world.enter(left),
                Action::Decommit(left) => world.decommit(left),
                Action::Demote(to) if out && !world.residency.is_decommitted() => world.demote(PLACES[to]),
                Action::Write if resident => world.write(),
                Action::DropCopy if resident => world.drop_copy(),
                _ => continue,
            }
            prop_assert!(!world.residency.is_moving());
            world.goes_on();
        }
    }
}

/// Everything that is not in the picture is refused.
#[test]
fn only_the_steps_of_the_picture_are_taken() {
    let (at, other) = (Place::Host, Place::File);
    let allowed = [
        (Residency::NEW, Step::Evict(at)),
        (Residency::NEW, Step::Evict(other)),
        (Residency::NEW, Step::DropCopy),
        (Residency::Resident { copy: Some(at) }, Step::Evict(at)),
        (Residency::NEW, Step::Evict(Place::Nowhere)),
        (Residency::Resident { copy: Some(at) }, Step::Evict(Place::Nowhere)),
        (Residency::Evicted { at }, Step::Evict(Place::Nowhere)),
        (Residency::Interrupted { at }, Step::Evict(Place::Nowhere)),
        (Residency::Resident { copy: Some(at) }, Step::DropCopy),
        (Residency::Evicting { to: at }, Step::Copied),
        (Residency::Evicting { to: at }, Step::Failed),
        (Residency::Releasing { at }, Step::Released),
        (Residency::Releasing { at }, Step::Failed),
        (Residency::Evicted { at }, Step::Refill),
        (Residency::Evicted { at }, Step::Demote(at)),
        (Residency::Evicted { at }, Step::Demote(other)),
        (Residency::Refilling { from: at }, Step::Arrived),
        (Residency::Refilling { from: at }, Step::Failed),
        (Residency::Evicted { at: Place::Nowhere }, Step::Refill),
        (Residency::Evicted { at: Place::Nowhere }, Step::Evict(Place::Nowhere)),
        (Residency::Interrupted { at }, Step::Refill),
        (Residency::Interrupted { at }, Step::Evict(at)),
    ];
    let states = [
        Residency::NEW,
        Residency::Resident { copy: Some(at) },
        Residency::Evicting { to: at },
        Residency::Releasing { at },
        Residency::Evicted { at },
        Residency::Evicted { at: Place::Nowhere },
        Residency::Refilling { from: at },
        Residency::Interrupted { at },
    ];
    let places = [Place::Gpu, at, other, Place::Nowhere];
    let (leaves, demotions) = (places.map(Step::Evict), places.map(Step::Demote));
    let rest = [Step::Copied, Step::Released, Step::Refill, Step::Arrived, Step::Failed, Step::DropCopy];
    for residency in states {
        for step in leaves.into_iter().chain(demotions).chain(rest) {
            let answer = residency.after(step);
            assert_eq!(answer.is_ok(), allowed.contains(&(residency, step)), "{residency}, {step}");
            if let Err(refused) = answer {
                assert_eq!(refused, NotNow { residency, step });
                assert!(refused.to_string().contains(&residency.to_string()), "{refused}");
            }
        }
    }
}
