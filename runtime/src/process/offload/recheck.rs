//! Copies that are made once more when their block is freed ([`Checks`](super::checks::Checks)).

use std::sync::Arc;

use glake_device::owned::{Digesting, OwnedEvent, Span};
use glake_device::{Address, Stream};
use glake_transfer::paths::Direction;
use glake_transfer::{CopyHandle, UserStream};
use glake_units::Bytes;

use super::checks::{CheckState, SaveId, Watch};
use super::entries::{Away, Load};
use super::queue::Queue;
use super::{Offload, Place, Result};

/// What digests begin at a multiple of.
const WORD: u64 = 16;
/// A copy over another is tried so often.
const TRIES: usize = 2;

impl Offload {
    /// As [`Offload::offload`], of a save that is to be checked: the bytes are copied again when the block is freed, so that what comes
    /// back is what the block had then, and both are compared.
    ///
    /// # Errors
    /// As [`Offload::offload`].
    pub fn offload_checked(&self, raw: Stream, address: Address, size: Bytes, save: SaveId) -> Result<u64> {
        self.copy_out(raw, address, size, Some(save))
    }

    /// What is known of a save.
    pub fn check_state(&self, save: SaveId) -> CheckState {
        if self.registry.is_stopped() { CheckState::Due } else { self.checks.state(save) }
    }

    /// Saves of a site are to be checked anew, as where another plan offloads others of them.
    pub fn check_again(&self, site: u64) {
        self.checks.again(site);
    }

    /// Forgets a site: its plans, and what is known of its saves.
    ///
    /// # Errors
    /// [`ProcessError::UnknownSite`](super::ProcessError::UnknownSite).
    pub fn release_site(&self, site: u64) -> Result<()> {
        self.checks.forget_site(site);
        self.sites.release(site)
    }

    /// The block that begins there is about to be freed. What goes wrong here is told when the bytes are reloaded.
    #[inline]
    pub(in super::super) fn before_free(&self, address: Address) {
        if self.checks.are_any_watched() {
            self.copy_watched(address);
        }
    }

    /// The digest of bytes that are about to be copied, where there is one.
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
        // A few bytes more, where the bytes begin in between: they are of the same block.
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
            let last = entry.load.as_ref().map(|load: &Load| load.event.clone());
            let Some((away, _)) = entry.away.as_mut() else { continue };
            away.watched = None;
            let save = watch.save;
            match self.copy_again(watch, away, last.as_deref()) {
                Ok(Some((first, second))) => self.checks.compare(save, first, second),
                Ok(None) | Err(_) => self.checks.miss(),
            }
        }
    }

    /// Copies what a block has now over what it had. Where it cannot be, and was not begun, what it had counts.
    fn copy_again(
        &self,
        watch: Watch,
        away: &mut Away,
        last: Option<&OwnedEvent>,
    ) -> Result<Option<(Digesting, Digesting)>> {
        let Watch { block, address, stream, digest: first, .. } = watch;
        let device = away.device;
        self.streams.with_default_of(Some(device), || {
            let place = self.place(address, away.size)?;
            if place.block != block {
                // The block that was watched went in a way that nobody sees, as with a checkpoint that is restored.
                return Ok(None);
            }
            let packed = self.stream(stream)?;
            let own = self.streams.handle(block.stream).filter(|own| *own != stream);
            let own = own.map(|own| self.stream(own)).transpose()?;
            let out = self.queues.of(device, Direction::FromGpu)?;
            let mut out = out.lock();
            if let Some(own) = own {
                out.follow(own)?;
            }
            if let Some(last) = last {
                out.wait_for(last)?;
            }
            let second = first.as_ref().and_then(|_| self.digest(&mut out, packed, &place, address));
            let holds = place.started.pool.read_holds();
            let mut again = || copy_over(&mut out, packed, away, &place.span);
            let copied = (1..TRIES).fold(again(), |copied, _| copied.or_else(|_| again()));
            let held = copied.and_then(|(event, handle)| {
                (away.out, away.copied) = (event, Some(handle));
                Ok(holds.hold(block, &away.out)?)
            });
            if let Err(error) = held {
                out.finish();
                return Err(error);
            }
            Ok(first.zip(second))
        })?
    }
}

/// What fails leaves nobody knows what.
fn copy_over(
    out: &mut Queue,
    behind: UserStream,
    away: &mut Away,
    from: &Span,
) -> Result<(Arc<OwnedEvent>, CopyHandle)> {
    let copied = out.copy_out(behind, &away.taken, from);
    away.is_torn = copied.is_err();
    copied
}
