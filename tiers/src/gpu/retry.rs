//! Calls of a driver that is busy.

use glake_device::DriverError;

/// How often a busy device is asked again before the call is given up: about 100 ms.
const ATTEMPTS: u32 = 1000;
const PAUSE: std::time::Duration = std::time::Duration::from_micros(100);

/// Asks again while the device is busy.
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
