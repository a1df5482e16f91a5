//! Who makes a copy: the one place that decides it.
//!
//! ```text
//! copy ─┬─ asked to be direct, or too small ────────────────────────────────┐
//!       ├─ its ends: nothing to gain, not host and GPU, not open to the stream ─┼─► Native: the driver's own copy
//!       ├─ under a context that is not its GPU's primary one ───────────────┘
//!       └─ else ─► Engine, with what its ends were found to be; of a list, of what is alike
//! a try   also Native: no relays, the other way round, refused before anything was enqueued
//! ```
//!
//! Nothing is enqueued here, and nothing is asked of the driver that the answer before has settled.

use glake_device::CopyRequest;
use glake_device::owned::{Blocks, Lent, LentCopy};
use glake_device::{DeviceId, PointerKind};
use glake_transfer::graph::Direction;
use glake_units::Bytes;

use super::super::{ProcessError, Result};
use super::Copies;
use super::ask::{CopyAsk, Form};
use super::endpoints::Ends;
use super::pending::captured;

/// Who makes the copies of a call.
#[derive(Debug)]
pub(super) enum Way<'a> {
    /// The driver.
    Native,
    /// The engine, one copy.
    Engine(LentCopy, Ends),
    /// The engine these, the driver the rest.
    Blocks { blocks: Vec<Blocks<'a>>, rest: Vec<Lent<'a>> },
    /// The engine, from one range to several GPUs.
    ToAll(Vec<(LentCopy, Ends)>),
}

impl Copies {
    /// Who makes the copies of a call.
    ///
    /// # Errors
    /// What the driver answers; [`ProcessError::Captured`].
    pub(super) fn decide<'a>(&self, lent: Lent<'a>, form: Form, ask: &CopyAsk) -> Result<Way<'a>> {
        let way = match form {
            Form::One => self.decide_one(lent, ask)?,
            Form::List => self.decide_list(lent, ask)?,
            Form::ToAll => self.decide_to_all(lent, ask)?,
        };
        if let Way::Native = way {
            self.refuse_native(ask)?;
        }
        Ok(way)
    }

    /// Whether a copy that is tried may be one for the engine, before more is asked of it.
    ///
    /// # Errors
    /// What bringing its ends back meets, or starting the relays.
    pub(super) fn may_split(&self, size: Bytes) -> Result<bool> {
        Ok(size >= self.least_split() && self.has_relays()?)
    }

    /// What both ends are of a copy that is tried, where it is one for the engine and goes the way that is asked for.
    ///
    /// # Errors
    /// What the driver answers.
    pub(super) fn decide_try(
        &self,
        request: &CopyRequest,
        ask: &CopyAsk,
        way: Option<Direction>,
    ) -> Result<Option<Ends>> {
        let ends = self.split(request, ask)?.filter(|ends| goes(ends, way));
        if ends.is_some() {
            self.refuse_wait(ask)?;
        }
        Ok(ends)
    }

    /// Whether the bytes of a copy are compared, of whatever size and whatever way.
    pub(super) fn verifies(&self, ask: &CopyAsk) -> bool {
        ask.blocking && (ask.verify || self.registry.engine.config().verify)
    }

    /// What both ends are, where it is a copy for the engine.
    fn split(&self, request: &CopyRequest, ask: &CopyAsk) -> Result<Option<Ends>> {
        if ask.direct || request.size < self.least_split() {
            return Ok(None);
        }
        let Some(ends) = self.ends.both_ends(request, ask.stream, self.verifies(ask))? else {
            return Ok(None);
        };
        match self.streams.primary_of(ask.stream)? {
            Some(device) => Ok(sides(device, Some(ends))),
            None => Ok(None),
        }
    }

    /// Nobody can wait for what is captured, nor under a context that is none of ours.
    ///
    /// # Errors
    /// [`ProcessError::ForeignContext`], [`ProcessError::Captured`].
    fn refuse_native(&self, ask: &CopyAsk) -> Result<()> {
        // A copy that nobody waits for is made in the context that is current, whichever that is.
        if (ask.blocking || ask.waited) && self.streams.primary_of(ask.stream)?.is_none() {
            return Err(ProcessError::ForeignContext);
        }
        self.refuse_wait(ask)
    }

    /// A captured copy runs when its graph does: no call can wait for it.
    ///
    /// # Errors
    /// [`ProcessError::Captured`].
    fn refuse_wait(&self, ask: &CopyAsk) -> Result<()> {
        if !ask.blocking {
            return Ok(());
        }
        let on = self.streams.user(ask.stream)?;
        if self.streams.is_captured(on)? { Err(captured(on)) } else { Ok(()) }
    }

    fn decide_one<'a>(&self, lent: Lent<'a>, ask: &CopyAsk) -> Result<Way<'a>> {
        let Some(copy) = lent.each().next() else { return Ok(Way::Native) };
        let Some(ends) = self.split(&copy.request(), ask)? else { return Ok(Way::Native) };
        self.refuse_wait(ask)?;
        Ok(Way::Engine(copy, ends))
    }

    fn decide_list<'a>(&self, lent: Lent<'a>, ask: &CopyAsk) -> Result<Way<'a>> {
        let sizes = lent.requests().iter().map(|request| request.size);
        let all = sizes.fold(Bytes::ZERO, Bytes::saturating_add);
        if all < self.least_split() || ask.direct {
            return Ok(Way::Native);
        }
        self.refuse_wait(ask)?;
        let Some(device) = self.streams.primary_of(ask.stream)? else { return Ok(Way::Native) };
        let mut ends = self.ends.many();
        let (mut blocks, mut rest, mut left) = (Vec::new(), Vec::new(), lent);
        while !left.requests().is_empty() {
            let (ends, count) = ends.alike(left.requests())?;
            let (alike, others) = left.split_at(count);
            left = others;
            match sides(device, ends) {
                // All ends are what was found of the first.
                Some((to, from)) => blocks.push(alike.blocks(to.side(), from.side())),
                None => rest.push(alike),
            }
        }
        Ok(Way::Blocks { blocks, rest })
    }

    fn decide_to_all<'a>(&self, lent: Lent<'a>, ask: &CopyAsk) -> Result<Way<'a>> {
        let small = lent.requests().first().is_none_or(|first| first.size < self.least_split());
        if small || ask.direct {
            return Ok(Way::Native);
        }
        let with_ends = |copy: LentCopy| Ok(self.split(&copy.request(), ask)?.map(|ends| (copy, ends)));
        let copies: Option<Vec<(LentCopy, Ends)>> = lent.each().map(with_ends).collect::<Result<_>>()?;
        let Some(copies) = copies else { return Ok(Way::Native) };
        self.refuse_wait(ask)?;
        Ok(Way::ToAll(copies))
    }
}

/// Whether a copy was refused before anything of it was enqueued: the process asks the driver of its stream, and ends before it asks the
/// engine.
pub(super) fn is_early(error: &ProcessError) -> bool {
    matches!(error, ProcessError::Driver(_) | ProcessError::Captured { .. })
}

/// The ends, where one is host memory and the other a GPU's. Where the stream's device may not make the copy the engine has no
/// way back to one link: then it is none for it.
fn sides(device: DeviceId, ends: Option<Ends>) -> Option<Ends> {
    ends.filter(|(to, from)| to.is_other_side_of(from) && to.is_open_to(device) && from.is_open_to(device))
}

/// Whether a copy between these goes a way. Memory that moves as it is touched is on neither side.
fn goes((to, from): &Ends, way: Option<Direction>) -> bool {
    let is_host = |kind: PointerKind| matches!(kind, PointerKind::Pinned | PointerKind::Pageable);
    match way {
        None => true,
        Some(Direction::ToGpu) => is_host(from.kind),
        Some(Direction::FromGpu) => is_host(to.kind),
    }
}
