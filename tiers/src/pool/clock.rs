//! Epochs of the core as completions on the device.
//!
//! An epoch is closed in the core and then recorded on the device, so that its event covers every free in it; a failed
//! recording reopens nothing and loses nothing: the frees are covered by the next event, which covers more.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use glake_device::DriverError;
use glake_device::owned::Passed;
use glake_stitch::Epoch;

use super::{GpuPool, Result};

/// What was recorded and has not passed, oldest first.
#[derive(Debug, Default)]
pub(super) struct EpochClock {
    recorded: VecDeque<(Epoch, glake_device::owned::Epoch)>,
    passed: Option<Passed>,
}

impl EpochClock {
    pub(super) fn passed(&self) -> Option<Passed> {
        self.passed.clone()
    }

    /// Records an epoch if anything was freed since the last one. While a capture is open nothing is recorded.
    fn record(&mut self, pool: &GpuPool) -> Result<()> {
        let mut core = pool.core.lock();
        if core.uncovered().is_none() {
            return Ok(());
        }
        let closed = core.close_epoch();
        drop(core);
        let failed = match pool.epochs.record(pool.devices()) {
            Ok(event) => {
                self.recorded.push_back((closed, event));
                return Ok(());
            }
            Err(DriverError::Capturing { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        };
        pool.core.lock().uncover();
        pool.freed.store(true, Ordering::Release);
        failed
    }

    /// Tells the core what has passed.
    fn poll(&mut self, pool: &GpuPool) -> Result<()> {
        while let Some((epoch, event)) = self.recorded.front_mut() {
            let Some(proof) = event.poll()? else { break };
            let epoch = *epoch;
            self.recorded.pop_front();
            self.pass(pool, epoch, proof);
        }
        Ok(())
    }

    fn pass(&mut self, pool: &GpuPool, epoch: Epoch, proof: Passed) {
        self.passed = Some(proof);
        pool.core.lock().pass_epoch(epoch);
    }

    /// Waits on the host until `epoch` has passed.
    pub(super) fn wait(&mut self, pool: &GpuPool, epoch: Epoch) -> Result<()> {
        while pool.core.lock().passed() < epoch {
            if self.recorded.is_empty() {
                self.record(pool)?;
            }
            let Some((next, mut event)) = self.recorded.pop_front() else {
                return Err(DriverError::Capturing { verb: glake_device::Verb::EventRecordContext }.into());
            };
            match event.wait() {
                Ok(proof) => self.pass(pool, next, proof),
                Err(error) => {
                    self.recorded.push_front((next, event));
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// Records what is uncovered and waits for all of it.
    pub(super) fn settle(&mut self, pool: &GpuPool) -> Result<()> {
        self.record(pool)?;
        while let Some((epoch, _)) = self.recorded.front() {
            let epoch = *epoch;
            self.wait(pool, epoch)?;
        }
        Ok(())
    }
}

impl GpuPool {
    /// Keeps the epochs going: tells the core what has passed, and records one if anything was freed since the last.
    /// To be called every so often ([`crate::Ticker`] does); a miss calls it too.
    ///
    /// # Errors
    /// What the driver answers; nothing is lost.
    pub fn tick(&self) -> Result<()> {
        let mut clock = self.clock.lock();
        if self.freed.swap(false, Ordering::AcqRel) {
            clock.record(self)?;
        }
        clock.poll(self)
    }

    /// Whether frees wait to be covered or to pass: then [`GpuPool::tick`] has something to do.
    pub fn is_ticking(&self) -> bool {
        self.freed.load(Ordering::Acquire) || !self.clock.lock().recorded.is_empty()
    }

    /// The thread to wake when there is something to do again.
    pub(crate) fn wakes(&self, thread: std::thread::Thread) {
        let _ = self.sleeper.set(thread);
    }
}
