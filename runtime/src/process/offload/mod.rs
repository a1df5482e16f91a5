//! Bytes of live blocks that leave their GPU and come back to another address, one tensor's at a time.
//!
//! ```text
//! stream:  … write ─┬─ free, and what comes next …        malloc ─┬──────────────── wait ─ read …
//! out:              └─► copy ─► event: a read hold               │                   ▲
//! in:                              └──────────────────────────────┴─► copy ─► event ─┘
//! host:             [ taken ─────────────────────────────────── released: the next copy out waits for the event ]
//! ```
//!
//! The caller frees the block as soon as it likes: its bytes are its stream's again behind the event of the copy out ([`ReadHolds`]). It
//! takes memory for the way back itself, on its own stream.
//!
//! | part | has |
//! |---|---|
//! | [`Queues`] | one stream a direction and GPU, in whose order copies run; how long they took |
//! | [`HostMemory`] | pinned host memory of a GPU's copies, handed out again behind the copies that read it |
//! | [`Entries`] | what is offloaded, by a number that is never given twice |
//! | [`Checks`] | whether what was offloaded changed until its block was freed |
//! | [`Sites`] | what is to be offloaded of each pass of a site, and when its reloads begin |
//! | [`Measures`], [`Timers`] | what plans are made from: memory, links, room, times |
//!
//! Invariants: nothing waits on the host for a GPU. Who waits for a copy waits for its event, on the GPU. Nothing of a copy is handed to
//! anybody else before its event, but behind a wait for it: source and target are held, host memory goes back with its last copy.
//! At the end of the process nothing here calls the driver.
//!
//! [`ReadHolds`]: glake_tiers::ReadHolds

mod checks;
mod chunks;
mod entries;
mod host_memory;
mod measures;
mod passes;
mod queue;
mod ranges;
mod recheck;
mod sites;
mod statistics;
#[cfg(test)]
#[cfg(not(schedules))]
mod tests;
mod timer;
mod told;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::owned::Span;
use glake_device::{Address, DeviceId, Stream};
use glake_stitch::StreamKey;
use glake_tiers::{BlockId, PoolError};
use glake_transfer::UserStream;
use glake_transfer::paths::Direction;
use glake_units::Bytes;

use super::device::{DeviceMemory, Started};
use super::device_registry::DeviceRegistry;
use super::regions::RegionSet;
use super::streams::Streams;
use super::{PoolId, ProcessError, Result};
use crate::sync::Mutex;
pub use checks::{CheckState, SaveId};
use checks::{Checks, Watch};
use entries::{Away, Entries, Entry, Load};
use glake_offload::Position;
pub use glake_offload::{ItemId, LeafPart, Pack, Preset, ScopeId, Verdict};
use host_memory::HostMemory;
use measures::Measures;
use queue::Queues;
pub use sites::{PackedItem, Sites};
use timer::Timers;

/// What of a process's memory is offloaded.
#[derive(Debug)]
pub struct Offload {
    registry: Arc<DeviceRegistry>,
    streams: Arc<Streams>,
    regions: Arc<RegionSet>,
    queues: Queues,
    /// By device, made when something is first offloaded.
    hosts: Box<[Mutex<Option<Arc<HostMemory>>>]>,
    entries: Entries,
    checks: Checks,
    sites: Sites,
    measures: Measures,
    timers: Timers,
    /// Times that host memory was refused.
    refused: AtomicU64,
}

/// Where bytes of a live block are.
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

    /// Where the program offloads.
    pub fn sites(&self) -> &Sites {
        &self.sites
    }

    /// Copies bytes of a live block to the host, after what is on `stream` by now; the caller may free the block from then on. Returns the
    /// number by which they are known until [`Offload::release`].
    ///
    /// Enqueues the copy, and waits for nothing, but for host memory to be pinned where there is none that is free.
    ///
    /// # Errors
    /// [`ProcessError::Host`] where there is no host memory, [`ProcessError::NotOurs`], [`ProcessError::OffloadPrivate`],
    /// [`ProcessError::OffloadCaptured`], [`ProcessError::ForeignContext`]: the bytes stay where they are, and so should the caller's tensor. [`ProcessError::InNoBlock`],
    /// [`ProcessError::Pool`] where they lie in no live block; [`ProcessError::Decommitted`]; what bringing evicted memory back meets; what
    /// the driver answers.
    pub fn offload(&self, raw: Stream, address: Address, size: Bytes) -> Result<u64> {
        self.copy_out(raw, address, size, None)
    }

    /// Returns whether an owner counts on the memory at an address: memory of a private pool, or GLake's memory in no live
    /// block, which a graph tree may keep account of. Such bytes are not offloaded, and nothing may free, move or replace them in their owner's place.
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
            return Err(ProcessError::OffloadPrivate { device, address, id });
        }
        self.streams.with_default_of(Some(device), || {
            let on = self.stream(raw)?;
            self.regions.touched(address)?;
            let place = self.place(address, size)?;
            let host = self.host(device)?;
            let out = self.queues.of(device, Direction::FromGpu)?;
            let taken = host.take(size).inspect_err(|error| self.note_refused(error))?;
            // From here on it goes back whatever fails.
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
                    let away = Away { device, size, taken, out: event, copied, watched, is_torn: false };
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

    /// Begins to copy what was offloaded to a live block, after the copy out and after what is on `stream` by now: the block may have
    /// been memory of earlier work there. It may be asked for again, for the same memory or other.
    ///
    /// # Errors
    /// [`ProcessError::UnknownOffload`]; [`ProcessError::OffloadedElsewhere`] for memory of another GPU; [`ProcessError::Transfer`] where the
    /// bytes were lost on their way out, [`ProcessError::OffloadTorn`] where they were when they were checked; as [`Offload::offload`] of the address. Nothing may be read at the address then.
    pub fn begin_reload(&self, id: u64, raw: Stream, address: Address) -> Result<()> {
        let entry = self.entries.of(id)?;
        // Under no lock: it may call a program's hooks.
        self.regions.written(address)?;
        let mut entry = entry.lock();
        let Some((away, _)) = entry.away.as_mut() else {
            entry.is_loaded = true;
            return Ok(());
        };
        let device = self.device_of(address)?;
        if device != away.device {
            return Err(ProcessError::OffloadedElsewhere { id, device: away.device, asked: device });
        }
        if away.is_torn {
            return Err(ProcessError::OffloadTorn { id });
        }
        away.check()?;
        let load = self.streams.with_default_of(Some(device), || self.load(away, raw, address))??;
        entry.keep(load);
        Ok(())
    }

    /// Has a stream wait, on its GPU, for the last copy in that was begun.
    ///
    /// # Errors
    /// [`ProcessError::UnknownOffload`]; [`ProcessError::NotReloading`] where none was begun; [`ProcessError::OffloadCaptured`]; what the
    /// driver answers.
    pub fn wait_reload(&self, id: u64, raw: Stream) -> Result<()> {
        let entry = self.entries.of(id)?;
        let mut entry = entry.lock();
        if !entry.is_loaded {
            return Err(ProcessError::NotReloading { id });
        }
        let Some((away, _)) = &entry.away else { return Ok(()) };
        let device = away.device;
        let on = self.streams.with_default_of(Some(device), || self.stream(raw))??;
        let Some(load) = entry.load.as_mut() else { return Ok(()) };
        load.check()?;
        self.timers.waits(on.device, on.raw, &load.event);
        self.queues.driver().stream_wait_event(on.device, on.raw, load.event.id())?;
        // The stream that the block goes back to is behind the copy now.
        if StreamKey(on.id.0) == load.block.stream
            && let Some(hold) = load.hold.take()
        {
            self.started(device)?.pool.read_holds().end(hold);
        }
        Ok(())
    }

    /// [`Offload::begin_reload`] and [`Offload::wait_reload`] for one stream.
    ///
    /// # Errors
    /// As these.
    pub fn reload(&self, id: u64, raw: Stream, address: Address) -> Result<()> {
        self.begin_reload(id, raw, address)?;
        self.wait_reload(id, raw)
    }

    /// How many bytes were offloaded under a number.
    ///
    /// # Errors
    /// [`ProcessError::UnknownOffload`].
    pub fn size(&self, id: u64) -> Result<Bytes> {
        let entry = self.entries.of(id)?;
        let entry = entry.lock();
        Ok(entry.away.as_ref().map_or(Bytes::ZERO, |(away, _)| away.size))
    }

    /// A number for the life of the live block that an address lies in; no other block of its device ever has the same.
    ///
    /// # Errors
    /// [`ProcessError::NotOurs`], [`ProcessError::InNoBlock`].
    pub fn generation(&self, address: Address) -> Result<u64> {
        let started = self.started(self.device_of(address)?)?;
        Ok(self.identified(started, address, Bytes::new(1))?.generation)
    }

    /// Forgets what was offloaded. Its host memory is free for the next copy out behind the copies that are still under way; nothing waits for
    /// them on the host. At the end of the process it stays as it is.
    ///
    /// # Errors
    /// [`ProcessError::UnknownOffload`].
    pub fn release(&self, id: u64) -> Result<()> {
        // Books alone are kept then: what is dropped here has events.
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

    /// Has host memory pinned for so many bytes of a device, so that [`Offload::offload`] need not: to be called ahead, on another thread.
    ///
    /// # Errors
    /// [`ProcessError::NoSuchDevice`]; [`ProcessError::Host`]: what was pinned by then stays.
    pub fn prepare(&self, device: i64, size: Bytes) -> Result<()> {
        let device = self.registry.device(device)?.id();
        self.host(device)?.prepare(size)
    }

    /// Gives host memory back that nothing is offloaded to, for whoever wants host memory of this process next; returns how much.
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

    /// Whose memory an address is.
    fn device_of(&self, address: Address) -> Result<DeviceId> {
        let started = self.registry.devices.iter().filter_map(DeviceMemory::started);
        let holds = |started: &&Started| {
            let (start, size) = started.pool.range();
            address.0.checked_sub(start.0).is_some_and(|offset| Bytes::new(offset) < size)
        };
        let found = { started }.find(holds);
        found.map(|started| started.pool.device()).ok_or(ProcessError::NotOurs { address })
    }

    /// The bytes of a live block, all of which are there.
    fn place(&self, address: Address, size: Bytes) -> Result<Place<'_>> {
        let started = self.started(self.device_of(address)?)?;
        let block = self.identified(started, address, size)?;
        if self.regions.flags().is_any_decommitted() && started.pool.is_decommitted(address, size) {
            return Err(ProcessError::Decommitted { address, size });
        }
        Ok(Place { started, block, span: started.pool.read_holds().span(address, size)? })
    }

    fn identified(&self, started: &Started, address: Address, size: Bytes) -> Result<BlockId> {
        match started.pool.read_holds().identify(address, size) {
            Err(PoolError::UnknownAddress { .. }) => Err(ProcessError::InNoBlock { address }),
            found => Ok(found?),
        }
    }

    /// A stream of the program that is not captured, in its GPU's primary context.
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

    /// The host memory of a device's copies.
    fn host(&self, device: DeviceId) -> Result<Arc<HostMemory>> {
        let count = self.hosts.len();
        let place = usize::try_from(device.0).ok().and_then(|index| self.hosts.get(index));
        let mut host = place.ok_or(ProcessError::NoSuchDevice { device: device.0.into(), count })?.lock();
        if let Some(host) = &*host {
            return Ok(host.clone());
        }
        let made = HostMemory::new(&self.regions.host(device)?, self.regions.host_arena());
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
