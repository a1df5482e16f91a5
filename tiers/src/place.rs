//! Location of an extent's bytes, and the state machine that names the valid copy: pure, no driver, no clock.
//!
//! ```text
//!  Resident ──Evict──► Evicting ──Copied──► Releasing ──Released──► Evicted
//!     ▲                   │                  ▲     │                 │
//!     ├──────Failed───────┘            Evict │     │ Failed       ▲  │
//!     │                                      │     ▼              │  │
//!     │                                    Interrupted    NotMade │  │ Refill
//!     │                             Failed ▲     │ Refill         │  │
//!     │                                    │     ▼                │  ▼
//!     └──────────────Arrived────────────── Refilling ─────────────┘◄─┘
//!
//!  Resident with a copy ──Evict──► Releasing: nothing is copied       DropCopy: resident without one
//!  any that does not move ──Evict (nowhere)──► Releasing, or stays Evicted: decommitted, its bytes are given up
//!  Evicted ──Demote──► Evicted: its bytes are copied to another place, which holds the valid copy
//! ```
//!
//! | state | memory of the GPU | the copy | authority |
//! |---|---|---|---|
//! | resident | the bytes | none, or equal | the GPU |
//! | evicting | the bytes | being written | the GPU |
//! | releasing | the bytes, then nothing | whole | the copy |
//! | evicted | nothing | whole | the copy |
//! | refilling | made, mapped, being filled | whole | the copy |
//! | interrupted | anything | whole | the copy |
//!
//! Invariant: every state names exactly one valid copy ([`Residency::authority`]), and it is complete. Authority leaves the GPU once the
//! copy is known to be complete, before GPU memory is given up, and returns when all bytes have arrived. The bytes are written only in
//! *resident*, and then only without a copy: a caller that allows writes drops the copy first.

#[cfg(test)]
mod tests;

use std::fmt;

use glake_device::DeviceId;

/// Location of an extent's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Memory of the extent's own GPU, where programs use the bytes.
    Gpu,
    /// Pinned memory of the host.
    Host,
    /// Memory of another GPU.
    Peer(DeviceId),
    /// File on a disk.
    File,
    /// No location: the program has given the bytes up, and may later get new memory at the same addresses.
    Nowhere,
}

/// State of one extent's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Residency {
    /// On the GPU and usable.
    Resident {
        /// Location of an identical copy, kept for the next eviction.
        copy: Option<Place>,
    },
    /// Being copied out. The copy is incomplete and not valid yet.
    Evicting {
        /// Location of the copy being written.
        to: Place,
    },
    /// Copied; the GPU's memory is being unmapped and released.
    Releasing {
        /// Location of the copy.
        at: Place,
    },
    /// Not on the GPU any more.
    Evicted {
        /// Location of the bytes.
        at: Place,
    },
    /// Memory of the GPU is being made, mapped and filled.
    Refilling {
        /// Location of the copy being read.
        from: Place,
    },
    /// Releasing or refilling failed. GPU memory may be left, with undefined contents.
    Interrupted {
        /// Location of the bytes.
        at: Place,
    },
}

/// Step of an eviction or a refill, or its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Begins to move the bytes out, without copying if a complete copy exists at the place.
    Evict(Place),
    /// Completes the copy: it has all bytes, verified if checks are enabled.
    Copied,
    /// Completes the release: the extent is unmapped at all its addresses, and its memory released.
    Released,
    /// Begins a refill at the same addresses. Remaining GPU memory is used or released first.
    Refill,
    /// Completes the refill: all bytes are on the GPU. The copy stays until it is dropped.
    Arrived,
    /// Reports that the current step failed or was cancelled.
    Failed,
    /// Reports that there was no memory for a refill: the extent holds no GPU memory.
    NotMade,
    /// Drops the copy, because the bytes on the GPU may be written to, or the copy's memory is needed.
    DropCopy,
    /// Makes a copy in another place the valid one, because the memory of the current one is needed.
    Demote(Place),
}

/// Error of a step that the state does not allow. The state is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{step} was asked of an extent that is {residency}: {}", allowed(*residency))]
pub struct NotNow {
    /// State of the extent.
    pub residency: Residency,
    /// Step that was requested.
    pub step: Step,
}

impl Residency {
    /// State of an extent that was never moved.
    pub const NEW: Residency = Residency::Resident { copy: None };

    /// Returns the location of the valid copy.
    pub fn authority(self) -> Place {
        match self {
            Residency::Resident { .. } | Residency::Evicting { .. } => Place::Gpu,
            Residency::Releasing { at } | Residency::Evicted { at } | Residency::Interrupted { at } => at,
            Residency::Refilling { from } => from,
        }
    }

    /// Returns the location of a complete copy outside the GPU, if there is one.
    pub fn copy(self) -> Option<Place> {
        match self {
            Residency::Resident { copy } => copy,
            Residency::Evicting { .. } => None,
            other => Some(other.authority()),
        }
    }

    /// Returns whether the extent holds, or may hold, GPU memory.
    pub fn holds_gpu(self) -> bool {
        !matches!(self, Residency::Evicted { .. })
    }

    /// Returns the state as the allocator knows it: whether the memory is available for blocks. The records of [`crate::GpuPool`] report it
    /// with each step.
    pub fn to_allocator(self) -> glake_stitch::ExtentState {
        match self {
            Residency::Resident { .. } => glake_stitch::ExtentState::Resident,
            Residency::Evicted { .. } => glake_stitch::ExtentState::Evicted,
            _ => glake_stitch::ExtentState::Moving,
        }
    }

    /// Returns whether the extent has neither memory nor bytes to preserve: the program has given them up.
    pub fn is_decommitted(self) -> bool {
        self == Residency::Evicted { at: Place::Nowhere }
    }

    /// Returns whether a step is in progress that must end before another begins.
    pub fn is_moving(self) -> bool {
        use Residency::{Evicting, Refilling, Releasing};
        matches!(self, Evicting { .. } | Releasing { .. } | Refilling { .. })
    }

    /// Returns the state after a step.
    ///
    /// # Errors
    /// [`NotNow`], with the steps that are allowed.
    pub fn after(self, step: Step) -> Result<Residency, NotNow> {
        use Residency::{Evicted, Evicting, Interrupted, Refilling, Releasing, Resident};
        match (self, step) {
            (Resident { .. } | Interrupted { .. }, Step::Evict(Place::Nowhere)) => {
                Ok(Releasing { at: Place::Nowhere })
            }
            (Evicted { .. }, Step::Evict(Place::Nowhere)) => Ok(Evicted { at: Place::Nowhere }),
            (Resident { copy: None }, Step::Evict(to)) if to != Place::Gpu => Ok(Evicting { to }),
            (Resident { copy: Some(at) } | Interrupted { at }, Step::Evict(to)) if to == at => {
                Ok(Releasing { at })
            }
            (Evicting { to }, Step::Copied) => Ok(Releasing { at: to }),
            (Evicting { .. }, Step::Failed) => Ok(Resident { copy: None }),
            (Releasing { at }, Step::Released) => Ok(Evicted { at }),
            (Evicted { at } | Interrupted { at }, Step::Refill) => Ok(Refilling { from: at }),
            (Refilling { from }, Step::NotMade) => Ok(Evicted { at: from }),
            (Refilling { from }, Step::Arrived) => {
                Ok(Resident { copy: (from != Place::Nowhere).then_some(from) })
            }
            (Releasing { at } | Refilling { from: at }, Step::Failed) => Ok(Interrupted { at }),
            (Resident { .. }, Step::DropCopy) => Ok(Resident { copy: None }),
            (Evicted { at }, Step::Demote(to)) if ![at, to].contains(&Place::Nowhere) && to != Place::Gpu => {
                Ok(Evicted { at: to })
            }
            (residency, step) => Err(NotNow { residency, step }),
        }
    }
}

/// Returns the text that names the allowed steps.
fn allowed(residency: Residency) -> &'static str {
    match residency {
        Residency::Resident { copy: None } => "it can be evicted, to another place than its GPU",
        Residency::Resident { copy: Some(_) } => {
            "it can be evicted to where its copy is, or the copy be dropped"
        }
        Residency::Evicting { .. } => "wait until it is copied or has failed",
        Residency::Releasing { .. } => "wait until it is released or that has failed",
        Residency::Evicted { at: Place::Nowhere } => "it can be refilled",
        Residency::Evicted { .. } => "it can be refilled, demoted, or decommitted",
        Residency::Refilling { .. } => "wait until it has arrived or failed",
        Residency::Interrupted { .. } => "it can be refilled, or evicted to where its copy is",
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Gpu => f.pad("gpu"),
            Place::Host => f.pad("host"),
            Place::Peer(device) => write!(f, "peer {device}"),
            Place::File => f.pad("file"),
            Place::Nowhere => f.pad("nowhere"),
        }
    }
}

impl fmt::Display for Residency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Residency::Resident { copy: None } => f.pad("resident"),
            Residency::Resident { copy: Some(at) } => write!(f, "resident with a copy ({at})"),
            Residency::Evicting { to } => write!(f, "evicting ({to})"),
            Residency::Releasing { at } => write!(f, "releasing ({at})"),
            Residency::Evicted { at: Place::Nowhere } => f.pad("decommitted"),
            Residency::Evicted { at } => write!(f, "evicted ({at})"),
            Residency::Refilling { from } => write!(f, "refilling ({from})"),
            Residency::Interrupted { at } => write!(f, "interrupted ({at})"),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Evict(to) => write!(f, "evict ({to})"),
            Step::Copied => f.pad("copied"),
            Step::Released => f.pad("released"),
            Step::Refill => f.pad("refill"),
            Step::Arrived => f.pad("arrived"),
            Step::Failed => f.pad("failed"),
            Step::NotMade => f.pad("not made"),
            Step::DropCopy => f.pad("drop the copy"),
            Step::Demote(to) => write!(f, "demote ({to})"),
        }
    }
}
