//! Second copies of checked saves when their block is freed ([`Checks`](super::checks::Checks)).

use glake_device::owned::{Digesting, OwnedEvent};
use glake_device::{Address, Stream};
use glake_transfer::UserStream;
use glake_transfer::paths::Direction;
use glake_units::Bytes;

use super::checks::{CheckState, SaveId, Watch};
use super::entries::Away;
use super::queue::Queue;
use super::{Offload, Place, ProcessError, Result};

/// Alignment of digested memory in bytes.
const WORD: u64 = 16;

impl Offload {
    /// Offloads like [`Offload::offload`], for a save that must be checked: the bytes are copied again when the block is freed, so that a
    /// reload returns the block's last contents, and both versions are compared.
    ///
    /// # Errors
    /// As [`Offload::offload`].
    pub fn offload_checked(&self, raw: Stream, address: Address, size: Bytes, save: SaveId) -> Result<u64> {
        if let Ok(site) = self.sites.of(save.site) {
            let mut site = site.lock();
            site.checked = site.checked.saturating_add(size);
        }
        self.copy_out(raw, address, size, Some(save))
    }

    /// Returns the result of a save's checks so far.
    pub fn check_state(&self, save: SaveId) -> CheckState {
        if self.registry.is_stopped() { CheckState::Due } else { self.checks.state(save) }
    }

    /// Handles the free of the block that begins at `address`. Failures are reported when the bytes are reloaded.
    #[inline]
    pub(in super::super) fn before_free(&self, address: Address) {
        if self.checks.are_any_watched() {
            self.copy_watched(address);
        }
    }

    /// Enqueues the digest of bytes that are about to be copied, if one is possible.
    pub(super) fn digest(
        &self,
        out: &mut Queue,
        on: UserStream,
        place: &Place<'_>,
        address: Address,
    ) -> Option<Digesting> {
        if !self.checks.have_room() {
            return None;
        }
        let digests = self.regions.digests(place.started.pool.device()).ok()??;
        // Includes a few earlier bytes for alignment, which lie in the same block.
        let before = address.0 % WORD;
        let size = place.span.size().saturating_add(Bytes::new(before));
        let span = place.started.pool.read_holds().span(Address(address.0 - before), size).ok()?;
        out.digest(on, &digests, &span).ok()
    }

    #[cold]
    fn copy_watched(&self, address: Address) {
        if self.registry.is_stopped() {
            return;
        }
        self.checks.poll();
        for watch in self.checks.take(address) {
            let Ok(entry) = self.entries.of(watch.entry) else { continue };
            let mut entry = entry.lock();
            let last = entry.load.as_ref().map(|load| load.event.clone());
            let Some((away, _)) = entry.away.as_mut() else { continue };
            away.watched = None;
            let mut copied = self.copy_again(&watch, away, last.as_deref());
            if copied.is_err() {
                copied = self.copy_again(&watch, away, last.as_deref());
                // The progress of the first copy is unknown.
                away.is_torn = !matches!(copied, Ok(Again::Copied(_)));
            }
            match (copied, watch.digest) {
                (Ok(Again::Copied(Some(second))), Some(first)) => {
                    self.checks.compare(watch.save, first, second);
                }
                _ => self.checks.miss(),
            }
        }
    }

    /// Copies the current contents of a block over its first copy.
    fn copy_again(&self, watch: &Watch, away: &mut Away, last: Option<&OwnedEvent>) -> Result<Again> {
        let Watch { block, address, stream, ref digest, .. } = *watch;
        let device = away.device;
        self.streams.with_default_of(Some(device), || {
            // Evicted memory, or a block freed in an unobserved way, as by a restored checkpoint.
            let Ok(place) = self.place(address, away.size) else { return Ok(Again::Left) };
            if place.block != block {
                return Ok(Again::Left);
            }
            let own = self.streams.handle(block.stream).filter(|own| *own != stream);
            let mut streams = Vec::new();
            for raw in own.into_iter().chain([stream]) {
                match self.stream(raw) {
                    Err(ProcessError::OffloadCaptured { .. } | ProcessError::ForeignContext) => {
                        return Ok(Again::Left);
                    }
                    // The program has destroyed the stream.
                    Err(ProcessError::Driver(error)) if error.is_gone() => return Ok(Again::Left),
                    found => streams.push(found?),
                }
            }
            let out = self.queues.of(device, Direction::FromGpu)?;
            let mut out = out.lock();
            for &behind in &streams {
                out.follow(behind)?;
            }
            if let Some(last) = last {
                out.wait_for(last)?;
            }
            let Some(&packed) = streams.last() else { return Ok(Again::Left) };
            let second = digest.as_ref().and_then(|_| self.digest(&mut out, packed, &place, address));
            let held = out.copy_out(packed, &away.taken, &place.span).and_then(|(event, handles)| {
                (away.out, away.copied) = (event, handles);
                Ok(place.started.pool.read_holds().hold(block, &away.out, out.id())?)
            });
            if let Err(error) = held {
                // The block is freed next.
                out.finish();
                return Err(error);
            }
            Ok(Again::Copied(second))
        })?
    }
}

/// Result of a second copy.
#[derive(Debug)]
enum Again {
    /// The copy is enqueued, perhaps with a digest.
    Copied(Option<Digesting>),
    /// No second copy was possible; the first one counts.
    Left,
}
