//! Reports about a process's memory: statistics and mapped ranges (`snapshot`).

use std::sync::Arc;
use std::time::Duration;

use glake_device::Recorder;
use glake_tiers::GpuWaits;

use super::device_registry::DeviceRegistry;
use super::regions::RegionSet;
use super::streams::Streams;
use super::{Result, SegmentView};
use crate::metrics::DeviceStats;

/// Reports about a process's memory.
#[derive(Debug)]
pub struct Reports {
    /// Recorder that counts and times every driver call; a hit makes none.
    pub(super) recorder: Arc<Recorder>,
    pub(super) registry: Arc<DeviceRegistry>,
    pub(super) streams: Arc<Streams>,
    pub(super) regions: Arc<RegionSet>,
}

impl Reports {
    /// Returns the number of driver calls so far, on all threads and devices, and their total time on the host.
    pub fn driver_calls(&self) -> (u64, Duration) {
        let counters = self.recorder.counters();
        (counters.calls(), counters.time())
    }

    /// Returns all statistics of a device; zeros if its pool has not started.
    ///
    /// # Errors
    /// [`super::ProcessError::NoSuchDevice`].
    pub fn stats(&self, device: i64) -> Result<DeviceStats> {
        let started = self.registry.device(device)?.started();
        Ok(started.map_or_else(DeviceStats::default, |started| {
            let pool = &started.pool;
            // Asks the driver whether waits are over.
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

    /// Resets the peaks of a device to the current values.
    ///
    /// # Errors
    /// [`super::ProcessError::NoSuchDevice`].
    pub fn reset_peaks(&self, device: i64) -> Result<()> {
        if let Some(started) = self.registry.device(device)?.started() {
            started.pool.report().reset_peaks();
        }
        Ok(())
    }

    /// Resets the totals and counters of a device to zero.
    ///
    /// # Errors
    /// [`super::ProcessError::NoSuchDevice`].
    pub fn reset_totals(&self, device: i64) -> Result<()> {
        if let Some(started) = self.registry.device(device)?.started() {
            started.reset_totals();
        }
        Ok(())
    }

    /// Returns every mapped range of a device with its blocks.
    ///
    /// # Errors
    /// [`super::ProcessError::NoSuchDevice`].
    pub fn segments(&self, device: i64) -> Result<Vec<SegmentView>> {
        Ok(self.segments_of(self.registry.device(device)?))
    }
}
