//! The plain scheduler: copies are split by rate and load, fork, take their lanes, and join. None gives way, none is bound late, and
//! the graph is what it was given as.

use super::Scheduler;

/// Every hook as it is by default.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstOrder;

impl Scheduler for FirstOrder {}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use glake_device::DeviceId;
    use glake_device::owned::DeviceSet;
    use glake_units::{Bytes, Micros};

    use super::*;
    use crate::Priority;
    use crate::engine::routes::Routes;
    use crate::links::relays::Relays;
    use crate::paths::{Direction, PathGraph};
    use crate::schedule::contention::Contenders;

    #[test]
    fn no_copy_minds_another() {
        for priority in [Priority::Normal, Priority::Critical, Priority::Background] {
            assert!(FirstOrder.urgent_call(priority).is_none() && !FirstOrder.minds_others(priority));
            let prioritized = FirstOrder.prioritize(priority, Direction::ToGpu, Bytes::gib(1), 4);
            assert!(prioritized.is_alone());
            assert_eq!(prioritized.slice(), Bytes::MAX);
        }
        FirstOrder.keep_apart(DeviceId(0), Direction::ToGpu, Micros(1e6));
        assert_eq!(FirstOrder.contenders(DeviceId(1), Direction::ToGpu), Contenders::default());
        assert!(!FirstOrder.defers(Bytes::MAX) && !FirstOrder.is_stale());
    }

    #[test]
    fn a_graph_is_set_as_it_is() {
        let relays = Arc::new(Relays::new(1, DeviceSet::EMPTY, false));
        let routes = Routes::new(&relays, None);
        let before = routes.graph();
        FirstOrder.replace_graph(&routes, PathGraph::empty());
        assert!(!Arc::ptr_eq(&before, &routes.graph()));
    }
}
