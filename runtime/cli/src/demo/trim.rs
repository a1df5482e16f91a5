//! Everything goes back to the device, and comes again when it is asked for.

use glake_device::owned::OwnedStream;
use glake_sim::Census;
use glake_stitch::Stats;
use glake_units::Bytes;

use super::{DemoError, Story, figures};
use glake_replay::machine::Machine;
use serde_json::{Map, Value};

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
