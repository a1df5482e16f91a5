//! Input and output of the splitter.

use std::ops::Deref;

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::{Bandwidth, Bytes, Micros};
use smallvec::SmallVec;

use super::{Direction, Load, Way};

/// Copy to be split.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// GPU whose memory is copied.
    pub target: DeviceId,
    /// Direction of the copy.
    pub direction: Direction,
    /// Size of the copy.
    pub size: Bytes,
    /// Relays that can access the memory from their own streams.
    pub zero_staging: DeviceSet,
    /// Relays with free buffers.
    pub staged: DeviceSet,
    /// Bytes in flight of other copies, without those of the same stream that precede this copy anyway.
    pub load: &'a Load,
    /// Number of other GPUs whose copies are expected to use the same relays before this copy completes.
    pub expected: u32,
}

/// Part of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// GPU whose link is used; the target itself for its own link.
    pub relay: DeviceId,
    /// Method by which the relay passes the bytes on.
    pub way: Way,
    /// Offset within the copy.
    pub offset: Bytes,
    /// Size of the part.
    pub size: Bytes,
}

impl Share {
    /// Returns the part after the first `sent` bytes; `None` if nothing remains.
    pub(crate) fn behind(self, sent: Bytes) -> Option<Share> {
        let size = self.size.saturating_sub(sent);
        (!size.is_zero()).then_some(Share { offset: self.offset.saturating_add(sent), size, ..self })
    }
}

/// Parts of a copy in the order of their offsets. They cover it exactly and begin at multiples of 4 KiB.
#[derive(Clone, Debug, PartialEq)]
pub struct Shares {
    pub(super) shares: SmallVec<[Share; 8]>,
    /// Predicted rates in GB/s while all parts are in flight.
    pub(super) rates: SmallVec<[f64; 8]>,
    pub(super) predicted: Micros,
    pub(super) direct: Micros,
}

impl Shares {
    /// Returns the predicted time from the fork until all parts have arrived.
    pub fn predicted(&self) -> Micros {
        self.predicted
    }

    /// Returns the predicted time of one native copy over the target's own link; 0 if the copy was too small for a prediction.
    pub fn direct(&self) -> Micros {
        self.direct
    }

    /// Returns the predicted rate of a share while all are in flight; 0 if the share does not exist.
    pub fn rate(&self, share: usize) -> Bandwidth {
        Bandwidth(self.rates.get(share).copied().unwrap_or(0.0))
    }

    /// Returns one share over the target's own link.
    pub(super) fn native(ask: &Ask<'_>, rate: Bandwidth, took: Micros) -> Shares {
        let share = Share { relay: ask.target, way: Way::Direct, offset: Bytes::ZERO, size: ask.size };
        let (shares, rates) = (SmallVec::from_iter([share]), SmallVec::from_iter([rate.0]));
        Shares { shares, rates, predicted: took, direct: took }
    }
}

impl Deref for Shares {
    type Target = [Share];

    fn deref(&self) -> &[Share] {
        &self.shares
    }
}

impl<'a> IntoIterator for &'a Shares {
    type Item = &'a Share;
    type IntoIter = std::slice::Iter<'a, Share>;

    fn into_iter(self) -> Self::IntoIter {
        self.shares.iter()
    }
}
