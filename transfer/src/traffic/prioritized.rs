//! What the priority of a copy makes of its parts on the links.
//!
//! ```text
//!   Background        each part in slices, each slice behind the barrier of its link
//!   Normal, Critical  while background copies are under way: the barriers of its links are shut from its begin to its end
//! ```
//!
//! A copy engine stays with a stream that has work queued: on an H200, a copy beside another stream's queued slices of 4 MiB took
//! tens of milliseconds instead of a tenth. So normal copies shut barriers too.
//!
//! Invariant: a barrier that a copy shut is opened by a stream behind the part, or by the copy's end.

use glake_device::DeviceId;
use glake_device::owned::{DeviceSet, StreamRef};
use glake_units::Bytes;

use crate::Priority;
use crate::paths::Direction;
use crate::traffic::barriers::{Barriers, Ticket};

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
pub(crate) struct Prioritized<'a> {
    barriers: Option<&'a Barriers>,
    direction: Direction,
    kind: Kind,
    /// Of the copy: what it has on a link at most.
    size: Bytes,
    /// Links whose barrier it shut, and that no stream was told to open yet.
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

impl<'a> Prioritized<'a> {
    /// Of a copy that takes no turns.
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

    /// Of a copy of so many bytes that is about to be enqueued, over so many links at most.
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

    /// Whether it neither gives way nor is given way to.
    pub(crate) fn is_alone(&self) -> bool {
        matches!(self.kind, Kind::Alone)
    }

    /// Whether it gives way.
    pub(crate) fn is_background(&self) -> bool {
        matches!(self.kind, Kind::Background { .. })
    }

    /// Whether others give way to it.
    pub(crate) fn is_foreground(&self) -> bool {
        matches!(self.kind, Kind::Foreground)
    }

    /// What is enqueued at a time at most.
    pub(crate) fn slice(&self) -> Bytes {
        match self.kind {
            Kind::Background { slice, .. } => slice,
            Kind::Alone | Kind::Foreground => Bytes::MAX,
        }
    }

    /// Shuts the barriers of links now: of a copy that nothing keeps from running.
    pub(crate) fn shut_now(&mut self, links: impl Iterator<Item = DeviceId>) {
        if let (Some(barriers), Kind::Foreground) = (self.barriers, self.kind) {
            for link in links {
                barriers.shut(link, self.direction, self.size);
                self.shut = self.shut.union(DeviceSet::of(link));
            }
        }
    }

    /// Before a part, or a slice of one, is enqueued on a stream of a link.
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

    /// All of this copy's work on a stream of a link is enqueued.
    pub(crate) fn after(&mut self, on: StreamRef<'_>) {
        if let Some(barriers) = self.barriers.filter(|_| self.shut.contains(on.device())) {
            barriers.open_on(self.direction, on);
            self.shut = self.shut.without(DeviceSet::of(on.device()));
        }
    }

    /// The copy is enqueued, and ends where its stream is now.
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
