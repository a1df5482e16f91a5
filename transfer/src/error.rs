//! Errors of copies. Each variant corresponds to an action of the caller.

use std::io;
use std::path::PathBuf;

use glake_device::{DeviceId, DriverError};
use glake_units::Bytes;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, TransferError>;

/// Error of the transfer engine.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// Paths that name an unlisted GPU: calibrate again.
    #[error("the paths name {device}, which is not among their {count} GPUs: calibrate again")]
    UnknownGpu {
        /// Unlisted GPU.
        device: DeviceId,
        /// Number of listed GPUs.
        count: usize,
    },
    /// Link figure outside its range: calibrate again.
    #[error("the paths say {figure} = {found} of {device}: allowed is {allowed}; calibrate again")]
    BadFigure {
        /// Name of the figure.
        figure: &'static str,
        /// GPU of the figure.
        device: DeviceId,
        /// Value found.
        found: f64,
        /// Permitted range.
        allowed: &'static str,
    },
    /// Calibration that could not be stored; the next process calibrates again.
    #[error("{}: {source}", path.display())]
    CacheFile {
        /// File of the calibration.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        source: io::Error,
    },
    /// Calibration that could not be serialized.
    #[error("the calibration cannot be written: {source}")]
    CacheEncoding {
        /// Cause.
        #[source]
        source: Box<toml::ser::Error>,
    },
    /// Malformed calibration file: calibrate again.
    #[error("this is no calibration: {}", source.message())]
    CacheMalformed {
        /// Cause.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// Calibration file of another GLake version: calibrate again.
    #[error("the calibration is of version {found}, and {expected} is read: calibrate again")]
    CacheVersion {
        /// Version of the file.
        found: u32,
        /// Supported version.
        expected: u32,
    },
    /// Calibration file of other devices, another driver, boot or user: calibrate again.
    #[error("the calibration is of other devices, another driver, boot or user: calibrate again")]
    CacheOfOthers,
    /// Copy whose ends differ in size: a bug of the caller.
    #[error("a copy of {from} to {to}: both ends must be of one size")]
    SizesDiffer {
        /// Size of the destination.
        to: Bytes,
        /// Size of the source.
        from: Bytes,
    },
    /// Relay that was lost while it carried parts of copies, whose bytes may not have arrived. Repeat these copies, and the copy of the
    /// call that reports it. The relay stays disabled.
    #[error(
        "{relay} was lost while it relayed parts of {copies} copies, whose bytes may not have arrived: copy them again"
    )]
    Lost {
        /// Lost relay.
        relay: DeviceId,
        /// Number of copies whose parts on the relay are not known to have arrived.
        copies: u64,
    },
    /// Bytes that differ from their source even after a second copy.
    #[error(
        "{bytes} of a copy of {size} differ from their source, after a second attempt too: check the links and the memory"
    )]
    Damaged {
        /// Bytes in damaged parts.
        bytes: Bytes,
        /// Total size of the copy.
        size: Bytes,
    },
    /// Thread that the operating system refused to create.
    #[error("no thread for the copy engine: {0}")]
    NoThread(#[source] std::io::Error),
    /// Error of the driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
