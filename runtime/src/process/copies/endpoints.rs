//! Kind and reachability of the memory at an address.
//!
//! ```text
//! address ─► pool memory: by its range, without the driver; accessible to its device and the devices that the pool names
//!         └► other memory: as the driver reports it
//! ```
//!
//! A range must lie within one allocation or registration; a copy cannot rely on a range that leaves the registration in which it begins.
//! Host memory that was pinned a few copies before is not queried again if the driver makes the copy or its parts.
//!
//! Invariant: users of the cache of pinned ranges make driver copies or parts of them, which are correct even if the memory is no longer
//! pinned.

use std::collections::BTreeMap;
use std::sync::Arc;

use glake_device::owned::{DeviceSet, LentCopy, Side};
use glake_device::{Address, CopyDevices, CopyRequest, DeviceId, PointerAttributes, PointerKind, Stream};
use glake_tiers::{GpuPool, LiveBlock};
use glake_transfer::paths::Direction;
use glake_transfer::{Benefit, TransferError};
use glake_units::Bytes;
use parking_lot::Mutex;

use super::super::device_registry::DeviceRegistry;
use super::super::streams::Streams;
use super::super::{ProcessError, Result};

/// Start address and size of a range.
type Range = (Address, Bytes);

/// Kind of memory, and the devices whose streams may access it directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Endpoint {
    /// Kind of the memory, from the driver or the pool.
    pub(in super::super) kind: PointerKind,
    /// Devices whose streams may access it directly.
    pub(in super::super) reach: DeviceSet,
    /// Whether it is pool memory, which devices outside `reach` cannot access at all.
    pub(in super::super) is_pool: bool,
}

impl Endpoint {
    /// Endpoint of pinned host memory.
    const PINNED: Endpoint = Endpoint { kind: PointerKind::Pinned, reach: DeviceSet::ALL, is_pool: false };

    /// Returns whether streams of a device can take part in a copy of the memory.
    pub(super) fn is_open_to(&self, device: DeviceId) -> bool {
        !self.is_pool || self.reach.contains(device)
    }

    /// Returns the properties that the engine compares between ranges.
    pub(super) fn side(&self) -> Side {
        Side { kind: self.kind, reach: self.reach }
    }

    /// Returns whether a copy between these ends is between host memory and a GPU.
    pub(in super::super) fn is_other_side_of(&self, other: &Endpoint) -> bool {
        let on_host = |end: &Endpoint| matches!(end.kind, PointerKind::Pinned | PointerKind::Pageable);
        let [own, others] = [self, other].map(|end| (end.kind.device().is_some(), on_host(end)));
        own.0 && others.1 || own.1 && others.0
    }
}

/// Destination and source of a copy.
pub(in super::super) type Ends = (Endpoint, Endpoint);

/// Endpoints of the copies of one call, cached so that memory is queried once.
#[derive(Debug)]
pub(in super::super) struct EndsOfMany<'e> {
    endpoints: &'e Endpoints,
    /// Known ranges by start address, with their size.
    known: BTreeMap<Address, (Bytes, Endpoint)>,
    /// Cached ranges that contain the destination and the source of the previous copy; `None` if a range was not cached yet.
    last: [Option<Range>; 2],
}

impl EndsOfMany<'_> {
    /// Returns both ends of a copy, as [`Endpoints::end_of`] does.
    ///
    /// # Errors
    /// What the driver answers.
    pub(in super::super) fn of(&mut self, request: &CopyRequest) -> Result<Option<Ends>> {
        let (to, from) = (self.end(0, request.to, request.size)?, self.end(1, request.from, request.size)?);
        Ok(to.zip(from))
    }

    /// Splits the copy into parts whose ends are of one kind each, and returns these with the parts.
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
                // A range ends where the kinds of its first and last byte differ; found by bisection.
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

    /// Returns the ends of the first copy and the number of leading copies with equal ends. Copies of 0 bytes match any ends.
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
            // Most ends lie in the ranges of the previous copy.
            let is_alike = request.size.is_zero() || self.is_where_last(request) || self.of(request)? == ends;
            if !is_alike {
                break;
            }
            count += 1;
        }
        Ok((ends, count))
    }

    /// Returns whether both ends lie in the ranges of the last copy.
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
            // Of overlapping ranges, as where a copy leaves a block, only the first is cached: the one before an address is then the
            // only one that may contain it.
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

/// Returns the endpoint of a range of a pool, and a surrounding range for which it also holds.
fn end_of_pool(pool: &GpuPool, start: Address, size: Bytes) -> (Endpoint, Range) {
    let (reach, range) = pool.reach_of(start, size);
    (Endpoint { kind: kind_of(pool), reach, is_pool: true }, range)
}

/// Returns whether a range lies within another.
#[inline]
fn holds((from, whole): Range, start: Address, size: Bytes) -> bool {
    let offset = start.0.checked_sub(from.0);
    let end = offset.and_then(|offset| offset.checked_add(size.get()));
    end.is_some_and(|end| end <= whole.get())
}

/// Lookup of endpoints: pool memory by its ranges, other memory by the driver, with a cache of pinned ranges.
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

    /// Returns the endpoint of a range; `None` if the range mixes kinds or leaves its allocation or registration.
    ///
    /// # Errors
    /// What the driver answers.
    pub(in super::super) fn end_of(&self, start: Address, size: Bytes) -> Result<Option<Endpoint>> {
        Ok(self.found(start, size)?.0)
    }

    /// Returns the endpoint of a range, and the surrounding range for which it holds, if known.
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
            // Mapped memory may consist of many handles side by side, and for unknown memory the driver reports no range.
            (_, Some(last)) => {
                self.registry.completion_events.driver().pointer_attributes(last)?.kind == kind
            }
        };
        let reach = match kind {
            // Only the owner of a foreign mapping knows which devices can access it.
            PointerKind::Device { mapped: true, .. } => DeviceSet::EMPTY,
            PointerKind::Device { device, .. } => DeviceSet::of(device),
            PointerKind::Pinned => DeviceSet::ALL,
            PointerKind::Managed | PointerKind::Pageable => DeviceSet::EMPTY,
        };
        // For mapped memory of other libraries the driver reports addresses with arbitrary contents.
        let is_whole = matches!(kind, PointerKind::Pinned | PointerKind::Device { mapped: false, .. });
        let range = range.filter(|_| is_whole);
        Ok((is_one.then_some(Endpoint { kind, reach, is_pool: false }), range))
    }

    /// Returns both ends of a copy on a stream; `None` if the driver must make it. The driver is queried only if the answer can matter, or
    /// if `anyway` is set: a query takes as long as the smallest copies gain.
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
            // All parts of a copy of pool memory are driver copies, unless a graph captures them.
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

    /// Returns the endpoint like [`Endpoints::end_of`] and caches pinned ranges.
    fn seen(&self, start: Address, size: Bytes) -> Result<Option<Endpoint>> {
        let (end, range) = self.found(start, size)?;
        if let (Some(Endpoint { kind: PointerKind::Pinned, .. }), Some(range)) = (end, range) {
            self.pinned.saw(range);
        }
        Ok(end)
    }

    /// Returns a lookup with a cache for the copies of one call.
    pub(in super::super) fn many(&self) -> EndsOfMany<'_> {
        EndsOfMany { endpoints: self, known: BTreeMap::new(), last: [None; 2] }
    }

    /// Returns the pool in which a range lies. No driver call.
    #[inline]
    pub(super) fn pool_of(&self, start: Address, size: Bytes) -> Option<&Arc<GpuPool>> {
        let mut pools = self.registry.devices.iter().filter_map(|memory| Some(&memory.started()?.pool));
        pools.find(|pool| holds(pool.range(), start, size))
    }

    /// Returns the device whose pool contains the address. No driver call.
    #[inline]
    pub(in super::super) fn pool_owner(&self, at: Address) -> Option<DeviceId> {
        self.pool_of(at, Bytes::new(1)).map(|pool| pool.device())
    }

    /// Adds the block to the driver's error about a copy that leaves it.
    #[cold]
    pub(super) fn with_block(&self, error: ProcessError, requests: &[CopyRequest]) -> ProcessError {
        let source = match error {
            ProcessError::Driver(source) | ProcessError::Transfer(TransferError::Driver(source)) => source,
            other => return other,
        };
        let ends =
            requests.iter().flat_map(|request| [(request.to, request.size), (request.from, request.size)]);
        let mut left = ends.filter_map(|(at, asked)| {
            let pool = self.pool_of(at, Bytes::new(1))?;
            let block = pool.find(at)?;
            let behind = block.size.get() - (at.0 - block.address.0);
            (asked.get() > behind).then_some((pool.device(), block, at, asked))
        });
        match left.next().filter(|_| !source.is_sticky()) {
            Some((device, LiveBlock { address: block, size, .. }, at, asked)) => {
                ProcessError::LeavesBlock { device, block, size, at, asked, source }
            }
            None => ProcessError::Driver(source),
        }
    }

    /// Returns the two devices of a device-to-device copy; `None` if an end is host or managed memory.
    ///
    /// # Errors
    /// The driver's error for memory outside pools.
    pub(super) fn devices_of(&self, request: &CopyRequest) -> Result<Option<CopyDevices>> {
        let of = |at| -> Result<Option<DeviceId>> {
            Ok(match self.pool_owner(at) {
                Some(owner) => Some(owner),
                None => self.end_of(at, Bytes::new(1))?.and_then(|end| end.kind.device()),
            })
        };
        Ok(of(request.to)?.zip(of(request.from)?).map(|(to, from)| CopyDevices { to, from }))
    }

    /// Returns the devices whose streams may make a copy, as far as pools restrict them. No driver call.
    pub(super) fn may_make(&self, request: &CopyRequest) -> DeviceSet {
        self.reach_of(request.to, request.size).intersection(self.reach_of(request.from, request.size))
    }

    /// Returns whether streams of a device may make a copy, as far as pools restrict it; a device may always access its own memory. No
    /// driver call.
    #[inline]
    pub(super) fn is_open_to(&self, device: DeviceId, request: &CopyRequest) -> bool {
        let open = |start| match self.pool_of(start, Bytes::new(1)) {
            Some(pool) if pool.device() != device => pool.reach_of(start, request.size).0.contains(device),
            _ => true,
        };
        open(request.to) && open(request.from)
    }

    /// Returns whether streams of every device may make a copy, as far as pools restrict it.
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

    /// Returns the devices that may access the memory at an address.
    fn reach_of(&self, at: Address, size: Bytes) -> DeviceSet {
        self.pool_of(at, Bytes::new(1)).map_or(DeviceSet::ALL, |pool| pool.reach_of(at, size).0)
    }
}

/// Maximum number of cached ranges.
const KEPT: usize = 8;
/// Number of copies after which the driver is queried again. A query takes 1 us; pageable memory wrongly taken for pinned is copied at the
/// driver's rate.
const TRUSTED: u32 = 64;

/// Cached ranges; the last one was reported most recently.
#[derive(Debug, Default)]
pub(super) struct PinnedRanges(Mutex<Vec<Seen>>);

#[derive(Debug)]
struct Seen {
    start: Address,
    size: Bytes,
    /// Number of copies that may still use the entry.
    trusted: u32,
}

impl PinnedRanges {
    /// Adds a range that the driver reported as pinned.
    pub(super) fn saw(&self, (start, size): (Address, Bytes)) {
        let mut ranges = self.0.lock();
        ranges.retain(|seen| seen.start != start);
        if ranges.len() == KEPT {
            ranges.remove(0);
        }
        ranges.push(Seen { start, size, trusted: TRUSTED });
    }

    /// Returns whether memory lies in a cached range; `false` if another thread holds the cache.
    pub(super) fn holds(&self, start: Address, size: Bytes) -> bool {
        let Some(mut ranges) = self.0.try_lock() else { return false };
        let holds = |seen: &Seen| {
            let offset = start.0.checked_sub(seen.start.0);
            let end = offset.and_then(|offset| offset.checked_add(size.get()));
            end.is_some_and(|end| end <= seen.size.get())
        };
        let Some(place) = ranges.iter().rposition(holds) else { return false };
        match ranges[place].trusted.checked_sub(1) {
            Some(left) => {
                ranges[place].trusted = left;
                true
            }
            None => {
                ranges.remove(place);
                false
            }
        }
    }
}

#[cfg(test)]
mod pinned_tests {
    use super::*;

    #[test]
    fn a_range_is_trusted_for_a_while_and_the_oldest_are_forgotten() {
        let ranges = PinnedRanges::default();
        let at = |number: u64| Address(number << 20);
        assert!(!ranges.holds(at(1), Bytes::new(1)));
        ranges.saw((at(1), Bytes::mib(1)));
        for _ in 0..TRUSTED {
            assert!(ranges.holds(Address(at(1).0 + 5), Bytes::new((1 << 20) - 5)));
        }
        assert!(!ranges.holds(at(1), Bytes::mib(1)), "asked again");
        ranges.saw((at(1), Bytes::mib(1)));
        assert!(!ranges.holds(at(1), Bytes::new((1 << 20) + 1)) && !ranges.holds(Address(0), Bytes::mib(1)));
        assert!(!ranges.holds(at(1), Bytes::MAX) && !ranges.holds(at(2), Bytes::new(1)));
        for number in 2..=8 {
            ranges.saw((at(number), Bytes::mib(1)));
        }
        assert!(ranges.holds(at(1), Bytes::mib(1)));
        ranges.saw((at(9), Bytes::mib(1)));
        assert!(!ranges.holds(at(1), Bytes::mib(1)) && ranges.holds(at(9), Bytes::mib(1)));
        // Replaces an older range with the same start.
        ranges.saw((at(9), Bytes::kib(4)));
        assert!(!ranges.holds(at(9), Bytes::kib(8)) && ranges.holds(at(9), Bytes::kib(4)));
    }
}
