//! Which copies are worth asking the driver what their memory is. Takes no lock that is held for long, and asks no driver.

use glake_device::DeviceId;
use glake_units::Bytes;

use crate::Engine;
use crate::kinds::pageable;
use crate::paths::{Direction, LEAST_STAGED};

/// What a copy has to be for the engine to gain by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Benefit {
    /// Whatever the memory is, the driver's copy is as good.
    Nothing,
    /// It gains if the host's memory is pageable.
    Pageable,
    /// It may gain whatever the memory is.
    Anything,
}

/// Of smaller copies of memory that is no pool's and only gains if it is pageable, asking takes too much.
const ASKED: Bytes = Bytes::mib(4);

impl Engine {
    /// Of a copy between pool memory of a GPU and the host.
    pub fn benefit(&self, target: DeviceId, direction: Direction, size: Bytes) -> Benefit {
        let configured = || self.options.break_even.is_some();
        let even = || self.graph.read().break_even(target, direction);
        let splits =
            self.may_split(target, size) && (configured() || even().is_some_and(|even| size >= even));
        match splits {
            true => Benefit::Anything,
            false if size >= pageable::LEAST => Benefit::Pageable,
            false => Benefit::Nothing,
        }
    }

    /// Of a copy of memory that is no pool's.
    pub fn benefit_of_other(&self, size: Bytes) -> Benefit {
        // Where GPUs are shared its own is one of them.
        let alone = self.relays.usable().len() <= u32::from(self.options.shared_gpus);
        match alone {
            false if size >= LEAST_STAGED => Benefit::Anything,
            true if size >= ASKED => Benefit::Pageable,
            _ => Benefit::Nothing,
        }
    }
}
