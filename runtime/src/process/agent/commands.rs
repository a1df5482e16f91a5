//! The thread that carries the agent's commands out, one after the other: they wait for uses and for copies.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use glake_units::Bytes;
use parking_lot::Mutex;

use super::AgentError;
use super::ledger::Say;
use super::port::Port;
use crate::process::device_registry::DeviceRegistry;
use crate::process::gate::Closing;
use crate::process::regions::{Refill as RefillAsk, RegionSet, Shrink, Tier};
use crate::process::{ProcessError, Result};

/// How soon memory that parked uses wait for is asked for again.
const AGAIN: Duration = Duration::from_secs(1);
/// How soon it is looked whether the process ends.
const STEP: Duration = Duration::from_millis(20);
/// How much goes to files before the agent is told, who gives up one of whom it hears nothing for 30 s: an extent of the usual size.
const DEMOTED_AT_ONCE: Bytes = Bytes::mib(128);

/// A command, and of which agent it is.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) epoch: u64,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    /// `unparks`: how many had been said before it; one more ends it.
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
    /// The thread ends.
    End,
}

/// What the thread has.
#[derive(Debug)]
pub(super) struct Carrier {
    port: Arc<Port>,
    registry: Arc<DeviceRegistry>,
    regions: Arc<RegionSet>,
    refill: Arc<Mutex<Refill>>,
    demotion: Arc<Mutex<DemotionState>>,
    /// They run now, or did last.
    refill_thread: Option<JoinHandle<()>>,
    demotion_thread: Option<JoinHandle<()>>,
}

/// How it stands with bringing all memory back.
#[derive(Debug, Default)]
struct Refill {
    is_running: bool,
    /// It is to be done once more.
    is_asked: bool,
}

/// How it stands with moving copies to files.
#[derive(Debug, Default)]
struct DemotionState {
    is_running: bool,
    /// The last that was said and not begun: how much is to go, and which agent wants it.
    asked: Option<(Bytes, u64)>,
}

/// Uses that wait at safe points, for so long at most.
struct Parked<'g> {
    _closing: Closing<'g>,
    until: Instant,
}

impl Carrier {
    pub(super) fn new(port: &Arc<Port>, registry: &Arc<DeviceRegistry>, regions: &Arc<RegionSet>) -> Carrier {
        let (port, registry, regions) = (port.clone(), registry.clone(), regions.clone());
        let (refill, demotion) = Default::default();
        Carrier { port, registry, regions, refill, demotion, refill_thread: None, demotion_thread: None }
    }

    /// Until the end comes.
    pub(super) fn run(mut self, commands: &Receiver<Command>) {
        let regions = self.regions.clone();
        let mut parked: Option<Parked<'_>> = None;
        // Whether anything was shrunk since: what others have shrunk is not wanted back.
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
            // An agent that is gone asks for nothing.
            let is_stale = command.epoch != self.port.lock().epoch;
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
                    // Before the new closing: what was parked stays so.
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
                    // What is parked stays so for the shrinks of its other GPUs.
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
            // Its panic is its own.
            let _ = thread.join();
        }
    }

    fn answer(&self, what: &'static str, outcome: Result<Say>) {
        let answer = outcome.unwrap_or_else(|error| {
            tracing::info!(target: "glake::agent", what, %error, "a command was not carried out");
            Say::Failed { what, why: error.to_string() }
        });
        self.port.note(|ledger, _| ledger.answer(answer));
    }

    /// No use runs from then on. It is given up where the agent says before that it need not be.
    fn park<'g>(&self, regions: &'g RegionSet, until: Instant, unparks: u64) -> Result<Closing<'g>> {
        self.check_loaded()?;
        let timeout = until.saturating_duration_since(Instant::now());
        regions.park(timeout, &|| self.port.unparks() == unparks)
    }

    /// Whether memory is in use only while uses run.
    ///
    /// # Errors
    /// [`AgentError::Loading`], whatever the agent takes silence for.
    fn check_loaded(&self) -> Result<()> {
        if self.port.is_loading() { Err(AgentError::Loading.into()) } else { Ok(()) }
    }

    /// Gives back so much of a GPU: what is leased and not made, free memory, then regions' memory.
    fn shrink(
        &self,
        gpu: &str,
        device: Option<i64>,
        bytes: Bytes,
        tier: &glake_wire::Tier,
        until: Instant,
    ) -> Result<()> {
        let no_gpu = |gpu: &str| ProcessError::NoSuchGpu { gpu: gpu.to_owned() };
        let memory = self.registry.device(device.ok_or_else(|| no_gpu(gpu))?)?;
        let taken = match memory.started() {
            Some(started) => started.pool.take_lease(bytes)?,
            None => memory.lease.take_unused(bytes),
        };
        if !taken.is_zero() {
            self.port.note(|ledger, _| ledger.returned(memory.id(), taken));
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
        self.regions.shrink_while(&ask, &|| !self.port.is_over()).map(|_| ())
    }

    /// Uses that were parked for a shrink ask for nothing themselves: their memory is wanted again at once.
    fn want_parked_back(&mut self) {
        if self.regions.gate().view().parked > 0 {
            self.refill();
        }
    }

    /// Brings everything back in the background; again and again, while parked uses wait for it.
    fn refill(&mut self) {
        {
            let mut refill = self.refill.lock();
            if refill.is_running {
                refill.is_asked = true;
                return;
            }
            refill.is_running = true;
        }
        let (regions, port, refill) = (self.regions.clone(), self.port.clone(), self.refill.clone());
        let run = move || {
            loop {
                let outcome = regions.refill(&RefillAsk::default());
                if let Err(error) = &outcome {
                    tracing::info!(target: "glake::agent", %error, "memory does not come back yet");
                }
                let mut state = refill.lock();
                let asked = std::mem::take(&mut state.is_asked);
                let waits = regions.gate().view().parked > 0 && outcome.is_err();
                if port.is_over() || !(asked || waits) {
                    state.is_running = false;
                    return;
                }
                drop(state);
                let until = Instant::now() + AGAIN;
                while !asked && Instant::now() < until && !port.is_over() {
                    std::thread::sleep(STEP);
                }
                if port.is_over() {
                    // Nobody would grant it.
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

    /// Moves so much of the copies in host memory to files, in the background: nobody waits for it, and every refill ends it. The agent is told
    /// as it goes on, and at its end.
    fn demote(&mut self, bytes: Bytes, epoch: u64) {
        {
            let mut demotion = self.demotion.lock();
            demotion.asked = Some((bytes, epoch));
            if demotion.is_running {
                return;
            }
            demotion.is_running = true;
        }
        let (regions, port, demotion) = (self.regions.clone(), self.port.clone(), self.demotion.clone());
        let run = move || {
            loop {
                // Not in the condition of the loop: the lock would be held in it.
                let next = demotion.lock().next();
                let Some((mut left, epoch)) = next else { break };
                while !left.is_zero() {
                    let asked = left.min(DEMOTED_AT_ONCE);
                    let moved = regions.demote(asked, &|| port.may_demote(epoch));
                    if let Err(error) = &moved {
                        tracing::warn!(target: "glake::agent", %error, "copies stay in host memory");
                    }
                    let moved = moved.unwrap_or_default();
                    left = left.saturating_sub(moved);
                    // Less than was asked: nothing else can go, or something ended it.
                    if moved < asked || demotion.lock().asked.is_some() {
                        break;
                    }
                    if !left.is_zero() {
                        port.note(|ledger, _| ledger.changed());
                    }
                }
                port.note(|ledger, _| ledger.changed());
            }
        };
        match std::thread::Builder::new().name("glake-agent-demote".to_owned()).spawn(run) {
            Ok(thread) => self.demotion_thread = Some(thread),
            Err(error) => {
                tracing::warn!(target: "glake::agent", %error, "copies stay in host memory");
                *self.demotion.lock() = DemotionState::default();
                self.port.note(|ledger, _| ledger.changed());
            }
        }
    }
}

impl DemotionState {
    /// What is to be done next; it runs no more where that is nothing.
    fn next(&mut self) -> Option<(Bytes, u64)> {
        let next = self.asked.take();
        self.is_running = next.is_some();
        next
    }
}
