//! Physical memory that is released when dropped.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

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
}

impl Extent {
    /// New memory, holding zeroes; `size` is a multiple of the granularity.
    pub fn new(driver: &Arc<dyn Driver>, size: Bytes, properties: ExtentProperties) -> Result<Self> {
        let handle = driver.create(size, properties)?;
        Ok(Extent { driver: driver.clone(), handle, size, properties })
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
        Ok(Extent { driver: driver.clone(), handle, size, properties })
    }

    /// A file descriptor by which another process can import it; it was made exportable.
    pub fn export(&self) -> Result<OwnedFd> {
        self.driver.export(self.handle)
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
        for _ in 0..ATTEMPTS {
            // SAFETY: the handle is alive and this owner's. Mappings keep the memory. A failure leaks it.
            match unsafe { self.driver.release(self.handle) } {
                Err(DriverError::NotReady { .. }) => std::thread::sleep(PAUSE),
                _ => return,
            }
        }
    }
}
