//! Stage `stitch`: a request that no free range can serve gets many of them at one address.
//!
//! ```text
//! Churn: blocks come and go, stamped ─► free memory in short ranges ─► stitched block ─► its bytes found at home ─► all given back
//!                                        Home: mappings by the log of driver calls, independent of the pool
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use fastrand::Rng;
use glake_device::owned::OwnedStream;
use glake_device::topology::Topology;
use glake_device::{Logged, Verb};
use glake_replay::machine::Machine;
use glake_replay::stamps::Stamps;
use glake_replay::trace::{BlockId, Trace, TraceError};
use glake_runtime::config::Config;
use glake_sim::{Census, pattern};
use glake_stitch::{SegmentKind, Stats};
use glake_tiers::{Block, GpuPool, PoolStream};
use glake_units::Bytes;
use serde_json::{Map, Value};

use super::{DemoError, LIMIT, Stage, Story, figures};

/// Bytes written and compared at a time.
const CHUNK: usize = 4 << 20;
/// Seed of the stitched block's bytes.
const SEED: u64 = 1;

/// Fragments a pool, stitches a block from the free ranges, and gives everything back. Returns the program's trace too.
pub(super) fn stage(
    machine: &Machine,
    topology: &Topology,
    config: &Config,
) -> Result<(Stage, Trace), DemoError> {
    let before = Footprint::of(machine)?;
    let mut story = Story::new(machine, config)?;
    let fragments = fragment(&mut story)?;
    let (blocks, bytes) = (story.churn.count(), story.churn.bytes());
    let mut stage = stitch(&mut story, &fragments)?;
    let trace = story.churn.trace()?;
    let back = give_back(story, before)?;
    stage.says += &format!(" All {} went back to the GPU afterwards.", back.reserved);
    let gpu = machine.gpu();
    let device = figures! {
        "device": machine.name(),
        "simulated": machine.is_simulated(),
        "gpus": topology.devices.len(),
        "memory_bytes": gpu.memory.get(),
        "allocations": STEPS,
        "live_blocks": blocks,
        "live_bytes": bytes,
        "reserved_bytes": fragments.reserved.get(),
        "free_bytes": fragments.free.get(),
        "free_ranges": fragments.ranges,
    };
    stage.figures.extend(device.into_iter().chain(back.figures));
    stage.ok &= back.ok && fragments.free > fragments.longest;
    Ok((stage, trace))
}

fn stitch(story: &mut Story<'_>, fragments: &Fragments) -> Result<Stage, DemoError> {
    let pool = &story.pool;
    let longest = fragments.longest.get();
    let idle = story.home.idle(&story.churn.live);
    let whole: u64 = idle.iter().map(|range| range.1).sum();
    let wanted = Bytes::new(whole / 4 * 3 / 512 * 512);

    let (counted, reserved) = (pool.counters(), pool.reserved());
    let asked = story.recorder.counters();
    let block = story.churn.allocate(pool, wanted, story.stream)?;
    let asked = story.recorder.counters().since(&asked);
    let stitches = pool.counters().stitches - counted.stitches;
    let grown = pool.reserved().saturating_sub(reserved);

    let alias = alias(pool, block);
    story.home.follow(story.recorder.take_log());
    let extents: Vec<Range> = alias.map_or(Vec::new(), |alias| story.home.within(alias).collect());
    story.home = story.home.without(alias.unwrap_or_default());

    write(pool, block)?;
    let through = matching(pool, block.address.0, 0, block.size.get())?;
    let lent = at_home(pool, &story.home, &idle, block, &extents)?;
    let at_home: u64 = lent.iter().map(|range| range.1).sum();
    let untouched = story.churn.compare(pool, block)?;
    story.churn.stamp(pool, block)?;

    let us = asked.time().as_secs_f64() * 1e6;
    let says = format!(
        "{STEPS} blocks came and {} went: {} of {} are free, in {} ranges of at most {}. A request for {wanted} gets {} \
         free extents from {} ranges at one address, in {us:.0} us of {}, {grown} grown. Every byte reads back \
         there and at home; {untouched} live blocks hold what they held.",
        STEPS as usize - untouched,
        fragments.free,
        fragments.reserved,
        fragments.ranges,
        fragments.longest,
        extents.len(),
        runs(&lent),
        if story.machine.is_simulated() { "modelled driver calls" } else { "driver calls" },
    );
    let picture = story.home.picture(64, 4, &story.churn.live, &lent);
    let figures = figures! {
        "wanted_bytes": wanted.get(),
        "longest_free_bytes": longest,
        "stitches": stitches,
        "extents": extents.len(),
        "ranges": runs(&lent),
        "grown_bytes": grown.get(),
        "driver_calls": asked.calls(),
        "driver_us": us,
        "written_bytes": block.size.get(),
        "matched_through_bytes": through,
        "matched_at_home_bytes": at_home,
        "untouched_blocks": untouched,
    };
    let ok = stitches == 1
        && longest < wanted.get()
        && [through, at_home].iter().all(|matched| *matched == block.size.get());
    Ok(Stage { stage: "stitch", says, picture: Some(drawn(&picture)), figures, ok, gain: None })
}

fn drawn(picture: &str) -> String {
    format!("{picture}\n# live  + partly live  . free  S lent to the stitched block")
}

/// The alias that a block lies in.
fn alias(pool: &GpuPool, block: Block) -> Option<Range> {
    let base = pool.base().0;
    let segments =
        pool.report().segments().into_iter().filter(|segment| segment.kind == SegmentKind::Stitched);
    let mut aliases = segments.map(|segment| (base + segment.offset.get(), segment.size.get()));
    aliases.find(|(start, size)| (*start..start + size).contains(&block.address.0))
}

fn write(pool: &GpuPool, block: Block) -> Result<(), DemoError> {
    let mut bytes = vec![0; CHUNK];
    for from in (0..block.size.get()).step_by(CHUNK) {
        let bytes = clipped(&mut bytes, block.size.get() - from);
        pattern::fill(bytes, from, SEED);
        pool.write(glake_device::Address(block.address.0 + from), bytes)?;
    }
    Ok(())
}

/// Returns the number of bytes at an address that match the block's pattern from `place` on, up to the first differing word.
fn matching(pool: &GpuPool, address: u64, place: u64, size: u64) -> Result<u64, DemoError> {
    let most = usize::try_from(size).unwrap_or(usize::MAX).min(CHUNK);
    let mut found = vec![0; most];
    for from in (0..size).step_by(CHUNK) {
        let found = clipped(&mut found, size - from);
        pool.read(glake_device::Address(address + from), found)?;
        let right = pattern::matching(found, place + from, SEED);
        if right < found.len() as u64 {
            return Ok(from + right);
        }
    }
    Ok(size)
}

fn clipped(bytes: &mut [u8], most: u64) -> &mut [u8] {
    let length = usize::try_from(most).unwrap_or(usize::MAX).min(bytes.len());
    &mut bytes[..length]
}

/// Finds each extent of the alias at home, by nothing but its bytes, and compares all of them.
fn at_home(
    pool: &GpuPool,
    home: &Home,
    idle: &[Range],
    block: Block,
    extents: &[Range],
) -> Result<Vec<Range>, DemoError> {
    let end = block.address.0 + block.size.get();
    let mut lent = Vec::with_capacity(extents.len());
    // What was free before, then everything else: what the alias has in part, and what was grown for it.
    let rest = home.within((0, u64::MAX)).filter(|range| !idle.contains(range));
    let places: Vec<Range> = idle.iter().copied().chain(rest).collect();
    for &(start, size) in extents {
        let (from, to) = (start.max(block.address.0), (start + size).min(end));
        let Some(length) = to.checked_sub(from) else { continue };
        for &(at, _) in places.iter().filter(|place| place.1 == size) {
            let (address, place) = (at + (from - start), from - block.address.0);
            if matching(pool, address, place, 8)? == 8 {
                lent.push((address, matching(pool, address, place, length)?));
                break;
            }
        }
    }
    Ok(lent)
}

/// Returns the number of ranges after adjacent ones are merged.
fn runs(ranges: &[Range]) -> usize {
    let mut sorted = ranges.to_vec();
    sorted.sort_unstable();
    let breaks = sorted.windows(2).filter(|pair| pair[0].0 + pair[0].1 != pair[1].0).count();
    breaks + usize::from(!sorted.is_empty())
}

/// Number of allocations.
pub(super) const STEPS: u32 = 3000;
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

    /// Returns the number of live blocks.
    pub(super) fn count(&self) -> usize {
        self.live.len()
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

/// Fragmentation after the program.
pub(super) struct Fragments {
    pub(super) free: Bytes,
    pub(super) ranges: usize,
    pub(super) longest: Bytes,
    pub(super) reserved: Bytes,
}

/// Runs the program until its free memory lies in many short ranges.
pub(super) fn fragment(story: &mut Story<'_>) -> Result<Fragments, DemoError> {
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
    Ok(Fragments {
        free: Bytes::new(free),
        ranges: ranges.len(),
        longest: Bytes::new(longest),
        reserved: pool.reserved(),
    })
}

/// A range of addresses: start and length.
pub(super) type Range = (u64, u64);

/// Every mapping by its address.
#[derive(Clone, Debug, Default)]
pub(super) struct Home {
    mapped: BTreeMap<u64, u64>,
}

impl Home {
    /// Applies logged driver calls.
    pub(super) fn follow(&mut self, log: Vec<Logged>) {
        for Logged { call, .. } in log.into_iter().filter(|logged| logged.done) {
            let (start, size) = (call.start.0, call.size.get());
            match call.verb {
                Verb::Map => drop(self.mapped.insert(start, size)),
                Verb::Unmap => self.mapped.retain(|at, _| !(start..start + size).contains(at)),
                _ => {}
            }
        }
    }

    /// Mappings that lie in a range.
    pub(super) fn within(&self, (start, size): Range) -> impl Iterator<Item = Range> + '_ {
        self.mapped.range(start..start + size).map(|(start, size)| (*start, *size))
    }

    /// Returns the mappings outside a range.
    pub(super) fn without(&self, (start, size): Range) -> Home {
        let outside = self.mapped.iter().filter(|(at, _)| !(start..start + size).contains(*at));
        Home { mapped: outside.map(|(start, size)| (*start, *size)).collect() }
    }

    /// Mappings that no live block touches.
    pub(super) fn idle(&self, live: &[(BlockId, Block)]) -> Vec<Range> {
        let taken = sorted(live);
        let is_free = |&(start, size): &Range| {
            let next = taken.partition_point(|block| block.0 + block.1 <= start);
            taken.get(next).is_none_or(|block| block.0 >= start + size)
        };
        self.mapped.iter().map(|(start, size)| (*start, *size)).filter(is_free).collect()
    }

    /// Mapped bytes between live blocks, joined where they touch.
    pub(super) fn free_ranges(&self, live: &[(BlockId, Block)]) -> Vec<Range> {
        let taken = sorted(live);
        let mut free: Vec<Range> = Vec::new();
        for (&start, &size) in &self.mapped {
            let mut at = start;
            let first = taken.partition_point(|block| block.0 + block.1 <= start);
            for &(from, length) in taken[first..].iter().take_while(|block| block.0 < start + size) {
                add(&mut free, at, from);
                at = from + length;
            }
            add(&mut free, at, start + size);
        }
        free
    }

    /// The mappings as lines of `width` marks, each for an equal share of the addresses between the first and the last
    /// mapping: `S` mostly in `lent`, else `#` live, `+` partly live, `.` free, and a blank where nothing is mapped.
    pub(super) fn picture(
        &self,
        width: usize,
        lines: usize,
        live: &[(BlockId, Block)],
        lent: &[Range],
    ) -> String {
        let (Some((&first, _)), Some((&last, &size))) =
            (self.mapped.first_key_value(), self.mapped.last_key_value())
        else {
            return String::new();
        };
        let live = sorted(live);
        let cells = (width * lines) as u64;
        let share = (last + size - first).div_ceil(cells);
        let marks = (0..cells).map(|cell| {
            let place = (first + cell * share, share);
            let mapped = covered(self.mapped.iter().map(|(start, size)| (*start, *size)), place);
            let (live, lent) = (covered(live.iter().copied(), place), covered(lent.iter().copied(), place));
            match (lent * 2 > share, live * 4 > share * 3, live * 4 > share, mapped > 0) {
                (true, ..) => 'S',
                (_, true, ..) => '#',
                (_, _, true, _) => '+',
                (_, _, _, true) => '.',
                _ => ' ',
            }
        });
        let marks: Vec<char> = marks.collect();
        let rows: Vec<String> = marks.chunks(width).map(|row| row.iter().collect::<String>()).collect();
        rows.join("\n")
    }
}

fn sorted(live: &[(BlockId, Block)]) -> Vec<Range> {
    let mut taken: Vec<Range> = live.iter().map(|(_, block)| (block.address.0, block.size.get())).collect();
    taken.sort_unstable();
    taken
}

fn add(free: &mut Vec<Range>, from: u64, to: u64) {
    match free.last_mut() {
        _ if from >= to => {}
        Some(last) if last.0 + last.1 == from => last.1 = to - last.0,
        _ => free.push((from, to - from)),
    }
}

fn covered(ranges: impl Iterator<Item = Range>, (start, size): Range) -> u64 {
    ranges.map(|(from, length)| (from + length).min(start + size).saturating_sub(from.max(start))).sum()
}

/// A GPU's own bookkeeping may keep some memory after mappings are gone.
const SLACK: Bytes = Bytes::mib(64);

/// Memory in use on a device before the demo.
#[derive(Clone, Copy, Debug)]
pub(super) struct Footprint {
    free: Bytes,
    census: Option<Census>,
}

impl Footprint {
    pub(super) fn of(machine: &Machine) -> Result<Self, DemoError> {
        // The driver takes its own part of a GPU, half a gibibyte, with the first that a process makes there.
        drop(OwnedStream::new(machine.driver(), machine.id())?);
        Ok(Footprint { free: machine.free_memory()?, census: machine.census() })
    }
}

/// Outcome of freeing everything.
pub(super) struct GivenBack {
    pub(super) reserved: Bytes,
    pub(super) figures: Map<String, Value>,
    pub(super) ok: bool,
}

/// Frees every block, gives the memory back, and allocates and frees once more.
pub(super) fn give_back(mut story: Story<'_>, before: Footprint) -> Result<GivenBack, DemoError> {
    let reserved = story.pool.reserved();
    give_all_back(&mut story)?;
    let (empty, free) = (is_empty(&story.pool.stats()), story.machine.free_memory()?);

    let again = Bytes::mib(256);
    story.churn.allocate(&story.pool, again, story.stream)?;
    let grown = story.pool.reserved();
    give_all_back(&mut story)?;
    let empty = empty && is_empty(&story.pool.stats());

    let machine = story.machine;
    drop(story);
    let after = Footprint::of(machine)?;
    let slack = if machine.is_simulated() { Bytes::ZERO } else { SLACK };
    let back = [free, after.free].iter().all(|free| free.saturating_add(slack) >= before.free);
    let figures = figures! {
        "released_bytes": reserved.get(),
        "grown_again_bytes": grown.get(),
        "gauges_at_zero": empty,
        "free_before_bytes": before.free.get(),
        "free_after_bytes": after.free.get(),
        "leaked": before.census != after.census,
    };
    let ok = empty && back && grown >= again && before.census == after.census;
    Ok(GivenBack { reserved, figures, ok })
}

/// Compares and frees every block, and gives the memory back.
fn give_all_back(story: &mut Story<'_>) -> Result<(), DemoError> {
    while !story.churn.live.is_empty() {
        story.churn.free(&story.pool, 0)?;
    }
    story.pool.settle()?;
    story.pool.trim(Bytes::ZERO)?;
    Ok(())
}

fn is_empty(stats: &Stats) -> bool {
    let gauges = [&stats.all, &stats.small_pool, &stats.large_pool].map(|pool| {
        [
            pool.allocation,
            pool.allocated_bytes,
            pool.requested_bytes,
            pool.active,
            pool.active_bytes,
            pool.extents,
            pool.reserved_bytes,
        ]
    });
    gauges.iter().flatten().all(|gauge| gauge.current == 0)
        && stats.mappings == 0
        && stats.alias_bytes.is_zero()
}

#[cfg(test)]
mod home_tests {
    use glake_device::{Address, Call};
    use glake_units::Bytes;

    use super::*;

    fn home(maps: &[Range]) -> Home {
        let logged = |verb, (start, size)| {
            let call = Call { verb, device: None, start: Address(start), size: Bytes::new(size), gpus: 0 };
            Logged { call, done: true }
        };
        let mut home = Home::default();
        home.follow(maps.iter().map(|&range| logged(Verb::Map, range)).collect());
        home.follow(vec![logged(Verb::Unmap, (90, 20))]);
        home
    }

    #[test]
    fn free_is_what_lies_between() {
        let home = home(&[(0, 10), (10, 10), (30, 10), (90, 10), (100, 10)]);
        let block = |start, size| (BlockId(0), Block { address: Address(start), size: Bytes::new(size) });
        let live = [block(4, 3), block(12, 2), block(34, 6)];
        assert_eq!(home.free_ranges(&live), [(0, 4), (7, 5), (14, 6), (30, 4)]);
        assert_eq!(home.idle(&live[1..]), [(0, 10)]);
        assert_eq!(home.picture(4, 1, &live, &[(30, 10)]), "+. S");
    }
}
