//! Which devices' work may touch a pool's memory.
//!
//! Invariant: a device that was added stays. Both sets have a lock of their own, under which nothing else is taken.

use glake_device::owned::DeviceSet;
use glake_device::{Access, DeviceId, Protection};
use parking_lot::Mutex;

/// The devices of a pool.
#[derive(Debug)]
pub(super) struct Reach {
    own: DeviceId,
    peers: Mutex<Peers>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Peers {
    /// May touch what is mapped, and will be given what is mapped next.
    given: DeviceSet,
    /// Completion points wait for these.
    watched: DeviceSet,
}

impl Reach {
    pub(super) fn of(own: DeviceId) -> Self {
        Reach { own, peers: Mutex::default() }
    }

    /// Whose work a completion point has to cover.
    pub(super) fn watched(&self) -> DeviceSet {
        self.peers.lock().watched.union(DeviceSet::of(self.own))
    }

    /// What new mappings are given; with an owner, those of its peer blocks.
    pub(super) fn access(&self, owner: Option<DeviceId>) -> Vec<Access> {
        let others = owner.map_or_else(|| self.given(), DeviceSet::of);
        [self.own].into_iter().chain(others.iter()).map(read_write).collect()
    }

    /// The devices, besides its own, that may touch all memory.
    pub(super) fn given(&self) -> DeviceSet {
        self.peers.lock().given
    }

    /// Whether all who may write to a pool's memory are among these.
    pub(super) fn may_all_write(&self, writers: DeviceSet) -> bool {
        self.given().union(DeviceSet::of(self.own)).is_subset(writers)
    }

    pub(super) fn give(&self, peer: DeviceId) {
        let given = &mut self.peers.lock().given;
        *given = given.union(DeviceSet::of(peer));
    }

    pub(super) fn watch(&self, peer: DeviceId) {
        let watched = &mut self.peers.lock().watched;
        *watched = watched.union(DeviceSet::of(peer));
    }
}

/// All that a device can be given.
pub(super) fn read_write(device: DeviceId) -> Access {
    Access { device, protection: Protection::ReadWrite }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: DeviceId = DeviceId(0);
    const ONE: DeviceId = DeviceId(1);
    const TWO: DeviceId = DeviceId(2);

    #[test]
    fn what_is_lent_is_not_watched() {
        let reach = Reach::of(OWN);
        reach.give(ONE);
        assert_eq!((reach.watched(), reach.given()), (DeviceSet::of(OWN), DeviceSet::of(ONE)));
        reach.watch(TWO);
        assert_eq!(reach.watched(), DeviceSet::of(OWN).union(DeviceSet::of(TWO)));
        assert_eq!(reach.given(), DeviceSet::of(ONE));
    }

    #[test]
    fn an_owners_mappings_are_open_to_it_alone() {
        let reach = Reach::of(OWN);
        reach.give(ONE);
        assert_eq!(reach.access(None), [OWN, ONE].map(read_write));
        assert_eq!(reach.access(Some(TWO)), [OWN, TWO].map(read_write));
        assert!(!reach.may_all_write(DeviceSet::of(OWN)));
        assert!(reach.may_all_write(DeviceSet::of(OWN).union(DeviceSet::of(ONE))));
    }
}
