//! Copies that a stream captures into a graph. They are split by nodes, because no code of GLake's runs when the graph does.
//!
//! Enabled by [`crate::EngineOptions::graphs`]: a graph with nodes on several GPUs cannot be launched from a GPU, nor be the body of a
//! conditional node, and a capture does not reveal how its graph will be used.
//!
//! ```text
//!   capturing stream ──┤fork├── own share: a memcpy node ──┤join├──
//!                          ├─► branch of relay 1: a kernel node ─┤     memcpy nodes with these ends would all use the
//!                          └─► branch of relay 2: a kernel node ─┘     target's own link
//! ```
//!
//! Invariants:
//! - A branch belongs to one capture from its first use until it is no longer recorded; no running work is ever on it.
//! - A branch that joined a capture is joined back, whatever failed in between, or the call returns an error.

use std::sync::Arc;

use glake_device::owned::{DeviceSet, OwnedEvent, Span};

use crate::copies::resources::{Branch, KernelSet};
use crate::copies::shared::{Route, Shared};
use crate::paths::{Ask, Load, Way, split};
use crate::{Result, UserStream};

/// Captured copies of one engine.
#[derive(Debug)]
pub(crate) struct CapturedCopies {
    pub(crate) shared: Arc<Shared>,
    /// Empty load: the traffic at the time of a graph's launch is unknown.
    pub(crate) idle: Load,
}

impl CapturedCopies {
    /// Captures a copy between pinned memory and a GPU. Returns `false`, with nothing captured, if a single node is better.
    ///
    /// # Errors
    /// The driver's: the capture is invalidated, or the copy is captured incompletely.
    pub(crate) fn copy(
        &self,
        to: &Span,
        from: &Span,
        on: UserStream,
        route: Route,
        capture: u64,
    ) -> Result<bool> {
        let Route { target, direction, .. } = route;
        let kernels = self.shared.resources.kernels.now();
        let reach = kernels.relays_reaching([to.side(), from.side()].into_iter());
        let reach = reach.intersection(self.shared.ledger.relays.usable());
        let reach = reach.without(DeviceSet::of(target));
        let (size, load) = (to.size(), &self.idle);
        let shares = split(
            &self.shared.routes.graph(),
            &Ask { target, direction, size, zero_staging: reach, staged: reach, load, expected: 0 },
        );
        if shares.iter().all(|share| share.way == Way::Direct) {
            return Ok(false);
        }
        let Some(branches) = self.shared.resources.branches.of(capture, on.id) else {
            return Ok(false);
        };
        let Some(fork) = branches.forks.get(&on.device) else {
            drop(branches);
            self.shared.resources.want(on.device);
            return Ok(false);
        };
        if fork.record(on.raw).is_err() {
            return Ok(false);
        }
        let mut outcome = Ok(());
        for share in &shares {
            let ends = (to.part(share.offset, share.size), from.part(share.offset, share.size));
            let (Some(to), Some(from)) = ends else { continue };
            let path = route.path(share.relay, share.way);
            let branch = branches.get(share.relay).filter(|_| share.way != Way::Direct);
            let recorded = branch.map(|branch| self.record(&kernels, branch, fork, on, &to, &from));
            match recorded {
                Some(Ok(true)) => self.shared.ledger.counters.sent(path, share.size, 1),
                Some(Err(error)) => outcome = Err(error),
                None | Some(Ok(false)) => {
                    self.shared.native.copy_twice(&to, &from, on)?;
                    self.shared.ledger.counters.sent(route.own_path(), share.size, 1);
                }
            }
        }
        self.shared.ledger.counters.split();
        tracing::debug!(
            target: "glake::transfer",
            %size, %target, ?direction, paths = shares.len(), "a copy over several links, into a graph"
        );
        outcome.map(|()| true)
    }

    /// Captures a share on a branch. Returns `false` if it must be captured elsewhere.
    fn record(
        &self,
        kernels: &KernelSet,
        branch: &Branch,
        fork: &OwnedEvent,
        on: UserStream,
        to: &Span,
        from: &Span,
    ) -> Result<bool> {
        let Some(gather) = kernels.relay(branch.stream.device()) else { return Ok(false) };
        if branch.stream.wait_for(fork.id()).is_err() {
            return Ok(false);
        }
        let recorded = gather.copy(branch.stream.id(), to, from).is_ok();
        // The branch is part of the capture now: without a join the capture would fail.
        let join = || {
            branch.join.record(branch.stream.id())?;
            self.shared.contexts.driver().stream_wait_event(on.device, on.raw, branch.join.id())
        };
        join().or_else(|_| join())?;
        Ok(recorded)
    }
}
