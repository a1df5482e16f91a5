//! A request that no free range can serve is stitched, and its bytes are found again at their home addresses.

use glake_sim::pattern;
use glake_stitch::SegmentKind;
use glake_tiers::{Block, GpuPool};
use glake_units::Bytes;

use super::churn::{Fragments, STEPS, fragment};
use super::home::{Home, Range};
use super::trim::{Footprint, give_back};
use super::{DemoError, Stage, Story, figures};
use glake_device::topology::Topology;
use glake_replay::machine::Machine;
use glake_replay::trace::Trace;
use glake_runtime::config::Config;

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
