//! What the memory at an address is, and who may touch it.
//!
//! ```text
//! address ─► of a pool: by its range, without the driver; its device may touch it, and who the pool says, nobody else
//!         └► any other: as the driver knows it
//! ```
//!
//! A range is what the one allocation or registration is that holds all of it; one that leaves the registration it begins in is
//! nothing that a copy could count on. Host memory that was
//! pinned a few copies before is not asked for again (`pinned`), where the driver's own copies follow, or parts of one.

use std::collections::BTreeMap;
use std::sync::Arc;

use glake_device::owned::{DeviceSet, LentCopy, Side};
use glake_device::{Address, CopyDevices, CopyRequest, DeviceId, PointerAttributes, PointerKind, Stream};
use glake_tiers::GpuPool;
use glake_transfer::Benefit;
use glake_transfer::paths::Direction;
use glake_units::Bytes;

use super::super::Result;
use super::super::device_registry::DeviceRegistry;
use super::super::streams::Streams;
use super::pinned::PinnedRanges;

/// Where it begins, and how long it is.
type Range = (Address, Bytes);

/// What memory is, and whose streams may touch it without a copy in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Endpoint {
    /// What it is.
    pub(in super::super) kind: PointerKind,
    /// Those devices.
    pub(in super::super) reach: DeviceSet,
    /// Whether it is pool memory: others than those devices cannot touch it at all.
    pub(in super::super) is_pool: bool,
}

impl Endpoint {
    /// Pinned memory of the host.
    const PINNED: Endpoint = Endpoint { kind: PointerKind::Pinned, reach: DeviceSet::ALL, is_pool: false };

    /// Whether streams of a device can take part in a copy of it.
    pub(super) fn is_open_to(&self, device: DeviceId) -> bool {
        !self.is_pool || self.reach.contains(device)
    }

    /// What ranges like this one have in common.
    pub(super) fn side(&self) -> Side {
        Side { kind: self.kind, reach: self.reach }
    }

    /// Whether a copy between these is one between host memory and a GPU's.
    pub(in super::super) fn is_other_side_of(&self, other: &Endpoint) -> bool {
        let on_host = |end: &Endpoint| matches!(end.kind, PointerKind::Pinned | PointerKind::Pageable);
        let [own, others] = [self, other].map(|end| (end.kind.device().is_some(), on_host(end)));
        own.0 && others.1 || own.1 && others.0
    }
}

/// Where a copy goes, and where it comes from.
pub(in super::super) type Ends = (Endpoint, Endpoint);

/// The ends of the copies of one call: memory that was found once is not asked for again.
#[derive(Debug)]
pub(in super::super) struct EndsOfMany<'e> {
    endpoints: &'e Endpoints,
    /// By where they begin, with how long they are.
    known: BTreeMap<Address, (Bytes, Endpoint)>,
    /// Where the ends of the last copy lay, where that is known.
    last: [Option<Range>; 2],
}

impl EndsOfMany<'_> {
    /// What both ends of a copy are, as [`Endpoints::end_of`] tells.
    ///
    /// # Errors
    /// What the driver answers.
    pub(in super::super) fn of(&mut self, request: &CopyRequest) -> Result<Option<Ends>> {
        let (to, from) = (self.end(0, request.to, request.size)?, self.end(1, request.from, request.size)?);
        Ok(to.zip(from))
    }

    /// The copy in parts whose ends are each of one kind, with what these are.
    ///
    /// # Errors
    /// What the driver answers.
    pub(super) fn parts(&mut self, copy: LentCopy) -> Result<Vec<(LentCopy, Ends)>> {
        let (mut parts, mut left) = (Vec::new(), vec![copy]);
        while let Some(part) = left.pop() {
            let size = part.request().size;
            match self.of(&part.request())? {
                _ if size.is_zero() => {}
                Some(ends) => parts.push((part, ends)),
                // A range ends where its first and its last byte differ: looked for by halves.
                None => {
                    let half = Bytes::new(size.get() / 2);
                    if half.is_zero() {
                        continue;
                    }
                    left.extend(part.part(half, size.saturating_sub(half)));
                    left.extend(part.part(Bytes::ZERO, half));
                }
            }
        }
        Ok(parts)
    }

    /// What the ends of the first copy are, and how many of the copies, from the first on, have alike ends. Those of no
    /// bytes have any.
    ///
    /// # Errors
    /// What the driver answers.
    pub(in super::super) fn alike(&mut self, requests: &[CopyRequest]) -> Result<(Option<Ends>, usize)> {
        let Some(first) = requests.iter().position(|request| !request.size.is_zero()) else {
            return Ok((None, requests.len()));
        };
        let ends = self.of(&requests[first])?;
        let mut count = first + 1;
        for request in &requests[count..] {
            // Most lie where the one before does.
            let is_alike = request.size.is_zero() || self.is_where_last(request) || self.of(request)? == ends;
            if !is_alike {
                break;
            }
            count += 1;
        }
        Ok((ends, count))
    }

    /// Whether both ends lie in the memory where those of the last copy were found.
    #[inline]
    fn is_where_last(&self, request: &CopyRequest) -> bool {
        let [Some(to), Some(from)] = self.last else { return false };
        holds(to, request.to, request.size) && holds(from, request.from, request.size)
    }

    fn end(&mut self, side: usize, start: Address, size: Bytes) -> Result<Option<Endpoint>> {
        let before = self.known.range(..=start).next_back();
        let known = before.map(|(from, (size, end))| ((*from, *size), *end));
        let known = known.filter(|(range, _)| holds(*range, start, size));
        self.last[side] = known.map(|(range, _)| range);
        match known {
            Some((_, end)) => Ok(Some(end)),
            None => self.learn(start, size),
        }
    }

    fn learn(&mut self, start: Address, size: Bytes) -> Result<Option<Endpoint>> {
        let (end, range) = self.endpoints.found(start, size)?;
        if let (Some(end), Some((from, size))) = (end, range) {
            // Of ranges that overlap, as where a copy leaves a block, the first is remembered alone: then the one before an address is the
            // one that may hold it.
            let behind = Address(from.0.saturating_add(size.get()));
            let before = self.known.range(..behind).next_back();
            if before.is_none_or(|(start, (size, _))| start.0.saturating_add(size.get()) <= from.0) {
                self.known.insert(from, (size, end));
            }
        }
        Ok(end)
    }
}

fn kind_of(pool: &GpuPool) -> PointerKind {
    PointerKind::Device { device: pool.device(), mapped: true }
}

/// What a range of a pool is, and a range around it of which the same is true.
fn end_of_pool(pool: &GpuPool, start: Address, size: Bytes) -> (Endpoint, Range) {
    let (reach, range) = pool.reach_of(start, size);
    (Endpoint { kind: kind_of(pool), reach, is_pool: true }, range)
}

/// Whether a range lies in another.
#[inline]
fn holds((from, whole): Range, start: Address, size: Bytes) -> bool {
    let offset = start.0.checked_sub(from.0);
    let end = offset.and_then(|offset| offset.checked_add(size.get()));
    end.is_some_and(|end| end <= whole.get())
}

/// What is known of memory: that of pools by their ranges, and of other memory what the driver was last asked.
#[derive(Debug)]
pub(in super::super) struct Endpoints {
    registry: Arc<DeviceRegistry>,
    streams: Arc<Streams>,
    pinned: PinnedRanges,
}

impl Endpoints {
    pub(super) fn new(registry: &Arc<DeviceRegistry>, streams: &Arc<Streams>) -> Endpoints {
        Endpoints { registry: registry.clone(), streams: streams.clone(), pinned: PinnedRanges::default() }
    }

    /// What a range of memory is; `None` where it is not of one kind, or leaves the allocation or registration that it begins in.
    ///
    /// # Errors
    /// What the driver answers.
    pub(in super::super) fn end_of(&self, start: Address, size: Bytes) -> Result<Option<Endpoint>> {
        Ok(self.found(start, size)?.0)
    }

    /// As above, and the range of which the same is true, where one is known.
    fn found(&self, start: Address, size: Bytes) -> Result<(Option<Endpoint>, Option<Range>)> {
        if let Some(pool) = self.pool_of(start, size) {
            let (end, range) = end_of_pool(pool, start, size);
            return Ok((Some(end), Some(range)));
        }
        let PointerAttributes { kind, range } =
            self.registry.completion_events.driver().pointer_attributes(start)?;
        let in_one = range.is_some_and(|range| holds(range, start, size));
        let is_one = match (kind, start.checked_add(size.get().saturating_sub(1))) {
            _ if in_one => true,
            (_, None) | (PointerKind::Pinned | PointerKind::Device { mapped: false, .. }, _) => false,
            // Mapped memory may be many handles side by side, and of memory that the driver does not know it tells no range.
            (_, Some(last)) => {
                self.registry.completion_events.driver().pointer_attributes(last)?.kind == kind
            }
        };
        let reach = match kind {
            // Who may touch what others mapped only they know.
            PointerKind::Device { mapped: true, .. } => DeviceSet::EMPTY,
            PointerKind::Device { device, .. } => DeviceSet::of(device),
            PointerKind::Pinned => DeviceSet::ALL,
            PointerKind::Managed | PointerKind::Pageable => DeviceSet::EMPTY,
        };
        // Of mapped memory that is nobody's here the driver tells addresses that may hold anything.
        let is_whole = matches!(kind, PointerKind::Pinned | PointerKind::Device { mapped: false, .. });
        let range = range.filter(|_| is_whole);
        Ok((is_one.then_some(Endpoint { kind, reach, is_pool: false }), range))
    }

    /// What both ends of a copy on a stream are; `None` where it is one for the driver. That is asked only where the answer can matter,
    /// or `anyway`: it takes as long as the smallest copies gain.
    ///
    /// # Errors
    /// What the driver answers.
    pub(in super::super) fn both_ends(
        &self,
        request: &CopyRequest,
        on: Stream,
        anyway: bool,
    ) -> Result<Option<Ends>> {
        let size = request.size;
        let pools = [request.to, request.from].map(|start| (start, self.pool_of(start, size)));
        let [(_, to), (_, from)] = pools;
        let benefit = match (to, from) {
            (Some(_), Some(_)) => return Ok(None),
            _ if anyway => Benefit::Anything,
            (Some(to), None) => self.registry.engine.benefit(kind_of(to), Direction::ToGpu, size),
            (None, Some(from)) => self.registry.engine.benefit(kind_of(from), Direction::FromGpu, size),
            (None, None) => self.registry.engine.benefit_of_other(size),
        };
        let mut unknown = pools.iter().filter(|(_, pool)| pool.is_none());
        match benefit {
            Benefit::Nothing => return Ok(None),
            Benefit::Pageable if unknown.any(|(start, _)| self.pinned.holds(*start, size)) => {
                return Ok(None);
            }
            Benefit::Pageable | Benefit::Anything => {}
        }
        let of_pool = to.is_some() || from.is_some();
        let mut ends = pools.map(|(start, pool)| (start, pool.map(|pool| end_of_pool(pool, start, size).0)));
        for (start, end) in ends.iter_mut().filter(|(_, end)| end.is_none()) {
            // All parts of a copy of pool memory are the driver's own copies, unless a graph keeps them.
            *end = match of_pool && !anyway && self.pinned.holds(*start, size) && !self.captures(on)? {
                true => Some(Endpoint::PINNED),
                false => self.seen(*start, size)?,
            };
        }
        let [(_, to), (_, from)] = ends;
        let is_pageable = |end: &Endpoint| end.kind == PointerKind::Pageable;
        let gains = benefit == Benefit::Anything || to.iter().chain(&from).any(is_pageable);
        Ok(to.zip(from).filter(|_| gains))
    }

    fn captures(&self, raw: Stream) -> Result<bool> {
        self.streams.is_captured(self.streams.user(raw)?)
    }

    /// As [`Endpoints::end_of`]; what is pinned is remembered.
    fn seen(&self, start: Address, size: Bytes) -> Result<Option<Endpoint>> {
        let (end, range) = self.found(start, size)?;
        if let (Some(Endpoint { kind: PointerKind::Pinned, .. }), Some(range)) = (end, range) {
            self.pinned.saw(range);
        }
        Ok(end)
    }

    /// As [`Endpoints::end_of`], for many.
    pub(in super::super) fn many(&self) -> EndsOfMany<'_> {
        EndsOfMany { endpoints: self, known: BTreeMap::new(), last: [None; 2] }
    }

    /// The pool that a range lies in. No driver call.
    #[inline]
    pub(super) fn pool_of(&self, start: Address, size: Bytes) -> Option<&Arc<GpuPool>> {
        let mut pools = self.registry.devices.iter().filter_map(|memory| Some(&memory.started()?.pool));
        pools.find(|pool| holds(pool.range(), start, size))
    }

    /// The device whose pool an address lies in. No driver call.
    #[inline]
    pub(in super::super) fn pool_owner(&self, at: Address) -> Option<DeviceId> {
        self.pool_of(at, Bytes::new(1)).map(|pool| pool.device())
    }

    /// The devices whose memory a copy is between; `None` where an end is host memory, or memory that moves.
    ///
    /// # Errors
    /// What the driver answers about memory that is no pool's.
    pub(super) fn devices_of(&self, request: &CopyRequest) -> Result<Option<CopyDevices>> {
        let of = |at| -> Result<Option<DeviceId>> {
            Ok(match self.pool_owner(at) {
                Some(owner) => Some(owner),
                None => self.end_of(at, Bytes::new(1))?.and_then(|end| end.kind.device()),
            })
        };
        Ok(of(request.to)?.zip(of(request.from)?).map(|(to, from)| CopyDevices { to, from }))
    }

    /// The devices whose streams may make a copy, as far as pools are asked. No driver call.
    pub(super) fn may_make(&self, request: &CopyRequest) -> DeviceSet {
        self.reach_of(request.to, request.size).intersection(self.reach_of(request.from, request.size))
    }

    /// Whether streams of a device may make a copy, as far as pools are asked: memory of its own it may touch anyway. No driver call.
    #[inline]
    pub(super) fn is_open_to(&self, device: DeviceId, request: &CopyRequest) -> bool {
        let open = |start| match self.pool_of(start, Bytes::new(1)) {
            Some(pool) if pool.device() != device => pool.reach_of(start, request.size).0.contains(device),
            _ => true,
        };
        open(request.to) && open(request.from)
    }

    /// Whether streams of any device may make a copy, as far as pools are asked.
    #[inline]
    pub(in super::super) fn is_open_to_all(&self, request: &CopyRequest) -> bool {
        let open = |start| match self.pool_of(start, Bytes::new(1)) {
            Some(pool) => {
                let (reach, _) = pool.reach_of(start, request.size);
                self.registry.devices.iter().all(|memory| reach.contains(memory.info.id))
            }
            None => true,
        };
        open(request.to) && open(request.from)
    }

    /// Who may touch what lies at an address.
    fn reach_of(&self, at: Address, size: Bytes) -> DeviceSet {
        self.pool_of(at, Bytes::new(1)).map_or(DeviceSet::ALL, |pool| pool.reach_of(at, size).0)
    }
}
