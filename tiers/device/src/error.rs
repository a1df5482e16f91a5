//! What a driver answers when it does not do what was asked. A variant is what the caller can do about it.

use std::fmt;

use crate::{Address, DeviceId, Verb};
use glake_units::Bytes;

/// The outcome of a verb.
pub type Result<T> = std::result::Result<T, DriverError>;

/// Why a verb was not done.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// No driver answers on this machine: choose the simulator, or install one.
    #[error(
        "no CUDA driver: {library} {found}; install the NVIDIA driver, or choose the simulator with --device sim"
    )]
    NoDriver {
        /// What was looked for.
        library: &'static str,
        /// What was found instead.
        found: &'static str,
    },
    /// The driver lacks a call that this needs: update it, or do without.
    #[error("{verb} is not supported here")]
    Unsupported {
        /// What was asked.
        verb: Verb,
        /// The driver's error number; 801 where the call was not even made.
        code: u32,
    },
    /// There is no such device.
    #[error("{device} does not exist: the driver shows {count}")]
    NoSuchDevice {
        /// What was asked for.
        device: DeviceId,
        /// How many there are.
        count: u32,
    },
    /// Not now: try again.
    #[error("{verb}: the device is busy, try again")]
    NotReady {
        /// What was asked.
        verb: Verb,
    },
    /// The device (or the driver itself) has no memory left: give some back and try again.
    #[error("{verb}: out of device memory ({wanted} wanted)")]
    OutOfMemory {
        /// What was asked.
        verb: Verb,
        /// How much; zero where the verb names no size.
        wanted: Bytes,
    },
    /// The call is not allowed while a stream capture is open: ask again after it.
    #[error("{verb}: not while a stream capture is open")]
    Capturing {
        /// What was asked.
        verb: Verb,
        /// The driver's error number; 900 where the call was not even made.
        code: u32,
    },
    /// The arguments are wrong: a bug of the caller.
    #[error("{verb} was refused at {address}: {reason}")]
    Refused {
        /// What was asked.
        verb: Verb,
        /// Where, zero if nowhere.
        address: Address,
        /// Which rule it breaks.
        reason: Refusal,
    },
    /// What was made in a context lives, and goes with it: destroy that first.
    #[error("the context of {device} is not given back: it holds {living} of ours; destroy them first")]
    ContextInUse {
        /// Whose context.
        device: DeviceId,
        /// What lives.
        living: Living,
    },
    /// Nothing can ever complete what is being waited for (only the simulator can tell).
    #[error("{verb}: waits for work that nothing enqueued will complete")]
    Deadlock {
        /// What was asked.
        verb: Verb,
    },
    /// The context is lost: every further call fails. Report it as itself and start the process again.
    #[error("{verb}: CUDA error {code}; the context is lost and this process cannot use the GPU any more")]
    Sticky {
        /// The verb that was told.
        verb: Verb,
        /// The driver's error number.
        code: u32,
    },
    /// A descriptor of memory could not be made or opened, most likely because the process has none left: close some, or raise its limit.
    #[error(
        "{verb}: CUDA error {}, from the operating system: this process may open {limit} files, and seems to have no file descriptor left; \
         raise the limit (ulimit -n)",
        DriverError::OPERATING_SYSTEM
    )]
    TooManyFiles {
        /// What was asked.
        verb: Verb,
        /// The process's limit of open files.
        limit: u64,
    },
    /// Another error of the driver.
    #[error("{verb}: CUDA error {code}")]
    Failed {
        /// What was asked.
        verb: Verb,
        /// The driver's error number.
        code: u32,
    },
    /// The operating system refused what the simulated device is made of.
    #[error("{verb}: {source}")]
    Os {
        /// What was asked.
        verb: Verb,
        /// The operating system's answer.
        #[source]
        source: std::io::Error,
    },
}

/// The rule that a refused call breaks; the first group CUDA reports too, the second it leaves undefined and
/// the simulator catches.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum Refusal {
    #[error("a value is out of range or misaligned")]
    InvalidValue,
    #[error("there is no such device")]
    UnknownDevice,
    #[error("the context is not there, or not the one that it must be")]
    UnknownContext,
    #[error("the handle names nothing that is alive")]
    UnknownHandle,
    #[error("nothing of this name is there")]
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

    #[error("the memory was touched before its access was set")]
    NoAccess,
    #[error("the memory is mapped read-only")]
    ReadOnly,
    #[error("a peer touched memory that it was given no access to")]
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
    /// CUDA's number for it, of a call of a verb.
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
            // A fault of the GPU, which the driver tells of later and of the whole context.
            Refusal::NoAccess | Refusal::ReadOnly => Some(700),
            Refusal::InUse | Refusal::Unordered | Refusal::Aliased | Refusal::ReleasedTwice => None,
        }
    }
}

/// How much lives of what a driver made in a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Living {
    /// Streams.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Modules.
    pub modules: u64,
    /// Allocations of the device's memory.
    pub extents: u64,
    /// Ranges of host memory that were pinned in it, though for every context.
    pub registrations: u64,
}

impl Living {
    /// Whether nothing does.
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
    /// Whether the context is lost.
    pub fn is_sticky(&self) -> bool {
        matches!(self, DriverError::Sticky { .. })
    }

    /// What was named is not there any more: its owner destroyed it.
    pub fn is_gone(&self) -> bool {
        matches!(self, DriverError::Refused { reason: Refusal::UnknownHandle, .. })
    }

    /// Nothing was made that the driver would have to be asked for: what it calls not supported.
    pub const UNSUPPORTED: u32 = 801;
    /// Not allowed while a stream is captured.
    pub const CAPTURING: u32 = 900;
    /// A call of the operating system failed.
    pub const OPERATING_SYSTEM: u32 = 304;

    /// The error of a number for which there is no more general one.
    pub fn of_number(verb: Verb, code: u32) -> DriverError {
        match (verb, code) {
            (Verb::Export | Verb::Import, DriverError::OPERATING_SYSTEM) => {
                DriverError::TooManyFiles { verb, limit: open_files() }
            }
            _ => DriverError::Failed { verb, code },
        }
    }

    /// CUDA's number for it: the one that the driver answered, or the one that it would have. `None` where it has none: what only the
    /// simulator can tell, and what the operating system refused.
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

    /// Whether giving memory back and asking again may help.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, DriverError::OutOfMemory { .. })
    }
}

/// The process's limit of open files.
fn open_files() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: an out-parameter of this frame.
    let answer = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    if answer == 0 { limit.rlim_cur } else { 0 }
}
