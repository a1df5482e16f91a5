//! State shared by all kinds of copies of an engine, and the route of a copy: which of its ends is host memory, and which GPU it concerns.

use std::sync::Arc;

use glake_device::owned::{CompletionEvents, DeviceSet, Span};
use glake_device::{DeviceId, PointerKind};

use crate::copies::handle::{EventPool, Parts};
use crate::copies::native::NativeCopies;
use crate::copies::pageable::staging::Staging;
use crate::copies::resources::Resources;
use crate::links::lane_sets::LaneSets;
use crate::links::ledger::{Ledger, Path};
use crate::links::relays::Relays;
use crate::links::requests::Requests;
use crate::links::{Contexts, Links};
use crate::paths::{Direction, Way};
use crate::traffic::Traffic;
use crate::traffic::routes::Routes;
use crate::{CopyHandle, CopyOptions, EngineOptions, Result, TransferError, UserStream};

/// State of an engine that its copies share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) contexts: Arc<Contexts>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) routes: Arc<Routes>,
    pub(crate) links: Links,
    pub(crate) traffic: Arc<Traffic>,
    pub(crate) native: NativeCopies,
    pub(crate) resources: Resources,
    /// Events that mark the ends of copies.
    pub(crate) marks: Arc<EventPool>,
    pub(crate) requests: Arc<Requests>,
}

impl Shared {
    /// Creates the state of an engine. Creates no context.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn new(
        completion_events: Arc<CompletionEvents>,
        options: &EngineOptions,
    ) -> Result<Arc<Shared>> {
        let contexts = Contexts::new(completion_events)?;
        let devices = contexts.devices();
        let requests = Arc::new(Requests::default());
        let relays = Arc::new(Relays::new(devices, options.relays, options.shared_gpus));
        let ledger = Ledger::new(&relays, devices);
        let routes = Routes::new(&relays, options.break_even);
        let traffic = Traffic::new(&ledger, &routes, &requests, devices);
        let lane_sets = LaneSets::new(&ledger, traffic.clone());
        let staging = Staging::new(&contexts, options.pageable_threads, options.pageable_slots);
        Ok(Arc::new(Shared {
            links: Links::new(&contexts, &relays, lane_sets, &ledger, &requests, options.streams),
            native: NativeCopies::new(&contexts, &ledger),
            resources: Resources::new(&contexts, &requests, staging, options.lists),
            marks: EventPool::new(contexts.driver().clone()),
            contexts,
            ledger,
            routes,
            traffic,
            requests,
        }))
    }

    /// Includes a copy on a program's stream in later completion points, also after an error: a part of the copy may be enqueued.
    pub(crate) fn covered<T>(&self, enqueued: Result<T>, memory: DeviceSet, on: UserStream) -> Result<T> {
        let told = self.contexts.program().enqueued_on(memory, (on.device, on.raw));
        let enqueued = enqueued?;
        told?;
        Ok(enqueued)
    }

    /// Returns a handle for a copy that was just enqueued.
    pub(crate) fn handle(
        &self,
        on: UserStream,
        options: CopyOptions,
        parts: Option<Parts>,
    ) -> Result<CopyHandle> {
        if options.waited {
            match self.marks.mark(on).or_else(|_| self.marks.mark(on)) {
                Ok(mark) => return Ok(CopyHandle::marked(mark, parts)),
                Err(TransferError::Driver(error)) if !error.is_sticky() => {
                    tracing::debug!(target: "glake::transfer", %error, "a handle waits for its whole stream");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(CopyHandle::unmarked(self.contexts.driver(), on, parts))
    }
}

/// Route of a copy between the host and one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// GPU whose memory is copied.
    pub(crate) target: DeviceId,
    pub(crate) direction: Direction,
    pub(crate) host: Host,
}

/// Kind of the host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    /// Registered with the driver.
    Pinned,
    Pageable,
}

impl Route {
    /// Returns the route between two kinds of memory; `None` unless one is the host's and the other a GPU's.
    pub(crate) fn between(to: PointerKind, from: PointerKind) -> Option<Route> {
        let (target, direction, host) = match (to, from) {
            (PointerKind::Device { device, .. }, host) => (device, Direction::ToGpu, host),
            (host, PointerKind::Device { device, .. }) => (device, Direction::FromGpu, host),
            _ => return None,
        };
        let host = match host {
            PointerKind::Pinned => Host::Pinned,
            PointerKind::Pageable => Host::Pageable,
            PointerKind::Device { .. } | PointerKind::Managed => return None,
        };
        Some(Route { target, direction, host })
    }

    /// Like [`Route::between`], for pinned host memory only.
    pub(crate) fn pinned(to: PointerKind, from: PointerKind) -> Option<Route> {
        Route::between(to, from).filter(|route| route.host == Host::Pinned)
    }

    /// Returns the path over the link of `relay`.
    pub(crate) fn path(self, relay: DeviceId, way: Way) -> Path {
        Path { target: self.target, relay, direction: self.direction, way }
    }

    /// Returns the path over the target's own link.
    pub(crate) fn own_path(self) -> Path {
        self.path(self.target, Way::Direct)
    }
}

/// Checks that both ends of a copy have the same size.
///
/// # Errors
/// [`TransferError::SizesDiffer`].
pub(crate) fn check_sizes(to: &Span, from: &Span) -> Result<()> {
    match (to.size(), from.size()) {
        (to, from) if to != from => Err(TransferError::SizesDiffer { to, from }),
        _ => Ok(()),
    }
}
