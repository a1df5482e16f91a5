//! Outcome of calls: a status for the caller, and an error text kept for the thread.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ffi::{CString, c_char};

use glake_abi::{
    GLAKE_CLOSED, GLAKE_DRIVER, GLAKE_INVALID, GLAKE_OK, GLAKE_OUT_OF_MEMORY, GLAKE_TIMEOUT,
    GLAKE_UNAVAILABLE, GLAKE_UNSUPPORTED,
};
use glake_device::DriverError;
use glake_runtime::process::{ErrorKind, InTorchWords, ProcessError};
use glake_runtime::share::ShareError;
use glake_tiers::{PoolError, RegionError};
use glake_transfer::TransferError;

use crate::torch;

/// CUDA's error number for out of memory.
const OUT_OF_MEMORY: u32 = 2;

/// Failure of a call, with its reason.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: i32,
    text: String,
    /// The driver's error number, if any.
    code: Option<u32>,
}

thread_local! {
    static LAST: RefCell<Option<CString>> = const { RefCell::new(None) };
    static STATUS: Cell<i32> = const { Cell::new(GLAKE_OK) };
}

impl Failure {
    pub(crate) fn new(status: i32, text: impl ToString) -> Self {
        Failure { status, text: text.to_string(), code: None }
    }

    pub(crate) fn invalid(text: impl ToString) -> Self {
        Failure::new(GLAKE_INVALID, text)
    }

    pub(crate) fn closed(text: impl ToString) -> Self {
        Failure::new(GLAKE_CLOSED, text)
    }

    pub(crate) fn unavailable(text: impl ToString) -> Self {
        Failure::new(GLAKE_UNAVAILABLE, text)
    }

    /// Returns the driver's own error, negated.
    pub(crate) fn driver_error(&self) -> Option<i32> {
        self.code.and_then(|code| i32::try_from(code).ok()).map(|code| -code)
    }

    /// Creates the failure of a panic, which is a bug of GLake.
    pub(crate) fn panicked(panic: &(dyn Any + Send)) -> Self {
        let said = panic.downcast_ref::<String>().map(String::as_str);
        let said = said.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
        Failure::new(GLAKE_DRIVER, format_args!("GLake failed: {said}; please report this"))
    }

    /// Keeps the text for the thread and returns the status. An exiting thread keeps nothing.
    #[cold]
    pub(crate) fn keep(self) -> i32 {
        let text = CString::new(self.text.replace('\0', " ")).unwrap_or_default();
        let _ = LAST.try_with(|last| last.replace(Some(text)));
        let _ = STATUS.try_with(|last| last.set(self.status));
        self.status
    }

    /// Logs the failure, if the caller cannot receive it.
    pub(crate) fn log(&self) {
        tracing::error!(target: "glake::ffi", "{}", self.text);
    }
}

impl From<ProcessError> for Failure {
    #[cold]
    fn from(error: ProcessError) -> Failure {
        let status = Failure::status_of(&error);
        let code = match status {
            GLAKE_OUT_OF_MEMORY => Some(OUT_OF_MEMORY),
            _ => Failure::driver_error_of(&error).and_then(DriverError::code),
        };
        let text = match &error {
            ProcessError::OutOfMemory(shortage) if torch::is_loaded() => InTorchWords(shortage).to_string(),
            error => error.to_string(),
        };
        Failure { status, text, code }
    }
}

impl Failure {
    /// Returns the driver error behind an error.
    fn driver_error_of(error: &ProcessError) -> Option<&DriverError> {
        match error {
            ProcessError::Driver(error)
            | ProcessError::LeavesBlock { source: error, .. }
            | ProcessError::Transfer(TransferError::Driver(error))
            | ProcessError::Pool(PoolError::Driver(error))
            | ProcessError::Region(RegionError::Pool(PoolError::Driver(error))) => Some(error),
            ProcessError::Partly { source, .. } => Failure::driver_error_of(source),
            _ => None,
        }
    }

    fn status_of(error: &ProcessError) -> i32 {
        use ProcessError as E;
        match error {
            E::OutOfMemory(_) => GLAKE_OUT_OF_MEMORY,
            E::Pool(pool) | E::Share(ShareError::Pool(pool)) => Failure::status_of_pool(pool),
            E::Partly { source, .. } => Failure::status_of(source),
            E::NoDriver { .. } | E::Topology(_) => GLAKE_UNAVAILABLE,
            E::Agent(error) if error.is_misuse() => GLAKE_INVALID,
            E::Agent(_) => GLAKE_UNAVAILABLE,
            E::Driver(DriverError::Unsupported { .. }) => GLAKE_UNSUPPORTED,
            E::Region(region) => Failure::status_of_region(region),
            E::Host(host) if host.is_shortage() => GLAKE_OUT_OF_MEMORY,
            E::NoRoom { .. } => GLAKE_OUT_OF_MEMORY,
            E::Closed { .. } => GLAKE_CLOSED,
            E::HeldTooLong { .. } | E::StillUsed { .. } | E::StillComing { .. } => GLAKE_TIMEOUT,
            E::ForeignContext | E::OffloadCaptured { .. } => GLAKE_UNSUPPORTED,
            E::Driver(_) | E::LeavesBlock { .. } | E::NoThread { .. } | E::Host(_) => GLAKE_DRIVER,
            E::Refused { kind: ErrorKind::Closed, .. } => GLAKE_CLOSED,
            E::Refused { kind: ErrorKind::Timeout, .. } => GLAKE_TIMEOUT,
            E::Refused { kind: ErrorKind::Unsupported, .. } => GLAKE_UNSUPPORTED,
            E::Refused { kind: ErrorKind::Lost, .. } => GLAKE_DRIVER,
            E::Transfer(TransferError::Driver(DriverError::Unsupported { .. })) => GLAKE_UNSUPPORTED,
            E::Transfer(TransferError::SizesDiffer { .. }) => GLAKE_INVALID,
            E::Transfer(_) => GLAKE_DRIVER,
            E::Share(
                ShareError::NoSocket { .. }
                | ShareError::TooManyFiles { .. }
                | ShareError::TooManyFilesThere { .. }
                | ShareError::Crowded { .. }
                | ShareError::NotGiven { .. }
                | ShareError::Broken { .. },
            ) => GLAKE_DRIVER,
            _ => GLAKE_INVALID,
        }
    }

    fn status_of_region(error: &RegionError) -> i32 {
        match error {
            RegionError::Pool(pool) => Failure::status_of_pool(pool),
            RegionError::Host(host) if host.is_shortage() => GLAKE_OUT_OF_MEMORY,
            RegionError::Stopped { source, .. } => Failure::status_of_region(source),
            RegionError::Peer { .. } => GLAKE_OUT_OF_MEMORY,
            RegionError::NotSealable { .. }
            | RegionError::Sealed { .. }
            | RegionError::Captured { .. }
            | RegionError::OwnMemory { .. } => GLAKE_INVALID,
            _ => GLAKE_DRIVER,
        }
    }

    fn status_of_pool(error: &PoolError) -> i32 {
        match error {
            PoolError::Driver(DriverError::Unsupported { .. })
            | PoolError::NotExportable { .. }
            | PoolError::Plain { .. }
            | PoolError::NoDescriptors { .. } => GLAKE_UNSUPPORTED,
            PoolError::Driver(_) | PoolError::Poisoned { .. } => GLAKE_DRIVER,
            _ if error.is_out_of_memory() => GLAKE_OUT_OF_MEMORY,
            _ => GLAKE_INVALID,
        }
    }
}

/// Returns the text of the calling thread's last failed call; empty before the first. Valid until the thread's next failed call.
#[unsafe(no_mangle)]
pub extern "C" fn glake_last_error() -> *const c_char {
    let last = LAST.try_with(|last| last.borrow().as_ref().map(|text| text.as_ptr()));
    last.ok().flatten().unwrap_or(c"".as_ptr())
}

/// Returns the status of the calling thread's last failed call, for calls that return no status; `GLAKE_OK` before the first.
#[unsafe(no_mangle)]
pub extern "C" fn glake_last_status() -> i32 {
    STATUS.try_with(Cell::get).unwrap_or(GLAKE_OK)
}

/// Returns the same text as `glake_last_error`.
#[unsafe(no_mangle)]
pub extern "C" fn gmlake_last_error() -> *const c_char {
    glake_last_error()
}
