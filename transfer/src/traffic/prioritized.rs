//! Effect of a copy's priority on its parts.
//!
//! ```text
//!   Background        each part in slices, each slice behind the barrier of its link
//!   Normal, Critical  while background copies are in flight: the barriers of its links are closed from its begin to its end
//! ```
//!
//! A copy engine stays with a stream that has work queued: on an H200, a copy next to another stream's queued slices of 4 MiB took
//! tens of milliseconds instead of a tenth. Therefore normal copies close barriers too.
//!
//! Invariant: a barrier that a copy closes is opened by a stream after the part, or by the copy's end.

use glake_device::DeviceId;
use glake_device::owned::{DeviceSet, StreamRef};
use glake_units::Bytes;

use crate::Priority;
use crate::paths::Direction;
use crate::traffic::barriers::{Barriers, Ticket};

/// Slice size of background copies, by direction. Another copy waits on each link for one slice of each stream that has some; copies to the
/// host wait for slices on other links too, because the host's write rate limits them all. Smaller slices would cost more processor time
/// than they gain.
const SLICES: [Bytes; 2] = [Bytes::mib(1), Bytes::kib(512)];
/// Bytes in flight at a time on all links together while other copies arrive continually.
const NEAR: Bytes = Bytes::mib(1);
/// Minimum slice size.
const LEAST: Bytes = Bytes::kib(256);

/// Priority state of one copy.
#[derive(Debug)]
pub(crate) struct Prioritized<'a> {
    barriers: Option<&'a Barriers>,
    direction: Direction,
    kind: Kind,
    /// Maximum bytes of the copy on one link.
    size: Bytes,
    /// Links whose barriers the copy has closed and no stream will open yet.
    shut: DeviceSet,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Takes no turns with other copies.
    Alone,
    Foreground,
    Background {
        ticket: Option<Ticket>,
        slice: Bytes,
    },
}

impl<'a> Prioritized<'a> {
    /// Creates the state of a copy that takes no turns.
    pub(crate) fn alone() -> Prioritized<'a> {
        let shut = DeviceSet::EMPTY;
        Prioritized {
            barriers: None,
            direction: Direction::ToGpu,
            kind: Kind::Alone,
            size: Bytes::ZERO,
            shut,
        }
    }

    /// Creates the state of a copy of `size` bytes over at most `links` links.
    pub(crate) fn of(
        barriers: Option<&'a Barriers>,
        priority: Priority,
        direction: Direction,
        size: Bytes,
        links: u32,
    ) -> Prioritized<'a> {
        let kind = match (barriers, priority) {
            (None, _) => Kind::Alone,
            (Some(barriers), Priority::Background) => {
                let most = SLICES[direction.index()];
                let near = || Bytes::new(NEAR.get() / u64::from(links.max(1))).max(LEAST).min(most);
                let slice = if barriers.have_urgent_calls() { near() } else { most };
                Kind::Background { ticket: barriers.begin_background(), slice }
            }
            (Some(barriers), Priority::Normal | Priority::Critical) if barriers.is_needed() => {
                Kind::Foreground
            }
            (Some(_), Priority::Normal | Priority::Critical) => Kind::Alone,
        };
        Prioritized { barriers, direction, kind, size, shut: DeviceSet::EMPTY }
    }

    /// Returns whether the copy takes no turns.
    pub(crate) fn is_alone(&self) -> bool {
        matches!(self.kind, Kind::Alone)
    }

    /// Returns whether the copy yields to others.
    pub(crate) fn is_background(&self) -> bool {
        matches!(self.kind, Kind::Background { .. })
    }

    /// Returns whether others yield to the copy.
    pub(crate) fn is_foreground(&self) -> bool {
        matches!(self.kind, Kind::Foreground)
    }

    /// Returns the maximum size of one driver copy.
    pub(crate) fn slice(&self) -> Bytes {
        match self.kind {
            Kind::Background { slice, .. } => slice,
            Kind::Alone | Kind::Foreground => Bytes::MAX,
        }
    }

    /// Closes the barriers of links immediately, for a copy that nothing delays.
    pub(crate) fn shut_now(&mut self, links: impl Iterator<Item = DeviceId>) {
        if let (Some(barriers), Kind::Foreground) = (self.barriers, self.kind) {
            for link in links {
                barriers.shut(link, self.direction, self.size);
                self.shut = self.shut.union(DeviceSet::of(link));
            }
        }
    }

    /// Waits for the copy's turn before a part or slice is enqueued on a stream of a link.
    ///
    /// # Errors
    /// The driver's: the slice must not be enqueued here.
    pub(crate) fn before(&mut self, on: StreamRef<'_>) -> glake_device::Result<()> {
        let link = on.device();
        let Some(barriers) = self.barriers else { return Ok(()) };
        match self.kind {
            Kind::Alone => {}
            Kind::Background { .. } => {
                barriers.yield_to_urgent();
                barriers.await_on(self.direction, on)?;
                barriers.yield_to_urgent();
            }
            Kind::Foreground => {
                // A barrier that cannot be shut costs time and nothing else.
                if !self.shut.contains(link) && barriers.shut_on(self.direction, on, self.size).is_ok() {
                    self.shut = self.shut.union(DeviceSet::of(link));
                }
            }
        }
        Ok(())
    }

    /// Opens the copy's barrier after its last work on a stream of a link.
    pub(crate) fn after(&mut self, on: StreamRef<'_>) {
        if let Some(barriers) = self.barriers.filter(|_| self.shut.contains(on.device())) {
            barriers.open_on(self.direction, on);
            self.shut = self.shut.without(DeviceSet::of(on.device()));
        }
    }

    /// Records the end of the copy at the current end of its stream.
    pub(crate) fn end(&mut self, on: StreamRef<'_>) {
        if let (Some(barriers), Kind::Background { ticket, .. }) = (self.barriers, &mut self.kind)
            && let Some(ticket) = ticket.take()
        {
            barriers.end_background_on(ticket, on);
        }
    }
}

impl Drop for Prioritized<'_> {
    fn drop(&mut self) {
        let Some(barriers) = self.barriers else { return };
        for link in self.shut.iter() {
            barriers.open(link, self.direction);
        }
        if let Kind::Background { ticket: Some(ticket), .. } = self.kind {
            barriers.end_background(ticket);
        }
    }
}
