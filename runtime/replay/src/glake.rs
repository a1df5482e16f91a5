//! GLake itself as the subject of a replay.
//!
//! ```text
//! Machine ─► Recorder (calls and their cost) ─► Lag (delay of the GPU) ─► GpuPool ◄─ Run (events)
//!                                                  ▲ trace time                ▲ ticks     └► Stamps (--verify)
//!                                                  └────────── Pace ───────────┘
//! ```
//!
//! The pool is the one that programs use; only its clock is the trace's. A subject leaves no memory behind on the device.
//!
//! Completion points advance in the trace's time, at the pace of the pool's own thread. The thread wakes up at the first free after a
//! pause, ticks at every interval while frees are pending, and sleeps otherwise. Between two events, only two ticks have an effect: the
//! first, which records a completion point, and the last, which detects completed ones. Only these are performed, at the times when they
//! are due.

use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::OwnedStream;
use glake_device::{Driver, DriverError, Lag, Recorder, Verb};
use glake_runtime::backend::Backend;
use glake_runtime::config::{self, Config};
use glake_stitch::Settings;
use glake_tiers::{Block, GpuPool, PoolError, PoolOptions, PoolStream};
use glake_units::Bytes;

use super::{Refusal, Subject};
use crate::Counters;
use crate::machine::Machine;
use crate::stamps::Stamps;
use crate::trace::{BlockId, StreamIndex, Trace};

/// GLake on an open device, ready for replays.
#[derive(Debug)]
pub struct Glake {
    machine: Machine,
    pool: config::Pool,
}

/// Options of one replay.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Delay of the GPU behind the host: a free's completion point passes this long after the free.
    pub gpu_lag_ms: u64,
    /// Limit of reserved memory; `None`: limited by the configuration and the device only.
    pub limit: Option<Bytes>,
    /// Stamp every block, and compare its bytes when it is freed.
    pub verify: bool,
}

impl Glake {
    /// Opens the device of a backend.
    ///
    /// # Errors
    /// [`Refusal::Failed`]: the device refused.
    pub fn open(backend: Backend, config: &Config) -> Result<Glake, Refusal> {
        Ok(Glake::on(Machine::open(&backend).map_err(failed)?, config.pool.clone()))
    }

    /// Creates a subject on an open device.
    pub fn on(machine: Machine, pool: config::Pool) -> Glake {
        Glake { machine, pool }
    }

    /// Returns the device's name for reports.
    pub fn device(&self) -> &str {
        self.machine.name()
    }

    /// Returns the open device.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Creates a subject with a new pool.
    ///
    /// # Errors
    /// [`Refusal::Failed`]: the device refused.
    pub fn subject<'a>(
        &'a self,
        trace: &'a Trace,
        options: Options,
    ) -> Result<Box<dyn Subject + 'a>, Refusal> {
        let lag = Duration::from_millis(options.gpu_lag_ms);
        let interval = Duration::from_micros(self.pool.completion_interval_us);
        let mut settings = self.machine.settings(&self.pool);
        settings.limit = settings.limit.min(options.limit.unwrap_or(Bytes::MAX));
        let run = Run::new(&self.machine, trace, settings, lag, interval, options.verify);
        Ok(Box::new(run.map_err(failed)?))
    }
}

fn failed(error: impl std::error::Error + Send + Sync + 'static) -> Refusal {
    Refusal::Failed(Box::new(error))
}

/// Converts driver errors that do not pass through a pool.
impl From<DriverError> for Refusal {
    fn from(error: DriverError) -> Self {
        failed(error)
    }
}

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

/// Times of the ticks.
#[derive(Debug)]
pub(super) struct Pace {
    interval_us: u64,
    now_us: u64,
    due_us: u64,
    /// Whether the simulated thread is awake.
    ticking: bool,
}

impl Pace {
    pub(super) fn new(interval: Duration) -> Self {
        let interval_us = u64::try_from(interval.as_micros()).unwrap_or(u64::MAX);
        Pace { interval_us, now_us: 0, due_us: 0, ticking: false }
    }

    /// Advances the time to `now_us` and performs the ticks that are due by then.
    pub(super) fn advance(&mut self, now_us: u64, lag: &Lag, pool: &GpuPool) -> Result<(), PoolError> {
        if now_us == self.now_us {
            return Ok(());
        }
        if self.ticking && self.due_us <= now_us {
            self.tick(self.due_us, lag, pool)?;
            // Of further ticks, only the last one.
            let left = (now_us - self.due_us).checked_div(self.interval_us).unwrap_or(u64::MAX);
            let last = if left == u64::MAX { now_us } else { self.due_us + left * self.interval_us };
            if last > self.due_us && pool.clock().is_ticking() {
                self.tick(last, lag, pool)?;
            }
            self.due_us = last.saturating_add(self.interval_us);
            self.ticking = pool.clock().is_ticking();
        }
        self.now_us = now_us;
        lag.set_now(Duration::from_micros(now_us));
        Ok(())
    }

    /// Records a free: the thread wakes up if it slept, and ticks immediately.
    pub(super) fn freed(&mut self) {
        if !self.ticking {
            self.ticking = true;
            self.due_us = self.now_us.saturating_add(self.interval_us.min(1));
        }
    }

    fn tick(&self, at_us: u64, lag: &Lag, pool: &GpuPool) -> Result<(), PoolError> {
        lag.set_now(Duration::from_micros(at_us));
        pool.tick()
    }
}
