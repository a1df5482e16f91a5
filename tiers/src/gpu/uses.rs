//! Use holds: events on the streams that freed blocks were recorded on.
//!
//! ```text
//! stream:   write ─┬──────────── free ─┬─ malloc, once the event has passed ─ write …
//! recorded:        └─ read ─────────── event       any other stream, unmapping: once the completion point has passed
//! ```
//!
//! The event is recorded at the free. The host queries it at a miss and at a tick. The block's own stream never waits for it on the GPU:
//! the recorded stream may itself wait for later work of that one.
//!
//! Invariant: a use without an event here ends with its completion point. That is the case if the event cannot be recorded (a capture is
//! open, the stream is gone or belongs to another GPU, the driver refuses), or if a later query fails.

use std::sync::Arc;

use glake_device::owned::OwnedEvent;
use glake_device::{DriverError, EventKind, Stream, StreamId};
use glake_stitch::{PointNumber, Request, StreamKey, StreamUse};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::PoolStream;
use super::core::Core;
use super::holds::{HoldEvent, HoldEvents};
use super::retry::retry;

/// Events of stream uses.
#[derive(Debug, Default)]
pub(super) struct UseEvents {
    pending: HoldEvents,
    /// Driver handles of the streams that blocks were recorded on.
    handles: Mutex<FxHashMap<StreamKey, Stream>>,
    /// Completed events, for reuse.
    idle: Mutex<Vec<OwnedEvent>>,
}

impl UseEvents {
    /// Registers the handle of a stream that a block is recorded on. Returns whether it is new.
    pub(super) fn know(&self, stream: PoolStream) -> bool {
        self.handles.lock().insert(stream.key, stream.raw) != Some(stream.raw)
    }

    /// Keeps the events of finished uses for reuse, unless another thread still queries one.
    fn keep(&self, passed: Vec<HoldEvent>) {
        let events = passed.into_iter().filter_map(|(_, event)| Arc::into_inner(event));
        self.idle.lock().extend(events);
    }
}

impl Core {
    /// Records the events of uses that frees have left behind.
    #[cold]
    pub(super) fn mark_uses(&self, uses: &[StreamUse]) {
        // A poisoned pool hands out no memory again.
        for used in uses.iter().filter(|_| self.usable().is_ok()) {
            let handle = self.uses().handles.lock().get(&used.stream).copied();
            let Some(stream) = handle else { continue };
            match self.record_use(stream, id_of(used.stream)) {
                Ok(event) => _ = self.uses().pending.add(used.hold, &Arc::new(event), id_of(used.stream)),
                Err(error) => {
                    if error.is_gone() {
                        self.uses().handles.lock().remove(&used.stream);
                    }
                    tracing::debug!(target: "glake::completion", %error, "a recorded stream has no event");
                }
            }
        }
    }

    fn record_use(&self, stream: Stream, id: StreamId) -> std::result::Result<OwnedEvent, DriverError> {
        let idle = self.uses().idle.lock().pop();
        let new = || OwnedEvent::new(self.driver(), self.device(), EventKind::Plain);
        let event = idle.map_or_else(|| retry(new), Ok)?;
        match retry(|| self.completion_events().record_event(&event, stream, id)) {
            Ok(()) => Ok(event),
            Err(error) => {
                self.uses().idle.lock().push(event);
                Err(error)
            }
        }
    }

    /// Tells the allocator which uses have ended.
    ///
    /// # Errors
    /// The driver's error if the context is lost.
    pub(super) fn poll_uses(&self) -> std::result::Result<(), DriverError> {
        loop {
            match self.poll_events(&self.uses().pending) {
                Ok(passed) => {
                    self.uses().keep(passed);
                    return Ok(());
                }
                Err((_, error)) if error.is_sticky() => return Err(error),
                Err((hold, _)) => self.uses().pending.remove(hold),
            }
        }
    }

    /// Returns the first use with an event that withholds bytes from the request's stream which were freed up to a completion point.
    pub(super) fn first_use(&self, request: &Request, upto: PointNumber) -> Option<HoldEvent> {
        let mut holds = self.lock().withheld_by(request, upto);
        holds.sort_unstable();
        holds.into_iter().find_map(|hold| Some((hold, self.uses().pending.event(hold)?)))
    }

    /// Waits on the host until a use has ended.
    ///
    /// # Errors
    /// The driver's error if the context is lost.
    pub(super) fn wait_use(&self, (hold, event): HoldEvent) -> std::result::Result<(), DriverError> {
        match retry(|| event.synchronize()) {
            Err(error) if !error.is_sticky() => self.uses().pending.remove(hold),
            waited => waited?,
        }
        // The event can be reused once no thread queries it.
        drop(event);
        self.poll_uses()
    }
}

fn id_of(key: StreamKey) -> StreamId {
    StreamId(key.0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use glake_device::owned::OwnedStream;
    use glake_device::{DeviceId, Verb};
    use glake_stitch::Allocator;
    use glake_units::Bytes;

    use super::super::fixture::{OWN, Parts};
    use super::*;

    const SIZE: Bytes = Bytes::mib(4);

    fn stream_of(parts: &Parts, stream: &OwnedStream, device: DeviceId) -> PoolStream {
        PoolStream::of(&*parts.driver, device, stream.id()).unwrap()
    }

    /// Frees a block of stream 1 that was recorded on another stream. Returns how many of its uses have an event.
    fn freed(parts: &Parts, on: PoolStream) -> usize {
        let offset = take(parts).unwrap_or_else(|| parts.grow(SIZE));
        assert!(parts.core.lock().record_stream(offset, on.key));
        parts.core.uses().know(on);
        let freed = parts.core.free(offset).unwrap();
        assert_eq!(freed.uses.len(), 1);
        parts.core.mark_uses(&freed.uses);
        parts.core.uses().pending.count()
    }

    fn take(parts: &Parts) -> Option<Bytes> {
        let request = Request { size: SIZE, stream: StreamKey(1), domain: Allocator::default_domain() };
        parts.core.take(&request).map(|grant| grant.offset)
    }

    fn is_free(parts: &Parts) -> bool {
        take(parts).is_some_and(|block| parts.core.free(block).is_ok())
    }

    #[test]
    fn a_use_is_over_with_its_stream_s_work_and_its_event_serves_the_next() {
        let parts = Parts::new();
        let on = stream_of(&parts, &parts.stream, OWN);
        for _ in 0..3 {
            let time = Duration::from_millis(1);
            parts.sim.enqueue_kernel(OWN, on.raw, &[], &[], time, |_| {}).unwrap();
            assert_eq!(freed(&parts, on), 1);
            parts.core.poll_uses().unwrap();
            assert!(!is_free(&parts));
            parts.stream.synchronize().unwrap();
            parts.core.poll_uses().unwrap();
            assert!(is_free(&parts));
            assert_eq!((parts.core.uses().pending.count(), parts.core.uses().idle.lock().len()), (0, 1));
        }
    }

    #[test]
    fn a_handle_that_names_another_stream_or_one_of_another_gpu_marks_nothing() {
        let parts = Parts::new();
        let other = OwnedStream::new(&parts.driver, DeviceId(1)).unwrap();
        let own = stream_of(&parts, &parts.stream, OWN);
        let of_another = PoolStream { key: StreamKey(own.key.0 + 1000), ..own };
        for on in [of_another, stream_of(&parts, &other, DeviceId(1))] {
            assert_eq!(freed(&parts, on), 0);
            assert!(!is_free(&parts), "its completion point tells");
        }
    }

    #[test]
    fn a_use_that_the_driver_does_not_answer_for_is_asked_for_once() {
        let parts = Parts::new();
        assert_eq!(freed(&parts, stream_of(&parts, &parts.stream, OWN)), 1);
        let fails = |when| glake_device::Fault {
            verb: Some(Verb::EventQuery),
            when,
            error: glake_device::Injected::Failed(999),
        };
        parts.faults.set(&[fails(glake_device::When::From(1))]);
        parts.core.poll_uses().unwrap();
        parts.core.poll_uses().unwrap();
        assert_eq!((parts.faults.injected(), parts.core.uses().pending.count()), (1, 0));
        parts.faults.set(&[]);
        parts.core.poll_uses().unwrap();
        assert!(!is_free(&parts), "its completion point tells");
    }
}
