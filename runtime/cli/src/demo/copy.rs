//! One copy over every link of the server, beside one over the GPU's own.
//!
//! ```text
//! one link    host ══link 0══► GPU 0
//! all links   host ══link 0══► GPU 0 ◄── NVLink ── GPU k ◄══link k══ host
//! ```

use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::owned::{self, Buffer, OwnedEvent, OwnedStream, Span};
use glake_device::{DeviceId, EventKind};
use glake_sim::Census;
use glake_tiers::HostBlock;
use glake_transfer::{CopyOptions, PathStatistics, UserStream};
use glake_units::Bytes;
use serde_json::{Map, Value};

use super::{DemoError, Stage, figures};
use crate::pattern::{CHUNK, fill, matching};
use crate::server::{Server, ServerOptions};
use glake_runtime::backend::Backend;
use glake_runtime::config::Config;

/// How much is copied: on the simulator it is real memory of this machine.
const SIZES: [Bytes; 2] = [Bytes::mib(48), Bytes::gib(1)];
/// How often each is timed, of which the best counts.
const RUNS: usize = 3;
/// A stream gets its paths in the background once it has asked for them.
const TIMEOUT: Duration = Duration::from_secs(1);
const SEED: u64 = 7;
/// What other links bring at least where they bring anything.
const GAIN: f64 = 1.1;

/// Memory on both sides, and a stream.
struct Field {
    source: HostBlock,
    sink: HostBlock,
    gpu: Arc<Buffer>,
    on: UserStream,
    begun: OwnedEvent,
    ended: OwnedEvent,
    _stream: OwnedStream,
}

pub(super) fn stage(backend: &Backend, config: &Config) -> Result<Stage, DemoError> {
    let server = Server::open(backend, config, ServerOptions::default())?;
    let simulated = server.is_simulated();
    let size = SIZES[usize::from(!simulated)];
    let (relays, calibrated) = (server.relays().len(), server.is_calibrated());
    let mut field = Field::new(&server, size)?;

    let one_us = best(|| field.one_link(&server))?;
    field.warm_up(&server)?;
    let before = server.engine().statistics();
    let all_us = best(|| field.all_links(&server))?;
    let paths = carried(&before.paths, &server.engine().statistics().paths);
    let arrived = field.arrived(size)?;
    let returned = field.returned(&server)?;
    drop(field);
    let left = server.end();

    let (one, all) = (gbps(size, one_us), gbps(size, all_us));
    let clock =
        if simulated { "in the model's virtual time, which is no measurement" } else { "as measured" };
    let means = match (relays, paths.len()) {
        (0, _) => format!(
            "here is no other GPU whose link could serve, so it takes its own link alone: {all:.1} GB/s, {clock}"
        ),
        (_, 0 | 1) => format!("it took its own link alone, {all:.1} GB/s, {clock}"),
        _ => format!(
            "it was given to {} links: {}; {all:.1} GB/s beside {one:.1} GB/s over one link{}, {clock}",
            paths.len(),
            told(&paths),
            if all < one * GAIN { ", so the others gained nothing here" } else { "" },
        ),
    };
    let says = format!(
        "{size} from the host to GPU 0 in one copy: {means}; {} read back from the GPU as they were sent, and {} copied \
         back to the host",
        Bytes::new(arrived),
        Bytes::new(returned),
    );
    let rate = match paths.len() {
        0 | 1 => format!("its own link, {all:.1} GB/s"),
        links => format!("{links} links, {all:.1} GB/s beside {one:.1}"),
    };
    let short = format!("{size} over {rate}{}", virtually(simulated));
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
        "matched_on_gpu_bytes": arrived,
        "matched_on_host_bytes": returned,
    };
    let whole = [arrived, returned].iter().all(|matched| *matched == size.get());
    let ok = whole && left.unwrap_or_default() == Census::default();
    Ok(Stage { stage: "copy", says, short, picture: None, figures, ok })
}

impl Field {
    fn new(server: &Server, size: Bytes) -> Result<Self, DemoError> {
        let (driver, device) = (server.driver(), server.target().id);
        let host = server.host()?;
        let (mut source, sink) = (host.take(size)?, host.take(size)?);
        if let Some(bytes) = source.as_mut_slice() {
            fill(bytes, 0, SEED);
        }
        let stream = OwnedStream::new(driver, device)?;
        Ok(Field {
            source,
            sink,
            gpu: server.buffer(size)?,
            on: UserStream::of(&**driver, device, stream.id())?,
            begun: OwnedEvent::new(driver, device, EventKind::Timed)?,
            ended: OwnedEvent::new(driver, device, EventKind::Timed)?,
            _stream: stream,
        })
    }

    /// The driver's own copy; microseconds between two events of the stream.
    fn one_link(&self, server: &Server) -> Result<f64, DemoError> {
        let (Some(gpu), Some(source)) = self.ends() else { return Ok(f64::NAN) };
        self.timed(|| Ok(owned::copy(&**server.driver(), self.on.device, self.on.raw, &gpu, &source)?))
    }

    /// The engine's.
    fn all_links(&self, server: &Server) -> Result<f64, DemoError> {
        let (Some(gpu), Some(source)) = self.ends() else { return Ok(f64::NAN) };
        self.timed(|| {
            let options = CopyOptions { waited: false, ..CopyOptions::default() };
            drop(server.engine().copy(&gpu, &source, self.on, options)?);
            Ok(())
        })
    }

    fn ends(&self) -> (Option<Span>, Option<Span>) {
        let size = self.source.size();
        (self.gpu.span(Bytes::ZERO, size), self.source.span(Bytes::ZERO, size))
    }

    fn timed(&self, copy: impl FnOnce() -> Result<(), DemoError>) -> Result<f64, DemoError> {
        self.begun.record(self.on.raw)?;
        copy()?;
        self.ended.record(self.on.raw)?;
        self.ended.synchronize()?;
        Ok(self.ended.since(&self.begun)?)
    }

    /// Copies until other links take part.
    fn warm_up(&self, server: &Server) -> Result<(), DemoError> {
        let begin = Instant::now();
        while !server.relays().is_empty()
            && server.engine().statistics().split_copies == 0
            && begin.elapsed() < TIMEOUT
        {
            self.all_links(server)?;
        }
        Ok(())
    }

    /// How much is on the GPU as it was sent, read without the engine.
    fn arrived(&self, size: Bytes) -> Result<u64, DemoError> {
        let mut found = vec![0; CHUNK];
        let mut at = 0;
        while at < size.get() {
            let length = usize::try_from(size.get() - at).unwrap_or(CHUNK).min(CHUNK);
            self.gpu.read(Bytes::new(at), &mut found[..length])?;
            let matched = matching(&found[..length], at, SEED);
            at += matched;
            if matched < length as u64 {
                break;
            }
        }
        Ok(at)
    }

    /// How much comes back to the host over all links as it was sent.
    fn returned(&mut self, server: &Server) -> Result<u64, DemoError> {
        let size = self.sink.size();
        if let Some(bytes) = self.sink.as_mut_slice() {
            bytes.fill(0);
        }
        if let (Some(to), Some(from)) = (self.sink.span(Bytes::ZERO, size), self.gpu.span(Bytes::ZERO, size))
        {
            server.engine().copy(&to, &from, self.on, CopyOptions::default())?.wait()?;
        }
        Ok(matching(self.sink.as_slice(), 0, SEED))
    }
}

fn best(mut timed: impl FnMut() -> Result<f64, DemoError>) -> Result<f64, DemoError> {
    (0..RUNS).try_fold(f64::INFINITY, |best, _| Ok(timed()?.min(best)))
}

/// What each link carried in between.
fn carried(before: &[PathStatistics], after: &[PathStatistics]) -> Vec<(DeviceId, Bytes)> {
    let of = |paths: &[PathStatistics], relay| -> Bytes {
        paths.iter().filter(|path| path.relay == relay).map(|path| path.bytes).sum()
    };
    let mut relays: Vec<DeviceId> = after.iter().map(|path| path.relay).collect();
    relays.sort_unstable();
    relays.dedup();
    let grown = relays.into_iter().map(|relay| (relay, of(after, relay).saturating_sub(of(before, relay))));
    grown
        .filter(|(_, bytes)| !bytes.is_zero())
        .map(|(relay, bytes)| (relay, Bytes::new(bytes.get() / RUNS as u64)))
        .collect()
}

fn told(paths: &[(DeviceId, Bytes)]) -> String {
    let each = paths.iter().map(|(relay, bytes)| format!("{bytes} by GPU {}'s", relay.0));
    each.collect::<Vec<_>>().join(", ")
}

fn virtually(simulated: bool) -> &'static str {
    if simulated { " (virtual time)" } else { "" }
}

/// 10^9 bytes a second.
#[allow(clippy::cast_precision_loss)] // a rate for people
fn gbps(size: Bytes, us: f64) -> f64 {
    size.get() as f64 / us / 1e3
}
