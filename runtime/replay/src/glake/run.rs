//! One replay on GLake, with a pool of its own.

use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::OwnedStream;
use glake_device::{Driver, Lag, Recorder, Verb};
use glake_stitch::Settings;
use glake_tiers::{Block, GpuPool, PoolError, PoolOptions, PoolStream};
use glake_units::Bytes;

use super::super::{Counters, Refusal, Subject};
use super::failed;
use super::pace::Pace;
use crate::machine::Machine;
use crate::stamps::Stamps;
use crate::trace::{BlockId, StreamIndex, Trace};

/// Pool of a replay, and the layers below it.
pub(super) struct Run {
    /// Declared before the streams: the pool is dropped first because it uses them.
    pool: GpuPool,
    lag: Arc<Lag>,
    recorder: Arc<Recorder>,
    pace: Pace,
    blocks: Vec<Option<Block>>,
    streams: Vec<PoolStream>,
    stamps: Option<Stamps>,
    limit: Bytes,
    _streams: Vec<OwnedStream>,
}

impl Run {
    pub(super) fn new(
        machine: &Machine,
        trace: &Trace,
        settings: Settings,
        lag: Duration,
        interval: Duration,
        verify: bool,
    ) -> Result<Self, PoolError> {
        // The program's own streams: their cost does not count as the pool's.
        let owned: Vec<OwnedStream> = (trace.streams().iter())
            .map(|_| OwnedStream::new(machine.driver(), machine.id()))
            .collect::<Result<_, _>>()?;
        let streams =
            owned.iter().map(|stream| PoolStream::of(&**machine.driver(), machine.id(), stream.id()));
        let streams = streams.collect::<Result<_, _>>()?;
        let recorder = Arc::new(machine.recorder());
        let lag = Arc::new(Lag::new(recorder.clone(), lag));
        let limit = settings.limit.min(settings.memory);
        let options = PoolOptions { settings: Some(settings), ..PoolOptions::default() };
        let below: Arc<dyn Driver> = lag.clone();
        Ok(Run {
            pool: GpuPool::new(below, machine.id(), options)?,
            lag,
            recorder,
            pace: Pace::new(interval),
            blocks: vec![None; trace.allocations() as usize],
            streams,
            stamps: verify.then(Stamps::default),
            limit,
            _streams: owned,
        })
    }

    fn advance(&mut self, now_us: u64) -> Result<(), Refusal> {
        self.pace.advance(now_us, &self.lag, &self.pool).map_err(failed)
    }

    fn block(&self, block: BlockId) -> Option<Block> {
        self.blocks.get(block.index()).copied().flatten()
    }
}

impl Subject for Run {
    fn allocate(
        &mut self,
        block: BlockId,
        bytes: Bytes,
        stream: StreamIndex,
        now_us: u64,
    ) -> Result<(), Refusal> {
        self.advance(now_us)?;
        let place = (self.blocks.get_mut(block.index())).zip(self.streams.get(usize::from(stream.0)));
        let Some((place, stream)) = place else { return Err(foreign(block)) };
        let handed_out = match self.pool.malloc(bytes, *stream) {
            Ok(handed_out) => handed_out,
            Err(error) if error.is_out_of_memory() => {
                let (reserved, limit) = (self.pool.reserved(), self.limit);
                return Err(Refusal::OutOfMemory { wanted: bytes, reserved, limit });
            }
            Err(error) => return Err(failed(error)),
        };
        *place = Some(handed_out);
        match &mut self.stamps {
            Some(stamps) => stamps.write(&self.pool, block, handed_out).map_err(failed),
            None => Ok(()),
        }
    }

    fn free_requested(&mut self, block: BlockId, now_us: u64) -> Result<(), Refusal> {
        self.advance(now_us)?;
        let Some(handed_out) = self.block(block) else { return Err(foreign(block)) };
        if let Some(stamps) = &mut self.stamps {
            stamps.compare(&self.pool, block, handed_out).map_err(failed)?;
        }
        self.pool.free(handed_out.address).map_err(failed)?;
        self.pace.freed();
        Ok(())
    }

    fn free_completed(&mut self, _: BlockId, now_us: u64) -> Result<(), Refusal> {
        self.advance(now_us)
    }

    fn record_stream(&mut self, block: BlockId, stream: StreamIndex, now_us: u64) -> Result<(), Refusal> {
        self.advance(now_us)?;
        let known = self.block(block).zip(self.streams.get(usize::from(stream.0)));
        match known {
            Some((block, stream)) if self.pool.record_stream(block.address, *stream) => Ok(()),
            _ => Err(foreign(block)),
        }
    }

    fn reserved(&self) -> Bytes {
        self.pool.reserved()
    }

    fn counters(&self) -> Counters {
        let done = self.pool.counters();
        let asked = self.recorder.counters();
        // Stamps belong to the check, not to the program.
        let stamps = [asked.of(Verb::ReadNow), asked.of(Verb::WriteNow)];
        let time = stamps.iter().fold(asked.time(), |time, stamp| time.saturating_sub(stamp.time));
        Counters {
            stitches: done.stitches,
            extent_maps: done.extent_maps,
            stream_waits: done.stream_waits,
            driver_calls: asked.calls() - stamps.iter().map(|stamp| stamp.calls).sum::<u64>(),
            driver_ns: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

/// Returns the error for a block that is not in the trace of this run.
fn foreign(block: BlockId) -> Refusal {
    Refusal::Failed(
        format!("{block} is not of the trace that this pool was made for, or not allocated").into(),
    )
}
