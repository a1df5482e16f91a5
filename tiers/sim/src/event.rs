//! Events: marks in the work of streams.
//!
//! Invariant: an event refers to its latest record only; an older record still in flight has no effect.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::context::ContextId;
use super::denial::{Checked, refuse};
use super::order::VectorClock;
use super::timeline::Point;
use glake_device::{Address, Event, Refusal};

/// Place that an event marks.
#[derive(Clone, Debug, Default)]
pub(super) enum Mark {
    /// Never recorded: counts as completed.
    #[default]
    Never,
    /// The end of all of these points.
    At(Vec<Point>),
    /// A place in the capture with this id, behind these operations; it has no time.
    Captured(u64, Vec<usize>),
}

#[derive(Debug)]
pub(super) struct Marked {
    pub(super) context: ContextId,
    pub(super) timed: bool,
    pub(super) mark: Mark,
    /// Work ordered before the event.
    pub(super) clock: VectorClock,
    /// Completion time in nanoseconds; `None` before.
    pub(super) at: Option<u64>,
    record: u64,
}

#[derive(Debug, Default)]
pub(super) struct Events {
    table: HashMap<Event, Marked>,
}

static NEXT: AtomicU64 = AtomicU64::new(1);

impl Events {
    pub(super) fn create(&mut self, context: ContextId, timed: bool) -> Event {
        let event = Event(NEXT.fetch_add(1, Relaxed) << 4);
        let clock = VectorClock::default();
        self.table.insert(event, Marked { context, timed, mark: Mark::Never, clock, at: None, record: 0 });
        event
    }

    pub(super) fn destroy(&mut self, context: ContextId, event: Event) -> Checked<()> {
        self.of(context, event)?;
        self.table.remove(&event);
        Ok(())
    }

    /// Returns the number of events created in a context.
    pub(super) fn made_in(&self, context: ContextId) -> u64 {
        self.table.values().filter(|marked| marked.context == context).count() as u64
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// Looks up an event, whatever context it belongs to.
    pub(super) fn get(&self, event: Event) -> Checked<&Marked> {
        match self.table.get(&event) {
            Some(marked) => Ok(marked),
            None => refuse(Address(0), Refusal::UnknownHandle),
        }
    }

    /// Returns an event that must belong to this context.
    pub(super) fn of(&self, context: ContextId, event: Event) -> Checked<&Marked> {
        match self.get(event)? {
            marked if marked.context == context => Ok(marked),
            _ => refuse(Address(0), Refusal::UnknownHandle),
        }
    }

    /// Begins a new record; returns its number for [`Events::pass`].
    pub(super) fn record(&mut self, event: Event, mark: Mark, clock: VectorClock) -> u64 {
        let Some(marked) = self.table.get_mut(&event) else { return 0 };
        marked.mark = mark;
        marked.clock = clock;
        marked.at = None;
        marked.record += 1;
        marked.record
    }

    /// Sets the points that a new record marks.
    pub(super) fn place(&mut self, event: Event, points: Vec<Point>) {
        if let Some(marked) = self.table.get_mut(&event) {
            marked.mark = Mark::At(points);
        }
    }

    /// Sets the completion time of a record.
    pub(super) fn pass(&mut self, event: Event, record: u64, now: u64) {
        if let Some(marked) = self.table.get_mut(&event).filter(|marked| marked.record == record) {
            marked.at = Some(now);
        }
    }
}
