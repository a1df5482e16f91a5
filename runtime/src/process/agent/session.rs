//! Thread that talks to the agent: connects, sends hello, sends and receives messages, and reconnects if the connection is lost.
//!
//! Workers that wait for memory without an agent take it one after the other, under a lock of all workers ([`Turns`]).

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use glake_device::DeviceId;
use glake_meter::ProcessStat;
use glake_tiers::Lease;
use glake_units::Bytes;
use glake_wire::{FrameError, Hello, Holding, Peer, Received, ToAgent, ToWorker, Welcome};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};

use super::AgentError;
use super::commands::{Command, What};
use super::connection::{ANSWER, Connection, Silence, pause};
use super::handle::{AgentHandle, State};
use super::identity::Identity;
use super::ledger::Say;
use crate::process::device::DeviceMemory;
use crate::process::device_registry::DeviceRegistry;
use crate::process::observers::AgentEvents as _;
use crate::process::regions::RegionSet;
use crate::process::shortage::Denial;

/// Number of hello attempts before allocations are held back during one.
const TRIES: u32 = 4;
/// Interval between checks whether a start may continue.
const LOOK: Duration = Duration::from_secs(1);
/// Minimum time for which the thread that starts the first pool waits for the agent.
pub(super) const START: Duration = Duration::from_secs(600);
/// Change of the holdings below which no report is sent: small blocks come and go all the time.
const NOTABLE: Bytes = Bytes::mib(16);
/// Time between the agent's deadline of a request and the end of the caller's wait.
const ANSWER_BEFORE: Duration = Duration::from_millis(200);
/// Timeout for sending the goodbye message.
const BYE: Duration = Duration::from_secs(1);

/// State of the thread that talks to the agent.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) handle: Arc<AgentHandle>,
    pub(super) registry: Arc<DeviceRegistry>,
    pub(super) regions: Arc<RegionSet>,
    pub(super) path: PathBuf,
    pub(super) identity: Identity,
    pub(super) wake: Arc<OwnedFd>,
    pub(super) commands: Sender<Command>,
    /// Device whose pool caused the process to join by itself; such a join is retried after a failure.
    pub(super) starting: Option<DeviceId>,
}

impl Session {
    /// Runs until the threads must stop or a first attempt fails for good.
    pub(super) fn run(&self) {
        let begin = Instant::now();
        let (mut back_off, mut turns, mut has_warned) = (BackOff::default(), Turns::default(), false);
        while !self.is_over() {
            match self.join() {
                Ok(mut connection) => {
                    (back_off, turns, has_warned) = (BackOff::default(), Turns::default(), false);
                    self.handle.set_outcome(Ok(()), true);
                    self.serve(&mut connection);
                    // Before its number can be reused by another file: a forked child closes it by number.
                    self.handle.set_socket(None);
                    self.lost();
                }
                Err(AgentError::Ending) => break,
                Err(error) => {
                    // A joined process keeps its leases as bounds, whatever the next agents answer, until one takes them over.
                    let is_joined = self.handle.is_on();
                    let by_itself = self.starting.is_some();
                    let is_awaited = !is_joined && !by_itself && error.is_brief() && begin.elapsed() < ANSWER;
                    if !has_warned && (by_itself || is_joined) {
                        has_warned = true;
                        tracing::warn!(target: "glake::agent", %error, "no agent: this process goes on as it is");
                    }
                    let goes_on = is_joined || is_awaited || by_itself && error.may_pass();
                    if !is_awaited {
                        self.handle.set_outcome(Err(error), goes_on);
                    }
                    if !goes_on {
                        return;
                    }
                }
            }
            self.help_itself(&mut turns);
            self.wait(back_off.next());
        }
    }

    fn is_over(&self) -> bool {
        self.handle.is_over()
    }

    /// Waits before the next attempt, but not longer than a caller that waits for memory can afford.
    fn wait(&self, wait: Duration) {
        let begin = Instant::now();
        loop {
            let (is_over, urgent) = {
                let mut state = self.handle.lock();
                (self.handle.is_over() || state.take_hurried(), state.ledger.is_urgent())
            };
            let until = begin + BackOff::bounded(wait, urgent);
            if is_over || Instant::now() >= until {
                return;
            }
            pause(&self.wake, until);
        }
    }

    /// Connects and waits for the welcome; repeats both if memory was created after hello was built.
    fn join(&self) -> Result<Connection, AgentError> {
        for last in (0..TRIES).map(|tried| tried + 1 == TRIES) {
            if let Some(connection) = self.join_once(last)? {
                return Ok(connection);
            }
        }
        Err(AgentError::Ending)
    }

    /// Connects once. Allocations continue until the welcome, because an agent may answer late; on the last attempt they are held back.
    fn join_once(&self, is_last: bool) -> Result<Option<Connection>, AgentError> {
        let mut connection = Connection::open(&self.path)?;
        self.handle.set_socket(Some(connection.socket()));
        let is_new = !self.handle.is_on();
        let mut taken = None;
        if is_new {
            self.note_made();
            while is_last && taken.is_none() {
                taken = self.take_leases().ok();
                if taken.is_none() {
                    self.note_made();
                }
            }
        }
        let page = self.handle.activity.descriptor();
        let page =
            page.map_err(|source| AgentError::Os { what: "a descriptor of the activity page", source });
        let welcomed = page.and_then(|page| {
            let (hello, told) = self.hello();
            let said_wants = hello.wants;
            let welcome = connection.greet(&self.path, hello, page, &self.wake, || self.is_over())?;
            Ok((welcome, told, said_wants))
        });
        match welcomed {
            Ok((welcome, told, said_wants)) => {
                if is_new && taken.is_none() && self.take_leases().is_err() {
                    self.handle.set_socket(None);
                    self.handle.set_off();
                    return Ok(None);
                }
                self.welcomed(&welcome, told, said_wants);
                Ok(Some(connection))
            }
            Err(error) => {
                self.handle.set_socket(None);
                if is_new {
                    self.handle.set_off();
                }
                if let Some(before) = taken {
                    self.leases().zip(before).for_each(|(lease, before)| lease.set(before));
                }
                Err(error)
            }
        }
    }

    /// Sets the ledger's leases to the memory created so far, which hello will report.
    fn note_made(&self) {
        let made = self.leases().map(|lease| lease.view().made).collect();
        self.handle.lock().ledger.set_leases(made);
        if self.handle.is_loading() {
            self.handle.starts(self.regions.made());
        }
        for memory in self.registry.devices.iter() {
            self.handle.activity.made(memory.id(), memory.lease.view().made);
        }
    }

    /// Hands the leases to the agent, beginning with the [noted](Session::note_made) amounts. Returns the previous leases.
    ///
    /// # Errors
    /// More memory was created meanwhile; the state is unchanged.
    fn take_leases(&self) -> Result<Vec<Option<Bytes>>, Bytes> {
        self.handle.set_on(|told| {
            let mut before = Vec::new();
            for (lease, told) in self.leases().zip(told) {
                match lease.hand_over(*told) {
                    Ok(leased) => before.push(leased),
                    Err(made) => {
                        self.leases().zip(before).for_each(|(lease, before)| lease.set(before));
                        return Err(made);
                    }
                }
            }
            Ok(before)
        })
    }

    /// Builds the hello message and returns the position in the conversation that it describes.
    fn hello(&self) -> (Hello, u64) {
        // Hello covers earlier messages, for an agent without knowledge; other agents get them. No change may come between:
        // it would be counted twice.
        let (mut state, held) = loop {
            let says = self.handle.lock().ledger.take();
            let held = self.held();
            let mut state = self.handle.lock();
            self.push(&mut state, says, &held);
            if !state.ledger.has_something_to_say() {
                break (state, held);
            }
        };
        state.told.clone_from(&held);
        let told = state.conversation.position();
        let pid = std::process::id();
        let hello = Hello {
            name: self.identity.name.clone(),
            peer: Peer { pid, start: ProcessStat::of(pid).map_or(0, |process| process.start) },
            build: env!("CARGO_PKG_VERSION").to_owned(),
            gang: self.identity.gang.clone(),
            ranks: self.identity.ranks,
            epoch: state.epoch,
            received: state.conversation.received(),
            starting: state.ledger.is_starting(),
            wants: state.ledger.wants(),
            holdings: leased(&state, held),
        };
        (hello, told)
    }

    fn welcomed(&self, welcome: &Welcome, told: u64, said_wants: bool) {
        let mut state = self.handle.lock();
        let now = Instant::now();
        if welcome.epoch == state.epoch {
            state.conversation.resume(welcome.received);
            state.ledger.resumed(now);
        } else {
            state.conversation.restart(told);
            state.epoch = welcome.epoch;
            state.ledger.restarted(said_wants, now);
            // Cancel parks that the previous agent requested.
            self.handle.unparked();
            self.regions.gate.changed();
            let _ = self.commands.send(Command { epoch: welcome.epoch, what: What::Unpark });
        }
        if welcome.wait {
            state.ledger.hold_start();
        }
        (state.is_heard, state.is_welcomed) = (true, true);
    }

    fn lost(&self) {
        let mut state = self.handle.lock();
        state.is_heard = false;
        state.ledger.lost(Instant::now());
    }

    /// Sends and receives messages until the connection is lost or the threads must stop.
    fn serve(&self, connection: &mut Connection) {
        let (mut bye, mut silence) = (None, Silence::default());
        loop {
            self.say(connection);
            let written = connection.write();
            connection.read();
            let heard = match self.hear(connection) {
                Ok(heard) => heard,
                Err(error) => {
                    tracing::warn!(target: "glake::agent", %error, "the agent is heard anew");
                    return;
                }
            };
            if written.is_err() || connection.has_ended() {
                return;
            }
            let (is_over, is_silent, until, owes) = {
                let state = self.handle.lock();
                let is_said =
                    !state.ledger.has_something_to_say() && state.conversation.unacknowledged() == 0;
                let is_silent = is_said || !state.says_bye;
                let look = state.ledger.is_starting().then(|| Instant::now() + LOOK);
                let until = [state.ledger.next(), look].into_iter().flatten().min();
                (self.handle.is_over(), is_silent, until, state.conversation.unacknowledged() > 0)
            };
            let now = Instant::now();
            let silent_at = silence.until(owes, heard, now);
            if silent_at.is_some_and(|at| at <= now) {
                tracing::warn!(
                    target: "glake::agent", socket = %self.path.display(), seconds = ANSWER.as_secs(),
                    "the agent does not answer: this process goes on as without one, and connects again (is the agent stopped?)"
                );
                return;
            }
            let until = until.into_iter().chain(silent_at).min();
            if is_over {
                let until = *bye.get_or_insert(now + BYE);
                if is_silent || now >= until {
                    return;
                }
                connection.poll(&self.wake, Some(until));
                continue;
            }
            connection.poll(&self.wake, until);
        }
    }

    /// Moves pending messages of the conversation into frames.
    fn say(&self, connection: &mut Connection) {
        let made = self.regions.made();
        let says = {
            let mut state = self.handle.lock();
            let now = Instant::now();
            if self.handle.wake.has_moved() {
                state.ledger.moved(now);
            }
            state.ledger.tick(now);
            state.ledger.made(made, now);
            state.ledger.take()
        };
        if says.contains(&Say::Moved) {
            self.handle.wake.begin_look();
        }
        // Looked up after the messages were taken, so that the holdings are of the same time or later.
        let began = Instant::now();
        let held = if says.is_empty() { Vec::new() } else { self.held() };
        let took = began.elapsed();
        let mut state = self.handle.lock();
        if !says.is_empty() {
            state.ledger.looked(took);
        }
        self.push(&mut state, says, &held);
        loop {
            match state.conversation.next(ToAgent::Ack) {
                Ok(Some(frame)) => connection.push(&frame),
                Ok(None) => return,
                Err(error) => {
                    tracing::warn!(target: "glake::agent", %error, "a message to the agent is too long, and is not said");
                }
            }
        }
    }

    /// Adds pending messages to the conversation.
    fn push(&self, state: &mut State, says: Vec<Say>, held: &[Holding]) {
        for say in says {
            if say == Say::Moved && !differ(&state.told, held) {
                continue;
            }
            let holdings = if say.tells_holdings() { leased(state, held.to_vec()) } else { Vec::new() };
            if say.tells_holdings() {
                state.told = held.to_vec();
            }
            let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
            // The agent's answer, with its reason, is to come before the caller's own time is over.
            let before = |time: Duration| time.saturating_sub((time / 4).min(ANSWER_BEFORE));
            let message = match say {
                Say::Want { within } => ToAgent::Want { deadline_ms: Some(ms(before(within))) },
                Say::Cancel => ToAgent::Cancel,
                Say::Grow { device, bytes, within } => {
                    ToAgent::Grow { gpu: self.gpu(device), bytes, within_ms: ms(before(within)) }
                }
                Say::Returned { device, bytes } => ToAgent::Returned { gpu: self.gpu(device), bytes },
                Say::Parked => ToAgent::Parked,
                Say::Shrunk => ToAgent::Shrunk { holdings },
                Say::Refilled => ToAgent::Refilled { holdings },
                Say::Failed { what, why } => {
                    let why = why.chars().take(2000).collect();
                    ToAgent::Failed { what: what.to_owned(), why, holdings }
                }
                Say::Changed | Say::Moved => ToAgent::Changed { holdings },
            };
            tracing::trace!(target: "glake::agent", ?message, "said");
            state.conversation.push(message);
        }
    }

    /// Returns the current holdings without their leases.
    fn held(&self) -> Vec<Holding> {
        let starting = self.starting;
        // First: if a use begins meanwhile, the number shows that the rest may be of before or after it.
        let as_of = self.handle.activity.begun_if_idle();
        let holding = |memory: &DeviceMemory| {
            let held = self.regions.device_holding(memory);
            Holding {
                gpu: memory.gpu(),
                device: memory.id().0,
                lease: Bytes::ZERO,
                resident: held.made,
                fixed: held.fixed,
                evicted: held.evicted,
                room: held.room,
                growth: held.growth,
                dirty: held.dirty,
                discardable: held.discardable,
                hosted: held.hosted,
                in_files: Some(held.in_files),
                in_peers: Some(held.in_peers),
                unused: Some(held.unused),
                as_of,
            }
        };
        let used = |memory: &&DeviceMemory| {
            let view = memory.lease.view();
            memory.started().is_some()
                || starting == Some(memory.id())
                || !view.made.is_zero()
                || view.leased.is_some_and(|leased| !leased.is_zero())
        };
        self.registry.devices.iter().filter(used).map(holding).collect()
    }

    fn gpu(&self, device: DeviceId) -> String {
        self.registry.device(device.0.into()).map_or_else(|_| device.0.to_string(), DeviceMemory::gpu)
    }

    fn find(&self, gpu: &str) -> Option<&DeviceMemory> {
        self.registry.devices.iter().find(|memory| memory.gpu() == gpu)
    }

    /// Handles all messages that were read. Returns whether there was one.
    ///
    /// # Errors
    /// The connection cannot continue.
    fn hear(&self, connection: &mut Connection) -> Result<bool, Unheard> {
        let mut heard = false;
        while let Some(frame) = connection.take()? {
            let mut state = self.handle.lock();
            match state.conversation.receive(frame.seq, frame.ack) {
                Received::New => {
                    self.apply(&mut state, frame.message);
                    drop(state);
                    self.handle.notify();
                }
                Received::Repeated => {}
                Received::Gap => return Err(Unheard::Gap { seq: frame.seq }),
            }
            heard = true;
        }
        Ok(heard)
    }

    fn apply(&self, state: &mut State, message: ToWorker) {
        tracing::trace!(target: "glake::agent", ?message, "heard");
        let (now, epoch) = (Instant::now(), state.epoch);
        let command = |what| {
            let _ = self.commands.send(Command { epoch, what });
        };
        let by = |within_ms| now + Duration::from_millis(within_ms).min(LONGEST_COMMAND);
        match message {
            ToWorker::Grant { gpu, bytes } => match self.find(&gpu) {
                Some(memory) => {
                    state.ledger.granted(memory.id(), bytes);
                    memory.lease.grant(bytes);
                }
                None => {
                    tracing::warn!(target: "glake::agent", gpu, "a grant of memory of a GPU that is not here: given back");
                    state.conversation.push(ToAgent::Returned { gpu, bytes });
                }
            },
            ToWorker::Admit => {
                state.ledger.admitted();
                self.leases().for_each(|lease| lease.forget_wanted());
            }
            ToWorker::Park { within_ms } => {
                let hold = Duration::from_millis(within_ms).min(LONGEST_COMMAND);
                command(What::Park { until: by(within_ms), hold, unparks: self.handle.unparks() });
            }
            ToWorker::Unpark => {
                self.handle.unparked();
                self.regions.gate.changed();
                command(What::Unpark);
            }
            ToWorker::Shrink { gpu, bytes, tier, within_ms, more } => {
                let device = self.find(&gpu).map(|memory| memory.id().0.into());
                command(What::Shrink { gpu, device, bytes, tier, until: by(within_ms), more });
            }
            ToWorker::Demote { bytes } => command(What::Demote { bytes }),
            ToWorker::Refill => {
                state.ledger.refill_asked();
                command(What::Refill);
            }
            ToWorker::Deny { why, retry_after_ms, gpus } => {
                for memory in self.registry.devices.iter() {
                    let found = gpus.iter().find(|of| of.gpu == memory.gpu());
                    let (budget, holders) =
                        found.map(|of| (of.budget, of.holders.clone())).unwrap_or_default();
                    *memory.denial.lock() = Some((now, Denial { why: Some(why), budget, holders }));
                }
                if state.ledger.denied(retry_after_ms.map(Duration::from_millis), now) {
                    tracing::info!(target: "glake::agent", ?why, "the agent grants no memory");
                    self.leases().for_each(|lease| lease.deny_refills());
                }
            }
            ToWorker::DenyGrowth { gpu, holders, budget, why, .. } => {
                if let Some(memory) = self.find(&gpu) {
                    *memory.denial.lock() = Some((now, Denial { why, budget, holders }));
                    state.ledger.growth_denied(memory.id());
                    memory.lease.deny_growth();
                }
            }
            ToWorker::Welcome(_) | ToWorker::Refused { .. } | ToWorker::Ack | ToWorker::Unknown => {}
        }
    }

    fn leases(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.registry.devices.iter().map(|memory| &memory.lease)
    }

    /// Takes the wanted memory itself if uses have waited too long without an agent and no other worker does so now. The driver's free
    /// memory limits it.
    fn help_itself(&self, turns: &mut Turns) {
        let (wanting, is_over) = {
            let state = self.handle.lock();
            (state.ledger.orphaned(Instant::now()), !state.ledger.is_urgent())
        };
        if is_over {
            *turns = Turns::default();
        }
        // All memory evicted there: several refills may wait, each for a part of it.
        let missing = |held: &Holding| {
            let device = DeviceId(held.device);
            let comes_back = held.evicted.saturating_add(held.room).saturating_add(held.growth);
            let all = held.resident.saturating_add(comes_back);
            let missing = all.saturating_sub(self.handle.lock().ledger.lease(device));
            (wanting.contains(&device) && !missing.is_zero()).then_some((device, missing))
        };
        let missing: Vec<_> =
            if wanting.is_empty() { Vec::new() } else { self.held().iter().filter_map(missing).collect() };
        if missing.is_empty() {
            return;
        }
        if turns.held.is_none() {
            match turns.take(&self.path, Instant::now()) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    tracing::debug!(target: "glake::agent", %error, "no turn among those without an agent");
                    return;
                }
            }
            tracing::warn!(
                target: "glake::agent", socket = %self.path.display(),
                "there has been no agent for too long: memory is taken as far as the GPU has it"
            );
        }
        // An agent that was only stopped knows nothing of it: the next hello tells it as to a new one.
        self.handle.lock().epoch = 0;
        for (device, bytes) in missing {
            let Ok(memory) = self.registry.device(device.0.into()) else { continue };
            self.handle.lock().ledger.granted(device, bytes);
            memory.lease.grant(bytes);
        }
    }
}

/// Upper bound for the duration of any command.
const LONGEST_COMMAND: Duration = Duration::from_secs(3600);

/// Reason why a welcomed connection cannot continue.
#[derive(Debug, thiserror::Error)]
enum Unheard {
    #[error("message {seq} came without the one before it")]
    Gap { seq: u64 },
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// Returns whether the holdings differ from the report so much that the agent must know. Leases are ignored: the agent knows them.
fn differ(told: &[Holding], held: &[Holding]) -> bool {
    let far = |told: Bytes, held: Bytes| told.max(held).saturating_sub(told.min(held)) >= NOTABLE;
    let is_same = |told: &Holding, held: &Holding| {
        let exact = |of: &Holding| (of.device, of.resident, of.fixed, of.evicted, of.room, of.hosted);
        // While no memory is unused, uses change nothing in a report; a running use makes any report stale.
        let unused = |of: &Holding| of.unused.unwrap_or_default();
        let is_known = held.as_of.is_none() || unused(held).is_zero() || held.as_of == told.as_of;
        exact(told) == exact(held)
            && is_known
            && !far(told.dirty, held.dirty)
            && !far(told.discardable, held.discardable)
            && !far(unused(told), unused(held))
    };
    told.len() != held.len() || !told.iter().zip(held).all(|(told, held)| is_same(told, held))
}

/// Adds the leases of the conversation to the holdings.
fn leased(state: &State, mut held: Vec<Holding>) -> Vec<Holding> {
    for holding in &mut held {
        holding.lease = state.ledger.lease(DeviceId(holding.device));
    }
    held
}

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Maximum interval while a caller waits for memory.
const LONGEST_URGENT_PAUSE: Duration = Duration::from_millis(200);

/// Interval that doubles with each attempt.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BackOff {
    last: Option<Duration>,
}

impl BackOff {
    /// Returns the wait before the next attempt.
    pub(super) fn next(&mut self) -> Duration {
        let next = self.last.map_or(FIRST_PAUSE, |last| (last * 2).min(LONGEST_PAUSE));
        *self.last.insert(next)
    }

    /// Limits `wait` to [`LONGEST_URGENT_PAUSE`] if a caller waits for memory.
    pub(super) fn bounded(wait: Duration, urgent: bool) -> Duration {
        if urgent { wait.min(LONGEST_URGENT_PAUSE) } else { wait }
    }
}

/// Time for which a worker waits for the turn of another one: a stopped process, and any other.
const PATIENCE: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(30)];

/// Turns among all workers that lost the agent of a socket. One worker at a time has the turn, the lock of a file beside the socket, in which
/// it writes its identity. A worker that has waited too long for the same other one goes to the next file, which has turns of its own: the
/// other one may be stopped, and takes no memory meanwhile. If it goes on later, two workers take memory at a time, each as far as the GPU
/// has it.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Turn of this worker.
    held: Option<Turn>,
    /// Number of files whose turns were given up.
    skipped: u32,
    /// Holder that this worker waits for, and the begin of the wait.
    waits: Option<(Option<Peer>, Instant)>,
}

impl Turns {
    /// Takes the turn. Returns whether this worker has it.
    ///
    /// # Errors
    /// The operating system's error; no worker can take a turn then.
    fn take(&mut self, socket: &Path, now: Instant) -> std::io::Result<bool> {
        let holder = match Turn::take(socket, self.skipped)? {
            Ok(turn) => {
                self.held = Some(turn);
                return Ok(true);
            }
            Err(holder) => holder,
        };
        let since = match self.waits {
            Some((known, since)) if known == holder => since,
            _ => self.waits.insert((holder, now)).1,
        };
        let process = |peer: Peer| ProcessStat::of(peer.pid).ok().filter(|found| found.start == peer.start);
        let is_stopped = holder.and_then(process).is_some_and(|process| process.is_stopped());
        let [stopped, any] = PATIENCE;
        if now.saturating_duration_since(since) >= if is_stopped { stopped } else { any } {
            tracing::warn!(
                target: "glake::agent", pid = holder.map_or(0, |holder| holder.pid), is_stopped,
                "another worker without an agent has its turn for too long: it is not waited for"
            );
            (self.skipped, self.waits) = (self.skipped + 1, None);
        }
        Ok(false)
    }
}

/// Exclusive turn of a worker; ends on drop.
#[derive(Debug)]
struct Turn {
    file: File,
}

impl Turn {
    /// Takes the turn of a file; `Err`: the worker that has it, if known.
    fn take(socket: &Path, number: u32) -> std::io::Result<Result<Turn, Option<Peer>>> {
        let mut path = socket.as_os_str().to_owned();
        path.push(".orphans");
        if number > 0 {
            path.push(format!(".{number}"));
        }
        let flags = OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::RDWR;
        let mut file = File::from(open(PathBuf::from(path), flags, Mode::RUSR | Mode::WUSR)?);
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let pid = std::process::id();
                let start = ProcessStat::of(pid).map_or(0, |process| process.start);
                // Without it, others wait longer for this worker.
                let written = file.set_len(0).and_then(|()| write!(file, "{pid} {start} "));
                written.unwrap_or_default();
                Ok(Ok(Turn { file }))
            }
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                (&file).take(64).read_to_string(&mut text).unwrap_or_default();
                let mut numbers = text.split_ascii_whitespace();
                let peer = || {
                    Some(Peer { pid: numbers.next()?.parse().ok()?, start: numbers.next()?.parse().ok()? })
                };
                Ok(Err({ peer }()))
            }
            Err(error) => Err(error.into()),
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // A child forked meanwhile also has the file open and must not keep the lock.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod backoff_tests {
    use super::*;

    #[test]
    fn waits_double_up_to_two_seconds() {
        let mut back_off = BackOff::default();
        let waits: Vec<u128> = (0..8).map(|_| back_off.next().as_millis()).collect();
        assert_eq!(waits, [50, 100, 200, 400, 800, 1600, 2000, 2000]);
        assert_eq!(BackOff::bounded(LONGEST_PAUSE, true), LONGEST_URGENT_PAUSE);
        assert_eq!(
            (BackOff::bounded(FIRST_PAUSE, true), BackOff::bounded(LONGEST_PAUSE, false)),
            (FIRST_PAUSE, LONGEST_PAUSE)
        );
    }
}

#[cfg(test)]
mod orphan_tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_the_turn() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, now) = (folder.path().join("agent.sock"), Instant::now());
        let (mut first, mut second) = (Turns::default(), Turns::default());
        assert!(first.take(&socket, now).unwrap());
        assert!(!second.take(&socket, now).unwrap());
        drop(first);
        assert!(second.take(&socket, now + PATIENCE[1]).unwrap());
        assert!(Turns::default().take(Path::new("/nowhere/agent.sock"), now).is_err());
    }

    /// A process that was stopped during its turn.
    #[test]
    fn a_turn_that_does_not_end_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, now) = (folder.path().join("agent.sock"), Instant::now());
        let mut holder = Turns::default();
        assert!(holder.take(&socket, now).unwrap());
        let mut others = [Turns::default(), Turns::default()];
        for other in &mut others {
            assert!(!other.take(&socket, now).unwrap());
            assert!(!other.take(&socket, now + PATIENCE[1] - Duration::from_millis(1)).unwrap());
        }
        let late = now + PATIENCE[1];
        let taken = others.each_mut().map(|other| {
            assert!(!other.take(&socket, late).unwrap(), "it goes to the next file");
            other.take(&socket, late).unwrap()
        });
        assert_eq!(taken, [true, false], "one at a time there too");
        others[0] = Turns::default();
        assert!(others[1].take(&socket, late).unwrap());
        // A stopped holder is given up early.
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
        while !ProcessStat::of(child.id()).unwrap().is_stopped() {
            std::thread::yield_now();
        }
        let start = ProcessStat::of(child.id()).unwrap().start;
        let mut path = socket.clone().into_os_string();
        path.push(".orphans");
        std::fs::write(path, format!("{} {start} ", child.id())).unwrap();
        let mut other = Turns { skipped: 0, ..Turns::default() };
        assert!(!other.take(&socket, now).unwrap() && other.skipped == 0);
        assert!(!other.take(&socket, now + PATIENCE[0]).unwrap() && other.skipped == 1);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
