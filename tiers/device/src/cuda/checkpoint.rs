//! Checkpoints of other processes by the driver (CUDA 12.8, driver 570 or later). The calls need no context.
//!
//! Driver 580 restores a process at the first attempt or never: a restore without room (error 2) leaves the process checkpointed, and every
//! later attempt fails (error 304).

use std::ffi::{c_int, c_uint};
use std::fmt;
use std::time::Duration;

use cudarc::driver::sys;
use glake_meter::checkpoint::{CheckpointError, ProcessCheckpoint, ProcessState, Step};

use super::api::{Api, Code};

/// Signature of a checkpoint call: a process id and its arguments.
type Call<A> = unsafe extern "C" fn(c_int, *mut A) -> c_uint;

/// Checkpoint interface of this machine's driver, for processes of this user. Creates no context.
pub struct CudaCheckpoint {
    state: Call<c_uint>,
    lock: Call<sys::CUcheckpointLockArgs>,
    checkpoint: Call<sys::CUcheckpointCheckpointArgs>,
    restore: Call<sys::CUcheckpointRestoreArgs>,
    unlock: Call<sys::CUcheckpointUnlockArgs>,
}

impl CudaCheckpoint {
    /// Opens the driver and keeps it open, so that idle GPUs stay initialised for a restore.
    ///
    /// # Errors
    /// [`CheckpointError::NoDriver`] if there is no driver or it is too old.
    pub fn open() -> Result<CudaCheckpoint, CheckpointError> {
        let none = |found: &str| CheckpointError::NoDriver { found: found.to_owned() };
        let api = Api::open().ok_or_else(|| none("libcuda.so.1 could not be loaded"))?;
        // SAFETY: the flags must be zero, and are.
        match unsafe { api.cuInit(0) } {
            Code(0) => {}
            Code::NO_DEVICE => return Err(none("libcuda.so.1 finds no GPU")),
            Code::STUB_LIBRARY => return Err(none("libcuda.so.1 is a stub for linking only")),
            Code::MISSING => return Err(none("libcuda.so.1 is not a CUDA driver")),
            Code(code) => return Err(none(&format!("libcuda.so.1 does not start: CUDA error {code}"))),
        }
        // SAFETY: `Api::open` has seen the library; these are the signatures of CUDA 12.8's header and later ones.
        unsafe { CudaCheckpoint::find() }.ok_or_else(|| none("libcuda.so.1 is of an older driver"))
    }

    /// # Safety
    /// libcuda must be loadable.
    unsafe fn find() -> Option<CudaCheckpoint> {
        // SAFETY: the caller's promise.
        let library = unsafe { sys::culib() };
        macro_rules! call {
            ($name:literal) => {
                // SAFETY: each name means the signature of the field that it fills.
                *unsafe { library.get(concat!($name, "\0").as_bytes()) }.ok()?
            };
        }
        Some(CudaCheckpoint {
            state: call!("cuCheckpointProcessGetState"),
            lock: call!("cuCheckpointProcessLock"),
            checkpoint: call!("cuCheckpointProcessCheckpoint"),
            restore: call!("cuCheckpointProcessRestore"),
            unlock: call!("cuCheckpointProcessUnlock"),
        })
    }
}

impl ProcessCheckpoint for CudaCheckpoint {
    fn state(&self, pid: u32) -> Result<ProcessState, CheckpointError> {
        let mut state = 0;
        // SAFETY: an out-parameter of this frame, of the enum's size.
        match unsafe { (self.state)(number(pid), &raw mut state) } {
            0 => {}
            // The process is unknown to the driver or has not initialised it.
            1 | 3 | 304 => return Err(CheckpointError::NoContext { pid }),
            code => return Err(refused(pid, Step::State, code)),
        }
        Ok(match state {
            // Also reported for a process without a context.
            0 => ProcessState::Running,
            1 => ProcessState::Locked,
            2 => ProcessState::Checkpointed,
            4 | 5 => ProcessState::Moving,
            _ => ProcessState::Failed,
        })
    }

    fn lock(&self, pid: u32, within: Duration) -> Result<(), CheckpointError> {
        // Zero would mean no timeout.
        let timeout = u32::try_from(within.as_millis()).unwrap_or(u32::MAX).max(1);
        let mut arguments = sys::CUcheckpointLockArgs { timeoutMs: timeout, reserved0: 0, reserved1: [0; 7] };
        // SAFETY: arguments of this frame, with reserved fields zero.
        match unsafe { (self.lock)(number(pid), &raw mut arguments) } {
            600 => Err(CheckpointError::Late { pid, within }),
            code => done(pid, Step::Lock, code),
        }
    }

    fn checkpoint(&self, pid: u32) -> Result<(), CheckpointError> {
        let mut arguments = sys::CUcheckpointCheckpointArgs { reserved: [0; 8] };
        // SAFETY: as above.
        done(pid, Step::Checkpoint, unsafe { (self.checkpoint)(number(pid), &raw mut arguments) })
    }

    fn restore(&self, pid: u32) -> Result<(), CheckpointError> {
        let mut arguments = sys::CUcheckpointRestoreArgs {
            gpuPairs: std::ptr::null_mut(),
            gpuPairsCount: 0,
            reserved: [0; 44],
            reserved1: 0,
        };
        // SAFETY: as above; without pairs every GPU is restored to itself.
        match unsafe { (self.restore)(number(pid), &raw mut arguments) } {
            2 => Err(CheckpointError::NoRoom { pid }),
            code => done(pid, Step::Restore, code),
        }
    }

    fn unlock(&self, pid: u32) -> Result<(), CheckpointError> {
        let mut arguments = sys::CUcheckpointUnlockArgs { reserved: [0; 8] };
        // SAFETY: as above.
        done(pid, Step::Unlock, unsafe { (self.unlock)(number(pid), &raw mut arguments) })
    }
}

impl fmt::Debug for CudaCheckpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaCheckpoint").finish_non_exhaustive()
    }
}

fn number(pid: u32) -> c_int {
    // The kernel's process ids are below 2^22.
    c_int::try_from(pid).unwrap_or(c_int::MAX)
}

fn done(pid: u32, step: Step, code: c_uint) -> Result<(), CheckpointError> {
    if code == 0 { Ok(()) } else { Err(refused(pid, step, code)) }
}

/// Maps an error code; 801 (not supported) is what CUDA's documentation names for IPC, MPS and others.
fn refused(pid: u32, step: Step, code: c_uint) -> CheckpointError {
    match code {
        801 => CheckpointError::Unsupported { pid, step, code },
        code => CheckpointError::Failed { pid, step, code },
    }
}
