//! Physical memory of an extent, counted by the lease until the driver has released it.

use glake_device::DriverError;
use glake_device::owned::Extent;

use super::lease::Counted;

/// Extent with physical memory.
#[derive(Debug)]
pub(super) struct Made(Option<(Extent, Counted)>);

impl Made {
    pub(super) fn new(memory: Extent, counted: Counted) -> Made {
        Made(Some((memory, counted)))
    }

    pub(super) fn memory(&self) -> Option<&Extent> {
        self.0.as_ref().map(|(memory, _)| memory)
    }

    /// Releases the memory. A shrink also lowers the lease; with `leased` the lease keeps its size.
    ///
    /// # Errors
    /// The driver's error, and the memory, which still exists.
    pub(super) fn release(mut self, leased: bool) -> std::result::Result<(), (Made, DriverError)> {
        let Some((memory, counted)) = self.0.take() else { return Ok(()) };
        match memory.release() {
            Ok(()) => {
                if !leased {
                    counted.give_back();
                }
                Ok(())
            }
            Err((memory, error)) => Err((Made::new(memory, counted), error)),
        }
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // Memory that the driver does not release is unavailable to others too.
        if let Some((memory, counted)) = self.0.take()
            && let Err((memory, _)) = memory.release()
        {
            memory.abandon();
            counted.keep();
        }
    }
}
