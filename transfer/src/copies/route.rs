//! Memory kinds at both ends of a copy.

use glake_device::owned::Span;
use glake_device::{DeviceId, PointerKind};

use crate::paths::Direction;
use crate::{Result, TransferError};

/// Both ends of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoints {
    /// Host memory and memory of one GPU.
    HostAndGpu {
        target: DeviceId,
        direction: Direction,
        /// Whether the host memory is registered with the driver.
        pinned: bool,
    },
    /// Any other combination.
    Other,
}

impl Endpoints {
    /// Classifies both ends of a copy.
    ///
    /// # Errors
    /// [`TransferError::SizesDiffer`].
    pub(crate) fn of(to: &Span, from: &Span) -> Result<Endpoints> {
        if to.size() != from.size() {
            return Err(TransferError::SizesDiffer { to: to.size(), from: from.size() });
        }
        Ok(match (to.kind(), from.kind()) {
            (PointerKind::Device { device, .. }, host @ (PointerKind::Pinned | PointerKind::Pageable)) => {
                Endpoints::between(device, Direction::ToGpu, host)
            }
            (host @ (PointerKind::Pinned | PointerKind::Pageable), PointerKind::Device { device, .. }) => {
                Endpoints::between(device, Direction::FromGpu, host)
            }
            _ => Endpoints::Other,
        })
    }

    fn between(target: DeviceId, direction: Direction, host: PointerKind) -> Endpoints {
        Endpoints::HostAndGpu { target, direction, pinned: host == PointerKind::Pinned }
    }
}
