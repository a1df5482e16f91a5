//! GPUs as seen by two drivers: the one of the program's contexts and the one of GLake's own contexts.
//!
//! Invariant: work on the program's streams is enqueued by the program's driver, work of relays by GLake's own.

use std::sync::Arc;

use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_device::{CaptureState, DeviceId, Driver};

use crate::{Result, UserStream};

/// Both drivers, each with the clock of its completion points.
#[derive(Debug)]
pub(crate) struct Contexts {
    program: Arc<CompletionEvents>,
    own: Arc<CompletionEvents>,
    devices: usize,
}

impl Contexts {
    /// Wraps the driver of a clock. Creates no context.
    ///
    /// # Errors
    /// What the driver answers.
    pub(crate) fn new(program: Arc<CompletionEvents>) -> Result<Arc<Contexts>> {
        let devices = program.driver().devices()?.len();
        let own = CompletionEvents::new(program.driver().own_contexts()?);
        Ok(Arc::new(Contexts { program, own, devices }))
    }

    /// Returns the clock of the program's contexts.
    pub(crate) fn program(&self) -> &Arc<CompletionEvents> {
        &self.program
    }

    /// Returns the driver of the program's contexts.
    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        self.program.driver()
    }

    /// Returns the clock of GLake's own contexts, in which relays work.
    pub(crate) fn own(&self) -> &Arc<CompletionEvents> {
        &self.own
    }

    /// Returns the driver of GLake's own contexts.
    pub(crate) fn own_driver(&self) -> &Arc<dyn Driver> {
        self.own.driver()
    }

    /// Returns the number of GPUs.
    pub(crate) fn devices(&self) -> usize {
        self.devices
    }

    /// Returns the GPUs with a primary context.
    pub(crate) fn in_use(&self) -> DeviceSet {
        self.all().filter(|device| matches!(self.driver().has_context(*device), Ok(true))).collect()
    }

    /// Returns those of `devices` that have a primary context. A failed query counts as having one.
    pub(crate) fn may_be_in_use(&self, devices: DeviceSet) -> DeviceSet {
        devices.iter().filter(|device| self.driver().has_context(*device).unwrap_or(true)).collect()
    }

    /// Returns the GPUs whose work can access a relay's memory.
    pub(crate) fn reaching(&self, relay: DeviceId) -> DeviceSet {
        let reach = |device: &DeviceId| {
            *device == relay || matches!(self.driver().can_access_peer(*device, relay), Ok(true))
        };
        self.all().filter(reach).collect()
    }

    /// Returns whether a stream is known not to be capturing. A failed query counts as capturing.
    pub(crate) fn is_plain(&self, on: UserStream) -> bool {
        matches!(self.driver().capture_state(on.device, on.raw), Ok(CaptureState::None))
    }

    /// Blocks until all work of a stream has completed.
    ///
    /// # Errors
    /// What the driver answers.
    pub(crate) fn synchronize(&self, on: UserStream) -> Result<()> {
        Ok(self.driver().stream_synchronize(on.device, on.raw)?)
    }

    fn all(&self) -> impl Iterator<Item = DeviceId> {
        (0_u32..).map(DeviceId).take(self.devices)
    }
}

#[cfg(test)]
mod tests {
    use glake_device::Stream;
    use glake_device::owned::OwnedStream;
    use glake_sim::{SimOptions, SimTopology, Simulator};
    use glake_units::Bytes;

    use super::*;

    #[test]
    fn making_it_makes_no_context() {
        let topology = SimTopology::uniform(3, Bytes::mib(64));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let driver: Arc<dyn Driver> = sim.clone();
        let contexts = Contexts::new(CompletionEvents::new(driver.clone())).unwrap();
        assert_eq!(contexts.devices(), 3);
        assert!(contexts.in_use().is_empty());
        let gpu = DeviceId(1);
        sim.hold_context(gpu).unwrap();
        assert_eq!(contexts.in_use(), DeviceSet::of(gpu));
        let others = DeviceSet::of(DeviceId(0)).union(DeviceSet::of(gpu));
        assert_eq!(contexts.may_be_in_use(others), DeviceSet::of(gpu));
        assert!(contexts.reaching(gpu).contains(gpu));
        let stream = OwnedStream::new(&driver, gpu).unwrap();
        let on = UserStream::of(&*driver, gpu, stream.id()).unwrap();
        assert!(contexts.is_plain(on) && on.raw != Stream::PER_THREAD);
        contexts.synchronize(on).unwrap();
    }
}
