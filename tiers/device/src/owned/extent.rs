//! Physical memory that is released when dropped.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use glake_units::Bytes;

use crate::{Address, DeviceId, Driver, DriverError, ExtentProperties, Handle, Refusal, Result, Verb};

/// Retries of a release while the device is busy, about 100 ms in total, before the memory is leaked.
const ATTEMPTS: u32 = 1000;
const PAUSE: std::time::Duration = std::time::Duration::from_micros(100);

/// Owner of a piece of physical memory, which may be mapped many times. The bytes live until the owner is dropped and the last mapping is
/// gone, so dropping it is safe at any time.
#[derive(Debug)]
pub struct Extent {
    driver: Arc<dyn Driver>,
    handle: Handle,
    size: Bytes,
    properties: ExtentProperties,
    exported: AtomicBool,
    released: bool,
}

impl Extent {
    /// Creates zeroed memory; `size` is a multiple of the granularity.
    pub fn new(driver: &Arc<dyn Driver>, size: Bytes, properties: ExtentProperties) -> Result<Self> {
        let handle = driver.create(size, properties)?;
        Ok(Extent::of(driver, handle, size, properties))
    }

    /// Imports memory that another process exported. Size and properties must be those stated by that process: the driver cannot be asked
    /// for them, and refuses to map another size.
    pub fn import(
        driver: &Arc<dyn Driver>,
        shared: BorrowedFd<'_>,
        size: Bytes,
        properties: ExtentProperties,
    ) -> Result<Self> {
        let handle = driver.import(shared)?;
        Ok(Extent::of(driver, handle, size, properties))
    }

    fn of(driver: &Arc<dyn Driver>, handle: Handle, size: Bytes, properties: ExtentProperties) -> Self {
        let exported = AtomicBool::new(false);
        Extent { driver: driver.clone(), handle, size, properties, exported, released: false }
    }

    /// Returns a file descriptor with which another process can import the memory, which must have been created exportable.
    pub fn export(&self) -> Result<OwnedFd> {
        let shared = self.driver.export(self.handle)?;
        self.exported.store(true, Ordering::Relaxed);
        Ok(shared)
    }

    /// Marks the memory as exported before any descriptor of it exists.
    pub fn mark_exported(&self) {
        self.exported.store(true, Ordering::Relaxed);
    }

    /// Returns whether another process may hold the memory: it was exported once, and importers do not report when they are done.
    pub fn is_exported(&self) -> bool {
        self.exported.load(Ordering::Relaxed)
    }

    /// Releases the memory like dropping it, but reports a failure.
    ///
    /// # Errors
    /// The driver's error, and the memory itself, still alive.
    pub fn release(mut self) -> std::result::Result<(), (Extent, DriverError)> {
        match self.try_release() {
            Ok(()) => {
                self.released = true;
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Leaks memory that the driver refuses to release.
    pub fn abandon(mut self) {
        self.released = true;
    }

    /// Releases the handle, retrying while the device is busy.
    fn try_release(&self) -> Result<()> {
        let mut attempts = 1;
        loop {
            // SAFETY: this owner has the live handle and forgets it afterwards. Mappings keep the memory.
            match unsafe { self.driver.release(self.handle) } {
                Err(DriverError::NotReady { .. }) if attempts < ATTEMPTS => std::thread::sleep(PAUSE),
                answer => return answer,
            }
            attempts += 1;
        }
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// Returns the properties that the memory was created with.
    pub fn properties(&self) -> ExtentProperties {
        self.properties
    }

    /// Returns the raw handle. It is valid while this owner lives.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    pub(super) fn is_of(&self, driver: &Arc<dyn Driver>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.driver), Arc::as_ptr(driver))
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        if !self.released {
            // If this fails, the memory leaks.
            let _ = self.try_release();
        }
    }
}

/// Owner of memory that the driver allocated at an address of its own ([`Driver::alloc_plain`]). Its device's work delays the release until
/// it is done; work of other devices on it must have completed before.
#[derive(Debug)]
pub struct PlainMemory {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    start: Address,
    size: Bytes,
    released: bool,
}

impl PlainMemory {
    /// Allocates memory of a device.
    pub fn new(driver: &Arc<dyn Driver>, device: DeviceId, size: Bytes) -> Result<Self> {
        let start = driver.alloc_plain(device, size)?;
        Ok(PlainMemory { driver: driver.clone(), device, start, size, released: false })
    }

    /// Returns the address of the first byte.
    pub fn start(&self) -> Address {
        self.start
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// Copies bytes from `at` on to the host and waits for completion. The caller orders the copy after the work that wrote the bytes.
    ///
    /// # Errors
    /// The driver's error.
    pub fn read(&self, at: Bytes, into: &mut [u8]) -> Result<()> {
        self.check(Verb::ReadNow, at, into.len())?;
        self.driver.read_now(self.device, Address(self.start.0 + at.get()), into)
    }

    /// Copies host bytes to the memory from `at` on and waits for completion.
    ///
    /// # Errors
    /// The driver's error.
    pub fn write(&self, at: Bytes, bytes: &[u8]) -> Result<()> {
        self.check(Verb::WriteNow, at, bytes.len())?;
        // SAFETY: the range lies in the live allocation; its user orders the write.
        unsafe { self.driver.write_now(self.device, Address(self.start.0 + at.get()), bytes) }
    }

    fn check(&self, verb: Verb, at: Bytes, length: usize) -> Result<()> {
        if at.saturating_add(Bytes::new(length as u64)) <= self.size {
            return Ok(());
        }
        Err(DriverError::Refused { verb, address: self.start, reason: Refusal::InvalidValue })
    }

    /// Frees the memory like dropping it, but reports a failure.
    ///
    /// # Errors
    /// The driver's error, and the memory itself, still alive.
    pub fn release(mut self) -> std::result::Result<(), (PlainMemory, DriverError)> {
        match self.try_release() {
            Ok(()) => {
                self.released = true;
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Leaks memory that the driver refuses to free.
    pub fn abandon(mut self) {
        self.released = true;
    }

    fn try_release(&self) -> Result<()> {
        // SAFETY: this owner has the live allocation and forgets it afterwards. The driver waits for its device's work; work of other
        // devices is the duty of the code that let them in.
        unsafe { self.driver.free_plain(self.device, self.start) }
    }
}

impl Drop for PlainMemory {
    fn drop(&mut self) {
        if !self.released {
            // If this fails, the memory leaks.
            let _ = self.try_release();
        }
    }
}
