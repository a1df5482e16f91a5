//! Devices whose work may access a pool's memory.
//!
//! ```text
//!                        own device   devices named by the program   relays of copies
//! memory of a domain         x                       x                         x
//! of a closed domain         x                       x
//! of an owner's domain       x                                                          and the owner
//! ```
//!
//! The driver's time to open and to unmap memory grows with the number of GPUs that have access. Therefore frequently mapped domains are
//! closed: relays copy their data through memory of their own.
//!
//! Invariant: an added device stays. The state has one lock, under which no other lock is taken.

use std::sync::atomic::{AtomicBool, Ordering};

use glake_device::owned::DeviceSet;
use glake_device::{Access, DeviceId, Protection};
use glake_stitch::DomainId;
use parking_lot::Mutex;
use rustc_hash::FxHashSet;

/// Devices with access to a pool.
#[derive(Debug)]
pub(super) struct Reach {
    own: DeviceId,
    peers: Mutex<Peers>,
    /// Whether a domain was ever closed: lets copies skip the lookup.
    is_any_closed: AtomicBool,
}

#[derive(Debug, Default)]
struct Peers {
    /// Devices with access to current and later mappings of open domains.
    given: DeviceSet,
    /// Subset of `given` that may also access closed domains.
    let_in: DeviceSet,
    /// Devices whose work completion points wait for.
    watched: DeviceSet,
    closed: FxHashSet<DomainId>,
}

impl Reach {
    pub(super) fn of(own: DeviceId) -> Self {
        Reach { own, peers: Mutex::default(), is_any_closed: AtomicBool::new(false) }
    }

    /// Returns the devices whose work a completion point has to cover.
    pub(super) fn watched(&self) -> DeviceSet {
        self.peers.lock().watched.union(DeviceSet::of(self.own))
    }

    /// Returns the access rights of a domain's new mappings; with an owner, those of its peer blocks.
    pub(super) fn access(&self, domain: DomainId, owner: Option<DeviceId>) -> Vec<Access> {
        let others = owner.map_or_else(|| self.of_domain(domain), DeviceSet::of);
        [self.own].into_iter().chain(others.iter()).map(read_write).collect()
    }

    /// Returns the other devices that may access open memory.
    pub(super) fn given(&self) -> DeviceSet {
        self.peers.lock().given
    }

    /// Returns the other devices named by the program, which may access closed memory too.
    pub(super) fn let_in(&self) -> DeviceSet {
        self.peers.lock().let_in
    }

    /// Returns the other devices that may access a domain's memory.
    pub(super) fn of_domain(&self, domain: DomainId) -> DeviceSet {
        let peers = self.peers.lock();
        if peers.closed.contains(&domain) { peers.let_in } else { peers.given }
    }

    /// Returns whether `writers` contains all devices that may write to a domain's memory.
    pub(super) fn may_all_write(&self, domain: DomainId, writers: DeviceSet) -> bool {
        self.of_domain(domain).union(DeviceSet::of(self.own)).is_subset(writers)
    }

    /// Gives a device access to open memory.
    pub(super) fn give(&self, peer: DeviceId) {
        let given = &mut self.peers.lock().given;
        *given = given.union(DeviceSet::of(peer));
    }

    /// Gives a device access to all memory, and watches its work.
    pub(super) fn let_in_all(&self, peer: DeviceId) {
        self.give(peer);
        let let_in = &mut self.peers.lock().let_in;
        *let_in = let_in.union(DeviceSet::of(peer));
    }

    /// Closes a domain that has no memory yet.
    pub(super) fn close(&self, domain: DomainId) {
        self.peers.lock().closed.insert(domain);
        self.is_any_closed.store(true, Ordering::Release);
    }

    /// Opens a closed domain again.
    pub(super) fn open(&self, domain: DomainId) {
        self.peers.lock().closed.remove(&domain);
    }

    /// Returns all closed domains.
    pub(super) fn closed(&self) -> Vec<DomainId> {
        self.peers.lock().closed.iter().copied().collect()
    }

    /// Returns whether any domain was ever closed.
    #[inline]
    pub(super) fn is_any_closed(&self) -> bool {
        self.is_any_closed.load(Ordering::Acquire)
    }

    pub(super) fn watch(&self, peer: DeviceId) {
        let watched = &mut self.peers.lock().watched;
        *watched = watched.union(DeviceSet::of(peer));
    }
}

/// Returns read and write access for a device.
pub(super) fn read_write(device: DeviceId) -> Access {
    Access { device, protection: Protection::ReadWrite }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: DeviceId = DeviceId(0);
    const ONE: DeviceId = DeviceId(1);
    const TWO: DeviceId = DeviceId(2);
    const DOMAIN: DomainId = glake_stitch::Allocator::default_domain();

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
        assert_eq!(reach.access(DOMAIN, None), [OWN, ONE].map(read_write));
        assert_eq!(reach.access(DOMAIN, Some(TWO)), [OWN, TWO].map(read_write));
        assert!(!reach.may_all_write(DOMAIN, DeviceSet::of(OWN)));
        assert!(reach.may_all_write(DOMAIN, DeviceSet::of(OWN).union(DeviceSet::of(ONE))));
    }

    #[test]
    fn a_closed_domain_is_open_to_those_that_were_let_in() {
        let reach = Reach::of(OWN);
        assert!(!reach.is_any_closed());
        reach.close(DOMAIN);
        reach.give(ONE);
        reach.let_in_all(TWO);
        let both = DeviceSet::of(ONE).union(DeviceSet::of(TWO));
        assert_eq!((reach.given(), reach.let_in()), (both, DeviceSet::of(TWO)));
        assert_eq!(reach.access(DOMAIN, None), [OWN, TWO].map(read_write));
        assert!(reach.is_any_closed() && reach.closed() == [DOMAIN]);
        reach.open(DOMAIN);
        assert_eq!(reach.of_domain(DOMAIN), both);
    }
}
