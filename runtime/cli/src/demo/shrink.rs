//! Stages `copy` and `shrink`: a copy over every link of the server, and a region that leaves its GPU and comes back.
//!
//! ```text
//! all links   host ══link 0══► GPU 0 ◄── NVLink ── GPU k ◄══link k══ host
//!
//! region      ████ sealed ████ ─shrink─►  (addresses kept)          ─refill─► ████████████
//! neighbour   ▌▐▌▌▐ allocates, writes, compares, frees, all the time ▐▌▌▐▐▌▌▐▌▐▌▐▌▌▐▌▌▐▐▌▌
//! guest       refused                       ░░░ has the room ░░░      gone
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use fastrand::Rng;
use glake_device::{Address, Stream};
use glake_replay::stamps::Stamps;
use glake_replay::trace::BlockId;
use glake_runtime::backend::Backend;
use glake_runtime::config::{self, Config};
use glake_sim::Census;
use glake_sim::pattern::{fill, matching};
use glake_tiers::{
    Block, CopyPolicy, GpuPool, Policy, PoolStream, Refilled, Region, RegionOptions, Shrunk, Store,
    TransferContext,
};
use glake_transfer::{LinkMover, Priority};
use glake_units::Bytes;
use serde_json::{Map, Value};

use super::{DemoError, Stage, figures, pool};
use crate::bench::times::{gbps, grown, us};
use crate::bench::{CopyDirection, CopyMemory};
use crate::copies::{Copies, CopyError, Shape};
use crate::rig::{Difference, Filled, Rig, RigOptions};

/// Average block size of the region, and its extent size, on the simulator and on a GPU.
const BLOCKS: [Bytes; 2] = [Bytes::mib(8), Bytes::mib(128)];
/// Number of blocks, and number of those freed before the first shrink.
const COUNT: u64 = 16;
const FREED: u64 = 4;
/// A simulated GPU has room for the region and the neighbour, and for little else.
const MEMORY: Bytes = Bytes::mib(256);
/// The neighbour has worked in both directions by then, or never will.
const TIMEOUT: Duration = Duration::from_secs(4);

/// The region, what moves it, and the pool of another process.
struct Setup {
    pool: Arc<GpuPool>,
    /// Pool that stands in for another process.
    guest: Arc<GpuPool>,
    host: Store,
    mover: LinkMover,
    idle: Filled,
    stream: PoolStream,
}

/// Measurements of the stage.
#[derive(Default)]
struct Told {
    first: Shrunk,
    again: Shrunk,
    refilled: Refilled,
    shrink: Duration,
    shrink_again: Duration,
    refill: Duration,
    /// `None` where the GPU has more free memory than that anyhow.
    refused_before: Option<bool>,
    lent: Bytes,
    matched: Bytes,
    meanwhile: u64,
    neighbour: Bytes,
}

pub(super) fn stage(backend: &Backend, config: &Config) -> Result<Stage, DemoError> {
    let rig = Rig::open(backend, config, RigOptions { memory: Some(MEMORY), ..RigOptions::default() })?;
    let simulated = rig.is_simulated();
    let setup = Setup::new(&rig, config)?;
    let live = setup.idle.live();
    let addresses = setup.addresses();
    let told = setup.story(&rig)?;
    let same = setup.addresses() == addresses;
    setup.end()?;
    let left = rig.end();

    let Told { first, again, refilled, .. } = &told;
    let freed = first.freed;
    let took = |time: Duration| match simulated {
        true => String::new(),
        false => format!(" in {:.1} ms", time.as_secs_f64() * 1e3),
    };
    let guest = match told.refused_before {
        Some(true) => ", refused before,",
        Some(false) => ", given as much before, which is wrong,",
        None => "",
    };
    let says = format!(
        "A region of {live} in {} blocks leaves GPU 0{}. Another pool{guest} has {} of it meanwhile, and a neighbour \
         allocates and frees {} blocks. Refilled at the same addresses{}, every byte compared; sealed, it leaves \
         again{} with {} copied.",
        block_count(),
        took(told.shrink),
        told.lent,
        told.meanwhile,
        took(told.refill),
        took(told.shrink_again),
        again.copied,
    );
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let figures = figures! {
        "live_bytes": live.get(),
        "blocks": block_count(),
        "freed_bytes": freed.get(),
        "copied_bytes": first.copied.get(),
        "left_bytes": first.resident.get(),
        "shrink_ms": ms(told.shrink),
        "refilled_bytes": refilled.mapped.get(),
        "refill_ms": ms(told.refill),
        "sealed_again_copied_bytes": again.copied.get(),
        "sealed_again_ms": ms(told.shrink_again),
        "matched_bytes": told.matched.get(),
        "same_addresses": same,
        "lent_bytes": told.lent.get(),
        "refused_before": told.refused_before,
        "neighbour_blocks_meanwhile": told.meanwhile,
        "neighbour_compared_bytes": told.neighbour.get(),
    };
    let ok = same
        && [first.resident, again.resident, refilled.evicted, again.copied]
            .iter()
            .all(|bytes| bytes.is_zero())
        && first.copied == live
        && told.matched == Bytes::new(live.get() * 2)
        && told.refused_before != Some(false)
        && told.meanwhile > 0
        && left.unwrap_or_default() == Census::default();
    Ok(Stage { stage: "shrink", says, picture: None, figures, ok, gain: None })
}

fn block_count() -> u64 {
    COUNT - FREED
}

impl Setup {
    fn new(rig: &Rig, config: &Config) -> Result<Self, DemoError> {
        let device = rig.target().id;
        let size = BLOCKS[usize::from(!rig.is_simulated())];
        let knobs = config::Pool { limit: None, ..pool(config) };
        let pool = rig.pool(device, &knobs)?;
        let options = RegionOptions {
            policy: Policy::Sealed,
            host_copy: CopyPolicy::Retain,
            extent: size,
            ..RegionOptions::of("idle")
        };
        let region = Region::new(&pool, options);
        let stream = PoolStream::of(&**rig.driver(), device, Stream::LEGACY)?;
        let sizes = (0..COUNT).map(|number| Bytes::new(size.get() / 2 + size.get() / COUNT * number));
        let blocks = sizes.map(|size| region.malloc(size, stream));
        let mut blocks = blocks.collect::<Result<Vec<Block>, _>>()?;
        for number in (0..FREED).rev() {
            let place = usize::try_from(number * COUNT / FREED).unwrap_or(0);
            pool.free(blocks.remove(place).address)?;
        }
        let setup = Setup {
            guest: rig.pool(device, &knobs)?,
            host: Store::Host(rig.host()?),
            mover: LinkMover::new(rig.engine(), device, Priority::Normal)?,
            idle: Filled::new(region, blocks)?,
            pool,
            stream,
        };
        setup.idle.region().seal(false)?;
        Ok(setup)
    }

    /// Out and in twice, the neighbour at work all the time.
    fn story(&self, rig: &Rig) -> Result<Told, DemoError> {
        let (neighbour, mut told) = (Neighbour::default(), Told::default());
        thread::scope(|scope| {
            let working = neighbour.begin(scope, &self.pool, self.stream);
            let begin = Instant::now();
            while neighbour.blocks() == 0 && begin.elapsed() < TIMEOUT {
                thread::yield_now();
            }
            let free = rig.free_memory(rig.target().id)?;
            // What there is of a simulated GPU does not hold so much; of a real one it may.
            let live = self.idle.live();
            let wanted =
                if rig.is_simulated() { free.saturating_add(Bytes::new(live.get() / 4)) } else { live };
            told.refused_before = rig.is_simulated().then(|| self.guest.malloc(wanted, self.stream).is_err());

            let before = neighbour.blocks();
            (told.first, told.shrink) = timed(|| self.shrink())?;
            told.meanwhile = neighbour.blocks() - before;
            self.lend(wanted)?;
            told.lent = wanted;
            let before = neighbour.blocks();
            (told.refilled, told.refill) = timed(|| self.refill())?;
            told.meanwhile += neighbour.blocks() - before;
            told.matched = self.compare()?;

            let before = neighbour.blocks();
            (told.again, told.shrink_again) = timed(|| self.shrink())?;
            self.refill()?;
            // Threads get their turns when the machine pleases.
            while neighbour.blocks() == before && begin.elapsed() < TIMEOUT {
                self.shrink()?;
                self.refill()?;
            }
            told.meanwhile += neighbour.blocks() - before;
            told.matched = told.matched.saturating_add(self.compare()?);
            told.neighbour = working.end()?;
            Ok(told)
        })
    }

    fn shrink(&self) -> Result<Shrunk, DemoError> {
        Ok(self.idle.shrink(&self.host, self.transfer_context())?)
    }

    fn refill(&self) -> Result<Refilled, DemoError> {
        Ok(self.idle.refill(self.transfer_context())?)
    }

    fn transfer_context(&self) -> TransferContext<'_> {
        TransferContext { mover: &self.mover, checks: None, fill: false }
    }

    /// Another pool of the same GPU uses memory and gives it back.
    fn lend(&self, wanted: Bytes) -> Result<(), DemoError> {
        let (mut stamps, id) = (Stamps::default(), BlockId(1));
        let block = self.guest.malloc(wanted, self.stream)?;
        stamps.write(&self.guest, id, block)?;
        stamps.compare(&self.guest, id, block)?;
        self.guest.free(block.address)?;
        self.guest.settle()?;
        self.guest.trim(Bytes::ZERO)?;
        Ok(())
    }

    /// Compares the whole region and returns its size.
    fn compare(&self) -> Result<Bytes, DemoError> {
        match self.idle.compare()? {
            None => Ok(self.idle.live()),
            Some(Difference { address, at, .. }) => Err(differs("a block of the region", address, at)),
        }
    }

    fn addresses(&self) -> Vec<Address> {
        self.pool.blocks_of(self.idle.region().domain()).iter().map(|block| block.address).collect()
    }

    fn end(self) -> Result<(), DemoError> {
        Ok(self.idle.end()?)
    }
}

fn timed<T>(work: impl FnOnce() -> Result<T, DemoError>) -> Result<(T, Duration), DemoError> {
    let begin = Instant::now();
    Ok((work()?, begin.elapsed()))
}

/// Number of blocks that the neighbour holds, and their maximum size.
const HELD: usize = 8;
const LARGEST: usize = 2 << 20;

/// Progress of a neighbour, readable by others.
#[derive(Debug, Default)]
pub(super) struct Neighbour {
    done: AtomicBool,
    blocks: AtomicU64,
}

/// Ends the neighbour when it is dropped, also where the story breaks off.
pub(super) struct Working<'scope> {
    neighbour: &'scope Neighbour,
    thread: Option<ScopedJoinHandle<'scope, Result<Bytes, DemoError>>>,
}

impl Neighbour {
    /// Begins to work on the default domain of a pool.
    pub(super) fn begin<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        pool: &'scope GpuPool,
        stream: PoolStream,
    ) -> Working<'scope> {
        let thread = scope.spawn(move || self.work(pool, stream));
        Working { neighbour: self, thread: Some(thread) }
    }

    /// Returns the number of blocks compared and freed.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Acquire)
    }

    /// Works until it is told to end; the bytes that it has compared.
    fn work(&self, pool: &GpuPool, stream: PoolStream) -> Result<Bytes, DemoError> {
        let (mut random, mut live, mut compared) = (Rng::with_seed(11), Vec::new(), Bytes::ZERO);
        let mut bytes = vec![0; LARGEST];
        let mut seed = 0;
        while !self.done.load(Ordering::Acquire) {
            seed += 1;
            let size = 8 * (1 + random.usize(..LARGEST / 8));
            fill(&mut bytes[..size], 0, seed);
            let block = pool.malloc(Bytes::new(size as u64), stream)?;
            pool.write(block.address, &bytes[..size])?;
            live.push((block, size, seed));
            if live.len() == HELD {
                let gone = live.swap_remove(random.usize(..HELD));
                compared = compared.saturating_add(self.give(pool, gone, &mut bytes)?);
            }
        }
        for block in live {
            compared = compared.saturating_add(self.give(pool, block, &mut bytes)?);
        }
        Ok(compared)
    }

    /// Compares a block and frees it.
    fn give(
        &self,
        pool: &GpuPool,
        (block, size, seed): (Block, usize, u64),
        bytes: &mut [u8],
    ) -> Result<Bytes, DemoError> {
        pool.read(block.address, &mut bytes[..size])?;
        let matched = matching(&bytes[..size], 0, seed);
        if matched < size as u64 {
            return Err(differs("the neighbour's block", block.address, matched));
        }
        pool.free(block.address)?;
        self.blocks.fetch_add(1, Ordering::Release);
        Ok(Bytes::new(matched))
    }
}

impl Working<'_> {
    /// Ends the work; the bytes that it has compared.
    pub(super) fn end(mut self) -> Result<Bytes, DemoError> {
        self.neighbour.done.store(true, Ordering::Release);
        match self.thread.take().map(ScopedJoinHandle::join) {
            Some(Ok(compared)) => compared,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(Bytes::ZERO),
        }
    }
}

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.neighbour.done.store(true, Ordering::Release);
    }
}

/// Creates the error for a block with wrong contents.
pub(super) fn differs(what: &str, address: Address, at: u64) -> DemoError {
    DemoError::Bytes(format!("{what} at {address}, byte {at}: not what was written there was found"))
}

/// Copy size on the simulator, which uses this machine's memory, and on a GPU.
const SIZES: [Bytes; 2] = [Bytes::mib(48), Bytes::gib(1)];
/// Number of timed repetitions, of which the best counts.
const RUNS: usize = 3;
const SEED: u64 = 7;
/// Minimum speed-up expected of additional links.
const GAIN: f64 = 1.1;

pub(super) fn copy(backend: &Backend, config: &Config) -> Result<Stage, DemoError> {
    let rig = Rig::open(backend, config, RigOptions::default())?;
    let simulated = rig.is_simulated();
    let size = SIZES[usize::from(!simulated)];
    let (relays, calibrated) = (rig.relays().len(), rig.is_calibrated());
    let copies = Copies::of_target(&rig)?;
    let mut ends = copies.ends(Shape { memory: CopyMemory::Pool, size, block: size })?;

    let way = CopyDirection::H2d;
    let one_us = best(|| ends.native(way))?;
    ends.warm_up(way)?;
    let before = rig.carried();
    let all_us = best(|| ends.engine(way))?;
    let paths: Vec<_> = grown(&before, &rig.carried())
        .into_iter()
        .map(|(relay, bytes)| (relay, Bytes::new(bytes / RUNS as u64)))
        .collect();
    let arrived = ends.verify(way, SEED)?;
    let returned = ends.verify(CopyDirection::D2h, SEED)?;
    drop(ends);
    drop(copies);
    let left = rig.end();

    let (one, all) = (gbps(size.get(), one_us), gbps(size.get(), all_us));
    let clock = if simulated { " in virtual time, which is no measurement" } else { "" };
    let way = match (relays, paths.len()) {
        (0, _) => "no other GPU's link is there".to_owned(),
        (_, 0 | 1) => "it took its own link alone".to_owned(),
        (_, links) if all < one * GAIN => format!("{links} links carried it and gained nothing"),
        (_, links) => format!("{links} links carried it"),
    };
    let says = format!(
        "{size} from the host to GPU 0 in one copy: {way}, at {all:.1} GB/s beside {one:.1} GB/s over one link{clock}. \
         {arrived} arrived on the GPU and {returned} back on the host as they were sent."
    );
    let gain =
        Some(format!("copies   {all:.1} GB/s where one link gives {one:.1} GB/s{}", virtually(simulated)));
    let shares = paths.iter().map(|(relay, bytes)| (format!("gpu{}", relay.0), Value::from(bytes.get())));
    let figures = figures! {
        "bytes": size.get(),
        "links": paths.len().max(1),
        "relays": relays,
        "link_gbps": one,
        "gbps": all,
        "virtual_time": simulated,
        "calibrated": calibrated,
        "link_bytes": Value::Object(shares.collect::<Map<_, _>>()),
        "matched_on_gpu_bytes": arrived.get(),
        "matched_on_host_bytes": returned.get(),
    };
    let whole = [arrived, returned].iter().all(|matched| *matched == size);
    let ok = whole && left.unwrap_or_default() == Census::default();
    Ok(Stage { stage: "copy", says, picture: None, figures, ok, gain })
}

/// The best of some, in microseconds.
fn best(mut timed: impl FnMut() -> Result<Duration, CopyError>) -> Result<f64, DemoError> {
    let least = (0..RUNS).try_fold(Duration::MAX, |best, _| Ok::<_, CopyError>(timed()?.min(best)))?;
    Ok(us(least))
}

fn virtually(simulated: bool) -> &'static str {
    if simulated { " (virtual time)" } else { "" }
}
