//! What copies are split by: the graph, and which relays serve now.
//!
//! Invariant: a copy that begins is split by one graph from its beginning to its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::Bytes;
use parking_lot::RwLock;

use super::Benefit;
use crate::kinds::pageable;
use crate::links::relays::Relays;
use crate::paths::{Direction, LEAST_STAGED, PathGraph};

/// Of smaller copies of memory that is no pool's and only gains if it is pageable, asking takes too much.
const ASKED: Bytes = Bytes::mib(4);

/// The graph that holds, and the relays.
#[derive(Debug)]
pub(crate) struct Routes {
    graph: RwLock<Arc<PathGraph>>,
    /// Smaller copies are native, whatever their target.
    floor: AtomicU64,
    /// What the floor is instead of what the graph says.
    configured: Option<Bytes>,
    relays: Arc<Relays>,
}

impl Routes {
    /// Of an empty graph, by which every copy is native.
    pub(crate) fn new(relays: &Arc<Relays>, configured: Option<Bytes>) -> Arc<Routes> {
        let routes = Routes {
            graph: RwLock::new(Arc::new(PathGraph::empty())),
            floor: AtomicU64::new(0),
            configured,
            relays: relays.clone(),
        };
        routes.set(PathGraph::empty());
        Arc::new(routes)
    }

    /// What copies that begin are split by.
    pub(crate) fn graph(&self) -> Arc<PathGraph> {
        self.graph.read().clone()
    }

    /// Splits copies that begin by another graph.
    pub(crate) fn set(&self, graph: PathGraph) {
        let least = graph.paths().links.iter().map(|link| link.break_even).min();
        let floor = self.configured.or(least).unwrap_or(Bytes::MAX);
        *self.graph.write() = Arc::new(graph);
        self.floor.store(floor.get(), Ordering::Relaxed);
    }

    /// Whether a copy of this size can be worth more than one path. Takes no lock and asks no driver.
    pub(crate) fn may_split(&self, target: DeviceId, size: Bytes) -> bool {
        size.get() >= self.floor.load(Ordering::Relaxed)
            && !self.relays.usable().without(DeviceSet::of(target)).is_empty()
    }

    /// How many links a copy can have at most: the relays', and the target's, which is one of these where GPUs are shared.
    pub(crate) fn most_links(&self) -> u32 {
        self.relays.usable().len() + u32::from(!self.relays.are_shared())
    }

    /// What a copy between pool memory of a GPU and the host gains by.
    pub(crate) fn benefit(&self, target: DeviceId, direction: Direction, size: Bytes) -> Benefit {
        let even = || self.graph.read().break_even(target, direction);
        let splits = self.may_split(target, size)
            && (self.configured.is_some() || even().is_some_and(|even| size >= even));
        match splits {
            true => Benefit::Anything,
            false if size >= pageable::LEAST => Benefit::Pageable,
            false => Benefit::Nothing,
        }
    }

    /// What a copy of memory that is no pool's gains by.
    pub(crate) fn benefit_of_other(&self, size: Bytes) -> Benefit {
        // Where GPUs are shared its own is one of them.
        let alone = self.relays.usable().len() <= u32::from(self.relays.are_shared());
        match alone {
            false if size >= LEAST_STAGED => Benefit::Anything,
            true if size >= ASKED => Benefit::Pageable,
            _ => Benefit::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: DeviceId = DeviceId(0);
    const RELAY: DeviceId = DeviceId(1);

    fn relays(shared: bool) -> Arc<Relays> {
        let both = DeviceSet::of(TARGET).union(DeviceSet::of(RELAY));
        Arc::new(Relays::new(2, both, shared))
    }

    #[test]
    fn a_copy_is_split_from_the_floor_on_where_another_gpu_serves() {
        let relays = relays(false);
        let routes = Routes::new(&relays, Some(Bytes::mib(2)));
        assert!(!routes.may_split(TARGET, Bytes::gib(1)), "no relay is ready");
        relays.add_ready(TARGET);
        assert!(!routes.may_split(TARGET, Bytes::gib(1)), "its own link is no other");
        relays.add_ready(RELAY);
        assert!(routes.may_split(TARGET, Bytes::mib(2)) && !routes.may_split(TARGET, Bytes::mib(1)));
        assert_eq!(routes.benefit(TARGET, Direction::ToGpu, Bytes::mib(2)), Benefit::Anything);
        assert_eq!(routes.benefit(TARGET, Direction::ToGpu, Bytes::kib(4)), Benefit::Nothing);
        relays.suspend(DeviceSet::ALL);
        assert_eq!(routes.benefit(TARGET, Direction::ToGpu, Bytes::mib(2)), Benefit::Pageable);
    }

    #[test]
    fn an_empty_graph_makes_every_copy_native() {
        let relays = relays(true);
        relays.add_ready(TARGET);
        relays.add_ready(RELAY);
        let routes = Routes::new(&relays, None);
        assert!(!routes.may_split(TARGET, Bytes::gib(1 << 20)));
        assert!(routes.graph().paths().links.is_empty());
        assert_eq!(routes.most_links(), 2, "the target's is one of the relays'");
        assert_eq!(routes.benefit_of_other(ASKED), Benefit::Anything);
    }
}
