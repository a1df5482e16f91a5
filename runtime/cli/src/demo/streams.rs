//! Memory passes from one stream to another, but only once the GPU has done what was enqueued before the free.

use std::sync::Arc;
use std::time::Duration;

use glake_device::Lag;
use glake_device::owned::OwnedStream;
use glake_tiers::{GpuPool, PoolOptions, PoolStream};
use glake_units::Bytes;

use super::{DemoError, Stage, figures, pool};
use glake_replay::machine::Machine;
use glake_runtime::config::{Borrow, Config};

const LAG: Duration = Duration::from_millis(100);
const SIZE: Bytes = Bytes::mib(64);

pub(super) fn streams(machine: &Machine, config: &Config) -> Result<Stage, DemoError> {
    let streams = [(); 2].map(|()| OwnedStream::new(machine.driver(), machine.id()));
    let [first, second] = streams;
    let (first, second) = (first?, second?);
    let known = |stream: &OwnedStream| PoolStream::of(&**machine.driver(), machine.id(), stream.id());
    let lag = Arc::new(Lag::new(Arc::new(machine.recorder()), LAG));
    let knobs = glake_runtime::config::Pool { borrow: Borrow::Completed, ..pool(config) };
    let settings = Some(machine.settings(&knobs));
    let pool = GpuPool::new(lag.clone(), machine.id(), PoolOptions { settings, ..PoolOptions::default() })?;

    let lent = pool.malloc(SIZE, known(&first)?)?;
    pool.write(lent.address, b"written by the first stream")?;
    pool.free(lent.address)?;
    let early = pool.malloc(SIZE, known(&second)?)?;
    lag.set_now(LAG + Duration::from_millis(1));
    pool.tick()?;
    let late = pool.malloc(SIZE, known(&second)?)?;
    let waits = pool.counters().stream_waits;

    let says = format!(
        "{SIZE} freed on one stream of a GPU that is {} ms behind: another stream that asks at once gets other memory, \
         and the same bytes once the GPU has passed the free. {waits} waits.",
        LAG.as_millis(),
    );
    let figures = figures! {
        "lag_ms": LAG.as_secs_f64() * 1e3,
        "block_bytes": SIZE.get(),
        "reserved_bytes": pool.reserved().get(),
        "stream_waits": waits,
        "apart_before": early.address != lent.address,
        "same_after": late.address == lent.address,
    };
    let ok = early.address != lent.address && late.address == lent.address && waits == 0;
    Ok(Stage { stage: "streams", says, picture: None, figures, ok, gain: None })
}
