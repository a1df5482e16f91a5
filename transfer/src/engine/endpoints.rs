//! Where a copy begins and ends, and what that allows.

use glake_device::owned::Span;
use glake_device::{DeviceId, PointerKind};

use crate::paths::Direction;
use crate::{Result, TransferError};

/// What a copy is between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoints {
    /// Host memory and a GPU's.
    HostAndGpu {
        target: DeviceId,
        direction: Direction,
        /// Whether the driver knows the host memory.
        pinned: bool,
    },
    /// Anything else.
    Other,
}

impl Endpoints {
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
