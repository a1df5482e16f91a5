//! The memory of an extent, which its lease counts as long as the driver has not released it.

use glake_device::DriverError;
use glake_device::owned::Extent;

use super::lease::Counted;

/// An extent that was made.
#[derive(Debug)]
pub(super) struct Made(Option<(Extent, Counted)>);

impl Made {
    pub(super) fn new(memory: Extent, counted: Counted) -> Made {
        Made(Some((memory, counted)))
    }

    pub(super) fn memory(&self) -> Option<&Extent> {
        self.0.as_ref().map(|(memory, _)| memory)
    }

    /// Releases it; a shrink gives what it was leased back too, and it stays `leased` otherwise.
    ///
    /// # Errors
    /// What the driver answers, and the memory itself, still alive.
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
        // What the driver does not release is lost to others too.
        if let Some((memory, counted)) = self.0.take()
            && let Err((memory, _)) = memory.release()
        {
            memory.abandon();
            counted.keep();
        }
    }
}
