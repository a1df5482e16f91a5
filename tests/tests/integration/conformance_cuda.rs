//! The conformance suite on real GPUs; skipped loudly where there is no driver.

use std::io::Write;
use std::sync::Arc;

use glake_device::{Cuda, Driver};
use glake_sim::conformance::{Slack, Verdict, checks, run};
use glake_units::Bytes;

/// Past the test harness, which keeps what passing tests print.
macro_rules! say {
    ($($what:tt)*) => {{ let _ = writeln!(std::io::stderr(), $($what)*); }};
}

#[test]
fn on_cuda() {
    let driver: Arc<dyn Driver> = match Cuda::open() {
        Ok(cuda) => Arc::new(cuda),
        Err(why) => {
            say!("SKIPPED: the conformance suite on CUDA: {why}");
            return;
        }
    };
    let mut failures = Vec::new();
    for check in checks() {
        // The driver keeps memory for modules, streams and copies when it first needs it.
        match run(&driver, &check, Slack(Bytes::mib(128))) {
            Ok(Verdict::Passed) => say!("passed: {}", check.name),
            Ok(Verdict::Skipped(why)) => say!("SKIPPED: {}: {why}", check.name),
            Err(failure) => {
                say!("FAILED: {}: {failure}", check.name);
                failures.push(check.name);
            }
        }
    }
    assert!(failures.is_empty(), "{failures:?}");
}
