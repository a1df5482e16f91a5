//! Errors of drivers. Each variant stands for one way in which the caller can react.

use std::fmt;

use crate::{Address, DeviceId, Verb};
use glake_units::Bytes;

/// Result of a method of [`crate::Driver`].
pub type Result<T> = std::result::Result<T, DriverError>;

/// Errors of the methods of [`crate::Driver`].
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// No driver answers on this machine: choose the simulator, or install one.
    #[error(
        "no CUDA driver: {library} {found}; install the NVIDIA driver, or choose the simulator with --device sim"
    )]
    NoDriver {
        /// Library that was looked for.
        library: &'static str,
        /// What happened instead, as a phrase that follows the library's name.
        found: &'static str,
    },
    /// The driver lacks a call: update it, or do without.
    #[error("{verb} is not supported here")]
    Unsupported {
        /// Verb of the failed call.
        verb: Verb,
        /// The driver's error number; 801 if the call was not even made.
        code: u32,
    },
    /// The device does not exist.
    #[error("{device} does not exist: the driver shows {count}")]
    NoSuchDevice {
        /// Ordinal that was requested.
        device: DeviceId,
        /// Number of devices present.
        count: u32,
    },
    /// The driver is busy; retry later.
    #[error("{verb}: the device is busy, try again")]
    NotReady {
        /// Verb of the failed call.
        verb: Verb,
    },
    /// The device (or the driver itself) is out of memory: free some and retry.
    #[error("{verb}: out of device memory ({wanted} wanted)")]
    OutOfMemory {
        /// Verb of the failed call.
        verb: Verb,
        /// Requested bytes; zero if the verb has no size.
        wanted: Bytes,
    },
    /// The call is forbidden while a stream capture is open: retry after it.
    #[error("{verb}: not allowed while a stream capture is open")]
    Capturing {
        /// Verb of the failed call.
        verb: Verb,
        /// The driver's error number; 900 if the call was not even made.
        code: u32,
    },
    /// The arguments are invalid: a bug in the caller.
    #[error("{verb} was refused at {address}: {reason}")]
    Refused {
        /// Verb of the failed call.
        verb: Verb,
        /// Address argument; zero if there is none.
        address: Address,
        /// Rule that the call breaks.
        reason: Refusal,
    },
    /// The context still holds live objects, which would go with it: destroy them first.
    #[error("the context of {device} cannot be released: GLake still has {living} in it; destroy them first")]
    ContextInUse {
        /// Device of the context.
        device: DeviceId,
        /// Live objects of the context.
        living: Living,
    },
    /// The awaited work can never complete (detected by the simulator only).
    #[error("{verb}: deadlock: no enqueued work can complete the wait")]
    Deadlock {
        /// Verb of the failed call.
        verb: Verb,
    },
    /// The context is lost and every further call fails. Report the error and restart the process.
    #[error("{verb}: CUDA error {code}; the context is lost and this process cannot use the GPU any more")]
    Sticky {
        /// Verb that reported the loss.
        verb: Verb,
        /// The driver's error number.
        code: u32,
    },
    /// A file descriptor for memory could not be created or opened, most likely because the process has none left: close some, or raise the
    /// limit.
    #[error(
        "{verb}: CUDA error {}, from the operating system: this process may open {limit} files, and seems to have no file descriptor left; \
         raise the limit (ulimit -n)",
        DriverError::OPERATING_SYSTEM
    )]
    TooManyFiles {
        /// Verb of the failed call.
        verb: Verb,
        /// Limit of open files of the process.
        limit: u64,
    },
    /// Any other error of the driver.
    #[error("{verb}: CUDA error {code}")]
    Failed {
        /// Verb of the failed call.
        verb: Verb,
        /// The driver's error number.
        code: u32,
    },
    /// The operating system refused a resource that the simulated device needs.
    #[error("{verb}: {source}")]
    Os {
        /// Verb of the failed call.
        verb: Verb,
        /// Error of the operating system.
        #[source]
        source: std::io::Error,
    },
}

/// Rule that a refused call breaks. CUDA reports the first group too; it leaves the second undefined, and the simulator catches it.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Refusal {
    #[error("a value is out of range or misaligned")]
    InvalidValue,
    #[error("there is no such device")]
    UnknownDevice,
    #[error("the context does not exist, or is not the one that the object belongs to")]
    UnknownContext,
    #[error("the handle names no live object")]
    UnknownHandle,
    #[error("the requested symbol or object was not found")]
    NotFound,
    #[error("the range is not inside one reservation")]
    NotReserved,
    #[error("the range is already mapped")]
    AlreadyMapped,
    #[error("the range is not, or not exactly, mapped")]
    NotMapped,
    #[error("the reservation still holds mappings")]
    StillMapped,
    #[error("the memory is neither registered nor known to the driver")]
    NotRegistered,

    #[error("the memory was accessed before its access rights were set")]
    NoAccess,
    #[error("the memory is mapped read-only")]
    ReadOnly,
    #[error("a peer accessed memory that it has no access to")]
    NoPeerAccess,
    #[error("enqueued work still uses the range")]
    InUse,
    #[error("another stream uses the range with no event between them")]
    Unordered,
    #[error("the memory was last used at another address, with no completion between")]
    Aliased,
    #[error("the handle was released twice")]
    ReleasedTwice,
    #[error("an event recorded in a capture was queried")]
    CapturedEvent,
}

impl Refusal {
    /// Returns CUDA's error number for a refused call of `verb`.
    fn code(self, verb: Verb) -> Option<u32> {
        match self {
            Refusal::InvalidValue | Refusal::NotReserved | Refusal::StillMapped => Some(1),
            Refusal::UnknownDevice => Some(101),
            Refusal::UnknownContext => Some(201),
            Refusal::AlreadyMapped if verb == Verb::HostRegister => Some(712),
            Refusal::AlreadyMapped => Some(208),
            Refusal::NotMapped => Some(211),
            Refusal::UnknownHandle => Some(400),
            Refusal::NotFound => Some(500),
            Refusal::NoPeerAccess => Some(705),
            Refusal::NotRegistered => Some(713),
            Refusal::CapturedEvent => Some(907),
            // A fault of the GPU, which the driver reports later and for the whole context.
            Refusal::NoAccess | Refusal::ReadOnly => Some(700),
            Refusal::InUse | Refusal::Unordered | Refusal::Aliased | Refusal::ReleasedTwice => None,
        }
    }
}

/// Number of live objects that a driver created in a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Living {
    /// Number of live streams.
    pub streams: u64,
    /// Number of live events.
    pub events: u64,
    /// Number of loaded modules.
    pub modules: u64,
    /// Allocations of the device's memory.
    pub extents: u64,
    /// Host ranges pinned in this context (though usable from every context).
    pub registrations: u64,
}

impl Living {
    /// Returns whether no object is alive.
    pub fn is_none(self) -> bool {
        self == Living::default()
    }
}

impl fmt::Display for Living {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = [
            (self.streams, "streams"),
            (self.events, "events"),
            (self.modules, "modules"),
            (self.extents, "extents"),
            (self.registrations, "ranges of pinned memory"),
        ];
        let mut shown = 0;
        for (count, what) in each.into_iter().filter(|(count, _)| *count > 0) {
            write!(f, "{}{count} {what}", if shown > 0 { ", " } else { "" })?;
            shown += 1;
        }
        if shown == 0 { f.write_str("nothing") } else { Ok(()) }
    }
}

impl DriverError {
    /// Returns whether the context is lost.
    pub fn is_sticky(&self) -> bool {
        matches!(self, DriverError::Sticky { .. })
    }

    /// Returns whether a named object no longer exists because its owner destroyed it.
    pub fn is_gone(&self) -> bool {
        matches!(self, DriverError::Refused { reason: Refusal::UnknownHandle, .. })
    }

    /// CUDA's number for an unsupported call; also used if the call was not made at all.
    pub const UNSUPPORTED: u32 = 801;
    /// CUDA's number for a call forbidden during a capture.
    pub const CAPTURING: u32 = 900;
    /// CUDA's number for a failed call of the operating system.
    pub const OPERATING_SYSTEM: u32 = 304;

    /// Returns the error for a number that has no variant of its own.
    pub fn of_number(verb: Verb, code: u32) -> DriverError {
        match (verb, code) {
            (Verb::Export | Verb::Import, DriverError::OPERATING_SYSTEM) => {
                DriverError::TooManyFiles { verb, limit: open_files() }
            }
            _ => DriverError::Failed { verb, code },
        }
    }

    /// Returns CUDA's number for the error, as returned by the driver or as it would be. `None` for errors that only the simulator or the
    /// operating system reports.
    pub fn code(&self) -> Option<u32> {
        match self {
            DriverError::Sticky { code, .. }
            | DriverError::Failed { code, .. }
            | DriverError::Unsupported { code, .. }
            | DriverError::Capturing { code, .. } => Some(*code),
            DriverError::TooManyFiles { .. } => Some(DriverError::OPERATING_SYSTEM),
            DriverError::NoDriver { .. } => Some(100),
            DriverError::NoSuchDevice { .. } => Some(101),
            DriverError::NotReady { .. } => Some(600),
            DriverError::OutOfMemory { .. } => Some(2),
            DriverError::Refused { verb, reason, .. } => reason.code(*verb),
            DriverError::ContextInUse { .. } | DriverError::Deadlock { .. } | DriverError::Os { .. } => None,
        }
    }

    /// Returns whether freeing memory and retrying may help.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, DriverError::OutOfMemory { .. })
    }
}

/// Returns the limit of open files of the process.
fn open_files() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: an out-parameter of this frame.
    let answer = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    if answer == 0 { limit.rlim_cur } else { 0 }
}
