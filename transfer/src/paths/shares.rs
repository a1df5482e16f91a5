//! What is asked of the splitter, and what it answers.

use std::ops::Deref;

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_units::{Bandwidth, Bytes, Micros};
use smallvec::SmallVec;

use super::{Direction, Load, Way};

/// A copy to be split.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The GPU whose memory it is.
    pub target: DeviceId,
    /// Which way the bytes go.
    pub direction: Direction,
    /// How many.
    pub size: Bytes,
    /// Relays that may touch the memory from their own streams.
    pub zero_staging: DeviceSet,
    /// Relays with buffers free.
    pub staged: DeviceSet,
    /// What other copies have in flight. Copies that this one comes after anyway, on its own stream, are better left out.
    pub load: &'a Load,
    /// How many other GPUs' copies will want the same relays before this one is done.
    pub expected: u32,
}

/// A part of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Whose link; the target for its own.
    pub relay: DeviceId,
    /// Which way it takes.
    pub way: Way,
    /// Where it begins.
    pub offset: Bytes,
    /// How long it is.
    pub size: Bytes,
}

impl Share {
    /// What of it lies behind its first bytes; `None`: nothing does.
    pub(crate) fn behind(self, sent: Bytes) -> Option<Share> {
        let size = self.size.saturating_sub(sent);
        (!size.is_zero()).then_some(Share { offset: self.offset.saturating_add(sent), size, ..self })
    }
}

/// The parts of a copy, in the order of their offsets: they cover it once, and begin at multiples of 4 KiB.
#[derive(Clone, Debug, PartialEq)]
pub struct Shares {
    pub(super) shares: SmallVec<[Share; 8]>,
    /// In GB/s, beside each other.
    pub(super) rates: SmallVec<[f64; 8]>,
    pub(super) predicted: Micros,
    pub(super) direct: Micros,
}

impl Shares {
    /// When all of them should have arrived, counted from the fork.
    pub fn predicted(&self) -> Micros {
        self.predicted
    }

    /// When one native copy over the target's own link should have; nothing where the copy was too small to ask.
    pub fn direct(&self) -> Micros {
        self.direct
    }

    /// What the path of a share should give beside the others, once its bytes flow; nothing where there is no such share.
    pub fn rate(&self, share: usize) -> Bandwidth {
        Bandwidth(self.rates.get(share).copied().unwrap_or(0.0))
    }

    /// All of it over the target's own link.
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
