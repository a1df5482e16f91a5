//! Copy over every link of the server, compared with one over the GPU's own.
//!
//! ```text
//! one link    host ══link 0══► GPU 0
//! all links   host ══link 0══► GPU 0 ◄── NVLink ── GPU k ◄══link k══ host
//! ```

use std::time::Duration;

use glake_sim::Census;
use glake_units::Bytes;
use serde_json::{Map, Value};

use super::{DemoError, Stage, figures};
use crate::bench::links::grown;
use crate::bench::times::{gbps, us};
use crate::bench::{CopyDirection, CopyMemory};
use crate::copies::{Copies, CopyError, Shape};
use crate::server::{Server, ServerOptions};
use glake_runtime::backend::Backend;
use glake_runtime::config::Config;

/// Copy size on the simulator, which uses this machine's memory, and on a GPU.
const SIZES: [Bytes; 2] = [Bytes::mib(48), Bytes::gib(1)];
/// Number of timed repetitions, of which the best counts.
const RUNS: usize = 3;
const SEED: u64 = 7;
/// Minimum speed-up expected of additional links.
const GAIN: f64 = 1.1;

pub(super) fn copy(backend: &Backend, config: &Config) -> Result<Stage, DemoError> {
    let server = Server::open(backend, config, ServerOptions::default())?;
    let simulated = server.is_simulated();
    let size = SIZES[usize::from(!simulated)];
    let (relays, calibrated) = (server.relays().len(), server.is_calibrated());
    let copies = Copies::of_target(&server)?;
    let mut ends = copies.ends(Shape { memory: CopyMemory::Pool, size, block: size })?;

    let way = CopyDirection::H2d;
    let one_us = best(|| ends.native(way))?;
    ends.warm_up(way)?;
    let before = server.carried();
    let all_us = best(|| ends.engine(way))?;
    let paths: Vec<_> = grown(&before, &server.carried())
        .into_iter()
        .map(|(relay, bytes)| (relay, Bytes::new(bytes / RUNS as u64)))
        .collect();
    let arrived = ends.verify(way, SEED)?;
    let returned = ends.verify(CopyDirection::D2h, SEED)?;
    drop(ends);
    drop(copies);
    let left = server.end();

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
