//! Route of a copy between the host and one GPU, from the kinds of memory at both ends.

use glake_device::owned::Span;
use glake_device::{DeviceId, PointerKind};

use crate::links::ledger::Path;
use crate::paths::{Direction, Way};
use crate::{Result, TransferError};

/// Route of a copy between the host and one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// GPU whose memory is copied.
    pub(crate) target: DeviceId,
    pub(crate) direction: Direction,
    pub(crate) host: Host,
}

/// Kind of the host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    /// Registered with the driver.
    Pinned,
    Pageable,
}

impl Route {
    /// Returns the route between two kinds of memory; `None` unless one is the host's and the other a GPU's.
    pub(crate) fn between(to: PointerKind, from: PointerKind) -> Option<Route> {
        let (target, direction, host) = match (to, from) {
            (PointerKind::Device { device, .. }, host) => (device, Direction::ToGpu, host),
            (host, PointerKind::Device { device, .. }) => (device, Direction::FromGpu, host),
            _ => return None,
        };
        let host = match host {
            PointerKind::Pinned => Host::Pinned,
            PointerKind::Pageable => Host::Pageable,
            PointerKind::Device { .. } | PointerKind::Managed => return None,
        };
        Some(Route { target, direction, host })
    }

    /// Like [`Route::between`], for pinned host memory only.
    pub(crate) fn pinned(to: PointerKind, from: PointerKind) -> Option<Route> {
        Route::between(to, from).filter(|route| route.host == Host::Pinned)
    }

    /// Returns the path over the link of `relay`.
    pub(crate) fn path(self, relay: DeviceId, way: Way) -> Path {
        Path { target: self.target, relay, direction: self.direction, way }
    }

    /// Returns the path over the target's own link.
    pub(crate) fn own_path(self) -> Path {
        self.path(self.target, Way::Direct)
    }
}

/// Checks that both ends of a copy have the same size.
///
/// # Errors
/// [`TransferError::SizesDiffer`].
pub(crate) fn check_sizes(to: &Span, from: &Span) -> Result<()> {
    match (to.size(), from.size()) {
        (to, from) if to != from => Err(TransferError::SizesDiffer { to, from }),
        _ => Ok(()),
    }
}
