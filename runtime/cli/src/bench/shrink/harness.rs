//! Test bed of shrink measurements: a server with its relays ready, and copies over one link for comparison.

use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::DeviceId;
use glake_device::owned::{self, Buffer, Digests, OwnedStream, Span};
use glake_tiers::{HostBlock, Mover as _};
use glake_transfer::{LinkMover, Priority};
use glake_units::Bytes;

use super::super::times::us;
use super::{BenchError, ShrinkOptions, ShrinkPhase, ShrinkTier};
use crate::server::{Server, ServerError, ServerOptions};
use glake_runtime::backend::Backend;
use glake_runtime::config::Config;

/// Maximum size of the single-link copy, on the simulator and on a GPU. Larger copies show the same rate.
const LINKS: [Bytes; 2] = [Bytes::mib(64), Bytes::gib(1)];
/// A stream gets its paths in the background once it has asked for them.
const TIMEOUT: Duration = Duration::from_millis(500);

/// A server, and memory for copies over one link.
pub(super) struct Harness {
    bytes: Bytes,
    peer: Option<DeviceId>,
    digests: Option<Digests>,
    mover: LinkMover,
    stream: OwnedStream,
    host: HostBlock,
    gpu: Arc<Buffer>,
    /// After all that is made of it.
    server: Server,
}

impl Harness {
    pub(super) fn open(
        backend: &Backend,
        config: &Config,
        options: &ShrinkOptions,
    ) -> Result<Self, BenchError> {
        let part = ServerOptions { target: options.target, paths: options.paths, ..ServerOptions::default() };
        let server = Server::open(backend, config, part)?;
        let default = if server.is_simulated() { Bytes::mib(64) } else { Bytes::gib(16) };
        let bytes = options.bytes.unwrap_or(default);
        let (target, size) = (server.target().id, bytes.min(LINKS[usize::from(!server.is_simulated())]));
        let digests = options.verify.then(|| Digests::new(server.completion_events(), target)).transpose()?;
        let harness = Harness {
            bytes,
            peer: peer(&server, options)?,
            digests,
            mover: LinkMover::new(server.engine(), target, Priority::Normal)?,
            stream: OwnedStream::new(server.driver(), target)?,
            // A pool of its own: what regions use is pinned by them.
            host: server.host()?.take(size)?,
            gpu: server.buffer(size)?,
            server,
        };
        harness.warm_up()?;
        Ok(harness)
    }

    pub(super) fn server(&self) -> &Server {
        &self.server
    }

    /// Moves regions' bytes, over all links from its first copy on.
    pub(super) fn mover(&self) -> &LinkMover {
        &self.mover
    }

    /// Returns the digests of region bytes if requested.
    pub(super) fn digests(&self) -> Option<&Digests> {
        self.digests.as_ref()
    }

    /// The GPU that lends its memory.
    ///
    /// # Errors
    /// [`BenchError::NoPeer`].
    pub(super) fn peer(&self) -> Result<DeviceId, BenchError> {
        self.peer.ok_or(BenchError::NoPeer { target: self.server.target().id.0 })
    }

    /// Returns the size of the region.
    pub(super) fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Returns the size of the single-link copy.
    pub(super) fn link_size(&self) -> Bytes {
        self.host.size()
    }

    pub(super) fn is_calibrated(&self) -> bool {
        self.server.is_calibrated()
    }

    /// Returns notes on the results.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.server.is_simulated() {
            notes.push(
                "the GPUs are simulated: times are those of this machine's memory, and say nothing of a GPU's".to_owned(),
            );
        }
        notes.push(match (self.server.relays().is_empty(), self.is_calibrated()) {
            (true, _) => "copies take one link: no other GPU relays".to_owned(),
            (false, true) => "the paths are calibrated".to_owned(),
            (false, false) => {
                "the paths are assumed, not calibrated: glake topo --calibrate measures them".to_owned()
            }
        });
        notes
    }

    /// Returns the free memory of the GPUs that a tier uses.
    pub(super) fn free_memory(&self, tier: ShrinkTier) -> Result<Bytes, BenchError> {
        let own = self.server.free_memory(self.server.target().id)?;
        Ok(match tier {
            ShrinkTier::Peer => own.saturating_add(self.server.free_memory(self.peer()?)?),
            ShrinkTier::Host | ShrinkTier::File => own,
        })
    }

    /// Microseconds of one copy of the driver's over the target's own link.
    pub(super) fn link_us(&self, phase: ShrinkPhase) -> Result<f64, BenchError> {
        let Some((to, from)) = self.ends(phase) else { return Ok(f64::NAN) };
        let begin = Instant::now();
        owned::copy(&**self.server.driver(), self.stream.device(), self.stream.id(), &to, &from)?;
        self.stream.synchronize()?;
        Ok(us(begin.elapsed()))
    }

    /// Bytes by the link that they went over.
    pub(super) fn carried(&self) -> Vec<(DeviceId, u64)> {
        self.server.carried()
    }

    fn ends(&self, phase: ShrinkPhase) -> Option<(Span, Span)> {
        let size = self.link_size();
        let (host, gpu) = (self.host.span(Bytes::ZERO, size)?, self.gpu.span(Bytes::ZERO, size)?);
        Some(match phase {
            ShrinkPhase::Shrink => (host, gpu),
            ShrinkPhase::Refill => (gpu, host),
        })
    }

    /// Copies both ways, until the mover has its paths: what they take of the GPUs is not a region's.
    fn warm_up(&self) -> Result<(), BenchError> {
        let begin = Instant::now();
        for phase in [ShrinkPhase::Shrink, ShrinkPhase::Refill] {
            self.link_us(phase)?;
            loop {
                let split = self.server.engine().statistics().split_copies;
                let pair = self.ends(phase).into_iter().collect::<Vec<_>>();
                let moving = self.mover.enqueue(&pair).map_err(BenchError::Unmoved)?;
                moving.wait().map_err(BenchError::Unmoved)?;
                let has_paths = self.server.engine().statistics().split_copies > split;
                if has_paths || self.server.relays().is_empty() || begin.elapsed() > TIMEOUT {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// The GPU that lends its memory: the one asked for, or the first other one; `None` where nobody has to.
fn peer(server: &Server, options: &ShrinkOptions) -> Result<Option<DeviceId>, BenchError> {
    if !options.tiers.contains(&ShrinkTier::Peer) {
        return Ok(None);
    }
    let target = options.target;
    let devices = server.driver().devices()?;
    let mut others = devices.iter().map(|info| info.id).filter(|id| id.0 != target);
    match options.peer {
        None => Ok(Some(others.next().ok_or(BenchError::NoPeer { target })?)),
        Some(asked) if asked == target => Err(BenchError::NoPeer { target }),
        Some(asked) => {
            let count = u32::try_from(devices.len()).unwrap_or(u32::MAX);
            let found = others.find(|id| id.0 == asked);
            Ok(Some(found.ok_or(ServerError::NoSuchGpu { device: asked, count })?))
        }
    }
}
