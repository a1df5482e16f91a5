//! Where an extent's bytes are, and which copy of them counts: pure, no driver, no clock.
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
//!  any that does not move ──Evict (nowhere)──► Releasing, or Evicted where it is evicted: decommitted, its bytes are given up
//!  Evicted ──Demote──► Evicted: its bytes are in another place as well, and count there
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
//! Invariant: every state names exactly one copy that counts ([`Residency::authority`]), and it is whole. Authority leaves the GPU
//! when the copy is known to be whole, before anything of the GPU's is given up, and returns when all bytes have arrived.
//! Nobody writes to the bytes but in *resident*, and then only without a copy: whoever lets a program write drops it first.

#[cfg(test)]
mod tests;

use std::fmt;

use glake_device::DeviceId;

/// Where bytes can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// In the memory of the extent's own GPU, where programs use them.
    Gpu,
    /// In pinned memory of the host.
    Host,
    /// In the memory of another GPU.
    Peer(DeviceId),
    /// In a file.
    File,
    /// Nowhere: their program has given them up, and may have memory for others at the same addresses later.
    Nowhere,
}

/// How it stands with the bytes of one extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Residency {
    /// On the GPU, for use.
    Resident {
        /// Where a copy is that is equal to them, kept for the next time.
        copy: Option<Place>,
    },
    /// Being copied. What is there of the copy is worth nothing yet.
    Evicting {
        /// Where to.
        to: Place,
    },
    /// Copied; the GPU's memory is being unmapped and released.
    Releasing {
        /// Where the copy is.
        at: Place,
    },
    /// The GPU has nothing of them.
    Evicted {
        /// Where they are.
        at: Place,
    },
    /// Memory of the GPU is being made, mapped and filled.
    Refilling {
        /// Where from.
        from: Place,
    },
    /// Releasing or refilling failed. Memory of the GPU may be left, and what it holds is worth nothing.
    Interrupted {
        /// Where they are.
        at: Place,
    },
}

/// What is begun, and what has come of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// Begins to move the bytes out; without a copy where a whole one is there already.
    Evict(Place),
    /// All bytes are in the copy, and were checked where checks are on.
    Copied,
    /// The extent is unmapped at all its addresses, and its memory released.
    Released,
    /// Begins to bring them back, at the addresses that they had. What is left of the GPU's memory is used or released first.
    Refill,
    /// All bytes are on the GPU. The copy stays, until it is dropped.
    Arrived,
    /// What was begun failed, or was given up.
    Failed,
    /// There was no memory to bring them back to: nothing of the GPU's is held.
    NotMade,
    /// The copy is given up: the bytes on the GPU may be written to, or the copy's memory is needed.
    DropCopy,
    /// All bytes of the copy are in another place as well, and count there: its memory is needed.
    Demote(Place),
}

/// A step that the state does not allow. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{step} was asked of an extent that is {residency}: {}", allowed(*residency))]
pub struct NotNow {
    /// How it stands.
    pub residency: Residency,
    /// What was asked.
    pub step: Step,
}

impl Residency {
    /// Of an extent that was never moved.
    pub const NEW: Residency = Residency::Resident { copy: None };

    /// Where the copy is that counts.
    pub fn authority(self) -> Place {
        match self {
            Residency::Resident { .. } | Residency::Evicting { .. } => Place::Gpu,
            Residency::Releasing { at } | Residency::Evicted { at } | Residency::Interrupted { at } => at,
            Residency::Refilling { from } => from,
        }
    }

    /// Where, besides the GPU, all bytes are as well or instead.
    pub fn copy(self) -> Option<Place> {
        match self {
            Residency::Resident { copy } => copy,
            Residency::Evicting { .. } => None,
            other => Some(other.authority()),
        }
    }

    /// Whether memory of the GPU is held for it, or may be.
    pub fn holds_gpu(self) -> bool {
        !matches!(self, Residency::Evicted { .. })
    }

    /// What the allocator has to know of it: whether the memory is there for blocks. [`crate::GpuPool`]'s records tell it with each step.
    pub fn to_allocator(self) -> glake_stitch::ExtentState {
        match self {
            Residency::Resident { .. } => glake_stitch::ExtentState::Resident,
            Residency::Evicted { .. } => glake_stitch::ExtentState::Evicted,
            _ => glake_stitch::ExtentState::Moving,
        }
    }

    /// Whether it has neither memory nor bytes that count: its program has given them up.
    pub fn is_decommitted(self) -> bool {
        self == Residency::Evicted { at: Place::Nowhere }
    }

    /// Whether something is under way that has to end before anything else begins.
    pub fn is_moving(self) -> bool {
        use Residency::{Evicting, Refilling, Releasing};
        matches!(self, Evicting { .. } | Releasing { .. } | Refilling { .. })
    }

    /// What it is after a step.
    ///
    /// # Errors
    /// [`NotNow`], which says what is allowed.
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

/// What may be asked instead.
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
