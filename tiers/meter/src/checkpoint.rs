//! The driver's checkpoint of another process: moves its GPU memory and context to host memory; its driver calls block until it is
//! restored.
//!
//! ```text
//!            lock               checkpoint
//!  running ───────► locked ─────────────────► checkpointed
//!     ▲     unlock   │  ▲        restore           │
//!     └──────────────┘  └──────────────────────────┘
//! ```
//!
//! The caller needs no context. Both directions begin by querying the state, so that they can be repeated after an earlier caller was
//! killed at any point: [`put_away`] and [`bring_back`] do that.

use std::time::Duration;

/// State of a process as reported by the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// Running, not locked or checkpointed.
    Running,
    /// Driver calls block; all memory is still on the GPU.
    Locked,
    /// Driver calls block; nothing is on any GPU.
    Checkpointed,
    /// In transition on behalf of another caller.
    Moving,
    /// Failed for good: the process must be restarted.
    Failed,
}

/// Transition of a process's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Query of the state.
    State,
    /// Transition from running to locked.
    Lock,
    /// Transition from locked to checkpointed.
    Checkpoint,
    /// Transition from checkpointed to locked.
    Restore,
    /// Transition from locked to running.
    Unlock,
}

/// Error of a transition.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// Missing driver support on this machine.
    #[error("the driver cannot checkpoint processes: {found}; this needs CUDA 12.8 and driver 570 or later")]
    NoDriver {
        /// Driver that was found, if any.
        found: String,
    },
    /// Process unknown to the driver.
    #[error("process {pid} has no context on a GPU: only one that uses GPUs can be checkpointed")]
    NoContext {
        /// ID of the process.
        pid: u32,
    },
    /// Driver calls of the process that did not end in time.
    #[error(
        "process {pid} was not locked within {within:?}: a call of the driver, or work on a GPU, did not end; try \
         again, or give more time"
    )]
    Late {
        /// ID of the process.
        pid: u32,
        /// Timeout that was given.
        within: Duration,
    },
    /// GPU memory that was insufficient for a restore. The driver refuses all later attempts.
    #[error("the GPUs of process {pid} do not have enough free memory to restore it")]
    NoRoom {
        /// ID of the process.
        pid: u32,
    },
    /// Restore that failed permanently.
    #[error(
        "{why}: process {pid} is lost, for this driver does not restore one whose restore has failed once; end it, \
         and start it again"
    )]
    Lost {
        /// ID of the process.
        pid: u32,
        /// Error of the driver.
        why: Box<CheckpointError>,
    },
    /// Process with resources that the driver cannot checkpoint.
    #[error(
        "the driver does not {step} process {pid} (CUDA error {code}): it may share memory with other processes (CUDA \
         IPC, NCCL), use MPS, or be a child of one that uses GPUs"
    )]
    Unsupported {
        /// ID of the process.
        pid: u32,
        /// Step that was requested.
        step: Step,
        /// Error code of the driver.
        code: u32,
    },
    /// Process in an unexpected state.
    #[error("process {pid} is {found}, so that it cannot be {}: {todo}", .step.done())]
    State {
        /// ID of the process.
        pid: u32,
        /// Step that was requested.
        step: Step,
        /// State that was found.
        found: ProcessState,
        /// Advice to the user.
        todo: &'static str,
    },
    /// Process that has exited and whose ID was reused.
    #[error("process {pid} is a different process by now: the intended one has ended")]
    Another {
        /// ID of the process.
        pid: u32,
    },
    /// Process that should run and is not known to.
    #[error(
        "{why}; and process {pid} is not known to run ({found}): its calls wait until glake checkpoint {pid} --restore \
         succeeds"
    )]
    Stays {
        /// ID of the process.
        pid: u32,
        /// State that was found, or the reason why it is unknown.
        found: String,
        /// Reason why it was not checkpointed.
        why: Box<CheckpointError>,
    },
    /// Other error of the driver.
    #[error("the driver did not {step} process {pid}: CUDA error {code}")]
    Failed {
        /// ID of the process.
        pid: u32,
        /// Step that was requested.
        step: Step,
        /// Error code of the driver.
        code: u32,
    },
    /// Inaccessible file of shared simulated GPUs.
    #[error("process {pid} cannot be looked up: {source}")]
    Os {
        /// ID of the process.
        pid: u32,
        /// Error of the operating system.
        source: std::io::Error,
    },
}

/// Driver interface for checkpointing other processes.
pub trait ProcessCheckpoint: Send + Sync {
    /// Returns the state of a process. A driver also reports [`ProcessState::Running`] for a process without a context.
    ///
    /// # Errors
    /// [`CheckpointError::NoContext`] if the driver does not know the process.
    fn state(&self, pid: u32) -> Result<ProcessState, CheckpointError>;

    /// Blocks new driver calls of the process and waits for running ones.
    ///
    /// # Errors
    /// [`CheckpointError::Late`] after `within`; the process keeps running.
    fn lock(&self, pid: u32, within: Duration) -> Result<(), CheckpointError>;

    /// Moves the GPU memory of a locked process to host memory.
    ///
    /// # Errors
    /// [`CheckpointError`]; the process stays locked with its memory.
    fn checkpoint(&self, pid: u32) -> Result<(), CheckpointError>;

    /// Moves the memory of a checkpointed process back to its GPUs; the process is locked afterwards. Call it only if the GPUs have enough
    /// free memory.
    ///
    /// # Errors
    /// [`CheckpointError::NoRoom`]: the process stays checkpointed, and a driver of version 580 answers each later call with error 304,
    /// however
    /// much memory is free.
    fn restore(&self, pid: u32) -> Result<(), CheckpointError>;

    /// Resumes the driver calls of a locked process.
    ///
    /// # Errors
    /// [`CheckpointError`]; the process stays locked.
    fn unlock(&self, pid: u32) -> Result<(), CheckpointError>;
}

/// Locks and checkpoints a process, whatever its state. Unlocks it again if it cannot be checkpointed.
///
/// # Errors
/// [`CheckpointError::Stays`] if it is not known to run; otherwise it runs or is unchanged.
pub fn put_away(driver: &dyn ProcessCheckpoint, pid: u32, within: Duration) -> Result<(), CheckpointError> {
    put_away_if(driver, pid, within, &|| true)
}

/// Like [`put_away`], provided that the ID still belongs to the intended process, also after it was locked.
///
/// # Errors
/// Like [`put_away`]; [`CheckpointError::Another`] if it does not.
pub fn put_away_if(
    driver: &dyn ProcessCheckpoint,
    pid: u32,
    within: Duration,
    is_meant: &dyn Fn() -> bool,
) -> Result<(), CheckpointError> {
    let refused = |found, todo| Err(CheckpointError::State { pid, step: Step::Checkpoint, found, todo });
    let found = driver.state(pid)?;
    if !is_meant() {
        return Err(CheckpointError::Another { pid });
    }
    match found {
        ProcessState::Checkpointed => return Ok(()),
        ProcessState::Failed => return refused(ProcessState::Failed, "start it again"),
        ProcessState::Moving => return refused(ProcessState::Moving, "wait until that is over"),
        // An earlier caller locked the process and was killed.
        ProcessState::Locked => {}
        ProcessState::Running => driver.lock(pid, within).map_err(|why| let_run(driver, pid, why))?,
    }
    if !is_meant() {
        return Err(let_run(driver, pid, CheckpointError::Another { pid }));
    }
    driver.checkpoint(pid).map_err(|why| let_run(driver, pid, why))
}

/// Resumes a process that could not be checkpointed. Returns `why`, or [`CheckpointError::Stays`] if it cannot be resumed.
fn let_run(driver: &dyn ProcessCheckpoint, pid: u32, why: CheckpointError) -> CheckpointError {
    // The result depends on whether the process runs afterwards.
    for _ in 0..2 {
        if matches!(driver.state(pid), Ok(ProcessState::Locked)) {
            let _ = driver.unlock(pid);
        }
    }
    let found = match driver.state(pid) {
        Ok(ProcessState::Running) | Err(CheckpointError::NoContext { .. }) => return why,
        Ok(found) => found.to_string(),
        Err(error) => error.to_string(),
    };
    CheckpointError::Stays { pid, found, why: Box::new(why) }
}

/// `CUDA_ERROR_OPERATING_SYSTEM`, the driver's answer to a restore after a failed one.
const RESTORE_FAILED_BEFORE: u32 = 304;

/// Restores and unlocks a process, whatever its state. No effect on a running process, or on one that the driver does not know and that has
/// nothing to lock. The caller has checked that its GPUs have enough free memory.
///
/// # Errors
/// [`CheckpointError::Lost`] if it cannot be restored any more; otherwise it stays checkpointed or locked.
pub fn bring_back(driver: &dyn ProcessCheckpoint, pid: u32) -> Result<(), CheckpointError> {
    let refused = |found, todo| CheckpointError::State { pid, step: Step::Restore, found, todo };
    let lost = |why| CheckpointError::Lost { pid, why: Box::new(why) };
    match driver.state(pid) {
        Ok(ProcessState::Running) | Err(CheckpointError::NoContext { .. }) => return Ok(()),
        Ok(ProcessState::Failed) => return Err(lost(refused(ProcessState::Failed, "start it again"))),
        Ok(ProcessState::Moving) => return Err(refused(ProcessState::Moving, "wait until that is over")),
        Ok(ProcessState::Locked) => {}
        Ok(ProcessState::Checkpointed) => driver.restore(pid).map_err(|why| match why {
            CheckpointError::NoRoom { .. } | CheckpointError::Failed { code: RESTORE_FAILED_BEFORE, .. } => {
                lost(why)
            }
            why => why,
        })?,
        Err(error) => return Err(error),
    }
    let Err(error) = driver.unlock(pid) else { return Ok(()) };
    match driver.state(pid) {
        Ok(ProcessState::Running) => Ok(()),
        Ok(ProcessState::Locked) => driver.unlock(pid),
        _ => Err(error),
    }
}

impl Step {
    fn done(self) -> &'static str {
        match self {
            Step::State => "looked up",
            Step::Lock => "locked",
            Step::Checkpoint => "checkpointed",
            Step::Restore => "restored",
            Step::Unlock => "unlocked",
        }
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Step::State => "look up",
            Step::Lock => "lock",
            Step::Checkpoint => "checkpoint",
            Step::Restore => "restore",
            Step::Unlock => "unlock",
        })
    }
}

impl ProcessState {
    /// Returns the name of the state.
    pub fn name(self) -> &'static str {
        match self {
            ProcessState::Running => "running",
            ProcessState::Locked => "locked",
            ProcessState::Checkpointed => "checkpointed",
            ProcessState::Moving => "on its way",
            ProcessState::Failed => "failed",
        }
    }
}

impl std::fmt::Display for ProcessState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Model of one process and of the calls on it.
    struct Model {
        state: Mutex<ProcessState>,
        fails: Option<Step>,
        /// Error code of the failing step.
        code: u32,
        unlocks: bool,
        /// Whether a failing lock still takes effect.
        locks_late: bool,
        asked: Mutex<Vec<Step>>,
    }

    impl Model {
        fn new(state: ProcessState, fails: Option<Step>) -> Self {
            let (unlocks, locks_late) = (true, false);
            Model { state: Mutex::new(state), fails, code: 999, unlocks, locks_late, asked: Mutex::default() }
        }

        fn step(
            &self,
            pid: u32,
            step: Step,
            from: ProcessState,
            to: ProcessState,
        ) -> Result<(), CheckpointError> {
            self.asked.lock().unwrap().push(step);
            let mut state = self.state.lock().unwrap();
            assert_eq!(*state, from, "{step}");
            if self.fails == Some(step) || step == Step::Unlock && !self.unlocks {
                if step == Step::Lock && self.locks_late {
                    *state = to;
                }
                return Err(match self.code {
                    2 => CheckpointError::NoRoom { pid },
                    code => CheckpointError::Failed { pid, step, code },
                });
            }
            *state = to;
            Ok(())
        }

        fn is(&self) -> ProcessState {
            *self.state.lock().unwrap()
        }
    }

    impl ProcessCheckpoint for Model {
        fn state(&self, _: u32) -> Result<ProcessState, CheckpointError> {
            Ok(self.is())
        }
        fn lock(&self, pid: u32, _: Duration) -> Result<(), CheckpointError> {
            self.step(pid, Step::Lock, ProcessState::Running, ProcessState::Locked)
        }
        fn checkpoint(&self, pid: u32) -> Result<(), CheckpointError> {
            self.step(pid, Step::Checkpoint, ProcessState::Locked, ProcessState::Checkpointed)
        }
        fn restore(&self, pid: u32) -> Result<(), CheckpointError> {
            self.step(pid, Step::Restore, ProcessState::Checkpointed, ProcessState::Locked)
        }
        fn unlock(&self, pid: u32) -> Result<(), CheckpointError> {
            self.step(pid, Step::Unlock, ProcessState::Locked, ProcessState::Running)
        }
    }

    const ALL: [ProcessState; 5] = [
        ProcessState::Running,
        ProcessState::Locked,
        ProcessState::Checkpointed,
        ProcessState::Moving,
        ProcessState::Failed,
    ];

    #[test]
    fn both_directions_work_from_every_state() {
        for state in ALL {
            let is_settled = !matches!(state, ProcessState::Moving | ProcessState::Failed);
            let model = Model::new(state, None);
            assert_eq!(put_away(&model, 7, Duration::ZERO).is_ok(), is_settled, "{state}");
            assert_eq!(model.is(), if is_settled { ProcessState::Checkpointed } else { state });
            let model = Model::new(state, None);
            assert_eq!(bring_back(&model, 7).is_ok(), is_settled, "{state}");
            assert_eq!(model.is(), if is_settled { ProcessState::Running } else { state });
        }
    }

    #[test]
    fn a_reused_process_id_is_left_alone() {
        for (meant, asked) in [(0, vec![]), (1, vec![Step::Lock, Step::Unlock])] {
            let model = Model::new(ProcessState::Running, None);
            let left = std::cell::Cell::new(meant);
            let is_meant = || left.replace(left.get() - 1) > 0;
            let error = put_away_if(&model, 7, Duration::ZERO, &is_meant).unwrap_err();
            assert!(matches!(error, CheckpointError::Another { pid: 7 }), "{error}");
            assert_eq!((model.is(), &*model.asked.lock().unwrap()), (ProcessState::Running, &asked));
        }
    }

    #[test]
    fn failures_leave_a_running_or_restorable_process() {
        let after = |state, fails, out: bool| {
            let model = Model::new(state, Some(fails));
            let done = if out { put_away(&model, 7, Duration::ZERO) } else { bring_back(&model, 7) };
            assert!(done.is_err());
            model.is()
        };
        assert_eq!(after(ProcessState::Running, Step::Lock, true), ProcessState::Running);
        assert_eq!(after(ProcessState::Running, Step::Checkpoint, true), ProcessState::Running);
        assert_eq!(after(ProcessState::Locked, Step::Checkpoint, true), ProcessState::Running);
        // The error says that the process does not run.
        let model = Model { unlocks: false, ..Model::new(ProcessState::Running, Some(Step::Checkpoint)) };
        let stays = put_away(&model, 7, Duration::ZERO).unwrap_err();
        assert!(matches!(stays, CheckpointError::Stays { .. }) && model.is() == ProcessState::Locked);
        assert!(stays.to_string().contains("is not known to run (locked)"), "{stays}");
        // The lock had taken effect nevertheless.
        let model = Model { locks_late: true, ..Model::new(ProcessState::Running, Some(Step::Lock)) };
        assert!(matches!(put_away(&model, 7, Duration::ZERO), Err(CheckpointError::Failed { .. })));
        assert_eq!(model.is(), ProcessState::Running);
        assert_eq!(after(ProcessState::Checkpointed, Step::Restore, false), ProcessState::Checkpointed);
        assert_eq!(after(ProcessState::Checkpointed, Step::Unlock, false), ProcessState::Locked);
        let text =
            put_away(&Model::new(ProcessState::Failed, None), 7, Duration::ZERO).unwrap_err().to_string();
        assert_eq!(text, "process 7 is failed, so that it cannot be checkpointed: start it again");
    }

    #[test]
    fn failed_restores_lose_the_process() {
        for (code, is_lost) in [(2, true), (304, true), (999, false)] {
            let checkpointed = Model::new(ProcessState::Checkpointed, Some(Step::Restore));
            let error = bring_back(&Model { code, ..checkpointed }, 7).unwrap_err();
            let is_final = matches!(error, CheckpointError::Lost { .. });
            assert_eq!(is_final, is_lost, "{error}");
            let advice = "process 7 is lost, for this driver does not restore one whose restore has failed once; end \
                          it, and start it again";
            assert_eq!(error.to_string().ends_with(advice), is_lost, "{error}");
        }
        // The result of an unlock does not mean that the process is lost.
        let locked = Model::new(ProcessState::Locked, Some(Step::Unlock));
        let error = bring_back(&Model { code: 304, ..locked }, 7).unwrap_err();
        assert!(matches!(error, CheckpointError::Failed { step: Step::Unlock, .. }), "{error}");
        let failed = bring_back(&Model::new(ProcessState::Failed, None), 7).unwrap_err();
        assert!(matches!(failed, CheckpointError::Lost { .. }), "{failed}");
    }
}
