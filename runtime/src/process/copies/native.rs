//! The driver's own copies: in the order of the program's stream, by a device that may touch both ends.

use std::sync::atomic::{AtomicU64, Ordering};

use glake_device::owned::{DeviceSet, Lent, LentCopy};
use glake_device::{CopyRequest, DeviceId, Stream};

use super::super::Result;
use super::Copies;
use super::ask::CopyAsk;

/// How many copies were none for the engine.
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

    /// How many, and their bytes.
    pub(super) fn get(&self) -> (u64, u64) {
        (self.copies.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }
}

impl Copies {
    /// Makes the driver's own copies; their handle, where somebody waits for them.
    ///
    /// # Errors
    /// What the driver answers.
    pub(super) fn make_native(&self, lent: Lent<'_>, ask: &CopyAsk) -> Result<u64> {
        if !ask.blocking {
            self.enqueue_native(&[lent], ask)?;
            return if ask.waited { self.mark(ask.stream) } else { Ok(0) };
        }
        let mut known = None;
        let enqueued = self.each_native(&[lent], ask, &mut known);
        if enqueued.is_err() {
            // A part may be enqueued. What the copy met is what the caller is told.
            let _told = self.tell_clock(&[lent], known, ask.stream);
            return enqueued.map(|()| 0);
        }
        let device = known.map_or_else(|| self.streams.device_of(ask.stream), Ok)?;
        self.registry.completion_events.driver().stream_synchronize(device, ask.stream)?;
        self.compare(lent, ask)?;
        Ok(0)
    }

    /// Enqueues the driver's own copies, which nobody waits for here.
    ///
    /// # Errors
    /// What the driver answers; a part may be enqueued then.
    pub(super) fn enqueue_native(&self, lent: &[Lent<'_>], ask: &CopyAsk) -> Result<()> {
        let mut known = None;
        let enqueued = self.each_native(lent, ask, &mut known);
        // Also of what fails: a part may be enqueued.
        let told = self.tell_clock(lent, known, ask.stream);
        enqueued.and(told)
    }

    /// `known` is the device of the stream, once it was asked for.
    fn each_native(&self, lent: &[Lent<'_>], ask: &CopyAsk, known: &mut Option<DeviceId>) -> Result<()> {
        let driver = &**self.registry.completion_events.driver();
        let copies = lent.iter().flat_map(Lent::each);
        copies.filter(|copy| !copy.request().size.is_zero()).try_for_each(|copy: LentCopy| {
            let request = copy.request();
            self.native.count(&request);
            if ask.device.is_none() && self.ends.is_open_to_all(&request) {
                return Ok(copy.enqueue_in_current(driver, ask.stream)?);
            }
            let device = (*known).map_or_else(|| self.streams.device_of(ask.stream), Ok)?;
            *known = Some(device);
            match self.device_for(device, &request)? {
                None => Ok(copy.enqueue(driver, device, ask.stream)?),
                Some(other) => self.streams.beside(other, ask.stream, |stream| {
                    copy.enqueue(driver, other, stream)?;
                    self.tell_clock_of(std::iter::once(&request), Some(other), stream)
                }),
            }
        })
    }

    /// The device whose streams may make a copy that those of `device` may not, where that is so: it is between pool memory that `device`
    /// was given no access to, and memory of which nothing is known.
    ///
    /// # Errors
    /// What the driver answers where a region has to be opened first.
    fn device_for(&self, device: DeviceId, request: &CopyRequest) -> Result<Option<DeviceId>> {
        if self.ends.is_open_to(device, request) {
            return Ok(None);
        }
        if self.ends.may_make(request).is_empty() {
            self.open_now(request)?;
        }
        let may = self.ends.may_make(request);
        Ok(if may.contains(device) { None } else { may.iter().next() })
    }

    fn tell_clock(&self, lent: &[Lent<'_>], device: Option<DeviceId>, raw: Stream) -> Result<()> {
        self.tell_clock_of(lent.iter().flat_map(Lent::requests), device, raw)
    }

    /// Copies of pool memory were enqueued on a stream, of a device if that is known: see [`glake_device::owned::CompletionEvents::enqueued_on`].
    ///
    /// # Errors
    /// What the driver answers; the copies are done then, or their device lost.
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
