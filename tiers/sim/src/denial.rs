//! Refusals inside the simulator, before the verb is known.

use std::io;

use glake_units::Bytes;

use glake_device::{Address, DeviceId, DriverError, Living, Refusal, Verb};

/// Result of a step inside the simulator.
pub(super) type Checked<T> = std::result::Result<T, Denial>;

/// A [`DriverError`] without its verb.
#[derive(Debug)]
pub(super) enum Denial {
    Refused(Address, Refusal),
    OutOfMemory(Bytes),
    NoSuchDevice {
        device: DeviceId,
        count: u32,
    },
    ContextInUse(DeviceId, Living),
    NotReady,
    Unsupported,
    Capturing,
    /// The context is lost with this CUDA error number.
    Lost(u32),
    /// Another CUDA error, by its number.
    Failed(u32),
    Os(io::Error),
}

/// Returns the refusal for a broken rule.
pub(super) fn refuse<T>(at: Address, reason: Refusal) -> Checked<T> {
    Err(Denial::Refused(at, reason))
}

impl Denial {
    /// Completes the error with its verb.
    pub(super) fn of(self, verb: Verb) -> DriverError {
        match self {
            Denial::Refused(address, reason) => DriverError::Refused { verb, address, reason },
            Denial::OutOfMemory(wanted) => DriverError::OutOfMemory { verb, wanted },
            Denial::NoSuchDevice { device, count } => DriverError::NoSuchDevice { device, count },
            Denial::ContextInUse(device, living) => DriverError::ContextInUse { device, living },
            Denial::Unsupported => DriverError::Unsupported { verb, code: DriverError::UNSUPPORTED },
            Denial::NotReady => DriverError::NotReady { verb },
            Denial::Capturing => DriverError::Capturing { verb, code: DriverError::CAPTURING },
            Denial::Lost(code) => DriverError::Sticky { verb, code },
            Denial::Failed(code) => DriverError::of_number(verb, code),
            Denial::Os(source) => DriverError::Os { verb, source },
        }
    }
}

impl From<io::Error> for Denial {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::ENOMEM | libc::ENOSPC | libc::EMFILE | libc::ENFILE) => {
                Denial::OutOfMemory(Bytes::ZERO)
            }
            _ => Denial::Os(error),
        }
    }
}
