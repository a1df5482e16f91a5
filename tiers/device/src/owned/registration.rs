//! Pinned host memory that is unpinned when dropped.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use glake_units::Bytes;

use super::{CompletionEvents, DeviceSet, Pages};
use crate::{Address, Result};

/// Exclusively owned host memory that every device can copy from and to at full speed.
///
/// Dropping it waits for all work of all devices that have a context, then unpins and frees the memory. If that fails (a lost context), the
/// memory leaks: a device may still write to it.
#[derive(Debug)]
pub struct Registration {
    completion_events: Arc<CompletionEvents>,
    devices: DeviceSet,
    pages: ManuallyDrop<Pages>,
}

impl Registration {
    /// Pins pages of host memory.
    pub fn new(completion_events: &Arc<CompletionEvents>, pages: Pages) -> Result<Self> {
        let driver = completion_events.driver();
        let devices = driver.devices()?.into_iter().map(|device| device.id).collect();
        // SAFETY: the pages are aligned and owned, and stay mapped until they are unregistered.
        unsafe { driver.host_register(pages.start(), pages.size())? };
        Ok(Registration {
            completion_events: completion_events.clone(),
            devices,
            pages: ManuallyDrop::new(pages),
        })
    }

    /// Returns the start address.
    pub fn start(&self) -> Address {
        self.pages.start()
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> Bytes {
        self.pages.size()
    }

    /// Returns the bytes as a slice. The caller must wait for device work on them.
    pub fn as_slice(&self) -> &[u8] {
        self.pages.as_slice()
    }

    /// Returns the bytes for writing. The caller must wait for device work on them.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.pages.as_mut_slice()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.completion_events.synchronize(self.devices).is_err() {
            return;
        }
        // SAFETY: the range was registered, and all work of every device is done.
        if unsafe { self.completion_events.driver().host_unregister(self.pages.start()) }.is_ok() {
            // SAFETY: the pages are dropped once, here, and not used again.
            unsafe { ManuallyDrop::drop(&mut self.pages) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stub::Stub;
    use crate::{Recorder, Verb};

    #[test]
    fn unpinning_waits_for_all_work() {
        let recorder = Arc::new(Recorder::measured(Stub::new()).with_log());
        let completion_events = CompletionEvents::new(recorder.clone());
        let mut pinned =
            Registration::new(&completion_events, Pages::new(Bytes::mib(2), 1).unwrap()).unwrap();
        pinned.as_mut_slice()[7] = 1;
        assert_eq!(pinned.as_slice()[7], 1);
        drop(pinned);
        let verbs: Vec<Verb> = recorder.take_log().iter().map(|logged| logged.call.verb).collect();
        use Verb::*;
        assert_eq!(verbs, [Devices, HostRegister, ContextSynchronize, ContextSynchronize, HostUnregister]);
    }
}
