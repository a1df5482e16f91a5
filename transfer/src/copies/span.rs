//! Copy between two spans or between a few large ones, dispatched to its kind.

use std::sync::Arc;

use glake_device::CaptureState;
use glake_device::owned::Span;
use glake_units::Bytes;

use crate::copies::captured::CapturedCopies;
use crate::copies::handle::Parts;
use crate::copies::pageable::PageableCopies;
use crate::copies::pinned::{Job, PinnedCopies};
use crate::copies::shared::{Host, Route, Shared, check_sizes};
use crate::paths::Load;
use crate::{Priority, Result, UserStream};

/// Minimum range size that justifies a driver copy each.
const LARGE: Bytes = Bytes::mib(1);
/// Maximum number of ranges. With more, parts that lanes reject would become too many copies on the stream.
const FEW: usize = 32;

/// Span copies of one engine.
#[derive(Debug)]
pub(crate) struct SpanCopies {
    pub(crate) shared: Arc<Shared>,
    pinned: PinnedCopies,
    pageable: PageableCopies,
    /// `None` if captured copies are single nodes.
    captured: Option<CapturedCopies>,
}

impl SpanCopies {
    /// Creates the span copies. If `graphs` is set, captured copies may be split.
    pub(crate) fn new(shared: &Arc<Shared>, graphs: bool) -> SpanCopies {
        SpanCopies {
            pinned: PinnedCopies { shared: shared.clone() },
            pageable: PageableCopies::new(shared),
            captured: graphs.then(|| CapturedCopies { shared: shared.clone(), idle: Load::new() }),
            shared: shared.clone(),
        }
    }

    /// Enqueues a copy. Returns its parts if it was split.
    ///
    /// # Errors
    /// As [`crate::Engine::copy`].
    pub(crate) fn enqueue(
        &self,
        to: &Span,
        from: &Span,
        on: UserStream,
        priority: Priority,
    ) -> Result<Option<Parts>> {
        check_sizes(to, from)?;
        let route = Route::between(to.kind(), from.kind());
        self.shared.links.begin_copy(on)?;
        if let Some(route @ Route { host: Host::Pageable, .. }) = route
            && self.pageable.copy(to, from, on, route, priority)?
        {
            self.shared.traffic.begin();
            return Ok(None);
        }
        let _call = self.shared.traffic.urgent_call(priority);
        if let Some(route @ Route { target, host: Host::Pinned, .. }) = route
            && (self.shared.routes.may_split(target, to.size()) || self.shared.traffic.minds_others(priority))
        {
            // A failed query counts as capturing.
            match self.shared.contexts.driver().capture_state(on.device, on.raw) {
                Ok(CaptureState::None) => {
                    return self.pinned.copy(Job::one(&[(to, from)], on, route), priority);
                }
                Ok(CaptureState::Active(capture)) if self.shared.routes.may_split(target, to.size()) => {
                    if let Some(captured) = &self.captured
                        && captured.copy(to, from, on, route, capture)?
                    {
                        return Ok(None);
                    }
                }
                Ok(CaptureState::Active(_) | CaptureState::Invalidated) | Err(_) => {}
            }
        }
        self.shared.native.copy(to, from, on)?;
        Ok(None)
    }

    /// Combines a few large ranges into one copy that may be split; `None` if they are many or small on average, are not between pinned
    /// memory and one GPU, or have only one link.
    pub(crate) fn as_one<'a>(
        &self,
        ranges: &'a [(&'a Span, &'a Span)],
        on: UserStream,
        unordered: bool,
    ) -> Option<Job<'a>> {
        let job = Job::list(ranges, on, unordered)?;
        let (target, size) = job.asked();
        let mean = Bytes::new(size.get() / ranges.len() as u64);
        let are_few_and_large = ranges.len() <= FEW && mean >= LARGE;
        // A graph keeps single copies.
        (are_few_and_large && self.shared.routes.may_split(target, size) && self.shared.contexts.is_plain(on))
            .then_some(job)
    }

    /// Enqueues a combined copy. Returns its parts if it was split.
    ///
    /// # Errors
    /// As [`crate::Engine::copy`].
    pub(crate) fn enqueue_as_one(&self, job: Job<'_>, priority: Priority) -> Result<Option<Parts>> {
        self.shared.links.begin_copy(job.on())?;
        let _call = self.shared.traffic.urgent_call(priority);
        self.pinned.copy(job, priority)
    }

    /// Stops the threads of pageable copies.
    pub(crate) fn stop(&self) {
        self.pageable.stop();
    }
}
