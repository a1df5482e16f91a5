//! Allocation, touching and pinning of memory.
//!
//! ```text
//!  touch  ├── 1 ──┼── 2 ──┼── 3 ──┤           by several threads: the pages exist when they are pinned
//!  pin            ├─── 1 ───┼─── 2 ───┼─── 3 ───┤     by one: the driver has a lock
//! ```
//!
//! [`Pinning`] records when this happens. Pinning takes host memory bandwidth from copies, so that timings of these copies are
//! no link measurement.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use glake_device::owned::{CompletionEvents, Pages, PinnedRange, Registration};
use glake_device::{DriverError, Verb};
use glake_units::Bytes;
use rayon::ThreadPool;
use rayon::prelude::*;
use rustix::process::{Resource, getrlimit};

use super::available::AvailableMemory;
use super::{HostError, HostOptions, Result};

/// Bytes that a thread touches at a time: a huge page.
const HUGE_PAGE: usize = 2 << 20;

/// Pins memory of these sizes while `wanted` returns true. Passes each range to `done` as soon as it is pinned, with the time since the
/// previous one.
pub(super) fn pin(
    completion_events: &Arc<CompletionEvents>,
    options: &HostOptions,
    sizes: &[Bytes],
    wanted: impl Fn() -> bool + Sync,
    mut done: impl FnMut(PinnedRange, Duration),
) -> Result<()> {
    let Some((first, others)) = sizes.split_first().filter(|_| wanted()) else { return Ok(()) };
    // Threads for this call only: pinning is rare, and idle threads would disturb a fork.
    let threads = threads(options.threads)?;
    let mut begun = Instant::now();
    let mut touched = threads.install(|| touched(options, *first))?;
    for next in others.iter().copied().map(Some).chain([None]) {
        let next = next.filter(|_| wanted());
        let (pinned, following) = threads.join(
            || registered(completion_events, touched),
            || next.map(|size| self::touched(options, size)).transpose(),
        );
        done(PinnedRange::whole(pinned?), begun.elapsed());
        begun = Instant::now();
        match following? {
            Some(pages) => touched = pages,
            None => break,
        }
    }
    Ok(())
}

fn threads(wanted: usize) -> Result<ThreadPool> {
    let builder = rayon::ThreadPoolBuilder::new().num_threads(wanted);
    let named = builder.thread_name(|index| format!("glake-touch-{index}"));
    named.build().map_err(|source| HostError::NoThreads { wanted, source })
}

/// Checks whether the host has enough available memory.
pub(super) fn has_room(options: &HostOptions, size: Bytes) -> Result<()> {
    let (spare, has) = (options.spare, AvailableMemory::of_host().least());
    match has.filter(|has| has.checked_sub(spare).is_none_or(|free| free < size)) {
        Some(available) => Err(HostError::Exhausted { wanted: size, available, spare }),
        None => Ok(()),
    }
}

/// Allocates memory with its pages present on the chosen nodes.
fn touched(options: &HostOptions, size: Bytes) -> Result<Pages> {
    has_room(options, size)?;
    let mut pages = Pages::new(size, 0).map_err(|_| {
        let available = AvailableMemory::of_host().least().unwrap_or(Bytes::ZERO);
        HostError::Exhausted { wanted: size, available, spare: options.spare }
    })?;
    if options.nodes.len() > 1
        && let Err(error) = pages.interleave(&options.nodes)
    {
        let nodes = &options.nodes;
        tracing::warn!(target: "glake::host", ?nodes, %error, "pinned memory is not spread over NUMA nodes");
    }
    pages.as_mut_slice().par_chunks_mut(HUGE_PAGE).for_each(Pages::touch);
    Ok(pages)
}

fn registered(completion_events: &Arc<CompletionEvents>, pages: Pages) -> Result<Registration> {
    let wanted = pages.size();
    Registration::new(completion_events, pages).map_err(|source| match source {
        DriverError::OutOfMemory { verb: Verb::HostRegister, .. }
        | DriverError::Failed { verb: Verb::HostRegister, .. }
        | DriverError::Os { verb: Verb::HostRegister, .. } => {
            let memlock = getrlimit(Resource::Memlock).current.map(Bytes::new);
            HostError::PinRefused { wanted, memlock, source }
        }
        other => HostError::Driver(other),
    })
}

/// Counter of pinning threads; shared by pools and by components that time copies.
#[derive(Debug, Default)]
pub struct Pinning {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// Guard while memory is touched and pinned.
#[derive(Debug)]
pub struct PinningUnderWay(Arc<Pinning>);

impl Pinning {
    /// Marks the beginning of pinning.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> PinningUnderWay {
        self.begun.fetch_add(1, Ordering::AcqRel);
        PinningUnderWay(self.clone())
    }

    /// Returns `None` while any thread pins, else a number that changes with each pinning.
    pub fn idle_since(&self) -> Option<u64> {
        // In this order: pinning that begins in between counts as in progress.
        let ended = self.ended.load(Ordering::Acquire);
        (self.begun.load(Ordering::Acquire) == ended).then_some(ended)
    }
}

impl Drop for PinningUnderWay {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod pinning_tests {
    use super::*;

    #[test]
    fn it_is_idle_between_those_who_pin() {
        let pinning = Arc::new(Pinning::default());
        let first = pinning.idle_since();
        assert_eq!(first, pinning.idle_since());
        let (one, other) = (pinning.begin(), pinning.begin());
        drop(one);
        assert_eq!((first.is_some(), pinning.idle_since()), (true, None));
        drop(other);
        assert!(pinning.idle_since().is_some_and(|since| Some(since) != first));
    }
}
