//! Current path graph and the relays that serve copies.
//!
//! Invariant: a copy uses one graph from its beginning to its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::Bytes;
use parking_lot::RwLock;

use crate::Benefit;
use crate::links::relays::Relays;
use crate::paths::{Direction, LEAST_STAGED, PathGraph};

/// Minimum size of pageable copies. For smaller ones, waking threads takes as long as the driver's copy.
pub(crate) const LEAST_PAGEABLE: Bytes = Bytes::mib(2);
/// Minimum size for querying the memory kind of a copy that gains only if its host memory is pageable.
const ASKED: Bytes = Bytes::mib(4);

/// Current graph and relays.
#[derive(Debug)]
pub(crate) struct Routes {
    graph: RwLock<Arc<PathGraph>>,
    /// Size below which copies to any target are native.
    floor: AtomicU64,
    /// Configured floor, which overrides the graph's.
    configured: Option<Bytes>,
    relays: Arc<Relays>,
}

impl Routes {
    /// Creates routes with an empty graph: all copies are native.
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

    /// Returns the graph for new copies.
    pub(crate) fn graph(&self) -> Arc<PathGraph> {
        self.graph.read().clone()
    }

    /// Replaces the graph for new copies.
    pub(crate) fn set(&self, graph: PathGraph) {
        let least = graph.paths().links.iter().map(|link| link.break_even).min();
        let floor = self.configured.or(least).unwrap_or(Bytes::MAX);
        *self.graph.write() = Arc::new(graph);
        self.floor.store(floor.get(), Ordering::Relaxed);
    }

    /// Returns whether a copy of this size may be worth several paths. Takes no lock and makes no driver call.
    pub(crate) fn may_split(&self, target: DeviceId, size: Bytes) -> bool {
        size.get() >= self.floor.load(Ordering::Relaxed)
            && !self.relays.usable().without(DeviceSet::of(target)).is_empty()
    }

    /// Returns the maximum number of links of a copy: those of the relays, and the target's unless GPUs are shared and it is a relay too.
    pub(crate) fn most_links(&self) -> u32 {
        self.relays.usable().len() + u32::from(!self.relays.are_shared())
    }

    /// Returns whether the engine can be faster for a copy between pool memory of a GPU and the host.
    pub(crate) fn benefit(&self, target: DeviceId, direction: Direction, size: Bytes) -> Benefit {
        let even = || self.graph.read().break_even(target, direction);
        let splits = self.may_split(target, size)
            && (self.configured.is_some() || even().is_some_and(|even| size >= even));
        match splits {
            true => Benefit::Anything,
            false if size >= LEAST_PAGEABLE => Benefit::Pageable,
            false => Benefit::Nothing,
        }
    }

    /// Like [`Routes::benefit`], for GPU memory outside of a pool.
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
