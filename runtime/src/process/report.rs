//! What a process tells about its memory, and who is told.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use glake_device::owned::DeviceSet;
use glake_tiers::GpuWaits;
use glake_transfer::{PathStatistics, RelayCost};
use glake_units::Bytes;
use serde_json::{Value, json};

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

    /// What copies did, and what their relays cost; see `glake_copy_stats_json`.
    pub fn copy_stats(&self) -> Value {
        let engine = self.registry.engine.made();
        let done = engine.map(|engine| engine.statistics()).unwrap_or_default();
        let native = |own: &AtomicU64, of_engine: u64| own.load(Ordering::Relaxed) + of_engine;
        let path = |path: &PathStatistics| {
            json!({
                "relay": path.relay.0,
                "target": path.target.0,
                "direction": path.direction,
                "way": path.way,
                "bytes": path.bytes.get(),
                "slices": path.slices,
                "busy_us": u64::try_from(path.busy.as_micros()).unwrap_or(u64::MAX),
                "retries": path.retries,
                "fenced": path.fenced,
            })
        };
        let cost = |cost: &RelayCost| json!({ "relay": cost.relay.0, "context_bytes": cost.context.get(), "slot_bytes": cost.slots.get() });
        let costs = engine.map(|engine| engine.relay_cost()).unwrap_or_default();
        let relays = engine.map_or(DeviceSet::EMPTY, |engine| engine.relays());
        json!({
            "multi_path": self.registry.engine.is_on(),
            "relays": relays.iter().map(|relay| relay.0).collect::<Vec<u32>>(),
            "ready": !relays.is_empty() && engine.is_some_and(|engine| !engine.graph().paths().links.is_empty()),
            "relay_costs": costs.iter().map(cost).collect::<Vec<Value>>(),
            "calibrated": engine.is_some_and(|engine| engine.graph().is_calibrated()),
            "break_even": self.registry.engine.least().get(),
            "native_copies": native(&self.native.copies, done.native_copies),
            "native_bytes": native(&self.native.bytes, done.native_bytes.get()),
            "split_copies": done.split_copies,
            "lost_copies": done.lost_copies,
            "paths": done.paths.iter().map(path).collect::<Vec<Value>>(),
        })
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
