//! What a process tells about its memory, and who is told.

use std::sync::atomic::Ordering;
use std::time::Duration;

use glake_tiers::GpuWaits;
use glake_units::Bytes;

use super::{DeviceStats, OnMapping, OnShortage, Process, Result, SegmentView};

impl Process {
    /// How many calls of the driver were made so far, on all threads and devices, and how long they took on the host.
    pub fn driver_calls(&self) -> (u64, Duration) {
        let counters = self.recorder.counters();
        (counters.calls(), counters.time())
    }

    /// The largest request that would be served now, with stitching and growing; starts the device's pool.
    ///
    /// # Errors
    /// What the driver answers when asked for its free memory.
    pub fn largest(&self, device: i64) -> Result<Bytes> {
        Ok(self.started(self.device(device)?)?.pool.largest()?)
    }

    /// Everything that is counted for a device; zeroes where its pool has not started.
    ///
    /// # Errors
    /// [`super::ProcessError::NoSuchDevice`].
    pub fn stats(&self, device: i64) -> Result<DeviceStats> {
        let started = self.device(device)?.started();
        Ok(started.map_or_else(DeviceStats::default, |started| {
            let pool = &started.pool;
            // Whether a wait is over is asked of the driver.
            let waits =
                if self.stopped.load(Ordering::Acquire) { GpuWaits::default() } else { pool.gpu_waits() };
            DeviceStats::of(&pool.stats(), started.times_settled(), pool.epoch_lag(), waits)
        }))
    }

    /// Starts the peaks of a device from what is now.
    ///
    /// # Errors
    /// [`super::ProcessError::NoSuchDevice`].
    pub fn reset_peaks(&self, device: i64) -> Result<()> {
        if let Some(started) = self.device(device)?.started() {
            started.pool.reset_peaks();
        }
        Ok(())
    }

    /// Starts the totals of a device, and what was done, from zero.
    ///
    /// # Errors
    /// [`super::ProcessError::NoSuchDevice`].
    pub fn reset_totals(&self, device: i64) -> Result<()> {
        if let Some(started) = self.device(device)?.started() {
            started.reset_totals();
        }
        Ok(())
    }

    /// Every mapped range of a device, and what lies in it.
    ///
    /// # Errors
    /// [`super::ProcessError::NoSuchDevice`].
    pub fn segments(&self, device: i64) -> Result<Vec<SegmentView>> {
        Ok(self.segments_of(self.device(device)?))
    }

    /// Starts or stops to keep events, the last `most` of them.
    pub fn keep_history(&self, on: bool, most: u64, clear: bool) {
        self.observers.history.keep(on, most, clear);
    }

    /// Whether events are kept.
    pub fn keeps_history(&self) -> bool {
        self.observers.history.is_on()
    }

    /// Who is told of every request that is about to be refused for want of memory; replaces who was told before.
    pub fn on_shortage(&self, observer: Option<OnShortage>) {
        self.observers.watch_shortage(observer);
    }

    /// Who is told of every range that is mapped and unmapped; replaces who was told before.
    pub fn on_mapping(&self, observer: Option<OnMapping>) {
        self.observers.watch_mapping(observer);
    }
}
