//! Why a pool does not do what it is asked.

use glake_device::{Address, DeviceId, DriverError};
use glake_stitch::StitchError;

use super::lease::LeaseShort;
use crate::place::NotNow;

/// A refusal of a pool; a variant is what the caller can do about it.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// There is not enough memory, the request is larger than the device, or what it names does not exist.
    #[error("{device}: {source}")]
    Refused {
        /// Where.
        device: DeviceId,
        /// Why.
        #[source]
        source: StitchError,
    },
    /// The driver has no memory left though the pool may reserve more: other processes hold it.
    #[error("{device}: {refusal}; the driver itself has none left, so something else holds the rest")]
    DeviceFull {
        /// Where.
        device: DeviceId,
        /// The pool's own account.
        refusal: StitchError,
    },
    /// There is not enough memory without what was freed and may still be in use, and nobody can wait for that while a stream
    /// capture is open: end it, or free memory before it begins.
    #[error("{device}: {refusal}; what is pending cannot be waited for while a stream capture is open")]
    CaptureOpen {
        /// Where.
        device: DeviceId,
        /// The pool's own account.
        refusal: StitchError,
    },
    /// The lease of the device's memory allows no more: grant more, or free memory.
    #[error("{device}: {short}")]
    Leased {
        /// Where.
        device: DeviceId,
        /// How it stood.
        #[source]
        short: LeaseShort,
        /// Whether a stream capture was open, so that what is pending could not be waited for.
        in_capture: bool,
    },
    /// The driver refused; the pool is as it was before the call.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The driver failed and could not be brought back to a known state, or the context is lost: this pool serves
    /// nothing any more. Start the process again.
    #[error("{device}: the pool is out of use since the driver failed: {cause}")]
    Poisoned {
        /// Where.
        device: DeviceId,
        /// The failure that did it.
        cause: String,
    },
    /// The pool does not own this address.
    #[error("{device}: no block of this pool begins at {address}: it was freed before, or never handed out")]
    UnknownAddress {
        /// Where.
        device: DeviceId,
        /// What was given.
        address: Address,
    },
    /// A range of bytes leaves its block, or ends before it begins.
    #[error("{device}: bytes {start} to {end} of the block at {address} do not lie in it: it has {size}")]
    OutsideBlock {
        /// Where.
        device: DeviceId,
        /// Where the block begins.
        address: Address,
        /// How long it is, in bytes.
        size: u64,
        /// The first byte of the range.
        start: u64,
        /// The byte behind it.
        end: u64,
    },
    /// Some of the block's memory is not on its GPU: refill its region first.
    #[error(
        "{device}: some of the memory at {address} is not on its GPU: refill its region, or commit what was decommitted, first"
    )]
    Evicted {
        /// Where.
        device: DeviceId,
        /// What was given.
        address: Address,
    },
    /// An extent is not where it would have to be for what was asked: two threads move one region, which is a defect.
    #[error("{device}: {source}")]
    NotNow {
        /// Where.
        device: DeviceId,
        /// What was asked, and what is allowed.
        #[source]
        source: NotNow,
    },
    /// The memory was not made for other processes.
    #[error(
        "{device}: the memory at {address} cannot be shared with another process, because it was not made exportable: \
         start with pool.exportable = true"
    )]
    NotExportable {
        /// Where.
        device: DeviceId,
        /// What was given.
        address: Address,
    },
    /// The driver gives no memory of the device to other processes.
    #[error(
        "{device}: the memory at {address} cannot be shared with another process, because the driver gives no file \
         descriptors of this device's memory (under WSL2 it gives none), so that pool.exportable has no effect: send the \
         bytes, by way of host memory"
    )]
    NoDescriptors {
        /// Where.
        device: DeviceId,
        /// What was given.
        address: Address,
    },
    /// The clock that the pool was to use belongs to another driver: make it of the same one.
    #[error(
        "{device}: the clock of completion points given for its pool belongs to another driver; make it of the pool's own driver"
    )]
    OtherDriver {
        /// Where.
        device: DeviceId,
    },
    /// The device does not exist.
    #[error("{device} does not exist: the driver shows {count}")]
    NoSuchDevice {
        /// What was asked for.
        device: DeviceId,
        /// How many there are.
        count: usize,
    },
}

impl PoolError {
    /// Whether there was not enough memory.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            PoolError::DeviceFull { .. } | PoolError::CaptureOpen { .. } | PoolError::Leased { .. } => true,
            PoolError::Refused { source, .. } => {
                matches!(source, StitchError::OutOfMemory { .. } | StitchError::LargerThanDevice { .. })
            }
            PoolError::Driver(error) => error.is_out_of_memory(),
            _ => false,
        }
    }
}
