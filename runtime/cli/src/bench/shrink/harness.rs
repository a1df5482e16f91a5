//! Test bed of shrink measurements: a rig with its relays ready, copies over one link for comparison, and the measured region with its
//! destination.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::owned::{self, Buffer, Digests, OwnedStream, Span};
use glake_device::{DeviceId, Stream};
use glake_runtime::backend::Backend;
use glake_runtime::config::Config;
use glake_tiers::{
    CopyPolicy, FileTier, HostBlock, Mover as _, Policy, PoolStream, Refilled, Region, RegionOptions, Shrunk,
    Store, TransferContext,
};
use glake_transfer::{LinkMover, Priority};
use glake_units::Bytes;

use super::super::times::us;
use super::{BenchError, ShrinkOptions, ShrinkPhase, ShrinkTier};
use crate::rig::{Difference, Filled, Rig, RigError, RigOptions, check_host_memory};

/// Maximum size of the single-link copy, on the simulator and on a GPU. Larger copies show the same rate.
const LINKS: [Bytes; 2] = [Bytes::mib(64), Bytes::gib(1)];
/// A stream gets its paths in the background once it has asked for them.
const TIMEOUT: Duration = Duration::from_millis(500);

/// A rig, and memory for copies over one link.
pub(super) struct Harness {
    bytes: Bytes,
    peer: Option<DeviceId>,
    digests: Option<Digests>,
    mover: LinkMover,
    stream: OwnedStream,
    host: HostBlock,
    gpu: Arc<Buffer>,
    /// After all that is made of it.
    rig: Rig,
}

impl Harness {
    pub(super) fn open(
        backend: &Backend,
        config: &Config,
        options: &ShrinkOptions,
    ) -> Result<Self, BenchError> {
        if let Some(bytes) = options.bytes {
            // Copies in memory are pinned while the region is still on its GPU.
            let in_memory = options.tiers.iter().any(|tier| *tier != ShrinkTier::File);
            check_host_memory(backend, if in_memory { bytes.saturating_add(bytes) } else { bytes })?;
        }
        let part = RigOptions { target: options.target, paths: options.paths, ..RigOptions::default() };
        let rig = Rig::open(backend, config, part)?;
        let default = if rig.is_simulated() { Bytes::mib(64) } else { Bytes::gib(16) };
        let bytes = options.bytes.unwrap_or(default);
        let (target, size) = (rig.target().id, bytes.min(LINKS[usize::from(!rig.is_simulated())]));
        let digests = options.verify.then(|| Digests::new(rig.completion_events(), target)).transpose()?;
        let harness = Harness {
            bytes,
            peer: peer(&rig, options)?,
            digests,
            mover: LinkMover::new(rig.engine(), target, Priority::Normal)?,
            stream: OwnedStream::new(rig.driver(), target)?,
            // A pool of its own: what regions use is pinned by them.
            host: rig.host()?.take(size)?,
            gpu: rig.buffer(size)?,
            rig,
        };
        harness.warm_up()?;
        Ok(harness)
    }

    pub(super) fn rig(&self) -> &Rig {
        &self.rig
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
        self.peer.ok_or(BenchError::NoPeer { target: self.rig.target().id.0 })
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
        self.rig.is_calibrated()
    }

    /// Returns notes on the results.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.rig.is_simulated() {
            notes.push(
                "the GPUs are simulated: times are those of this machine's memory, and say nothing of a GPU's".to_owned(),
            );
        }
        notes.push(match (self.rig.relays().is_empty(), self.is_calibrated()) {
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
        let own = self.rig.free_memory(self.rig.target().id)?;
        Ok(match tier {
            ShrinkTier::Peer => own.saturating_add(self.rig.free_memory(self.peer()?)?),
            ShrinkTier::Host | ShrinkTier::File => own,
        })
    }

    /// Microseconds of one copy of the driver's over the target's own link.
    pub(super) fn link_us(&self, phase: ShrinkPhase) -> Result<f64, BenchError> {
        let Some((to, from)) = self.ends(phase) else { return Ok(f64::NAN) };
        let begin = Instant::now();
        owned::copy(&**self.rig.driver(), self.stream.device(), self.stream.id(), &to, &from)?;
        self.stream.synchronize()?;
        Ok(us(begin.elapsed()))
    }

    /// Bytes by the link that they went over.
    pub(super) fn carried(&self) -> Vec<(DeviceId, u64)> {
        self.rig.carried()
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
                let split = self.rig.engine().statistics().split_copies;
                let pair = self.ends(phase).into_iter().collect::<Vec<_>>();
                let moving = self.mover.enqueue(&pair).map_err(BenchError::Unmoved)?;
                moving.wait().map_err(BenchError::Unmoved)?;
                let has_paths = self.rig.engine().statistics().split_copies > split;
                if has_paths || self.rig.relays().is_empty() || begin.elapsed() > TIMEOUT {
                    break;
                }
            }
        }
        Ok(())
    }
}

/// The GPU that lends its memory: the one asked for, or the first other one; `None` where nobody has to.
fn peer(rig: &Rig, options: &ShrinkOptions) -> Result<Option<DeviceId>, BenchError> {
    if !options.tiers.contains(&ShrinkTier::Peer) {
        return Ok(None);
    }
    let target = options.target;
    let devices = rig.driver().devices()?;
    let mut others = devices.iter().map(|info| info.id).filter(|id| id.0 != target);
    match options.peer {
        None => Ok(Some(others.next().ok_or(BenchError::NoPeer { target })?)),
        Some(asked) if asked == target => Err(BenchError::NoPeer { target }),
        Some(asked) => {
            let count = u32::try_from(devices.len()).unwrap_or(u32::MAX);
            let found = others.find(|id| id.0 == asked);
            Ok(Some(found.ok_or(RigError::NoSuchGpu { device: asked, count })?))
        }
    }
}

/// Extents of a simulated GPU's region, which is small.
const SMALL: Bytes = Bytes::mib(8);
/// Size of the staging buffer for files.
const STAGED: Bytes = Bytes::mib(96);

/// A region, and its store.
pub(super) struct Field<'a> {
    harness: &'a Harness,
    region: Filled,
    store: Store,
    /// After all that has files in it.
    _folder: Option<OwnFolder>,
}

/// A folder that is removed at the end.
struct OwnFolder(PathBuf);

impl<'a> Field<'a> {
    /// A region full of bytes that tell their places.
    pub(super) fn new(
        harness: &'a Harness,
        config: &Config,
        options: &ShrinkOptions,
        tier: ShrinkTier,
    ) -> Result<Self, BenchError> {
        let rig = harness.rig();
        let pool = rig.pool(rig.target().id, &config.pool)?;
        let mut wanted = RegionOptions::of("bench");
        if options.sealed {
            (wanted.policy, wanted.host_copy) = (Policy::Sealed, CopyPolicy::Retain);
        }
        if rig.is_simulated() {
            wanted.extent = SMALL;
        }
        let region = Region::new(&pool, wanted);
        let stream = PoolStream::of(&**rig.driver(), rig.target().id, Stream::LEGACY)?;
        let blocks = sizes(harness.bytes(), options.tensors).map(|size| region.malloc(size, stream));
        let blocks = blocks.collect::<Result<_, _>>()?;
        let (store, folder) = store(harness, config, options, tier)?;
        let region = Filled::new(region, blocks)?;
        if options.sealed {
            region.region().seal(false)?;
        }
        Ok(Field { harness, store, _folder: folder, region })
    }

    /// Evicts the whole region.
    pub(super) fn shrink(&self) -> Result<Shrunk, BenchError> {
        Ok(self.region.shrink(&self.store, self.transfer_context())?)
    }

    /// Refills the whole region.
    pub(super) fn refill(&self) -> Result<Refilled, BenchError> {
        Ok(self.region.refill(self.transfer_context())?)
    }

    fn transfer_context(&self) -> TransferContext<'_> {
        TransferContext { mover: self.harness.mover(), checks: self.harness.digests(), fill: false }
    }

    /// Compares every byte with the expected pattern.
    ///
    /// # Errors
    /// [`BenchError::Differs`].
    pub(super) fn compare(&self, when: &str) -> Result<(), BenchError> {
        match self.region.compare()? {
            None => Ok(()),
            Some(Difference { block, at, .. }) => {
                Err(BenchError::Differs { case: format!("{when}: tensor {block}, byte {at}") })
            }
        }
    }

    /// Frees everything; what is pinned for it goes with it.
    pub(super) fn end(self) -> Result<(), BenchError> {
        Ok(self.region.end()?)
    }
}

/// Divides `bytes` into block sizes that differ by at most 512, except for the last one.
fn sizes(bytes: Bytes, tensors: u32) -> impl Iterator<Item = Bytes> {
    let (bytes, count) = (bytes.get(), u64::from(tensors.max(1)));
    // Blocks are multiples of 512 bytes: of equal ones nothing is rounded.
    let each = (bytes / count) & !511;
    let each = if each == 0 { bytes / count } else { each };
    (0..count).map(move |number| Bytes::new(if number + 1 == count { bytes - each * number } else { each }))
}

/// Creates the store for the region's copies; allocates nothing in advance unless requested.
fn store(
    harness: &Harness,
    config: &Config,
    options: &ShrinkOptions,
    tier: ShrinkTier,
) -> Result<(Store, Option<OwnFolder>), BenchError> {
    let rig = harness.rig();
    let pinned = |size: Bytes| {
        let host = rig.host()?;
        if options.prepare {
            host.prepare(size)?;
        }
        Ok::<_, BenchError>(host)
    };
    match tier {
        ShrinkTier::Host => Ok((Store::Host(pinned(harness.bytes())?), None)),
        ShrinkTier::Peer => Ok((Store::Peer(rig.pool(harness.peer()?, &config.pool)?), None)),
        ShrinkTier::File => {
            let own = std::env::temp_dir().join(format!("glake-bench-{}", std::process::id()));
            let folder = options.folder.as_deref().unwrap_or(&own);
            let files = Arc::new(FileTier::open(folder)?);
            let host = pinned(STAGED.min(harness.bytes()))?;
            Ok((Store::File { files, host }, options.folder.is_none().then_some(OwnFolder(own))))
        }
    }
}

impl Drop for OwnFolder {
    fn drop(&mut self) {
        // What is not empty is not all ours.
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[cfg(test)]
mod field_tests {
    use super::*;

    #[test]
    fn sizes_are_about_equal_and_all_there() {
        for (bytes, tensors) in [(16 << 30, 64), (1000, 3), (5000, 3), (7, 7), (1 << 20, 1)] {
            let sizes: Vec<u64> = sizes(Bytes::new(bytes), tensors).map(Bytes::get).collect();
            assert_eq!((sizes.len(), sizes.iter().sum()), (tensors as usize, bytes));
            assert!(sizes.iter().all(|size| *size > 0), "{sizes:?}");
        }
    }
}
