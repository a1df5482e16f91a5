//! An idle region leaves its GPU and comes back, while another one works and a third takes the room.
//!
//! ```text
//! region      ████ sealed ████ ─shrink─►  (addresses kept)          ─refill─► ████████████
//! neighbour   ▌▐▌▌▐ allocates, writes, compares, frees, all the time ▐▌▌▐▐▌▌▐▌▐▌▐▌▌▐▌▌▐▐▌▌
//! neighbour   refused                       ░░░ has the room ░░░      gone
//! ```

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use glake_device::{Address, Stream};
use glake_sim::Census;
use glake_tiers::{
    Block, CopyPolicy, GpuPool, Policy, PoolStream, Refilled, Region, RegionOptions, Shrunk, Store,
    TransferContext,
};
use glake_transfer::{LinkMover, Priority};
use glake_units::Bytes;

use super::neighbour::{Neighbour, differs};
use super::{DemoError, Stage, figures, pool};
use crate::filled::{Difference, Filled};
use crate::server::{Server, ServerOptions};
use glake_replay::stamps::Stamps;
use glake_replay::trace::BlockId;
use glake_runtime::backend::Backend;
use glake_runtime::config::{self, Config};

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
    let server =
        Server::open(backend, config, ServerOptions { memory: Some(MEMORY), ..ServerOptions::default() })?;
    let simulated = server.is_simulated();
    let setup = Setup::new(&server, config)?;
    let live = setup.idle.live();
    let addresses = setup.addresses();
    let told = setup.story(&server)?;
    let same = setup.addresses() == addresses;
    setup.end()?;
    let left = server.end();

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
    fn new(server: &Server, config: &Config) -> Result<Self, DemoError> {
        let device = server.target().id;
        let size = BLOCKS[usize::from(!server.is_simulated())];
        let knobs = config::Pool { limit: None, ..pool(config) };
        let pool = server.pool(device, &knobs)?;
        let options = RegionOptions {
            policy: Policy::Sealed,
            host_copy: CopyPolicy::Retain,
            extent: size,
            ..RegionOptions::of("idle")
        };
        let region = Region::new(&pool, options);
        let stream = PoolStream::of(&**server.driver(), device, Stream::LEGACY)?;
        let sizes = (0..COUNT).map(|number| Bytes::new(size.get() / 2 + size.get() / COUNT * number));
        let blocks = sizes.map(|size| region.malloc(size, stream));
        let mut blocks = blocks.collect::<Result<Vec<Block>, _>>()?;
        for number in (0..FREED).rev() {
            let place = usize::try_from(number * COUNT / FREED).unwrap_or(0);
            pool.free(blocks.remove(place).address)?;
        }
        let setup = Setup {
            guest: server.pool(device, &knobs)?,
            host: Store::Host(server.host()?),
            mover: LinkMover::new(server.engine(), device, Priority::Normal)?,
            idle: Filled::new(region, blocks)?,
            pool,
            stream,
        };
        setup.idle.region().seal(false)?;
        Ok(setup)
    }

    /// Out and in twice, the neighbour at work all the time.
    fn story(&self, server: &Server) -> Result<Told, DemoError> {
        let (neighbour, mut told) = (Neighbour::default(), Told::default());
        thread::scope(|scope| {
            let working = neighbour.begin(scope, &self.pool, self.stream);
            let begin = Instant::now();
            while neighbour.blocks() == 0 && begin.elapsed() < TIMEOUT {
                thread::yield_now();
            }
            let free = server.free_memory(server.target().id)?;
            // What there is of a simulated GPU does not hold so much; of a real one it may.
            let live = self.idle.live();
            let wanted =
                if server.is_simulated() { free.saturating_add(Bytes::new(live.get() / 4)) } else { live };
            told.refused_before =
                server.is_simulated().then(|| self.guest.malloc(wanted, self.stream).is_err());

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
        TransferContext { mover: &self.mover, checks: None }
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
