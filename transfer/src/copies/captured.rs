//! Copies that a stream records into a graph: split by nodes, for nothing of ours runs when the graph does.
//!
//! Only where [`crate::EngineOptions::graphs`] says so: a graph that has nodes of several GPUs cannot be launched from a GPU, nor be
//! the body of a conditional node, and a capture does not tell what its graph will be.
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

use glake_device::owned::{DeviceSet, OwnedEvent, OwnedStream, Span};
use glake_device::{CaptureState, DeviceId, Driver, EventKind, StreamId};
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;

use crate::copies::resources::KernelSet;
use crate::copies::shared::Shared;
use crate::links::ledger::Path;
use crate::paths::{Ask, Load, Way, split};
use crate::{Result, UserStream};

/// Number of streams that can capture split copies at a time. Copies of further streams become single nodes.
const STREAMS: usize = 2;

/// Branches of all relays.
#[derive(Debug)]
pub(crate) struct Branches {
    all: [StreamBranches; STREAMS],
}

/// Captured copies of one engine.
#[derive(Debug)]
pub(crate) struct CapturedCopies {
    pub(crate) shared: Arc<Shared>,
    /// Empty load: the traffic at the time of a graph's launch is unknown.
    pub(crate) idle: Load,
}

/// Branches of one capturing stream.
#[derive(Debug)]
struct StreamBranches {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    each: Box<[Option<Branch>]>,
    /// Fork events for captured program streams, by device, in its primary context.
    forks: FxHashMap<DeviceId, OwnedEvent>,
    owner: Owner,
}

/// Last user of the branches: capture and stream.
type Owner = Option<(u64, StreamId)>;

/// Stream of a GPU for captures only.
#[derive(Debug)]
struct Branch {
    stream: OwnedStream,
    join: OwnedEvent,
}

impl Branches {
    pub(crate) fn new(devices: usize) -> Branches {
        let branches = |()| {
            let each = (0..devices).map(|_| None).collect();
            StreamBranches { state: Mutex::new(State { each, forks: FxHashMap::default(), owner: None }) }
        };
        Branches { all: [(); STREAMS].map(branches) }
    }

    /// Creates the events for capturing streams of a GPU, unless they exist.
    pub(crate) fn open_target(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<()> {
        for branches in &self.all {
            // Only the engine's thread makes them; none is made under the lock.
            let is_there = branches.state.lock().forks.contains_key(&device);
            if !is_there {
                let fork = OwnedEvent::new(driver, device, EventKind::Plain)?;
                branches.state.lock().forks.insert(device, fork);
            }
        }
        Ok(())
    }

    /// Creates the branches of a relay in GLake's own contexts, unless they exist.
    pub(crate) fn open_relay(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<()> {
        for branches in &self.all {
            if branches.state.lock().get(device).is_some() {
                continue;
            }
            let join = OwnedEvent::new(driver, device, EventKind::Plain)?;
            let branch = Branch { stream: OwnedStream::new(driver, device)?, join };
            // Only the engine's thread makes them.
            branches.state.lock().put(device, Some(branch));
        }
        Ok(())
    }

    /// Releases the branches of a GPU. Returns `false` while one is in a capture or its state is unknown.
    pub(crate) fn close(&self, device: DeviceId) -> bool {
        self.all.iter().all(|branches| {
            let Some(mut state) = branches.state.try_lock() else { return false };
            let free = state.get(device).is_none_or(Branch::is_free);
            let closed = if free { state.put(device, None) } else { None };
            drop(state);
            drop(closed);
            free
        })
    }

    /// Returns the branches of a capturing stream; `None` if all are in other captures.
    fn of(&self, capture: u64, stream: StreamId) -> Option<MutexGuard<'_, State>> {
        let owner = Some((capture, stream));
        let tried = || self.all.iter().filter_map(|branches| branches.state.try_lock());
        if let Some(own) = tried().find(|state| state.owner == owner) {
            return Some(own);
        }
        let mut state = tried().find(|state| state.is_free())?;
        state.owner = owner;
        Some(state)
    }
}

impl State {
    /// Returns whether no capture records any of the branches.
    fn is_free(&self) -> bool {
        self.each.iter().flatten().all(Branch::is_free)
    }

    fn get(&self, device: DeviceId) -> Option<&Branch> {
        self.each.get(usize::try_from(device.0).ok()?)?.as_ref()
    }

    /// Replaces a branch and returns the previous one.
    fn put(&mut self, device: DeviceId, branch: Option<Branch>) -> Option<Branch> {
        let place = usize::try_from(device.0).ok().and_then(|index| self.each.get_mut(index))?;
        std::mem::replace(place, branch)
    }
}

impl Branch {
    fn is_free(&self) -> bool {
        matches!(self.stream.capture_state(), Ok(CaptureState::None))
    }
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
        path: Path,
        capture: u64,
    ) -> Result<bool> {
        let Path { target, direction, .. } = path;
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
            let path = Path { target, relay: share.relay, direction, way: share.way };
            let branch = branches.get(share.relay).filter(|_| share.way != Way::Direct);
            let recorded = branch.map(|branch| self.record(&kernels, branch, fork, on, &to, &from));
            match recorded {
                Some(Ok(true)) => self.shared.ledger.counters.sent(path, share.size, 1),
                Some(Err(error)) => outcome = Err(error),
                None | Some(Ok(false)) => {
                    self.shared.native.copy_twice(&to, &from, on)?;
                    self.shared.ledger.counters.sent(
                        Path { relay: target, way: Way::Direct, ..path },
                        share.size,
                        1,
                    );
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
