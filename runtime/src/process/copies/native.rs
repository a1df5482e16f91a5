//! The driver's own copies, in the order of the program's stream, made by a device that may access both ends.
//!
//! Peer access is granted on demand. Regions are closed to relays at first, because that makes shrink and refill faster; parts of single
//! copies go through staging slots. Relay kernels that copy small blocks of a list, and broadcasts, need direct access. The engine's thread
//! opens a region at the first such copy and it stays open; until then its GPU's own link copies. A region that could not be opened is
//! retried by the next copies, a few times.
//!
//! A copy between two GPUs that neither could make first opens the pool of one to the other, and the region if the memory lies in one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::owned::{DeviceSet, Lent, LentCopy};
use glake_device::{CopyDevices, CopyRequest, DeviceId, DriverError, Stream};
use glake_stitch::DomainId;
use rustc_hash::FxHashMap;

use super::super::Result;
use super::Copies;
use super::decide::CopyAsk;
use crate::sync::Mutex;

/// Placement of a driver copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// On the stream itself.
    Here,
    /// On a stream of another device, ordered with the program's stream.
    Beside(DeviceId),
    /// On the stream itself, between two devices without access to each other's memory.
    Between(CopyDevices),
}

/// Counters of the copies that the driver made.
#[derive(Debug, Default)]
pub(super) struct NativeCount {
    copies: AtomicU64,
    bytes: AtomicU64,
}

impl NativeCount {
    #[inline]
    fn count(&self, request: &CopyRequest) {
        self.copies.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(request.size.get(), Ordering::Relaxed);
    }

    /// Returns the number of copies and their bytes.
    pub(super) fn get(&self) -> (u64, u64) {
        (self.copies.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}

impl Copies {
    /// Makes the driver's copies; returns their handle if the caller will wait for them.
    ///
    /// # Errors
    /// The driver's error.
    pub(super) fn make_native(&self, lent: Lent<'_>, ask: &CopyAsk) -> Result<u64> {
        if !ask.blocking {
            self.enqueue_native(&[lent], ask)?;
            return if ask.waited { self.mark(ask.stream) } else { Ok(0) };
        }
        let mut known = None;
        let enqueued = self.each_native(&[lent], ask, &mut known);
        if enqueued.is_err() {
            // Some copies may be enqueued. The caller gets the error of the copy.
            let _told = self.tell_clock(&[lent], known, ask.stream);
            return enqueued.map(|()| 0);
        }
        let device = known.map_or_else(|| self.streams.device_of(ask.stream), Ok)?;
        self.registry.completion_events.driver().stream_synchronize(device, ask.stream)?;
        self.compare(lent, ask)?;
        Ok(0)
    }

    /// Enqueues the driver's copies without waiting.
    ///
    /// # Errors
    /// The driver's error; some copies may be enqueued then.
    pub(super) fn enqueue_native(&self, lent: &[Lent<'_>], ask: &CopyAsk) -> Result<()> {
        let mut known = None;
        let enqueued = self.each_native(lent, ask, &mut known);
        // After a failure too: some copies may be enqueued.
        let told = self.tell_clock(lent, known, ask.stream);
        enqueued.and(told)
    }

    /// Enqueues the copies one by one; `known` caches the device of the stream.
    fn each_native(&self, lent: &[Lent<'_>], ask: &CopyAsk, known: &mut Option<DeviceId>) -> Result<()> {
        let driver = &**self.registry.completion_events.driver();
        let copies = lent.iter().flat_map(Lent::each);
        copies.filter(|copy| !copy.request().size.is_zero()).try_for_each(|copy: LentCopy| {
            let request = copy.request();
            self.native.count(&request);
            let copied = if ask.device.is_none() && self.ends.is_open_to_all(&request) {
                copy.enqueue_in_current(driver, ask.stream)
            } else {
                let device = (*known).map_or_else(|| self.streams.device_of(ask.stream), Ok)?;
                *known = Some(device);
                if !self.ends.is_open_to(device, &request) {
                    return self.enqueue_elsewhere(copy, device, ask.stream);
                }
                copy.enqueue(driver, device, ask.stream)
            };
            match copied {
                // Memory outside pools was not queried: it may be another GPU's.
                Err(refused @ DriverError::Refused { .. }) => self.enqueue_refused(copy, refused, ask.stream),
                copied => Ok(copied?),
            }
        })
    }

    /// Enqueues a refused copy again if it was a device-to-device copy on the stream of the wrong device.
    ///
    /// # Errors
    /// The first refusal, or the driver's error of the second attempt.
    #[cold]
    fn enqueue_refused(&self, copy: LentCopy, refused: DriverError, raw: Stream) -> Result<()> {
        let request = copy.request();
        let device = self.streams.device_of(raw)?;
        let of_pool = [request.to, request.from].into_iter().any(|at| self.ends.pool_owner(at).is_some());
        match self.ends.devices_of(&request) {
            Ok(Some(devices)) if of_pool && devices.to != devices.from => match self.way(device, &request)? {
                Way::Here => Err(refused.into()),
                way => self.enqueue_by(way, copy, device, raw),
            },
            _ => Err(refused.into()),
        }
    }

    /// Enqueues a copy of pool memory to which the stream's device has no access.
    ///
    /// # Errors
    /// The driver's error.
    fn enqueue_elsewhere(&self, copy: LentCopy, device: DeviceId, raw: Stream) -> Result<()> {
        self.enqueue_by(self.way(device, &copy.request())?, copy, device, raw)
    }

    fn enqueue_by(&self, way: Way, copy: LentCopy, device: DeviceId, raw: Stream) -> Result<()> {
        let driver = &**self.registry.completion_events.driver();
        match way {
            Way::Here => Ok(copy.enqueue(driver, device, raw)?),
            Way::Beside(other) => self.streams.beside(other, raw, |stream| {
                copy.enqueue(driver, other, stream)?;
                self.tell_clock_of(std::iter::once(&copy.request()), Some(other), stream)
            }),
            Way::Between(devices) => Ok(copy.enqueue_between(driver, device, devices, raw)?),
        }
    }

    /// Returns the placement of a copy that the stream's device may not make itself. Opens the pool memory to the GPU of the other end,
    /// which only these copies use; if this fails, the driver copies without peer access.
    ///
    /// # Errors
    /// The driver's error.
    fn way(&self, device: DeviceId, request: &CopyRequest) -> Result<Way> {
        let Some(devices) = self.ends.devices_of(request)?.filter(|devices| devices.to != devices.from)
        else {
            // One end is host or managed memory, or both ends are on one GPU.
            let may = self.ends.may_make(request);
            return Ok(if may.contains(device) {
                Way::Here
            } else {
                may.iter().next().map_or(Way::Here, Way::Beside)
            });
        };
        let CopyDevices { to, from } = devices;
        let is_pool = |at| self.ends.pool_owner(at).is_some();
        // Memory outside pools is accessible to its own GPU only, as far as is known.
        let makers = match (is_pool(request.to), is_pool(request.from)) {
            (true, false) => [from; 2],
            (false, _) => [to; 2],
            (true, true) if device == to => [to, from],
            (true, true) => [from, to],
        };
        let may_make = |maker: &DeviceId| self.ends.is_open_to(*maker, request);
        let maker = makers.into_iter().find(may_make).or_else(|| {
            self.open_to(makers[0], request);
            makers.into_iter().find(may_make)
        });
        Ok(match maker {
            Some(maker) if maker == device => Way::Here,
            Some(maker) => Way::Beside(maker),
            None => Way::Between(devices),
        })
    }

    fn tell_clock(&self, lent: &[Lent<'_>], device: Option<DeviceId>, raw: Stream) -> Result<()> {
        self.tell_clock_of(lent.iter().flat_map(Lent::requests), device, raw)
    }

    /// Tells the completion clock that copies of pool memory were enqueued on a stream, of `device` if known: see
    /// [`glake_device::owned::CompletionEvents::enqueued_on`].
    ///
    /// # Errors
    /// The driver's error; the copies are finished then, or their device is lost.
    fn tell_clock_of<'r>(
        &self,
        requests: impl Iterator<Item = &'r CopyRequest>,
        device: Option<DeviceId>,
        raw: Stream,
    ) -> Result<()> {
        let ends = requests.flat_map(|request| [request.to, request.from]);
        let owners: DeviceSet = ends.filter_map(|start| self.ends.pool_owner(start)).collect();
        if owners.is_empty() || self.registry.devices.len() < 2 {
            return Ok(());
        }
        let device = device.map_or_else(|| self.streams.device_of(raw), Ok)?;
        Ok(self.registry.completion_events.enqueued_on(owners, (device, raw))?)
    }
}

/// Maximum number of failed attempts to open a region, or a pool to a device.
const MOST: u32 = 3;

/// Memory that waits to be opened.
#[derive(Debug, Default)]
pub(super) struct Opening {
    /// Requested regions by device.
    asked: Arc<Mutex<FxHashMap<(DeviceId, DomainId), Asked>>>,
    /// Failed attempts to open a pool to a device, by both devices.
    refused: Mutex<FxHashMap<(DeviceId, DeviceId), u32>>,
}

#[derive(Debug, Default)]
struct Asked {
    /// Whether a request to the engine's thread is pending.
    is_pending: bool,
    failed: u32,
}

impl Copies {
    /// Requests that the engine's thread opens the memory of a copy to relays if it is closed; does not wait.
    pub(super) fn open_later(&self, request: &CopyRequest) {
        let Some(engine) = self.registry.engine.made() else { return };
        for start in [request.to, request.from] {
            let Some(pool) = self.ends.pool_of(start, request.size) else { continue };
            let Some(domain) = pool.peer_access().closed_at(start) else { continue };
            let (key, pool, asked) = ((pool.device(), domain), pool.clone(), self.opening.asked.clone());
            {
                let mut asked = asked.lock();
                let state = asked.entry(key).or_default();
                if state.is_pending || state.failed >= MOST {
                    continue;
                }
                state.is_pending = true;
            }
            let is_called = engine.call_on_thread(move |_| match pool.peer_access().open_domain(domain) {
                Ok(()) => drop(asked.lock().remove(&key)),
                Err(error) => {
                    tracing::warn!(target: "glake::copies", device = %key.0, %error, "lists of a region's blocks take one link for now");
                    let mut asked = asked.lock();
                    let state = asked.entry(key).or_default();
                    (state.is_pending, state.failed) = (false, state.failed + 1);
                }
            });
            if !is_called {
                self.opening.asked.lock().remove(&key);
            }
        }
    }

    /// Opens the pool memory of a copy to a device if it is closed to it. After several failures the pool is not tried again, and the copy
    /// takes another path.
    #[cold]
    pub(super) fn open_to(&self, device: DeviceId, request: &CopyRequest) {
        for start in [request.to, request.from] {
            let Some(pool) = self.ends.pool_of(start, request.size) else { continue };
            if pool.device() == device || pool.reach_of(start, request.size).0.contains(device) {
                continue;
            }
            let key = (pool.device(), device);
            if self.opening.refused.lock().get(&key).is_some_and(|failed| *failed >= MOST) {
                continue;
            }
            let access = pool.peer_access();
            let lent = if access.devices().contains(device) { Ok(()) } else { access.lend_to(device) };
            let opened = lent
                .and_then(|()| access.closed_at(start).map_or(Ok(()), |domain| access.open_domain(domain)));
            if let Err(error) = opened {
                tracing::warn!(target: "glake::copies", memory = %key.0, to = %device, %error, "copies between these go through the host for now");
                *self.opening.refused.lock().entry(key).or_default() += 1;
            }
        }
    }
}
