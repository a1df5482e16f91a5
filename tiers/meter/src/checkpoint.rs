//! The driver's checkpoint of another process: what it has on GPUs goes to host memory, its context too, and its calls
//! of the driver wait until it is restored.
//!
//! ```text
//!            lock               checkpoint
//!  running ───────► locked ─────────────────► checkpointed
//!     ▲     unlock   │  ▲        restore           │
//!     └──────────────┘  └──────────────────────────┘
//! ```
//!
//! Whoever asks needs no context. Either way begins with the state that the driver tells, so that it can be gone again
//! after whoever went it before was killed anywhere: [`put_away`] and [`bring_back`] do that.

use std::time::Duration;

/// What the driver says of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// Its calls run.
    Running,
    /// Its calls wait; it has all that it had.
    Locked,
    /// Its calls wait, and it has nothing on any GPU.
    Checkpointed,
    /// It is on its way from one of these to another, for somebody else.
    Moving,
    /// It cannot be brought back: it has to be started again.
    Failed,
}

/// A step from one state to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// To ask for the state.
    State,
    /// Running to locked.
    Lock,
    /// Locked to checkpointed.
    Checkpoint,
    /// Checkpointed to locked.
    Restore,
    /// Locked to running.
    Unlock,
}

/// Why a step was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// Nobody can do it here.
    #[error("no driver that checkpoints processes: {found}; it is CUDA 12.8's, of drivers from 570 on")]
    NoDriver {
        /// What was found.
        found: String,
    },
    /// The driver knows no such process.
    #[error("process {pid} has no context on a GPU: only one that uses GPUs can be checkpointed")]
    NoContext {
        /// Which.
        pid: u32,
    },
    /// Its calls did not end in time.
    #[error(
        "process {pid} was not locked within {within:?}: a call of the driver, or work on a GPU, did not end; try \
         again, or give more time"
    )]
    Late {
        /// Which.
        pid: u32,
        /// How long was waited.
        within: Duration,
    },
    /// Its memory did not fit its GPUs when the driver was asked. Drivers do not restore it after that.
    #[error("the driver found no room on its GPUs for what process {pid} had")]
    NoRoom {
        /// Which.
        pid: u32,
    },
    /// The driver did not restore it, and does not another time.
    #[error(
        "{why}: process {pid} is lost, for this driver does not restore one whose restore has failed once; end it, \
         and start it again"
    )]
    Lost {
        /// Which.
        pid: u32,
        /// What the driver answered.
        why: Box<CheckpointError>,
    },
    /// It has what the driver cannot checkpoint.
    #[error(
        "the driver does not {step} process {pid} (CUDA error {code}): it may share memory with other processes (CUDA \
         IPC, NCCL), use MPS, or be a child of one that uses GPUs"
    )]
    Unsupported {
        /// Which.
        pid: u32,
        /// What was asked.
        step: Step,
        /// The driver's number.
        code: u32,
    },
    /// It is in another state.
    #[error("process {pid} is {found}, so that it cannot be {}: {todo}", .step.done())]
    State {
        /// Which.
        pid: u32,
        /// What was asked.
        step: Step,
        /// What it is.
        found: ProcessState,
        /// What to do.
        todo: &'static str,
    },
    /// It has ended, and another has its number.
    #[error("process {pid} is another one by now: the one that was meant has ended")]
    Another {
        /// Which.
        pid: u32,
    },
    /// It was to run, and does not.
    #[error(
        "{why}; and process {pid} is not known to run ({found}): its calls wait until glake checkpoint {pid} --restore \
         succeeds"
    )]
    Stays {
        /// Which.
        pid: u32,
        /// What it is, or why that is not known.
        found: String,
        /// Why it was not checkpointed.
        why: Box<CheckpointError>,
    },
    /// Another error of the driver.
    #[error("the driver did not {step} process {pid}: CUDA error {code}")]
    Failed {
        /// Which.
        pid: u32,
        /// What was asked.
        step: Step,
        /// The driver's number.
        code: u32,
    },
    /// The file that simulated GPUs are counted in.
    #[error("process {pid} cannot be looked up: {source}")]
    Os {
        /// Which.
        pid: u32,
        /// The operating system's error.
        source: std::io::Error,
    },
}

/// Whoever can checkpoint processes.
pub trait ProcessCheckpoint: Send + Sync {
    /// What a process is. A driver tells [`ProcessState::Running`] of one too that has no context on any GPU.
    ///
    /// # Errors
    /// [`CheckpointError::NoContext`]: the driver knows no such process.
    fn state(&self, pid: u32) -> Result<ProcessState, CheckpointError>;

    /// Lets no further call of it begin, and waits for those that run.
    ///
    /// # Errors
    /// [`CheckpointError::Late`]: it runs on.
    fn lock(&self, pid: u32, within: Duration) -> Result<(), CheckpointError>;

    /// What a locked one has on GPUs goes to host memory.
    ///
    /// # Errors
    /// [`CheckpointError`]: it is locked on, and has what it had.
    fn checkpoint(&self, pid: u32) -> Result<(), CheckpointError>;

    /// What a checkpointed one had comes back to its GPUs: it is locked then. Ask only where its GPUs have room for it.
    ///
    /// # Errors
    /// [`CheckpointError::NoRoom`]: it stays checkpointed, and a driver of version 580 answers each later call with
    /// error 304, whatever room there is.
    fn restore(&self, pid: u32) -> Result<(), CheckpointError>;

    /// The calls of a locked one run.
    ///
    /// # Errors
    /// [`CheckpointError`]: it is locked on.
    fn unlock(&self, pid: u32) -> Result<(), CheckpointError>;
}

/// Locks and checkpoints a process, from whatever state it is in; where it cannot be checkpointed it is unlocked again.
///
/// # Errors
/// [`CheckpointError::Stays`]: it is not known to run; any other: it runs, or is what it was.
pub fn put_away(driver: &dyn ProcessCheckpoint, pid: u32, within: Duration) -> Result<(), CheckpointError> {
    put_away_if(driver, pid, within, &|| true)
}

/// The same, if the number is still of the process that is meant, also once that is locked.
///
/// # Errors
/// As of [`put_away`]; [`CheckpointError::Another`]: it is not.
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
        // Somebody locked it and was killed.
        ProcessState::Locked => {}
        ProcessState::Running => driver.lock(pid, within).map_err(|why| let_run(driver, pid, why))?,
    }
    if !is_meant() {
        return Err(let_run(driver, pid, CheckpointError::Another { pid }));
    }
    driver.checkpoint(pid).map_err(|why| let_run(driver, pid, why))
}

/// A process that could not be checkpointed runs again. Says why it was not, and whether it does not run.
fn let_run(driver: &dyn ProcessCheckpoint, pid: u32, why: CheckpointError) -> CheckpointError {
    // What is told is whether it runs then.
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

/// `CUDA_ERROR_OPERATING_SYSTEM`: what the driver answers to a restore of a process whose restore has failed.
const RESTORE_FAILED_BEFORE: u32 = 304;

/// Restores and unlocks a process, from whatever state it is in; nothing is done with one that runs, or that the driver
/// does not know: it has nothing that could be locked. Whoever asks has seen that its GPUs have room for what it had.
///
/// # Errors
/// [`CheckpointError::Lost`]: it is lost; another [`CheckpointError`]: it is checkpointed on, or locked.
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
    /// Its name.
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

    /// One process, what it is and what was asked.
    struct Model {
        state: Mutex<ProcessState>,
        fails: Option<Step>,
        /// What it fails with.
        code: u32,
        unlocks: bool,
        /// A lock that fails is had.
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
    fn both_ways_end_from_wherever_they_begin() {
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
    fn a_number_that_is_anothers_by_then_is_left_alone() {
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
    fn what_fails_leaves_a_process_that_runs_or_can_be_brought_back() {
        let after = |state, fails, out: bool| {
            let model = Model::new(state, Some(fails));
            let done = if out { put_away(&model, 7, Duration::ZERO) } else { bring_back(&model, 7) };
            assert!(done.is_err());
            model.is()
        };
        assert_eq!(after(ProcessState::Running, Step::Lock, true), ProcessState::Running);
        assert_eq!(after(ProcessState::Running, Step::Checkpoint, true), ProcessState::Running);
        assert_eq!(after(ProcessState::Locked, Step::Checkpoint, true), ProcessState::Running);
        // It is said that it does not run.
        let model = Model { unlocks: false, ..Model::new(ProcessState::Running, Some(Step::Checkpoint)) };
        let stays = put_away(&model, 7, Duration::ZERO).unwrap_err();
        assert!(matches!(stays, CheckpointError::Stays { .. }) && model.is() == ProcessState::Locked);
        assert!(stays.to_string().contains("is not known to run (locked)"), "{stays}");
        // The lock was had all the same.
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
    fn one_that_the_driver_has_no_room_for_or_does_not_know_any_more_is_lost() {
        for (code, is_lost) in [(2, true), (304, true), (999, false)] {
            let checkpointed = Model::new(ProcessState::Checkpointed, Some(Step::Restore));
            let error = bring_back(&Model { code, ..checkpointed }, 7).unwrap_err();
            let is_final = matches!(error, CheckpointError::Lost { .. });
            assert_eq!(is_final, is_lost, "{error}");
            let advice = "process 7 is lost, for this driver does not restore one whose restore has failed once; end \
                          it, and start it again";
            assert_eq!(error.to_string().ends_with(advice), is_lost, "{error}");
        }
        // What an unlock answers says nothing of that.
        let locked = Model::new(ProcessState::Locked, Some(Step::Unlock));
        let error = bring_back(&Model { code: 304, ..locked }, 7).unwrap_err();
        assert!(matches!(error, CheckpointError::Failed { step: Step::Unlock, .. }), "{error}");
        let failed = bring_back(&Model::new(ProcessState::Failed, None), 7).unwrap_err();
        assert!(matches!(failed, CheckpointError::Lost { .. }), "{failed}");
    }
}
