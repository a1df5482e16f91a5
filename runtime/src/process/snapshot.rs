//! Reports about a process's memory: statistics, mapped ranges, and the state of all pools in the format of torch's
//! `_cuda_memorySnapshot`, for its visualiser.

use std::sync::Arc;
use std::time::Duration;

use glake_device::{Address, DeviceId, Recorder, Stream};
use glake_stitch::SegmentKind;
use glake_tiers::GpuWaits;
use serde_json::{Value, json};

use super::device::DeviceMemory;
use super::device_registry::DeviceRegistry;
use super::observers::{Action, Entry};
use super::regions::RegionSet;
use super::streams::Streams;
use super::{PoolId, RegionView, Result};
use crate::metrics::DeviceStats;

/// A mapped range of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentView {
    /// Device of the segment.
    pub device: DeviceId,
    /// Start address of the segment.
    pub address: Address,
    /// Size of the segment in bytes.
    pub size: u64,
    /// Stream of the first block that belongs to one.
    pub stream: Stream,
    /// Private pool of the segment; (0, 0) for the default pool.
    pub pool: PoolId,
    /// Kind of the segment.
    pub kind: SegmentKind,
    /// Blocks in order and without gaps: torch's tools compute addresses by adding sizes. Parts of an alias that are not allocated are
    /// shown as inactive.
    pub blocks: Vec<BlockView>,
}

/// A block or gap within a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockView {
    /// Start address of the block.
    pub address: Address,
    /// Size of the block in bytes.
    pub size: u64,
    /// Size that was requested; 0 for free memory.
    pub requested: u64,
    /// Whether the block is allocated.
    pub live: bool,
    /// Whether the block is freed but still in use by other streams.
    pub pending: bool,
    /// Whether the bytes are used by a block of a stitched segment, where they are counted.
    pub lent: bool,
}

impl Reports {
    /// Returns every mapped range of a device with its blocks.
    pub(super) fn segments_of(&self, memory: &DeviceMemory) -> Vec<SegmentView> {
        let Some(started) = memory.started() else { return Vec::new() };
        let segments = started.pool.report().segments().into_iter().map(|segment| {
            let streams = segment.blocks.iter().filter_map(|block| block.stream);
            let stream = streams.filter_map(|key| self.streams.handle(key)).next();
            let address = started.pool.address_of(segment.offset);
            let blocks = segment.blocks.iter().map(|block| BlockView {
                address: started.pool.address_of(block.offset),
                size: block.size.get(),
                requested: block.requested.get(),
                live: block.live,
                pending: block.withheld,
                lent: block.lent,
            });
            SegmentView {
                device: memory.id(),
                address,
                size: segment.size.get(),
                stream: stream.unwrap_or(Stream(0)),
                pool: started.private.name(segment.domain).unwrap_or_default(),
                kind: segment.kind,
                blocks: without_gaps(address, segment.size.get(), blocks),
            }
        });
        segments.collect()
    }

    /// Returns torch's snapshot: segments of all devices, recorded events and the pool's settings.
    pub fn snapshot(&self) -> Value {
        let devices: Vec<_> = self.registry.devices.iter().collect();
        if self.registry.observers.history.is_on() {
            for memory in devices.iter().filter(|memory| memory.started().is_some()) {
                self.registry.observers.history.note(
                    Action::Snapshot,
                    memory.id(),
                    (0, 0),
                    Stream(0),
                    PoolId::default(),
                );
            }
        }
        let segments: Vec<Value> = devices
            .iter()
            .flat_map(|memory| self.segments_of(memory))
            .map(|segment| segment.json())
            .collect();
        let traces: Vec<Vec<Value>> = devices
            .iter()
            .map(|memory| self.registry.observers.history.of(memory.id()).iter().map(Entry::json).collect())
            .collect();
        json!({
            "segments": segments,
            "device_traces": traces,
            "allocator_settings": self.settings_json(),
            "external_annotations": [],
        })
    }

    /// Returns the settings under torch's names with their values here, and GLake's own under `glake`.
    fn settings_json(&self) -> Value {
        json!({
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": false,
            "pinned_num_register_threads": 1,
            "release_lock_on_cudamalloc": false,
            "pinned_use_cuda_host_register": false,
            "graph_capture_record_stream_reuse": false,
            "roundup_power2_divisions": {},
            "glake": serde_json::to_value(&self.registry.config).unwrap_or_default(),
            // Here, because torch's snapshots have no other place for unknown keys.
            "glake_regions": self.regions.views().unwrap_or_default().iter().map(RegionView::json).collect::<Vec<Value>>(),
        })
    }
}

impl SegmentView {
    fn json(&self) -> Value {
        let sum = |of: fn(&BlockView) -> u64| self.blocks.iter().map(of).sum::<u64>();
        let live = sum(|block| if block.live { block.size } else { 0 });
        let active = sum(|block| if block.live || block.pending { block.size } else { 0 });
        let blocks: Vec<Value> = self.blocks.iter().map(BlockView::json).collect();
        let mut segment = json!({
            "device": self.device.0,
            "address": self.address.0,
            "total_size": self.size,
            "allocated_size": live,
            "active_size": active,
            "requested_size": sum(|block| block.requested),
            "stream": self.stream.0,
            "segment_type": self.type_name(),
            "segment_pool_id": [self.pool.0, self.pool.1],
            "is_expandable": false,
            "frames": [],
            "blocks": blocks,
        });
        if self.kind == SegmentKind::Stitched {
            segment["glake_reserved"] = json!(0);
        }
        segment
    }

    fn type_name(&self) -> &'static str {
        match self.kind {
            SegmentKind::Home => "large",
            SegmentKind::Slabs => "small",
            SegmentKind::Stitched => "stitched",
        }
    }
}

/// Returns the blocks with inactive ones in the gaps between them.
fn without_gaps(start: Address, size: u64, blocks: impl Iterator<Item = BlockView>) -> Vec<BlockView> {
    let mut whole = Vec::new();
    let mut at = start.0;
    let gap = |at: u64, end: u64| {
        let inactive = BlockView {
            address: Address(at),
            size: end - at,
            requested: 0,
            live: false,
            lent: false,
            pending: false,
        };
        (at < end).then_some(inactive)
    };
    for block in blocks {
        whole.extend(gap(at, block.address.0));
        at = block.address.0 + block.size;
        whole.push(block);
    }
    whole.extend(gap(at, start.0 + size));
    whole
}

impl BlockView {
    fn json(&self) -> Value {
        let state = match (self.live, self.pending) {
            (true, _) => "active_allocated",
            (false, true) => "active_pending_free",
            (false, false) => "inactive",
        };
        let mut block = json!({
            "address": self.address.0,
            "size": self.size,
            "requested_size": self.requested,
            "state": state,
            "frames": [],
        });
        if self.lent {
            block["glake_lent"] = json!(true);
        }
        block
    }
}

impl Entry {
    fn json(&self) -> Value {
        let place = if self.action == Action::OutOfMemory { "device_free" } else { "addr" };
        json!({
            "action": self.action.name(),
            place: self.address,
            "size": self.size,
            "stream": self.stream.0,
            "time_us": self.time_us,
            "segment_pool_id": [self.pool.0, self.pool.1],
            "frames": [],
            "compile_context": "N/A",
            "user_metadata": "",
        })
    }
}

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
