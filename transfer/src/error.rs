//! Why something about a copy was not done. A variant is what the caller can do about it.

use std::io;
use std::path::PathBuf;

use glake_device::{DeviceId, DriverError};
use glake_units::Bytes;

/// The outcome of what this crate is asked.
pub type Result<T> = std::result::Result<T, TransferError>;

/// A refusal.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// What is known of the server's links speaks of a GPU that it does not list: calibrate again.
    #[error("the paths name {device}, which is not among their {count} GPUs: calibrate again")]
    UnknownGpu {
        /// Which.
        device: DeviceId,
        /// How many GPUs are listed.
        count: usize,
    },
    /// A figure that no link has: calibrate again.
    #[error("the paths say {figure} = {found} of {device}: allowed is {allowed}; calibrate again")]
    BadFigure {
        /// Which figure.
        figure: &'static str,
        /// Of which GPU.
        device: DeviceId,
        /// Its value.
        found: f64,
        /// What it may be.
        allowed: &'static str,
    },
    /// The calibration could not be kept: the next process calibrates again.
    #[error("{}: {source}", path.display())]
    CacheFile {
        /// Its file.
        path: PathBuf,
        /// The operating system's answer.
        #[source]
        source: io::Error,
    },
    /// A figure of the calibration cannot be written down.
    #[error("the calibration cannot be written: {source}")]
    CacheEncoding {
        /// Why.
        #[source]
        source: Box<toml::ser::Error>,
    },
    /// The file of a calibration is not what one looks like: calibrate again.
    #[error("this is no calibration: {}", source.message())]
    CacheMalformed {
        /// Why.
        #[source]
        source: Box<toml::de::Error>,
    },
    /// The file is of another version of GLake: calibrate again.
    #[error("the calibration is of version {found}, and {expected} is read: calibrate again")]
    CacheVersion {
        /// The file's.
        found: u32,
        /// What is read.
        expected: u32,
    },
    /// The file is of other devices, another driver, boot or user: calibrate again.
    #[error("the calibration is of other devices, another driver, boot or user: calibrate again")]
    CacheOfOthers,
    /// The two ends of a copy are not of one size: a bug of the caller.
    #[error("a copy of {from} to {to}: both ends must be of one size")]
    SizesDiffer {
        /// What it shall go to.
        to: Bytes,
        /// What it shall come from.
        from: Bytes,
    },
    /// A relay was lost while it carried parts of copies: their bytes may not have arrived. Copy them again, and that of the
    /// call that says so; the relay is out of use from now on.
    #[error(
        "{relay} was lost while it relayed parts of {copies} copies, whose bytes may not have arrived: copy them again"
    )]
    Lost {
        /// Which.
        relay: DeviceId,
        /// How many copies had parts under way there that were not seen to arrive.
        copies: u64,
    },
    /// The bytes that arrived are not those that were sent, after a second attempt too.
    #[error(
        "{bytes} of a copy of {size} differ from their source, after a second attempt too: check the links and the memory"
    )]
    Damaged {
        /// How many bytes lie in damaged parts.
        bytes: Bytes,
        /// Of how many.
        size: Bytes,
    },
    /// The operating system gives no thread.
    #[error("no thread for the copy engine: {0}")]
    NoThread(#[source] std::io::Error),
    /// The driver's answer.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
