//! A program like training: blocks of random sizes come and go until free memory lies in many short ranges.
//!
//! Every block is stamped, and what was done is kept as a trace, so that others can be asked how they would fare.

use std::fmt::Write as _;
use std::path::Path;

use glake_tiers::{Block, GpuPool, PoolStream};
use glake_units::Bytes;

use super::{DemoError, LIMIT, Stage, Story, figures};
use fastrand::Rng;
use glake_replay::stamps::Stamps;
use glake_replay::trace::{BlockId, Trace, TraceError};

const STEPS: u32 = 3000;
/// Shorter than an extent, so that nothing is stitched on the way.
const SIZES: [u64; 2] = [1 << 20, 15 << 20];
/// Maximum live share of the limit while blocks come and go, and share after they have gone, in percent.
const LIVE: [u64; 2] = [85, 62];

/// Allocations and frees in progress.
#[derive(Debug, Default)]
pub(super) struct Churn {
    /// Live blocks in no order.
    pub(super) live: Vec<(BlockId, Block)>,
    stamps: Stamps,
    program: String,
    blocks: u32,
    now_us: u64,
}

impl Churn {
    /// Allocates, stamps and notes a block.
    pub(super) fn allocate(
        &mut self,
        pool: &GpuPool,
        size: Bytes,
        stream: PoolStream,
    ) -> Result<Block, DemoError> {
        let block = pool.malloc(size, stream)?;
        let id = BlockId(self.blocks);
        self.stamps.write(pool, id, block)?;
        self.live.push((id, block));
        self.blocks += 1;
        self.now_us += 10;
        let _ = writeln!(self.program, "a {} {} 0 {}", id.0, size.get(), self.now_us);
        Ok(block)
    }

    /// Compares the stamps of a live block and frees it.
    pub(super) fn free(&mut self, pool: &GpuPool, place: usize) -> Result<(), DemoError> {
        let (id, block) = self.live.swap_remove(place);
        self.stamps.compare(pool, id, block)?;
        pool.free(block.address)?;
        self.now_us += 10;
        let _ = writeln!(self.program, "f {} {}", id.0, self.now_us);
        Ok(())
    }

    /// Compares the stamps of everything alive, but for one block that was overwritten.
    pub(super) fn compare(&mut self, pool: &GpuPool, but: Block) -> Result<usize, DemoError> {
        let rest = self.live.iter().filter(|(_, block)| *block != but);
        let mut compared = 0;
        for &(id, block) in rest {
            self.stamps.compare(pool, id, block)?;
            compared += 1;
        }
        Ok(compared)
    }

    /// Stamps a block anew.
    pub(super) fn stamp(&mut self, pool: &GpuPool, block: Block) -> Result<(), DemoError> {
        for &(id, _) in self.live.iter().filter(|(_, other)| *other == block) {
            self.stamps.write(pool, id, block)?;
        }
        Ok(())
    }

    /// Returns the bytes of live blocks.
    pub(super) fn bytes(&self) -> u64 {
        self.live.iter().map(|(_, block)| block.size.get()).sum()
    }

    /// Returns the program so far as a trace.
    pub(super) fn trace(&self) -> Result<Trace, TraceError> {
        Trace::from_bytes(Path::new("demo"), self.program.as_bytes(), None)
    }
}

pub(super) fn stage(story: &mut Story<'_>) -> Result<Stage, DemoError> {
    let (pool, churn) = (&story.pool, &mut story.churn);
    let mut random = Rng::with_seed(2024);
    for _ in 0..STEPS {
        let span = usize::try_from(SIZES[1] - SIZES[0]).unwrap_or(usize::MAX);
        let size = SIZES[0] + 1 + random.usize(..span) as u64;
        while churn.bytes() + size > LIMIT.get() / 100 * LIVE[0] {
            let place = random.usize(..churn.live.len());
            churn.free(pool, place)?;
        }
        churn.allocate(pool, Bytes::new(size), story.stream)?;
    }
    while churn.bytes() > LIMIT.get() / 100 * LIVE[1] {
        let place = random.usize(..churn.live.len());
        churn.free(pool, place)?;
    }
    pool.settle()?;
    story.home.follow(story.recorder.take_log());
    let ranges = story.home.free_ranges(&churn.live);
    let free = ranges.iter().map(|range| range.1).sum::<u64>();
    let longest = ranges.iter().map(|range| range.1).max().unwrap_or(0);
    let says = format!(
        "{STEPS} blocks of 1 to 15 MiB came and {} went, each with bytes of its own: of {} reserved {} are free, in {} \
         ranges, the longest {}",
        STEPS as usize - churn.live.len(),
        pool.reserved(),
        Bytes::new(free),
        ranges.len(),
        Bytes::new(longest),
    );
    let short = format!(
        "{} of {} free, the longest range {}",
        Bytes::new(free),
        pool.reserved(),
        Bytes::new(longest)
    );
    let figures = figures! {
        "allocations": STEPS,
        "live_blocks": churn.live.len(),
        "live_bytes": churn.bytes(),
        "reserved_bytes": pool.reserved().get(),
        "free_bytes": free,
        "free_ranges": ranges.len(),
        "longest_free_bytes": longest,
    };
    let ok = free > longest;
    Ok(Stage { stage: "churn", says, short, picture: None, figures, ok })
}
