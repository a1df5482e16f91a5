//! What a process tells about its memory: its statistics, and every mapped range (`snapshot`).

use std::sync::Arc;
use std::time::Duration;

use glake_device::Recorder;
use glake_tiers::GpuWaits;

use super::device_registry::DeviceRegistry;
use super::regions::RegionSet;
use super::streams::Streams;
use super::{Result, SegmentView};
use crate::metrics::DeviceStats;

/// What a process tells about its memory.
#[derive(Debug)]
pub struct Reports {
    /// Counts and times every call; a hit makes none.
    pub(super) recorder: Arc<Recorder>,
    pub(super) registry: Arc<DeviceRegistry>,
    pub(super) streams: Arc<Streams>,
    pub(super) regions: Arc<RegionSet>,
}

impl Reports {
    /// How many calls of the driver were made so far, on all threads and devices, and how long they took on the host.
    pub fn driver_calls(&self) -> (u64, Duration) {
        let counters = self.recorder.counters();
        (counters.calls(), counters.time())
    }

    /// Everything that is counted for a device; zeroes where its pool has not started.
    ///
    /// # Errors
    /// [`super::ProcessError::NoSuchDevice`].
    pub fn stats(&self, device: i64) -> Result<DeviceStats> {
        let started = self.registry.device(device)?.started();
        Ok(started.map_or_else(DeviceStats::default, |started| {
            let pool = &started.pool;
            // Whether a wait is over is asked of the driver.
            let waits =
                if self.registry.is_stopped() { GpuWaits::default() } else { pool.report().gpu_waits() };
            DeviceStats::of(
                &pool.stats(),
                started.times_settled(),
                pool.clock().lag(),
                waits,
                pool.lease().view(),
            )
        }))
    }

    /// Starts the peaks of a device from what is now.
    ///
    /// # Errors
    /// [`super::ProcessError::NoSuchDevice`].
    pub fn reset_peaks(&self, device: i64) -> Result<()> {
        if let Some(started) = self.registry.device(device)?.started() {
            started.pool.report().reset_peaks();
        }
        Ok(())
    }

    /// Starts the totals of a device, and what was done, from zero.
    ///
    /// # Errors
    /// [`super::ProcessError::NoSuchDevice`].
    pub fn reset_totals(&self, device: i64) -> Result<()> {
        if let Some(started) = self.registry.device(device)?.started() {
            started.reset_totals();
        }
        Ok(())
    }

    /// Every mapped range of a device, and what lies in it.
    ///
    /// # Errors
    /// [`super::ProcessError::NoSuchDevice`].
    pub fn segments(&self, device: i64) -> Result<Vec<SegmentView>> {
        Ok(self.segments_of(self.registry.device(device)?))
    }
}
