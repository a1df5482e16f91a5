//! Retries of driver calls while the device is busy.

use glake_device::DriverError;

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
