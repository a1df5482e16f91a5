//! A stream put behind what its new bytes were last used by: by its own work, where they change their address, and by
//! that of lenders.
//!
//! Invariant: the core counts an edge as made from the grant on. Until it is on the device (another thread is at it, or
//! it failed) every other grant to the stream makes one as well.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use glake_device::owned::OwnedEvent;
use glake_device::{CaptureState, DeviceId, Driver, DriverError, EventKind, Stream};
use glake_stitch::{Grant, StreamKey};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::execute::retry;
use super::{GpuPool, PoolStream, Result};

/// No stream's key: work that nobody knows.
const UNKNOWN: StreamKey = StreamKey(u64::MAX);

/// The edges of a pool.
#[derive(Debug)]
pub(super) struct Edges {
    /// Recorded and waited for in one go.
    event: Mutex<OwnedEvent>,
    /// How many edges streams were promised that are not made.
    owed: Mutex<FxHashMap<StreamKey, usize>>,
    /// Over all streams; changed under the lock of `owed`.
    count: AtomicUsize,
}

impl Edges {
    pub(super) fn new(driver: &Arc<dyn Driver>, device: DeviceId) -> glake_device::Result<Self> {
        let event = Mutex::new(OwnedEvent::new(driver, device, EventKind::Plain)?);
        Ok(Edges { event, owed: Mutex::default(), count: AtomicUsize::new(0) })
    }

    /// Notes the edge of a grant, or that it needs one since another is owed. To be called under the core's lock.
    #[inline]
    pub(super) fn owe(&self, mut grant: Grant, stream: StreamKey) -> Grant {
        if grant.edge || self.count.load(Ordering::Relaxed) > 0 {
            grant.edge = self.note(grant.edge, stream);
        }
        grant
    }

    /// Notes an edge that a grant needs by itself, or because another is owed to its stream; tells whether it does.
    #[cold]
    fn note(&self, needs: bool, stream: StreamKey) -> bool {
        let mut owed = self.owed.lock();
        let edge = needs || owed.contains_key(&stream);
        if edge {
            *owed.entry(stream).or_default() += 1;
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        edge
    }

    fn made(&self, stream: StreamKey) {
        let mut owed = self.owed.lock();
        if let Some(left) = owed.get_mut(&stream) {
            *left -= 1;
            if *left == 0 {
                owed.remove(&stream);
            }
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl GpuPool {
    /// Makes a stream wait, on the device, for what its new block's bytes were last used by. Capturing streams neither
    /// lend nor borrow: then the answer is false, and the block is withheld until its epoch, so that another is found.
    pub(super) fn order(&self, grant: &Grant, stream: PoolStream) -> Result<bool> {
        let ordered = self.wait_for_all(grant, stream);
        if !matches!(ordered, Ok(true)) {
            self.withhold(grant);
        }
        ordered.map_err(|error| self.failed(error))
    }

    fn wait_for_all(&self, grant: &Grant, stream: PoolStream) -> std::result::Result<bool, DriverError> {
        if grant.edge {
            self.wait_for(stream.raw, stream)?;
            self.edges.made(stream.key);
        }
        if grant.waits.is_empty() {
            return Ok(true);
        }
        let lenders: Vec<Stream> = {
            let held = self.held.lock();
            grant.waits.iter().filter_map(|key| held.streams.get(key).copied()).collect()
        };
        for &party in lenders.iter().chain([&stream.raw]) {
            match self.driver.capture_state(self.device, party) {
                // Its work may still run, and only an epoch tells when it is done.
                Err(error) if error.is_gone() && party != stream.raw => return Ok(false),
                state => {
                    if state? != CaptureState::None {
                        return Ok(false);
                    }
                }
            }
        }
        let timed = self.begin_wait(stream.raw);
        for lender in lenders {
            match self.wait_for(lender, stream) {
                Err(error) if error.is_gone() => return Ok(false),
                waits => waits?,
            }
        }
        self.end_wait(timed, stream.raw);
        Ok(true)
    }

    fn wait_for(&self, source: Stream, stream: PoolStream) -> std::result::Result<(), DriverError> {
        let event = self.edges.event.lock();
        retry(|| event.record(source))?;
        retry(|| self.driver.stream_wait_event(self.device, stream.raw, event.id()))
    }

    /// Takes a block back that is not ordered: nobody may have its bytes before their epoch, its stream neither.
    fn withhold(&self, grant: &Grant) {
        let mut core = self.core.lock();
        core.record_stream(grant.offset, UNKNOWN);
        let freed = core.free(grant.offset);
        drop(core);
        debug_assert!(freed.is_ok(), "it was just handed out");
        self.note_freed();
    }
}
