//! Physical memory that is released when dropped.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use glake_units::Bytes;

use crate::{Driver, DriverError, ExtentProperties, Handle, Result};

/// How often a busy device is asked again to release before the memory is leaked: about 100 ms.
const ATTEMPTS: u32 = 1000;
const PAUSE: std::time::Duration = std::time::Duration::from_micros(100);

/// A piece of physical memory. It may be mapped many times; the bytes live until it is dropped and the last
/// mapping is gone, so dropping it is safe at any time.
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
    /// New memory, holding zeroes; `size` is a multiple of the granularity.
    pub fn new(driver: &Arc<dyn Driver>, size: Bytes, properties: ExtentProperties) -> Result<Self> {
        let handle = driver.create(size, properties)?;
        Ok(Extent::of(driver, handle, size, properties))
    }

    /// Memory that another process exported. Size and properties are what that process says: neither can be
    /// asked of the driver, which refuses to map another size.
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

    /// A file descriptor by which another process can import it; it was made exportable.
    pub fn export(&self) -> Result<OwnedFd> {
        let shared = self.driver.export(self.handle)?;
        self.exported.store(true, Ordering::Relaxed);
        Ok(shared)
    }

    /// Counts it as exported from now on, though no descriptor of it was made yet.
    pub fn mark_exported(&self) {
        self.exported.store(true, Ordering::Relaxed);
    }

    /// Whether another process may have it: it was exported once, and who took it does not tell when they are done.
    pub fn is_exported(&self) -> bool {
        self.exported.load(Ordering::Relaxed)
    }

    /// Releases it, as dropping it does, and says where that fails.
    ///
    /// # Errors
    /// What the driver answers, and the memory itself, still alive.
    pub fn release(mut self) -> std::result::Result<(), (Extent, DriverError)> {
        match self.try_release() {
            Ok(()) => {
                self.released = true;
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Leaves it to the driver, which would not release it.
    pub fn abandon(mut self) {
        self.released = true;
    }

    /// Asks again while the device is busy.
    fn try_release(&self) -> Result<()> {
        let mut attempts = 1;
        loop {
            // SAFETY: the handle is alive and this owner's, who forgets it then. Mappings keep the memory.
            match unsafe { self.driver.release(self.handle) } {
                Err(DriverError::NotReady { .. }) if attempts < ATTEMPTS => std::thread::sleep(PAUSE),
                answer => return answer,
            }
            attempts += 1;
        }
    }

    /// How large it is.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// What it was made like.
    pub fn properties(&self) -> ExtentProperties {
        self.properties
    }

    /// Its name. It dies with this owner.
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
            // A failure leaks it.
            let _ = self.try_release();
        }
    }
}
