//! Whose turn it is on the links: what the priority of a copy makes of its parts.
//!
//! ```text
//!   Background        each part in slices, each slice behind the gate of its link
//!   Normal, Critical  while background copies are under way: the gates of its links are shut from its begin to its end
//! ```
//!
//! A copy engine stays with a stream that has work queued: on an H200, a copy beside another stream's queued slices of 4 MiB took
//! tens of milliseconds instead of a tenth. So normal copies shut gates too.
//!
//! Invariant: a gate that a turn shut is opened by a stream behind the part, or by the turn's end.

use glake_device::DeviceId;
use glake_device::owned::{DeviceSet, StreamRef};
use glake_units::Bytes;

use super::Priority;
use super::gates::{Gates, Ticket};
use crate::graph::Direction;

/// The slices of a background copy, by direction: another copy waits on each link for one of each stream that has them. Copies to
/// the host are bounded by what it writes in all, so that slices on other links hold them up too. Smaller ones would take more of the
/// processor than they give.
const SLICES: [Bytes; 2] = [Bytes::mib(1), Bytes::kib(512)];
/// While other copies come again and again: of all links together, so much at a time.
const NEAR: Bytes = Bytes::mib(1);
/// Slices are not smaller.
const LEAST: Bytes = Bytes::kib(256);

/// One copy's.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    gates: Option<&'a Gates>,
    direction: Direction,
    kind: Kind,
    /// Of the copy: what it has on a link at most.
    size: Bytes,
    /// Links whose gate it shut, and that no stream was told to open yet.
    shut: DeviceSet,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Nobody gives way.
    Alone,
    Foreground,
    Background {
        ticket: Option<Ticket>,
        slice: Bytes,
    },
}

impl<'a> Turn<'a> {
    /// Of a copy that takes no turns.
    pub(super) fn alone() -> Turn<'a> {
        let shut = DeviceSet::EMPTY;
        Turn { gates: None, direction: Direction::ToGpu, kind: Kind::Alone, size: Bytes::ZERO, shut }
    }

    /// The turn of a copy of so many bytes that is about to be enqueued, over so many links at most.
    pub(super) fn of(
        gates: Option<&'a Gates>,
        priority: Priority,
        direction: Direction,
        size: Bytes,
        links: u32,
    ) -> Turn<'a> {
        let kind = match (gates, priority) {
            (None, _) => Kind::Alone,
            (Some(gates), Priority::Background) => {
                let most = SLICES[direction.index()];
                let near = || Bytes::new(NEAR.get() / u64::from(links.max(1))).max(LEAST).min(most);
                let slice = if gates.are_called() { near() } else { most };
                Kind::Background { ticket: gates.enter(), slice }
            }
            (Some(gates), Priority::Normal | Priority::Critical) if gates.is_needed() => Kind::Foreground,
            (Some(_), Priority::Normal | Priority::Critical) => Kind::Alone,
        };
        Turn { gates, direction, kind, size, shut: DeviceSet::EMPTY }
    }

    /// Whether it neither gives way nor is given way to.
    pub(super) fn is_alone(&self) -> bool {
        matches!(self.kind, Kind::Alone)
    }

    /// Whether it gives way.
    pub(super) fn is_background(&self) -> bool {
        matches!(self.kind, Kind::Background { .. })
    }

    /// Whether others give way to it.
    pub(super) fn is_foreground(&self) -> bool {
        matches!(self.kind, Kind::Foreground)
    }

    /// What is enqueued at a time at most.
    pub(super) fn slice(&self) -> Bytes {
        match self.kind {
            Kind::Background { slice, .. } => slice,
            Kind::Alone | Kind::Foreground => Bytes::MAX,
        }
    }

    /// Shuts the gates of links now: of a copy that nothing keeps from running.
    pub(super) fn shut_now(&mut self, links: impl Iterator<Item = DeviceId>) {
        if let (Some(gates), Kind::Foreground) = (self.gates, self.kind) {
            for link in links {
                gates.shut(link, self.direction, self.size);
                self.shut = self.shut.union(DeviceSet::of(link));
            }
        }
    }

    /// Before a part, or a slice of one, is enqueued on a stream of a link.
    ///
    /// # Errors
    /// The driver's: the slice must not be enqueued here.
    pub(super) fn before(&mut self, on: StreamRef<'_>) -> glake_device::Result<()> {
        let link = on.device();
        let Some(gates) = self.gates else { return Ok(()) };
        match self.kind {
            Kind::Alone => {}
            Kind::Background { .. } => {
                gates.let_pass();
                gates.await_on(self.direction, on)?;
                gates.let_pass();
            }
            Kind::Foreground => {
                // A gate that cannot be shut costs time and nothing else.
                if !self.shut.contains(link) && gates.shut_on(self.direction, on, self.size).is_ok() {
                    self.shut = self.shut.union(DeviceSet::of(link));
                }
            }
        }
        Ok(())
    }

    /// All of this copy's work on a stream of a link is enqueued.
    pub(super) fn after(&mut self, on: StreamRef<'_>) {
        if let Some(gates) = self.gates.filter(|_| self.shut.contains(on.device())) {
            gates.open_on(self.direction, on);
            self.shut = self.shut.without(DeviceSet::of(on.device()));
        }
    }

    /// The copy is enqueued, and ends where its stream is now.
    pub(super) fn end(&mut self, on: StreamRef<'_>) {
        if let (Some(gates), Kind::Background { ticket, .. }) = (self.gates, &mut self.kind)
            && let Some(ticket) = ticket.take()
        {
            gates.leave_on(ticket, on);
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let Some(gates) = self.gates else { return };
        for link in self.shut.iter() {
            gates.open(link, self.direction);
        }
        if let Kind::Background { ticket: Some(ticket), .. } = self.kind {
            gates.leave(ticket);
        }
    }
}
