//! GPU memory for internal use, mapped once for a set of devices.

use std::sync::Arc;

use glake_units::Bytes;

use super::{CompletionEvents, DeviceSet, Extent, Reservation, Span};
use crate::{
    Access, Address, DeviceId, DriverError, ExtentProperties, Place, PointerKind, Protection, Result, Verb,
};

/// One extent at addresses of its own. Dropping it waits for all work of the devices that may access it.
#[derive(Debug)]
pub struct Buffer {
    device: DeviceId,
    reach: DeviceSet,
    size: Bytes,
    /// Declared before the extent, so that it is dropped, and unmapped, first.
    reservation: Reservation,
    _extent: Extent,
}

impl Buffer {
    /// Allocates at least `size` bytes of a GPU's memory, accessible to work of the devices in `reach` and always to the GPU itself.
    ///
    /// # Errors
    /// What the driver answers, above all where there is no memory, or a device of `reach` cannot reach this one.
    pub fn new(
        completion_events: &Arc<CompletionEvents>,
        device: DeviceId,
        size: Bytes,
        reach: DeviceSet,
    ) -> Result<Self> {
        Buffer::open(completion_events, device, size, reach, false)
    }

    /// Like [`Buffer::new`], if the caller joins all work of the devices in `reach` into the GPU's own context ([`Reservation::lend`]):
    /// dropping the buffer then waits for that context only.
    ///
    /// # Errors
    /// As [`Buffer::new`].
    pub fn lent(
        completion_events: &Arc<CompletionEvents>,
        device: DeviceId,
        size: Bytes,
        reach: DeviceSet,
    ) -> Result<Self> {
        Buffer::open(completion_events, device, size, reach, true)
    }

    fn open(
        completion_events: &Arc<CompletionEvents>,
        device: DeviceId,
        size: Bytes,
        reach: DeviceSet,
        lent: bool,
    ) -> Result<Self> {
        let driver = completion_events.driver();
        let properties = ExtentProperties { place: Place::Gpu(device), exportable: false, gpu_direct: false };
        let rounded = size.align_up(driver.granularity(properties)?);
        let size = rounded.ok_or(DriverError::OutOfMemory { verb: Verb::Create, wanted: size })?;
        let reach = reach.union(DeviceSet::of(device));
        let extent = Extent::new(driver, size, properties)?;
        let reservation = Reservation::new(completion_events, device, size)?;
        reservation.map(Bytes::ZERO, &extent)?;
        if lent {
            reach.without(DeviceSet::of(device)).iter().for_each(|device| reservation.lend(device));
        }
        let access = |device| Access { device, protection: Protection::ReadWrite };
        let access: Vec<Access> = reach.iter().map(access).collect();
        reservation.set_access(Bytes::ZERO, size, &access)?;
        Ok(Buffer { device, reach, size, reservation, _extent: extent })
    }

    /// Returns the device that owns the memory.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Returns the start address.
    pub fn start(&self) -> Address {
        self.reservation.start()
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// Returns a range of the buffer for asynchronous work; `None` past its end.
    pub fn span(self: &Arc<Self>, offset: Bytes, size: Bytes) -> Option<Span> {
        let kind = PointerKind::Device { device: self.device, mapped: true };
        // SAFETY: mapped with access for `reach` while this lives, and its end waits for all work of those devices.
        let whole = unsafe { Span::owned(self, (self.start(), self.size), kind, self.reach) };
        whole.part(offset, size)
    }

    /// Copies bytes to the host and returns when they have arrived. The caller orders it after the work that wrote them.
    pub fn read(&self, offset: Bytes, into: &mut [u8]) -> Result<()> {
        self.reservation.read(offset, into)
    }

    /// Copies host bytes into the buffer and returns when they have arrived.
    pub fn write(&self, offset: Bytes, bytes: &[u8]) -> Result<()> {
        self.reservation.write(offset, bytes)
    }
}
