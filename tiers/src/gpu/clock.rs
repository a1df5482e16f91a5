//! Epochs of the core as completions on the device.
//!
//! An epoch is closed in the core and then recorded on the device, so that its event covers every free in it; a failed
//! recording reopens nothing and loses nothing: the frees are covered by the next event, which covers more.
//!
//! Whoever waits on the host holds one event's lock and no other, so that everybody else's epochs go on.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{Thread, ThreadId};
use std::time::{Duration, Instant};

use glake_device::DriverError;
use glake_device::owned::Passed;
use glake_stitch::Epoch;
use parking_lot::Mutex;

use super::execute::retry;
use super::lag::{EpochLag, Lags};
use super::{GpuPool, Result};

type Event = Arc<Mutex<glake_device::owned::Epoch>>;

#[derive(Debug)]
struct Recorded {
    epoch: Epoch,
    event: Event,
    at: Instant,
}

/// What was recorded and has not passed, oldest first.
#[derive(Debug, Default)]
pub(super) struct EpochClock {
    recorded: VecDeque<Recorded>,
    passed: Option<Passed>,
    lags: Lags,
}

impl EpochClock {
    pub(super) fn passed(&self) -> Option<Passed> {
        self.passed
    }

    /// Records an epoch; while a capture is open that is refused.
    fn record(&mut self, pool: &GpuPool) -> std::result::Result<(), DriverError> {
        let closed = pool.core.lock().close_epoch();
        match retry(|| pool.epochs.record(pool.reach.watched())) {
            Ok(event) => {
                let event = Arc::new(Mutex::new(event));
                self.recorded.push_back(Recorded { epoch: closed, event, at: Instant::now() });
                Ok(())
            }
            Err(error) => {
                pool.core.lock().uncover();
                pool.freed.store(true, Ordering::Release);
                Err(error)
            }
        }
    }

    /// As [`EpochClock::record`], if anything was freed since the last one.
    fn cover(&mut self, pool: &GpuPool) -> std::result::Result<(), DriverError> {
        let uncovered = pool.core.lock().uncovered();
        uncovered.map_or(Ok(()), |_| self.record(pool))
    }

    /// Tells the core what has passed. An event that somebody waits for is theirs to tell of.
    fn poll(&mut self, pool: &GpuPool) -> std::result::Result<(), DriverError> {
        while let Some(Recorded { epoch, event, .. }) = self.recorded.front() {
            let Some(proof) = event.try_lock().map(|mut event| retry(|| event.poll())).transpose()? else {
                break;
            };
            let Some(proof) = proof else { break };
            self.pass(pool, *epoch, proof);
        }
        Ok(())
    }

    fn pass(&mut self, pool: &GpuPool, epoch: Epoch, proof: Passed) {
        while self.recorded.pop_front_if(|recorded| recorded.epoch <= epoch).is_some() {}
        if self.passed.is_none_or(|before| before.sequence() < proof.sequence()) {
            self.passed = Some(proof);
        }
        pool.core.lock().pass_epoch(epoch);
    }
}

impl GpuPool {
    /// Keeps the epochs going: tells the core what has passed, and records one if anything was freed since the last.
    /// To be called every so often ([`crate::Ticker`] does); a miss calls it too.
    ///
    /// # Errors
    /// What the driver answers; nothing is lost.
    pub fn tick(&self) -> Result<()> {
        self.usable()?;
        let mut clock = self.clock.lock();
        if self.freed.swap(false, Ordering::AcqRel) {
            match clock.cover(self) {
                Ok(()) | Err(DriverError::Capturing { .. }) => {}
                Err(error) => return Err(self.failed(error)),
            }
        }
        clock.poll(self).map_err(|error| self.failed(error))?;
        drop(clock);
        self.poll_waits();
        Ok(())
    }

    /// How far the GPU was behind the host when memory was asked for that was no hit.
    pub fn epoch_lag(&self) -> EpochLag {
        self.clock.lock().lags.told()
    }

    /// A miss: notes how long ago the oldest epoch was recorded that has not passed.
    pub(super) fn note_lag(&self) {
        let mut clock = self.clock.lock();
        let age = clock.recorded.front().map_or(Duration::ZERO, |oldest| oldest.at.elapsed());
        clock.lags.note(age);
    }

    pub(super) fn reset_lag(&self) {
        self.clock.lock().lags = Lags::default();
    }

    /// Whether frees wait to be covered or to pass: then [`GpuPool::tick`] has something to do.
    pub fn is_ticking(&self) -> bool {
        let waiting = self.freed.load(Ordering::Acquire) || !self.clock.lock().recorded.is_empty();
        waiting && self.usable().is_ok()
    }

    /// Waits until everything that was freed before this call may be taken by anyone.
    ///
    /// # Errors
    /// What the driver answers; [`DriverError::Capturing`] while a capture is open and frees wait for its end.
    pub fn settle(&self) -> Result<()> {
        self.usable()?;
        let last = {
            let mut clock = self.clock.lock();
            clock.cover(self).map_err(|error| self.failed(error))?;
            clock.recorded.back().map(|recorded| recorded.epoch)
        };
        last.map_or(Ok(()), |epoch| self.wait(epoch))
    }

    /// Waits on the host until `epoch` has passed.
    pub(super) fn wait(&self, epoch: Epoch) -> Result<()> {
        loop {
            let mut clock = self.clock.lock();
            if self.core.lock().passed() >= epoch {
                return Ok(());
            }
            let due = clock.recorded.iter().find(|recorded| recorded.epoch >= epoch);
            let Some((next, event)) = due.map(|due| (due.epoch, due.event.clone())) else {
                clock.record(self).map_err(|error| self.failed(error))?;
                continue;
            };
            drop(clock);
            let proof = retry(|| event.lock().wait()).map_err(|error| self.failed(error))?;
            self.clock.lock().pass(self, next, proof);
        }
    }

    /// A thread to wake when there is something to do again.
    pub(crate) fn wakes(&self, thread: Thread) {
        self.sleepers.lock().push(thread);
    }

    /// A thread that is woken no more.
    pub(crate) fn wakes_no_more(&self, thread: ThreadId) {
        self.sleepers.lock().retain(|sleeper| sleeper.id() != thread);
    }
}
