//! Errors of a pool, retries of driver calls while the device is busy, and the identity of streams.

use glake_device::{Address, DeviceId, Driver, DriverError, Result, Stream};
use glake_stitch::{StitchError, StreamKey};

use super::lease::LeaseShort;
use crate::place::NotNow;

/// Error of a pool. Each variant stands for one possible reaction of the caller.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// There is too little memory, the request is larger than the device, or its domain does not exist.
    #[error("{device}: {source}")]
    Refused {
        /// Device of the pool.
        device: DeviceId,
        /// Reason given by the allocator.
        #[source]
        source: StitchError,
    },
    /// The driver has no memory left, although the pool's limit allows more: other processes hold it.
    #[error("{device}: {refusal}; the driver itself has none left, so something else holds the rest")]
    DeviceFull {
        /// Device of the pool.
        device: DeviceId,
        /// Memory account of the pool.
        refusal: StitchError,
    },
    /// Free memory does not suffice, and a stream capture is open, so that the pool cannot wait for freed memory still in use. End the
    /// capture, or free memory before it begins.
    #[error("{device}: {refusal}; pending frees cannot be waited for while a stream capture is open")]
    CaptureOpen {
        /// Device of the pool.
        device: DeviceId,
        /// Memory account of the pool.
        refusal: StitchError,
    },
    /// The device's lease allows no more memory: grant more, or free memory.
    #[error("{device}: {short}")]
    Leased {
        /// Device of the pool.
        device: DeviceId,
        /// State of the lease.
        #[source]
        short: LeaseShort,
        /// Whether a stream capture was open, so that pending frees could not be waited for.
        in_capture: bool,
    },
    /// The driver refused; the pool is unchanged.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The driver failed in an unknown state, or the context is lost: the pool is unusable. Restart the process.
    #[error("{device}: the pool is out of use since the driver failed: {cause}")]
    Poisoned {
        /// Device of the pool.
        device: DeviceId,
        /// First failure that made the pool unusable.
        cause: String,
    },
    /// The address does not belong to the pool.
    #[error("{device}: no block of this pool begins at {address}: it was freed before, or never handed out")]
    UnknownAddress {
        /// Device of the pool.
        device: DeviceId,
        /// Address passed by the caller.
        address: Address,
    },
    /// A byte range exceeds its block, or ends before it begins.
    #[error("{device}: bytes {start} to {end} of the block at {address} do not lie in it: it has {size}")]
    OutsideBlock {
        /// Device of the pool.
        device: DeviceId,
        /// Address of the block.
        address: Address,
        /// Size of the block in bytes.
        size: u64,
        /// First byte of the range.
        start: u64,
        /// End of the range, exclusive.
        end: u64,
    },
    /// Part of the block's memory is not on its GPU: refill its region first.
    #[error(
        "{device}: some of the memory at {address} is not on its GPU: refill its region, or commit its decommitted memory, first"
    )]
    Evicted {
        /// Device of the pool.
        device: DeviceId,
        /// Address passed by the caller.
        address: Address,
    },
    /// An extent is in the wrong state for the operation: two threads move one region, which is a bug.
    #[error("{device}: {source}")]
    NotNow {
        /// Device of the pool.
        device: DeviceId,
        /// Requested and allowed operation.
        #[source]
        source: NotNow,
    },
    /// The memory was not created as exportable.
    #[error(
        "{device}: the memory at {address} cannot be shared with another process, because it was not made exportable: \
         start with pool.exportable = true"
    )]
    NotExportable {
        /// Device of the pool.
        device: DeviceId,
        /// Address passed by the caller.
        address: Address,
    },
    /// The memory is plain: it has an address of the driver's own, and stays there.
    #[error(
        "{device}: the memory at {address} is plain (glake.plain), so that GLake neither moves, offloads nor shares it: use the \
         driver's own calls, such as cudaIpcGetMemHandle, or allocate it outside of glake.plain"
    )]
    Plain {
        /// Device of the pool.
        device: DeviceId,
        /// Address passed by the caller.
        address: Address,
    },
    /// The driver cannot export memory of this device to other processes.
    #[error(
        "{device}: the memory at {address} cannot be shared with another process, because the driver gives no file \
         descriptors of this device's memory (under WSL2 it gives none), so that pool.exportable has no effect: send the \
         bytes, by way of host memory"
    )]
    NoDescriptors {
        /// Device of the pool.
        device: DeviceId,
        /// Address passed by the caller.
        address: Address,
    },
    /// The completion clock passed for the pool belongs to another driver: create it from the pool's own.
    #[error(
        "{device}: the clock of completion points given for its pool belongs to another driver; make it of the pool's own driver"
    )]
    OtherDriver {
        /// Device of the pool.
        device: DeviceId,
    },
    /// The device does not exist.
    #[error("{device} does not exist: the driver shows {count}")]
    NoSuchDevice {
        /// Device passed by the caller.
        device: DeviceId,
        /// Number of devices present.
        count: usize,
    },
}

impl PoolError {
    /// Returns whether the cause is a lack of memory.
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

/// Attempts to call a busy device before the call fails: about 100 ms in total.
const ATTEMPTS: u32 = 1000;
const PAUSE: std::time::Duration = std::time::Duration::from_micros(100);

/// Repeats a call while the device is busy.
pub(super) fn retry<T>(
    mut call: impl FnMut() -> std::result::Result<T, DriverError>,
) -> std::result::Result<T, DriverError> {
    for _ in 1..ATTEMPTS {
        match call() {
            Err(DriverError::NotReady { .. }) => std::thread::sleep(PAUSE),
            answer => return answer,
        }
    }
    call()
}

/// Stream of the program: its driver handle and its identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PoolStream {
    /// Handle of the driver.
    pub raw: Stream,
    /// Identity of the stream: distinguishes the legacy from the per-thread default streams, and a reused handle from the destroyed stream
    /// that had it before.
    pub key: StreamKey,
}

impl PoolStream {
    /// Stream of unknown identity: it owns no blocks, and no events are recorded on it.
    pub const UNKNOWN: PoolStream = PoolStream { raw: Stream(0), key: StreamKey::UNKNOWN };

    /// Resolves a stream handle with the driver.
    ///
    /// # Errors
    /// The driver's error.
    pub fn of(driver: &dyn Driver, device: DeviceId, raw: Stream) -> Result<Self> {
        driver.stream_id(device, raw).map(|id| PoolStream { raw, key: StreamKey(id.0) })
    }
}
