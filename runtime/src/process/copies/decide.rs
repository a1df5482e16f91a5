//! Choice of the implementation of a copy: the only place that decides between the driver and the engine.
//!
//! ```text
//! copy ─┬─ asked to be direct, or too small ────────────────────────────────┐
//!       ├─ its ends: nothing to gain, not host and GPU, not open to the stream ─┼─► Native: the driver's own copy
//!       ├─ under a context that is not its GPU's primary one ───────────────┘
//!       └─ otherwise ─► Engine, with the properties of its ends; a list in groups of equal ends
//!  a try   also Native: no relays, the opposite direction, refused before any enqueue
//! ```
//!
//! Nothing is enqueued here. The driver is asked only for answers that the earlier checks left open.

use glake_device::CopyRequest;
use glake_device::owned::{Blocks, Lent, LentCopy};
use glake_device::{DeviceId, PointerKind};
use glake_transfer::paths::Direction;
use glake_units::Bytes;

use super::super::{ProcessError, Result};
use super::Copies;
use super::ask::{CopyAsk, Form};
use super::endpoints::Ends;
use super::pending::captured;

/// Implementation that makes the copies of a call.
#[derive(Debug)]
pub(super) enum Maker<'a> {
    /// The driver makes all copies.
    Native,
    /// The engine makes the single copy.
    Engine(LentCopy, Ends),
    /// The engine makes the blocks, the driver the rest.
    Blocks { blocks: Vec<Blocks<'a>>, rest: Vec<Lent<'a>> },
    /// The engine copies one range to several GPUs.
    ToAll(Vec<(LentCopy, Ends)>),
}

impl Copies {
    /// Chooses the implementation for the copies of a call.
    ///
    /// # Errors
    /// The driver's error; [`ProcessError::Captured`].
    pub(super) fn decide<'a>(&self, lent: Lent<'a>, form: Form, ask: &CopyAsk) -> Result<Maker<'a>> {
        let maker = match form {
            Form::One => self.decide_one(lent, ask)?,
            Form::List => self.decide_list(lent, ask)?,
            Form::ToAll => self.decide_to_all(lent, ask)?,
        };
        if let Maker::Native = maker {
            self.refuse_native(ask)?;
        }
        Ok(maker)
    }

    /// Returns whether a tried copy may suit the engine, from its size and the relays alone.
    ///
    /// # Errors
    /// Errors of refilling its ends or of starting the relays.
    pub(super) fn may_split(&self, size: Bytes) -> Result<bool> {
        Ok(size >= self.least_split() && self.has_relays()?)
    }

    /// Returns the ends of a tried copy if it suits the engine and has the requested direction.
    ///
    /// # Errors
    /// The driver's error.
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

    /// Returns whether the bytes of a copy are compared, whatever its size and path.
    pub(super) fn verifies(&self, ask: &CopyAsk) -> bool {
        ask.blocking && (ask.verify || self.registry.engine.config().verify)
    }

    /// Returns both ends if the copy suits the engine.
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

    /// Refuses copies that the caller could not wait for: captured ones, and those under a foreign context.
    ///
    /// # Errors
    /// [`ProcessError::ForeignContext`], [`ProcessError::Captured`].
    fn refuse_native(&self, ask: &CopyAsk) -> Result<()> {
        // A copy without a wait runs in the current context, whichever it is.
        if (ask.blocking || ask.waited) && self.streams.primary_of(ask.stream)?.is_none() {
            return Err(ProcessError::ForeignContext);
        }
        self.refuse_wait(ask)
    }

    /// Refuses a wait for a captured copy, which runs only when its graph does.
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

    fn decide_one<'a>(&self, lent: Lent<'a>, ask: &CopyAsk) -> Result<Maker<'a>> {
        let Some(copy) = lent.each().next() else { return Ok(Maker::Native) };
        let Some(ends) = self.split(&copy.request(), ask)? else { return Ok(Maker::Native) };
        self.refuse_wait(ask)?;
        Ok(Maker::Engine(copy, ends))
    }

    fn decide_list<'a>(&self, lent: Lent<'a>, ask: &CopyAsk) -> Result<Maker<'a>> {
        let sizes = lent.requests().iter().map(|request| request.size);
        let all = sizes.fold(Bytes::ZERO, Bytes::saturating_add);
        if all < self.least_split() || ask.direct {
            return Ok(Maker::Native);
        }
        self.refuse_wait(ask)?;
        let Some(device) = self.streams.primary_of(ask.stream)? else { return Ok(Maker::Native) };
        let mut ends = self.ends.many();
        let (mut blocks, mut rest, mut left) = (Vec::new(), Vec::new(), lent);
        while !left.requests().is_empty() {
            let (ends, count) = ends.alike(left.requests())?;
            let (alike, others) = left.split_at(count);
            left = others;
            match sides(device, ends) {
                // All ends equal those of the first.
                Some((to, from)) => {
                    if let Some(first) = alike.requests().iter().find(|request| !request.size.is_zero()) {
                        self.open_later(first);
                    }
                    blocks.push(alike.blocks(to.side(), from.side()));
                }
                None => rest.push(alike),
            }
        }
        Ok(Maker::Blocks { blocks, rest })
    }

    fn decide_to_all<'a>(&self, lent: Lent<'a>, ask: &CopyAsk) -> Result<Maker<'a>> {
        let small = lent.requests().first().is_none_or(|first| first.size < self.least_split());
        if small || ask.direct {
            return Ok(Maker::Native);
        }
        lent.requests().iter().for_each(|request| self.open_later(request));
        let with_ends = |copy: LentCopy| Ok(self.split(&copy.request(), ask)?.map(|ends| (copy, ends)));
        let copies: Option<Vec<(LentCopy, Ends)>> = lent.each().map(with_ends).collect::<Result<_>>()?;
        let Some(copies) = copies else { return Ok(Maker::Native) };
        self.refuse_wait(ask)?;
        Ok(Maker::ToAll(copies))
    }
}

/// Returns whether a copy was refused before any part of it was enqueued: the stream lookup and the end of the process are checked before
/// the engine.
pub(super) fn is_early(error: &ProcessError) -> bool {
    matches!(error, ProcessError::Driver(_) | ProcessError::Captured { .. })
}

/// Returns the ends if one is host memory and the other a GPU's. If the stream's device may not make the copy, the engine could not fall
/// back to one link, so the result is `None`.
fn sides(device: DeviceId, ends: Option<Ends>) -> Option<Ends> {
    ends.filter(|(to, from)| to.is_other_side_of(from) && to.is_open_to(device) && from.is_open_to(device))
}

/// Returns whether a copy between these ends has the given direction. Managed memory is on neither side.
fn goes((to, from): &Ends, way: Option<Direction>) -> bool {
    let is_host = |kind: PointerKind| matches!(kind, PointerKind::Pinned | PointerKind::Pageable);
    match way {
        None => true,
        Some(Direction::ToGpu) => is_host(from.kind),
        Some(Direction::FromGpu) => is_host(to.kind),
    }
}

#[cfg(test)]
#[cfg(not(schedules))]
mod tests {
    use glake_device::owned::DeviceSet;
    use glake_device::{Address, Stream};
    use glake_transfer::Priority;

    use super::super::super::fixture::Parts;
    use super::super::endpoints::Endpoint;
    use super::*;

    const SIZE: Bytes = Bytes::mib(8);

    fn ask(stream: Stream) -> CopyAsk {
        let (device, priority) = (None, Priority::Normal);
        CopyAsk { stream, device, priority, blocking: false, verify: false, direct: false, waited: false }
    }

    fn kinds(ends: Option<Ends>) -> Option<(PointerKind, PointerKind)> {
        ends.map(|(to, from)| (to.kind, from.kind))
    }

    #[test]
    fn a_copy_is_the_engine_s_between_host_and_gpu_where_it_is_large_and_goes_the_way() {
        let parts = Parts::new();
        let (block, other) = (parts.block(0, SIZE), parts.block(0, SIZE));
        let host = vec![0_u8; 8 << 20];
        let host = Address(host.as_ptr() as u64);
        let (stream, gpu) =
            (parts.streams.create(0).unwrap(), PointerKind::Device { device: DeviceId(0), mapped: true });
        let decided = |request: CopyRequest, ask: &CopyAsk, way| {
            kinds(parts.copies.decide_try(&request, ask, way).unwrap())
        };
        let there = CopyRequest { to: block, from: host, size: SIZE };
        let back = CopyRequest { to: host, from: block, size: SIZE };
        let ask = ask(stream);
        assert_eq!(decided(there, &ask, None), Some((gpu, PointerKind::Pageable)));
        for (request, own, wrong) in
            [(there, Direction::ToGpu, Direction::FromGpu), (back, Direction::FromGpu, Direction::ToGpu)]
        {
            assert!(
                decided(request, &ask, Some(own)).is_some() && decided(request, &ask, Some(wrong)).is_none()
            );
        }
        assert_eq!(decided(there, &CopyAsk { direct: true, ..ask }, None), None);
        assert_eq!(decided(CopyRequest { size: Bytes::kib(4), ..there }, &ask, None), None);
        assert_eq!(decided(CopyRequest { from: other, ..there }, &ask, None), None, "it stays on the GPU");
        let far = CopyAsk { stream: parts.streams.create(1).unwrap(), ..ask };
        assert_eq!(decided(there, &far, None), None, "the stream's device may not touch the block");
    }

    #[test]
    fn what_is_captured_is_refused_to_who_blocks_and_to_nobody_else() {
        let parts = Parts::new();
        let (block, host) = (parts.block(0, SIZE), vec![0_u8; 8 << 20]);
        let request = CopyRequest { to: block, from: Address(host.as_ptr() as u64), size: SIZE };
        let stream = parts.streams.create(0).unwrap();
        parts.sim.begin_capture(DeviceId(0), stream).unwrap();
        let blocks = CopyAsk { blocking: true, ..ask(stream) };
        let refused = parts.copies.decide_try(&request, &blocks, None).unwrap_err();
        assert!(matches!(refused, ProcessError::Captured { .. }) && is_early(&refused), "{refused}");
        assert!(parts.copies.decide_try(&request, &ask(stream), None).unwrap().is_some());
        assert!(
            parts.copies.refuse_native(&blocks).is_err() && parts.copies.refuse_native(&ask(stream)).is_ok()
        );
    }

    #[test]
    fn sides_are_host_and_gpu_and_open_to_the_stream() {
        let end = |kind, is_pool| Endpoint { kind, reach: DeviceSet::of(DeviceId(0)), is_pool };
        let gpu = end(PointerKind::Device { device: DeviceId(0), mapped: true }, true);
        let (pinned, managed) = (end(PointerKind::Pinned, false), end(PointerKind::Managed, false));
        let taken = |device, ends| sides(DeviceId(device), Some(ends)).is_some();
        assert!(taken(0, (gpu, pinned)) && taken(0, (pinned, gpu)));
        assert!(!taken(1, (gpu, pinned)) && !taken(0, (gpu, gpu)) && !taken(0, (pinned, pinned)));
        assert!(!taken(0, (gpu, managed)) && sides(DeviceId(0), None).is_none());
    }
}
