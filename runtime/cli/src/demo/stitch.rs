//! A request that no free range can serve is stitched, and its bytes are found again where they really lie.

use glake_sim::pattern;
use glake_stitch::SegmentKind;
use glake_tiers::{Block, GpuPool};
use glake_units::Bytes;

use super::home::{Home, Range};
use super::{DemoError, Stage, Story, figures};

/// Bytes written and compared at a time.
const CHUNK: usize = 4 << 20;
/// Seed of the stitched block's bytes.
const SEED: u64 = 1;

pub(super) fn stage(story: &mut Story<'_>) -> Result<Stage, DemoError> {
    let pool = &story.pool;
    let free_ranges = story.home.free_ranges(&story.churn.live);
    let longest = free_ranges.iter().map(|range| range.1).max().unwrap_or(0);
    let idle = story.home.idle(&story.churn.live);
    let whole: u64 = idle.iter().map(|range| range.1).sum();
    let wanted = Bytes::new(whole / 4 * 3 / 512 * 512);
    let before = story.home.picture(64, 4, &story.churn.live, &[]);

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
        "{wanted} wanted, more than the longest free range of {}: {} free extents from {} ranges were mapped side by \
         side by {} driver calls in {us:.0} us, {grown} grown; {} written through the new address, {} of it read back \
         there and {} at home; {untouched} live blocks around it hold what they held",
        Bytes::new(longest),
        extents.len(),
        runs(&lent),
        asked.calls(),
        block.size,
        Bytes::new(through),
        Bytes::new(at_home),
    );
    let after = story.home.picture(64, 4, &story.churn.live, &lent);
    let short =
        format!("{wanted} from {} ranges, {grown} grown, {} matched", runs(&lent), Bytes::new(at_home));
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
    Ok(Stage { stage: "stitch", says, short, picture: Some(drawn(&before, &after)), figures, ok })
}

fn drawn(before: &str, after: &str) -> String {
    format!(
        "before\n{before}\nafter\n{after}\n# live   + partly live   . free   S lent to the stitched block: one range at its \
         own address"
    )
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
