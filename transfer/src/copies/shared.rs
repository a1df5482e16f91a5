//! State shared by all kinds of copies of an engine.

use std::sync::Arc;

use glake_device::owned::{CompletionEvents, DeviceSet};

use crate::copies::handle::{EventPool, Parts};
use crate::copies::native::NativeCopies;
use crate::copies::pageable::Staging;
use crate::copies::resources::Resources;
use crate::links::Links;
use crate::links::contexts::Contexts;
use crate::links::lane_sets::LaneSets;
use crate::links::ledger::Ledger;
use crate::links::relays::Relays;
use crate::links::requests::Requests;
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
