//! Bytes of live blocks that are copied to the host and come back to another address, one tensor at a time.
//!
//! ```text
//! stream:  … write ─┬─ free, and later work …            malloc ─┬──────────────── wait ─ read …
//! out:              └─► copy ─► event: a read hold               │                   ▲
//! in:                              └──────────────────────────────┴─► copy ─► event ─┘
//! host:             [ taken ─────────────────────────────────── released: the next copy out waits for the event ]
//! ```
//!
//! The caller may free the block at once: its stream can reuse the bytes after the event of the copy out ([`ReadHolds`]). The caller
//! allocates the memory for the way back itself, on its own stream.
//!
//! | part | purpose |
//! |---|---|
//! | [`Queues`] | one stream for each direction and GPU, in whose order copies run; their times |
//! | [`HostMemory`] | pinned host memory of a GPU's copies, reused after the copies that read it |
//! | [`Entries`] | offloaded entries, by a number that is never reused |
//! | `reserved` | host memory that is stored into again and read by the host |
//! | [`Checks`] | whether offloaded bytes changed until their block was freed |
//! | [`Sites`] | the saves to offload in each pass of a site, and the start of their reloads |
//! | [`Measures`], [`Timers`] | measurements for plans: memory, links, room, times |
//!
//! Invariants: only [`Offload::host_address`] waits on the host for a GPU; other waits for a copy are for its event, on the GPU. Memory of a
//! copy is reused before its event only behind a wait for it: source and destination are held, and host memory is returned with its last
//! copy. After the process has stopped, nothing here calls the driver.
//!
//! [`ReadHolds`]: glake_tiers::ReadHolds

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use checks::{Checks, Watch};
use entries::{Away, Entries, Entry, Load};
use glake_device::owned::Span;
use glake_device::{Address, DeviceId, Stream};
use glake_offload::Position;
use glake_stitch::StreamKey;
use glake_tiers::{BlockId, PoolError};
use glake_transfer::UserStream;
use glake_transfer::paths::Direction;
use glake_units::Bytes;
use host_memory::HostMemory;
use queue::Queues;
use timer::{Measures, Timers};

use super::device::{DeviceMemory, Started};
use super::device_registry::DeviceRegistry;
use super::regions::RegionSet;
use super::streams::Streams;
use super::{PoolId, ProcessError, Result};
use crate::metrics::{OffloadStats, micros};
use crate::sync::Mutex;

pub use checks::{CheckState, SaveId};
pub use glake_offload::{
    ItemId, LeafPart, Pack, Place as StreamedPlace, Preset, ScopeId, UseOrders, UsePhase, Verdict,
};
pub use sites::{PackedItem, Sites};

mod checks;
mod entries;
mod host_memory;
mod passes;
mod queue;
mod reserved;
mod sites;
#[cfg(test)]
#[cfg(not(schedules))]
mod tests;
mod timer;

/// Offloaded memory of a process.
#[derive(Debug)]
pub struct Offload {
    registry: Arc<DeviceRegistry>,
    streams: Arc<Streams>,
    regions: Arc<RegionSet>,
    queues: Queues,
    /// Host memory by device, created at the first offload.
    hosts: Box<[Mutex<Option<Arc<HostMemory>>>]>,
    entries: Entries,
    checks: Checks,
    sites: Sites,
    measures: Measures,
    timers: Timers,
    /// Number of refused requests for host memory.
    refused: AtomicU64,
}

/// Location of bytes within a live block.
#[derive(Debug)]
struct Place<'a> {
    started: &'a Started,
    block: BlockId,
    span: Span,
}

impl Offload {
    pub(super) fn new(
        registry: &Arc<DeviceRegistry>,
        streams: &Arc<Streams>,
        regions: &Arc<RegionSet>,
    ) -> Offload {
        Offload {
            registry: registry.clone(),
            streams: streams.clone(),
            regions: regions.clone(),
            queues: Queues::new(registry),
            hosts: registry.devices.iter().map(|_| Mutex::default()).collect(),
            entries: Entries::default(),
            checks: Checks::default(),
            sites: Sites::default(),
            measures: Measures::new(registry),
            timers: Timers::default(),
            refused: AtomicU64::new(0),
        }
    }

    /// Returns the places where the program offloads.
    pub fn sites(&self) -> &Sites {
        &self.sites
    }

    /// Copies bytes of a live block to the host, after the work enqueued on `stream` so far; the caller may free the block afterwards.
    /// Returns the number of the entry, valid until [`Offload::release`].
    ///
    /// Enqueues the copy without waiting, except to pin host memory if none is free.
    ///
    /// # Errors
    /// [`ProcessError::Host`] if there is no host memory, [`ProcessError::Refused`] for memory outside the pools or of private
    /// pools, [`ProcessError::OffloadCaptured`], [`ProcessError::ForeignContext`]: the bytes stay in place, and so
    /// should the caller's tensor. [`ProcessError::InNoBlock`] and [`ProcessError::Pool`] for bytes in no live block;
    /// [`ProcessError::Refused`] for decommitted memory; errors of refilling evicted memory and of the driver.
    pub fn offload(&self, raw: Stream, address: Address, size: Bytes) -> Result<u64> {
        self.copy_out(raw, address, size, None)
    }

    /// Returns whether another owner relies on the memory at an address: memory of a private pool, or GLake's memory in no live block,
    /// which a graph tree may track. Such bytes are not offloaded, and only their owner may free, move or replace them.
    pub fn is_private(&self, address: Address) -> bool {
        let Ok(started) = self.device_of(address).and_then(|device| self.started(device)) else {
            return false;
        };
        started.pool.find(address).is_none() || started.private.pool_at(&started.pool, address).is_some()
    }

    fn private_pool(&self, address: Address) -> Option<PoolId> {
        let started = self.started(self.device_of(address).ok()?).ok()?;
        started.private.pool_at(&started.pool, address)
    }

    fn copy_out(&self, raw: Stream, address: Address, size: Bytes, save: Option<SaveId>) -> Result<u64> {
        if size.is_zero() {
            return Ok(self.entries.add(Entry::empty()));
        }
        let device = self.device_of(address)?;
        if let Some(id) = self.private_pool(address) {
            return Err(ProcessError::unsupported(format!(
                "memory at {address} of {device} belongs to the private pool {id}, whose owner relies on its blocks: leave it on the GPU"
            )));
        }
        self.streams.with_default_of(Some(device), || {
            let on = self.stream(raw)?;
            self.regions.touched(address)?;
            let place = self.place(address, size)?;
            let host = self.host(device)?;
            let out = self.queues.of(device, Direction::FromGpu)?;
            let taken = host.take(size).inspect_err(|error| self.note_refused(error))?;
            // From here on the host memory is returned after any failure.
            let mut out = out.lock();
            let block = place.block;
            let digest = save.and_then(|_| self.digest(&mut out, on, &place, address));
            let copied = out.copy_out(on, &taken, &place.span).and_then(|(event, handles)| {
                drop(place.span);
                match place.started.pool.read_holds().hold(block, &event, out.id()) {
                    Ok(_) => Ok((event, handles)),
                    Err(error) => Err(error.into()),
                }
            });
            if copied.is_err() {
                // The caller may free the block.
                out.finish();
            }
            drop(out);
            match copied {
                Ok((event, copied)) => {
                    let watched = save.map(|_| block.address);
                    let (is_torn, is_reserved) = (false, false);
                    let away =
                        Away { device, size, taken, out: event, copied, watched, is_torn, is_reserved };
                    let id = self.entries.add(Entry::away(away, host));
                    if let Some(save) = save {
                        self.checks.watch(Watch { entry: id, save, block, address, stream: raw, digest });
                    }
                    Ok(id)
                }
                Err(error) => {
                    host.put(taken, None);
                    Err(error)
                }
            }
        })?
    }

    /// Starts to copy an entry back to a live block, after the copy out and the work enqueued on `stream` so far, which may have used the
    /// block's memory. May be called again, for the same or another block.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the number is unknown, for memory of another GPU, and if the second copy of a check failed;
    /// [`ProcessError::Transfer`] if the copy out failed; errors as of [`Offload::offload`] for the
    /// address. The contents at the address are undefined then.
    pub fn begin_reload(&self, id: u64, raw: Stream, address: Address) -> Result<()> {
        let entry = self.entries.of(id)?;
        // Without locks, because it may call a program's hooks.
        self.regions.written(address)?;
        let mut entry = entry.lock();
        let Some((away, _)) = entry.away.as_mut() else {
            entry.is_loaded = true;
            return Ok(());
        };
        let device = self.device_of(address)?;
        if device != away.device {
            let left = away.device;
            return Err(ProcessError::invalid(format!(
                "what is offloaded under the number {id} left {left}, and was to come back to memory of {device}: reload it to {left}, and \
                 copy it on"
            )));
        }
        away.check_bytes(id)?;
        let load = self.streams.with_default_of(Some(device), || self.load(away, raw, address))??;
        entry.keep(load);
        Ok(())
    }

    /// Makes a stream wait, on its GPU, for the most recent copy in.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the number is unknown or no reload was started;
    /// [`ProcessError::OffloadCaptured`]; the driver's error.
    pub fn wait_reload(&self, id: u64, raw: Stream) -> Result<()> {
        let entry = self.entries.of(id)?;
        let mut entry = entry.lock();
        if !entry.is_loaded {
            return Err(ProcessError::invalid(format!(
                "what is offloaded under the number {id} is not on its way back: begin to reload it first"
            )));
        }
        let Some((away, _)) = &entry.away else { return Ok(()) };
        let device = away.device;
        let on = self.streams.with_default_of(Some(device), || self.stream(raw))??;
        let Some(load) = entry.load.as_mut() else { return Ok(()) };
        load.check()?;
        self.timers.waits(on.device, on.raw, &load.event);
        self.queues.driver().stream_wait_event(on.device, on.raw, load.event.id())?;
        // The block's stream is ordered after the copy now.
        if StreamKey(on.id.0) == load.block.stream
            && let Some(hold) = load.hold.take()
        {
            self.started(device)?.pool.read_holds().end(hold);
        }
        Ok(())
    }

    /// Performs [`Offload::begin_reload`] and [`Offload::wait_reload`] for one stream.
    ///
    /// # Errors
    /// As these two.
    pub fn reload(&self, id: u64, raw: Stream, address: Address) -> Result<()> {
        self.begin_reload(id, raw, address)?;
        self.wait_reload(id, raw)
    }

    /// Returns the number of bytes of an entry.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the number is unknown.
    pub fn size(&self, id: u64) -> Result<Bytes> {
        let entry = self.entries.of(id)?;
        let entry = entry.lock();
        Ok(entry.away.as_ref().map_or(Bytes::ZERO, |(away, _)| away.size))
    }

    /// Returns a number for the lifetime of the live block that contains an address; no other block of its device ever has the same.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] for memory outside the pools, [`ProcessError::InNoBlock`].
    pub fn generation(&self, address: Address) -> Result<u64> {
        let started = self.started(self.device_of(address)?)?;
        Ok(self.identified(started, address, Bytes::new(1))?.generation)
    }

    /// Releases an entry. Its host memory is reused after the copies still in progress, without a wait on the host. After the process has
    /// stopped the memory stays as it is.
    ///
    /// # Errors
    /// [`ProcessError::Refused`] if the number is unknown.
    pub fn release(&self, id: u64) -> Result<()> {
        // Only bookkeeping is left then: dropped entries hold events.
        if self.registry.is_stopped() {
            return Ok(());
        }
        let entry = self.entries.remove(id)?;
        let mut entry = entry.lock();
        let last = entry.load.take().map(Load::into_mark);
        if let Some((away, host)) = entry.away.take() {
            if let Some(block) = away.watched {
                self.checks.forget(block, id);
            }
            host.put(away.taken, last);
        }
        Ok(())
    }

    /// Pins host memory for `size` bytes of a device ahead of time, on a background thread, so that [`Offload::offload`] need not.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`]; [`ProcessError::Host`]: the bytes pinned so far are kept.
    pub fn prepare(&self, device: i64, size: Bytes) -> Result<()> {
        let device = self.registry.device(device)?.id();
        self.host(device)?.prepare(size)
    }

    /// Returns unused host memory to the pool for other users of this process. Returns its size.
    pub(super) fn trim(&self) -> Bytes {
        self.known_hosts().map(|host| host.give_up(Bytes::MAX)).sum()
    }

    fn load(&self, away: &Away, raw: Stream, address: Address) -> Result<Load> {
        let on = self.stream(raw)?;
        let Place { started, block, span } = self.place(address, away.size)?;
        let queue = self.queues.of(away.device, Direction::ToGpu)?;
        let mut queue = queue.lock();
        let (event, number, handles) = queue.copy_in(on, &span, away)?;
        drop(span);
        match started.pool.read_holds().hold(block, &event, queue.id()) {
            Ok(hold) => Ok(Load { event, number, copied: handles, block, hold: Some(hold) }),
            Err(error) => {
                queue.finish();
                Err(error.into())
            }
        }
    }

    /// Returns the device whose pool contains an address.
    fn device_of(&self, address: Address) -> Result<DeviceId> {
        let started = self.registry.devices.iter().filter_map(DeviceMemory::started);
        let holds = |started: &&Started| {
            let (start, size) = started.pool.range();
            address.0.checked_sub(start.0).is_some_and(|offset| Bytes::new(offset) < size)
        };
        let found = { started }.find(holds);
        found.map(|started| started.pool.device()).ok_or_else(|| {
            ProcessError::unsupported(format!(
                "{address} is no memory of this library's pools, so its bytes cannot be offloaded: leave them where they are, or let this \
                 library allocate them (glake.enable)"
            ))
        })
    }

    /// Returns the live block and span of bytes that are all on the GPU.
    fn place(&self, address: Address, size: Bytes) -> Result<Place<'_>> {
        let started = self.started(self.device_of(address)?)?;
        let block = self.identified(started, address, size)?;
        if self.regions.flags.is_any_decommitted() && started.pool.is_decommitted(address, size) {
            return Err(ProcessError::decommitted(address, size));
        }
        Ok(Place { started, block, span: started.pool.read_holds().span(address, size)? })
    }

    fn identified(&self, started: &Started, address: Address, size: Bytes) -> Result<BlockId> {
        match started.pool.read_holds().identify(address, size) {
            Err(PoolError::UnknownAddress { .. }) => Err(ProcessError::InNoBlock { address }),
            found => Ok(found?),
        }
    }

    /// Returns a stream of the program, in its GPU's primary context and not captured.
    fn stream(&self, raw: Stream) -> Result<UserStream> {
        if self.streams.primary_of(raw)?.is_none() {
            return Err(ProcessError::ForeignContext);
        }
        let on = self.streams.user(raw)?;
        match self.streams.is_captured(on)? {
            true => Err(ProcessError::OffloadCaptured { device: on.device, stream: raw }),
            false => Ok(on),
        }
    }

    fn started(&self, device: DeviceId) -> Result<&Started> {
        self.registry.started(self.registry.device(device.0.into())?)
    }

    /// Returns the host memory for a device's copies.
    fn host(&self, device: DeviceId) -> Result<Arc<HostMemory>> {
        let count = self.hosts.len();
        let place = usize::try_from(device.0).ok().and_then(|index| self.hosts.get(index));
        let mut host = place.ok_or(ProcessError::NoSuchDevice { device: device.0.into(), count })?.lock();
        if let Some(host) = &*host {
            return Ok(host.clone());
        }
        let made = HostMemory::new(&self.regions.stores.host(device)?, self.regions.config.host_arena);
        Ok(host.insert(made).clone())
    }

    fn known_hosts(&self) -> impl Iterator<Item = Arc<HostMemory>> + '_ {
        self.hosts.iter().filter_map(|host| host.lock().clone())
    }

    fn note_refused(&self, error: &ProcessError) {
        if matches!(error, ProcessError::Host(error) if error.is_shortage()) {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Offload {
    /// Returns the statistics of offloading: bytes, times and checks.
    pub fn statistics(&self) -> OffloadStats {
        if !self.registry.is_stopped() {
            self.checks.poll();
        }
        let compared = self.checks.compared();
        let (out, back) = (self.queues.moved(Direction::FromGpu), self.queues.moved(Direction::ToGpu));
        let (mut pinned, mut live) = (Bytes::ZERO, Bytes::ZERO);
        for (all, own) in self.known_hosts().map(|host| host.bytes()) {
            pinned = pinned.saturating_add(all);
            live = live.saturating_add(own);
        }
        let pools =
            || self.registry.devices.iter().filter_map(DeviceMemory::started).map(|started| &started.pool);
        OffloadStats {
            entries: self.entries.count() as u64,
            host_bytes: live.get(),
            host_pinned_bytes: pinned.get(),
            copies_out: out.copies,
            bytes_out: out.bytes.get(),
            busy_us_out: micros(out.busy),
            timed_bytes_out: out.timed.get(),
            copies_in: back.copies,
            bytes_in: back.bytes.get(),
            busy_us_in: micros(back.busy),
            timed_bytes_in: back.timed.get(),
            refused: self.refused.load(Ordering::Relaxed),
            unchanged: compared.same,
            changed: compared.changed,
            unchecked: compared.missed,
            held_bytes: pools().map(|pool| pool.read_holds().freed_bytes()).sum::<Bytes>().get(),
            hold_waits: pools().map(|pool| pool.counters().hold_waits).sum(),
        }
    }
}
