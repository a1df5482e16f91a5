//! Copies that a stream records into a graph: split by nodes, for nothing of ours runs when the graph does.
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

use std::sync::{Arc, OnceLock};

use glake_device::owned::{DeviceSet, OwnedEvent, OwnedStream, Span};
use glake_device::{CaptureState, DeviceId, Driver, EventKind, StreamId};
use parking_lot::{Mutex, MutexGuard};

use super::counters::Path;
use super::{Engine, UserStream};
use crate::Result;
use crate::graph::{Ask, Load, Way, split};

/// So many streams can record split copies at a time; those of further ones are single nodes.
const STREAMS: usize = 2;

#[derive(Debug)]
pub(super) struct Captures {
    all: [Branches; STREAMS],
    /// What is under way when a graph will run is not known.
    idle: Load,
}

/// What one capturing stream has.
#[derive(Debug)]
struct Branches {
    each: Box<[OnceLock<Branch>]>,
    owner: Mutex<Owner>,
}

/// Whose branches were last: which capture's, and which stream's in it.
type Owner = Option<(u64, StreamId)>;

/// A stream of a GPU, for captures alone.
#[derive(Debug)]
struct Branch {
    stream: OwnedStream,
    /// Recorded on streams of this GPU that the program captures.
    fork: OwnedEvent,
    join: OwnedEvent,
}

impl Captures {
    pub(super) fn new(devices: usize) -> Captures {
        let branches =
            || Branches { each: (0..devices).map(|_| OnceLock::new()).collect(), owner: Mutex::new(None) };
        Captures { all: [(); STREAMS].map(|()| branches()), idle: Load::new() }
    }

    /// Makes the branches of a GPU, if they are not made.
    pub(super) fn open(&self, driver: &Arc<dyn Driver>, device: DeviceId) -> Result<()> {
        for branches in &self.all {
            let Some(place) = branches.place(device).filter(|place| place.get().is_none()) else { continue };
            let event = || OwnedEvent::new(driver, device, EventKind::Plain);
            let (fork, join) = (event()?, event()?);
            let _ = place.set(Branch { stream: OwnedStream::new(driver, device)?, fork, join });
        }
        Ok(())
    }

    /// The branches of a capturing stream; `None` where all are in other captures.
    fn of(
        &self,
        driver: &dyn Driver,
        capture: u64,
        stream: StreamId,
    ) -> Option<(&Branches, MutexGuard<'_, Owner>)> {
        let owner = Some((capture, stream));
        let tried = || self.all.iter().filter_map(|branches| Some((branches, branches.owner.try_lock()?)));
        if let Some(own) = tried().find(|(_, of)| **of == owner) {
            return Some(own);
        }
        let (branches, mut of) = tried().find(|(branches, _)| branches.are_free(driver))?;
        *of = owner;
        Some((branches, of))
    }
}

impl Branches {
    /// Whether no capture records any of them.
    fn are_free(&self, driver: &dyn Driver) -> bool {
        self.each.iter().filter_map(OnceLock::get).all(|branch| {
            let state = driver.capture_state(branch.stream.device(), branch.stream.id());
            matches!(state, Ok(CaptureState::None))
        })
    }

    fn get(&self, device: DeviceId) -> Option<&Branch> {
        self.place(device)?.get()
    }

    fn place(&self, device: DeviceId) -> Option<&OnceLock<Branch>> {
        self.each.get(usize::try_from(device.0).ok()?)
    }
}

impl Engine {
    /// Records a copy between pinned memory and a GPU; false, and nothing recorded, where a single node is better.
    ///
    /// # Errors
    /// The driver's: the capture is broken, or not all of the copy is recorded.
    pub(super) fn copy_captured(
        &self,
        to: &Span,
        from: &Span,
        on: UserStream,
        path: Path,
        capture: u64,
    ) -> Result<bool> {
        let Path { target, direction, .. } = path;
        let reach =
            self.kernels.reaching([to.side(), from.side()].into_iter()).intersection(self.relays.usable());
        let reach = reach.without(DeviceSet::of(target));
        let (size, load) = (to.size(), &self.captures.idle);
        let shares =
            split(&self.graph(), &Ask { target, direction, size, zero_staging: reach, staged: reach, load });
        if shares.iter().all(|share| share.way == Way::Direct) {
            return Ok(false);
        }
        let Some((branches, _owned)) = self.captures.of(&*self.driver, capture, on.id) else {
            return Ok(false);
        };
        let Some(fork) = branches.get(on.device).map(|branch| &branch.fork) else { return Ok(false) };
        if fork.record(on.raw).is_err() {
            return Ok(false);
        }
        let mut outcome = Ok(());
        for share in &shares {
            let ends = (to.part(share.offset, share.size), from.part(share.offset, share.size));
            let (Some(to), Some(from)) = ends else { continue };
            let path = Path { target, relay: share.relay, direction, way: share.way };
            let branch = branches.get(share.relay).filter(|_| share.way != Way::Direct);
            let recorded = branch.map(|branch| self.record(branch, fork, on, &to, &from));
            match recorded {
                Some(Ok(true)) => self.counters.sent(path, share.size, 1),
                Some(Err(error)) => outcome = Err(error),
                None | Some(Ok(false)) => {
                    self.native_twice(&to, &from, on)?;
                    self.counters.sent(Path { relay: target, way: Way::Direct, ..path }, share.size, 1);
                }
            }
        }
        self.counters.split();
        tracing::debug!(
            target: "glake::transfer",
            %size, %target, ?direction, paths = shares.len(), "a copy over several links, into a graph"
        );
        outcome.map(|()| true)
    }

    /// Records a share on a branch; false where it has to be recorded elsewhere.
    fn record(
        &self,
        branch: &Branch,
        fork: &OwnedEvent,
        on: UserStream,
        to: &Span,
        from: &Span,
    ) -> Result<bool> {
        let Some(gather) = self.kernels.get(branch.stream.device()) else { return Ok(false) };
        if branch.stream.wait_for(fork.id()).is_err() {
            return Ok(false);
        }
        let recorded = gather.copy(branch.stream.id(), to, from).is_ok();
        // The branch is part of the capture now: without a join the capture would fail.
        let join = || {
            branch.join.record(branch.stream.id())?;
            self.driver.stream_wait_event(on.device, on.raw, branch.join.id())
        };
        join().or_else(|_| join())?;
        Ok(recorded)
    }
}
