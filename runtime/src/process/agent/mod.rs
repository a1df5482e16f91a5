//! Worker side of the node agent: joins the agent, reports the memory held and wanted, and executes the agent's commands.
//!
//! ```text
//! AgentLink ─► join ─► Session (glake-agent: poll)  ◄──socket──► agent
//!                │         │ commands                 hello, want, grow, returned, …   welcome, grant, park, shrink, …
//!                │         ▼
//!                │      CommandThread (glake-commands)  ─► RegionSet: park, shrink, refill
//!                └► AgentHandle ◄─ refills, leases, pools, gate: events to report              ActivityWriter ─► memfd, read by the agent
//! ```
//!
//! This process holds the truth, the agent a copy. If the agent disappears, the leases stay in force and the program continues. The content
//! and the time of messages are decided without a socket ([`ledger`]).
//!
//! Invariants: no thread of it runs before a join, nor after [`AgentLink::leave`] or [`AgentLink::stop`] has returned.

mod commands;
mod connection;
mod handle;
mod identity;
mod ledger;
mod session;
#[cfg(test)]
#[cfg(not(schedules))]
mod tests;

use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;

use glake_device::DeviceId;
use glake_tiers::{LeaseEvent, LeaseObserver as _};
use glake_units::Bytes;
use parking_lot::Mutex;

use commands::{Command, CommandThread, What};
pub(super) use handle::AgentHandle;
use identity::Identity;
use session::Session;

use super::device::DeviceMemory;
use super::device_registry::DeviceRegistry;
use super::observers::{AgentEvents as _, Observers};
use super::regions::RegionSet;
use super::{AgentError, Result};
use crate::config::{self, Launch};

/// Connection of a process to its node agent, once it has joined one.
#[derive(Debug)]
pub struct AgentLink {
    joiner: Arc<Joiner>,
}

/// State from which the process joins an agent.
#[derive(Debug)]
pub(super) struct Joiner {
    handle: Arc<AgentHandle>,
    registry: Arc<DeviceRegistry>,
    regions: Arc<RegionSet>,
    launch: Launch,
    /// Default path of the agent's socket.
    socket: Option<PathBuf>,
    /// Whether the process joins without being asked; `false` if its GPUs are simulated for this process alone.
    joins_by_itself: bool,
    /// Whether the first pool has started or the program has joined before.
    has_begun: AtomicBool,
    /// Configured name of the worker, used if the caller gives none.
    name: Option<String>,
    joined: Mutex<Option<Joined>>,
    /// Whether further joins are refused.
    is_over: AtomicBool,
}

#[derive(Debug)]
struct Joined {
    path: PathBuf,
    identity: Identity,
    session: JoinHandle<()>,
    executor: JoinHandle<()>,
    commands: Sender<Command>,
}

impl AgentLink {
    pub(super) fn new(
        handle: &Arc<AgentHandle>,
        registry: &Arc<DeviceRegistry>,
        regions: &Arc<RegionSet>,
        launch: Launch,
        config: config::Agent,
        joins_by_itself: bool,
    ) -> AgentLink {
        let joiner = Arc::new(Joiner {
            handle: handle.clone(),
            registry: registry.clone(),
            regions: regions.clone(),
            socket: config.socket.filter(|path| !path.as_os_str().is_empty() && !launch.is_disabled),
            launch,
            joins_by_itself,
            name: config.name,
            has_begun: AtomicBool::new(false),
            joined: Mutex::default(),
            is_over: AtomicBool::new(false),
        });
        handle.set_joiner(Arc::downgrade(&joiner));
        AgentLink { joiner }
    }

    /// Joins the agent at `socket`, or at `agent.socket`, or at this user's default socket. From then on a lease bounds the memory that the
    /// process may create, beginning with the current amount; more has to be granted. Joining again with the same name and socket is no
    /// error. If the process holds memory, the join marks it as loaded: between uses its memory may be evicted. A refusal that may pass is
    /// retried for 5 seconds. A process that joins by itself and has reached no agent yet tries again at once. With `GLAKE_DISABLE` nothing
    /// happens.
    ///
    /// # Errors
    /// [`AgentError`]; the state is unchanged then.
    pub fn join(&self, name: Option<&str>, socket: Option<&Path>) -> Result<()> {
        if self.joiner.launch.is_disabled {
            tracing::info!(target: "glake::agent", "GLAKE_DISABLE is set: no agent is joined");
            return Ok(());
        }
        let path = self.joiner.path(socket)?;
        Ok(self.joiner.join(name, path, None)?)
    }

    /// Leaves the agent: only the configured limits bound the process from then on. Parked uses continue once their memory is refilled,
    /// which the caller has to request. Does nothing if no agent is joined.
    pub fn leave(&self) {
        self.joiner.end(true);
    }

    /// Returns whether the process joins an agent by itself, with its first pool.
    pub fn joins_by_itself(&self) -> bool {
        self.joiner.joins_by_itself && self.joiner.socket.is_some()
    }

    /// Returns whether the process has joined an agent, connected or not.
    pub fn is_joined(&self) -> bool {
        self.joiner.handle.is_on()
    }

    /// Returns the agent's socket, which a forked child inherits and must close.
    pub fn socket(&self) -> Option<RawFd> {
        self.joiner.handle.socket()
    }

    /// Ends all agent activity because the process ends. The agent notices the closed connection.
    pub(super) fn stop(&self) {
        self.joiner.is_over.store(true, Ordering::Release);
        // First, so that a join in progress stops waiting.
        self.joiner.handle.end();
        self.joiner.end(false);
    }
}

impl Drop for AgentLink {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Joiner {
    fn path(&self, asked: Option<&Path>) -> std::result::Result<PathBuf, AgentError> {
        match asked.map(Path::to_owned).or_else(|| self.socket.clone()) {
            Some(path) => Ok(path),
            None => Ok(glake_wire::find_socket(self.launch.runtime_dir.as_deref())?),
        }
    }

    /// Joins the agent at `path`. `starting`: the process joins by itself, with the pool of this device.
    fn join(
        &self,
        name: Option<&str>,
        path: PathBuf,
        starting: Option<DeviceId>,
    ) -> std::result::Result<(), AgentError> {
        self.has_begun.store(true, Ordering::Release);
        let program = std::env::args_os().next().unwrap_or_default();
        let asked = name.or(self.name.as_deref());
        let identity = Identity::of(asked, &program.to_string_lossy(), std::process::id(), &self.launch)?;
        let mut joined = self.joined.lock();
        if self.is_over.load(Ordering::Acquire) {
            return Err(AgentError::Ending);
        }
        if let Some(there) = joined.as_ref().filter(|there| !there.session.is_finished()) {
            let is_same = there.path == path && (name.is_none() || there.identity.name == identity.name);
            if is_same {
                self.note_loaded();
                self.handle.start_is_over();
                if let Some(outcome) = self.handle.attempt() {
                    self.handle.start_is_over();
                    return outcome;
                }
            } else if self.handle.is_welcomed() {
                self.note_loaded();
                self.handle.start_is_over();
                let (path, name) = (there.path.clone(), there.identity.name.clone());
                return Err(AgentError::Joined { path, name });
            }
        }
        // The session ended by itself, or has reached no agent and gives way to another.
        if let Some(before) = joined.take() {
            self.handle.end();
            self.end_session(before);
        }
        if starting.is_none() {
            self.note_loaded();
        }
        let os = |what| move |source| AgentError::Os { what, source };
        let wake = self.handle.open().map_err(os("a descriptor"))?;
        self.handle.activity.open()?;
        self.regions.gate.tell_activity();
        let (commands, to_do) = channel();
        let session = Session {
            handle: self.handle.clone(),
            registry: self.registry.clone(),
            regions: self.regions.clone(),
            path: path.clone(),
            identity: identity.clone(),
            wake,
            commands: commands.clone(),
            starting,
        };
        let executor = CommandThread::new(&self.handle, &self.registry, &self.regions);
        let executor = thread("glake-commands", move || executor.run(&to_do)).map_err(os("a thread"))?;
        let session = thread("glake-agent", move || session.run()).map_err(os("a thread"))?;
        let there = Joined { path, identity, session, executor, commands };
        let outcome = self.handle.outcome();
        match (outcome, starting) {
            (Err(error), None) => {
                self.join_threads(there);
                self.handle.activity.close();
                Err(error)
            }
            // A process that joins by itself has logged the reason; it retries unless the agent refused it.
            _ => {
                *joined = Some(there);
                Ok(())
            }
        }
    }

    /// Marks the program as loaded if it holds memory, because it joins.
    fn note_loaded(&self) {
        if !self.regions.made().is_zero() {
            self.handle.has_loaded();
        }
    }

    /// Joins by itself with the first pool, if a socket is configured and an agent can know the GPUs. If the agent says so, the thread that
    /// starts the pool waits for it.
    pub(super) fn pool_starts(&self, device: DeviceId, observers: &Observers) {
        if !self.has_begun.swap(true, Ordering::AcqRel)
            && let Some(path) = &self.socket
        {
            if !self.joins_by_itself {
                tracing::info!(
                    target: "glake::agent", socket = %path.display(),
                    "the agent is not joined: these GPUs are simulated for this process alone"
                );
                return;
            }
            if identity::is_secure_execution() {
                tracing::warn!(
                    target: "glake::agent", socket = %path.display(),
                    "the agent is not joined: this process has other rights than who started it (set-uid, set-gid, a file's capabilities, a security module); \
                     call glake_join"
                );
                return;
            }
            if let Err(error) = self.join(None, path.clone(), Some(device)) {
                tracing::warn!(
                    target: "glake::agent", socket = %path.display(), %error,
                    "the agent is not joined: memory is used without a lease; the next GPU's pool tries again"
                );
                self.has_begun.store(false, Ordering::Release);
            }
        }
        let until = Instant::now() + self.handle.refill_timeout.max(session::START);
        self.handle.wait_for_admission(until, || observers.told(LeaseEvent::Waiting, device, Bytes::ZERO));
    }

    fn end(&self, says_bye: bool) {
        let Some(joined) = self.joined.lock().take() else { return };
        match says_bye {
            true => self.handle.say_bye(),
            false => self.handle.end(),
        }
        self.end_session(joined);
    }

    /// Ends the threads, which were asked to stop, and all leases.
    fn end_session(&self, joined: Joined) {
        // Ends commands that wait for uses.
        self.regions.gate.changed();
        self.join_threads(joined);
        self.handle.set_off();
        self.registry.devices.iter().for_each(DeviceMemory::end_lease);
        self.handle.activity.close();
    }

    fn join_threads(&self, joined: Joined) {
        let Joined { session, executor, commands, .. } = joined;
        // The thread has reported its panic itself.
        let _ = session.join();
        let _ = commands.send(Command { epoch: 0, what: What::End });
        let _ = executor.join();
    }
}

fn thread(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name.to_owned()).spawn(run)
}
