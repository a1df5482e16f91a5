//! Host memory for the copies of a shrink, pinned while the first copies are made.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, Scope};

use glake_units::Bytes;

use super::Store;

impl Store {
    /// Starts a thread that pins host memory for copies of these sizes, until `over` is set. If it cannot, callers that take memory pin it
    /// themselves.
    pub(crate) fn pin_ahead<'s>(&'s self, scope: &'s Scope<'s, '_>, sizes: &[Bytes], over: &'s AtomicBool) {
        let Store::Host(host) = self else { return };
        let Some(expected) = host.expect(sizes) else { return };
        let work = move || expected.pin(|| !over.load(Ordering::Relaxed));
        if let Err(error) = Builder::new().name("glake-pin".to_owned()).spawn_scoped(scope, work) {
            tracing::debug!(target: "glake::host", %error, "no thread pins memory ahead");
        }
    }
}
