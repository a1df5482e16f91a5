//! Thread that executes the agent's commands one after the other; a command may wait for uses and for copies.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use glake_units::Bytes;
use parking_lot::Mutex;

use super::AgentError;
use super::handle::AgentHandle;
use super::ledger::Say;
use crate::process::device_registry::DeviceRegistry;
use crate::process::gate::Closing;
use crate::process::regions::{Refill as RefillAsk, RegionSet, Shrink, Tier};
use crate::process::{ProcessError, Result};

/// Interval between requests for memory that parked uses wait for.
const AGAIN: Duration = Duration::from_secs(1);
/// Interval between checks whether the process ends.
const STEP: Duration = Duration::from_millis(20);
/// Bytes moved to files between progress messages: one extent of the usual size. The agent drops a worker that is silent for 30 s.
const DEMOTED_AT_ONCE: Bytes = Bytes::mib(128);

/// A command together with the epoch of the agent that sent it.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) epoch: u64,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    /// Park command; `unparks` is the number of earlier unpark requests. A further request cancels the park.
    Park {
        until: Instant,
        hold: Duration,
        unparks: u64,
    },
    Unpark,
    Shrink {
        gpu: String,
        device: Option<i64>,
        bytes: Bytes,
        tier: glake_wire::Tier,
        until: Instant,
        more: bool,
    },
    Demote {
        bytes: Bytes,
    },
    Refill,
    /// Ends the command thread.
    End,
}

/// State of the thread that executes the agent's commands.
#[derive(Debug)]
pub(super) struct CommandThread {
    handle: Arc<AgentHandle>,
    registry: Arc<DeviceRegistry>,
    regions: Arc<RegionSet>,
    refill: Arc<Mutex<Refill>>,
    demotion: Arc<Mutex<DemotionState>>,
    /// Background threads that run now or ran last.
    refill_thread: Option<JoinHandle<()>>,
    demotion_thread: Option<JoinHandle<()>>,
}

/// State of the background refill of all memory.
#[derive(Debug, Default)]
struct Refill {
    is_running: bool,
    /// Whether another refill must follow the current one.
    is_asked: bool,
}

/// State of the background move of host copies to files.
#[derive(Debug, Default)]
struct DemotionState {
    is_running: bool,
    /// Most recent request that has not begun: the bytes to move and the epoch of the agent that asked.
    asked: Option<(Bytes, u64)>,
}

/// Uses that wait at safe points, with the maximum wait.
struct Parked<'g> {
    _closing: Closing<'g>,
    until: Instant,
}

impl CommandThread {
    pub(super) fn new(
        handle: &Arc<AgentHandle>,
        registry: &Arc<DeviceRegistry>,
        regions: &Arc<RegionSet>,
    ) -> CommandThread {
        let (handle, registry, regions) = (handle.clone(), registry.clone(), regions.clone());
        let (refill, demotion) = Default::default();
        CommandThread {
            handle,
            registry,
            regions,
            refill,
            demotion,
            refill_thread: None,
            demotion_thread: None,
        }
    }

    /// Executes commands until [`Command`]'s end marker arrives.
    pub(super) fn run(mut self, commands: &Receiver<Command>) {
        let regions = self.regions.clone();
        let mut parked: Option<Parked<'_>> = None;
        // Whether anything was shrunk since: only this thread's shrinks are refilled.
        let mut has_shrunk = false;
        loop {
            let command = match &parked {
                Some(of) => commands.recv_timeout(of.until.saturating_duration_since(Instant::now())),
                None => commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            let command = match command {
                Ok(command) => command,
                Err(RecvTimeoutError::Timeout) => {
                    tracing::info!(target: "glake::agent", "parked uses go on: nothing was taken of them in time");
                    parked = None;
                    if std::mem::take(&mut has_shrunk) {
                        self.want_parked_back();
                    }
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            };
            // An agent that is gone needs no answer.
            let is_stale = command.epoch != self.handle.lock().epoch;
            match command.what {
                What::End => break,
                What::Unpark => {
                    parked = None;
                    if std::mem::take(&mut has_shrunk) {
                        self.want_parked_back();
                    }
                }
                _ if is_stale => {}
                What::Park { until, hold, unparks } => {
                    // Before the new closing, so that parked uses stay parked.
                    let outcome = self.park(&regions, until, unparks).map(|closing| {
                        parked = Some(Parked { _closing: closing, until: Instant::now() + hold });
                        Say::Parked
                    });
                    self.answer("park", outcome);
                }
                What::Shrink { gpu, device, bytes, tier, until, more } => {
                    let outcome = self.shrink(&gpu, device, bytes, &tier, until).map(|()| Say::Shrunk);
                    self.answer("shrink", outcome);
                    has_shrunk = more;
                    // Parked uses stay parked for the shrinks of their other GPUs.
                    if !more {
                        parked = None;
                        self.want_parked_back();
                    }
                }
                What::Demote { bytes } => self.demote(bytes, command.epoch),
                What::Refill => self.refill(),
            }
        }
        drop(parked);
        for thread in [self.refill_thread.take(), self.demotion_thread.take()].into_iter().flatten() {
            // The thread has reported its panic itself.
            let _ = thread.join();
        }
    }

    fn answer(&self, what: &'static str, outcome: Result<Say>) {
        let answer = outcome.unwrap_or_else(|error| {
            tracing::info!(target: "glake::agent", what, %error, "a command was not carried out");
            Say::Failed { what, why: error.to_string() }
        });
        self.handle.note(|ledger, _| ledger.answer(answer));
    }

    /// Closes the gate: no use runs until the guard is dropped. Cancelled if the agent sends an unpark meanwhile.
    fn park<'g>(&self, regions: &'g RegionSet, until: Instant, unparks: u64) -> Result<Closing<'g>> {
        self.check_loaded()?;
        let timeout = until.saturating_duration_since(Instant::now());
        regions.park(timeout, &|| self.handle.unparks() == unparks)
    }

    /// Checks that memory is in use only while uses run.
    ///
    /// # Errors
    /// [`AgentError::Loading`] while the program still loads, even if the agent takes its silence for an idle worker.
    fn check_loaded(&self) -> Result<()> {
        if self.handle.is_loading() { Err(AgentError::Loading.into()) } else { Ok(()) }
    }

    /// Returns `bytes` of a GPU to the agent: first unused lease, then free memory, then memory of regions.
    fn shrink(
        &self,
        gpu: &str,
        device: Option<i64>,
        bytes: Bytes,
        tier: &glake_wire::Tier,
        until: Instant,
    ) -> Result<()> {
        let no_gpu = |gpu: &str| ProcessError::invalid(format!("GPU {gpu} is none of this process's"));
        let memory = self.registry.device(device.ok_or_else(|| no_gpu(gpu))?)?;
        let taken = match memory.started() {
            Some(started) => started.pool.take_lease(bytes)?,
            None => memory.lease.take_unused(bytes),
        };
        if !taken.is_zero() {
            self.handle.note(|ledger, _| ledger.returned(memory.id(), taken));
        }
        let rest = bytes.saturating_sub(taken);
        if rest.is_zero() {
            return Ok(());
        }
        self.check_loaded()?;
        let tier = match tier {
            glake_wire::Tier::Host => Tier::Host,
            glake_wire::Tier::File => Tier::File,
            glake_wire::Tier::Peer(peer) => {
                let named = self.registry.devices.iter().find(|memory| memory.gpu() == *peer);
                Tier::Peer(Some(named.ok_or_else(|| no_gpu(peer))?.id()))
            }
        };
        let timeout = Some(until.saturating_duration_since(Instant::now()));
        let ask = Shrink { bytes: Some(rest), device: Some(memory.id()), tier, timeout, ..Shrink::default() };
        self.regions.shrink_while(&ask, &|| !self.handle.is_over()).map(|_| ())
    }

    /// Requests the memory back for uses that a shrink parked: parked uses cannot request it themselves.
    fn want_parked_back(&mut self) {
        if self.regions.gate.view().parked > 0 {
            self.refill();
        }
    }

    /// Refills all memory in the background, and repeats this while parked uses wait for it.
    fn refill(&mut self) {
        {
            let mut refill = self.refill.lock();
            if refill.is_running {
                refill.is_asked = true;
                return;
            }
            refill.is_running = true;
        }
        let (regions, handle, refill) = (self.regions.clone(), self.handle.clone(), self.refill.clone());
        let run = move || {
            loop {
                let outcome = regions.refill(&RefillAsk::default());
                if let Err(error) = &outcome {
                    tracing::info!(target: "glake::agent", %error, "memory does not come back yet");
                }
                let mut state = refill.lock();
                let asked = std::mem::take(&mut state.is_asked);
                let waits = regions.gate.view().parked > 0 && outcome.is_err();
                if handle.is_over() || !(asked || waits) {
                    state.is_running = false;
                    return;
                }
                drop(state);
                let until = Instant::now() + AGAIN;
                while !asked && Instant::now() < until && !handle.is_over() {
                    std::thread::sleep(STEP);
                }
                if handle.is_over() {
                    // No agent would grant it.
                    refill.lock().is_running = false;
                    return;
                }
            }
        };
        match std::thread::Builder::new().name("glake-agent-refill".to_owned()).spawn(run) {
            Ok(thread) => self.refill_thread = Some(thread),
            Err(source) => {
                self.refill.lock().is_running = false;
                self.answer(
                    "refill",
                    Err(ProcessError::NoThread { what: "a refill that the agent asked for", source }),
                );
            }
        }
    }

    /// Moves up to `bytes` of host copies to files in the background. Any refill cancels it. The agent receives progress messages and the
    /// end.
    fn demote(&mut self, bytes: Bytes, epoch: u64) {
        {
            let mut demotion = self.demotion.lock();
            demotion.asked = Some((bytes, epoch));
            if demotion.is_running {
                return;
            }
            demotion.is_running = true;
        }
        let (regions, handle, demotion) = (self.regions.clone(), self.handle.clone(), self.demotion.clone());
        let run = move || {
            loop {
                // Not in the condition of the loop, which would hold the lock in the body.
                let next = demotion.lock().next();
                let Some((mut left, epoch)) = next else { break };
                while !left.is_zero() {
                    let asked = left.min(DEMOTED_AT_ONCE);
                    let moved = regions.demote(asked, &|| handle.may_demote(epoch));
                    if let Err(error) = &moved {
                        tracing::warn!(target: "glake::agent", %error, "copies stay in host memory");
                    }
                    let moved = moved.unwrap_or_default();
                    left = left.saturating_sub(moved);
                    // Fewer bytes than requested: nothing else can move, or the demotion was cancelled.
                    if moved < asked || demotion.lock().asked.is_some() {
                        break;
                    }
                    if !left.is_zero() {
                        handle.note(|ledger, _| ledger.changed());
                    }
                }
                handle.note(|ledger, _| ledger.changed());
            }
        };
        match std::thread::Builder::new().name("glake-agent-demote".to_owned()).spawn(run) {
            Ok(thread) => self.demotion_thread = Some(thread),
            Err(error) => {
                tracing::warn!(target: "glake::agent", %error, "copies stay in host memory");
                *self.demotion.lock() = DemotionState::default();
                self.handle.note(|ledger, _| ledger.changed());
            }
        }
    }
}

impl DemotionState {
    /// Takes the next request; `None` marks the thread as stopped.
    fn next(&mut self) -> Option<(Bytes, u64)> {
        let next = self.asked.take();
        self.is_running = next.is_some();
        next
    }
}
