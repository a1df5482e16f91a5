//! Why something about a copy was not done. A variant is what the caller can do about it.

use glake_device::DeviceId;

/// A refusal.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
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
}
