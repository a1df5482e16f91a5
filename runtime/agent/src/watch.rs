//! Watching the agent: snapshots for clients that stay connected, and such a client.
//!
//! ```text
//! time      0        100 ms     200 ms     300 ms          watchers wait for a slot of 100 ms
//! readings  ├─ r0 ───┼─ r1 ─────┼──────────┼─ r3 ─►        the first that wants a slot has it read: pages, meters, arbiter
//! fast      r0       r1         -          r3              all others of the slot get the same bytes
//! slow      r0 ──────────────────────────► r3 (1 missed)   a reading that is being sent, and no queue
//! ```
//!
//! Without a watcher that waits there is no timer and no reading.

use std::cell::{Cell, RefCell};
use std::io::Read as _;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use glake_meter::process_name;
use glake_wire::{Answer, Ask, Envelope, Frames, LEAST_INTERVAL_MS, Request, Snapshot, WatchedWorker, frame};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use tokio::sync::Notify;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep_until, timeout};

use crate::Agent;
use crate::daemon::Daemon;
use crate::link::{self, ClientError, Connection, is_for_now};

/// Length of a slot, the shortest interval of snapshots.
const SLOT: Duration = Duration::from_millis(LEAST_INTERVAL_MS);
/// Longest interval of snapshots.
const LONGEST_INTERVAL: Duration = Duration::from_secs(3600);
/// Longest wait of a snapshot for the meters.
pub(crate) const LONGEST_GLANCE: Duration = Duration::from_millis(50);
/// Limit of clients that watch at a time.
const MOST_WATCHERS: usize = 256;
/// Least size of the kernel's buffer for a watcher, which grows to a quarter of a snapshot: what it holds is old when a slow watcher reads it.
const SEND_BUFFER: usize = 16 << 10;

/// Readings for watchers.
#[derive(Default)]
pub(crate) struct Watchers {
    newest: RefCell<Option<Rc<Reading>>>,
    /// Whether a reading is being taken.
    is_taking: Cell<bool>,
    taken: Notify,
    count: Cell<usize>,
    /// Number of snapshots so far.
    snapshots: Cell<u64>,
}

/// Snapshot as bytes that all watchers get, without decisions.
struct Reading {
    slot: u64,
    number: u64,
    frames: Vec<u8>,
}

/// Place of a watcher, which is free again at its end.
struct Seat(Rc<Daemon>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.watchers.count.update(|count| count - 1);
    }
}

impl Daemon {
    /// Returns a snapshot of everything but decisions, by the last readings of pages and meters.
    pub(crate) fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.ask(Agent::snapshot);
        let absent =
            self.child_rows().into_iter().map(|row| WatchedWorker { row, ..WatchedWorker::default() });
        snapshot.workers.extend(absent);
        // Both parts are sorted.
        snapshot.workers.sort_by(|a, b| a.row.worker.cmp(&b.row.worker));
        self.watchers.snapshots.update(|number| number + 1);
        (snapshot.number, snapshot.pid) = (self.watchers.snapshots.get(), std::process::id());
        for process in snapshot.gpus.iter_mut().flat_map(|gpu| &mut gpu.others) {
            process.name = process_name(process.pid);
        }
        snapshot
    }
}

/// Returns the current slot.
fn slot(daemon: &Daemon) -> u64 {
    u64::try_from(daemon.now().as_millis()).unwrap_or(u64::MAX) / LEAST_INTERVAL_MS
}

impl Watchers {
    /// Returns a reading of a slot or a later one, once the slot has begun.
    async fn reading(daemon: &Rc<Daemon>, slot: u64) -> Rc<Reading> {
        sleep_until(daemon.begun + SLOT.saturating_mul(u32::try_from(slot).unwrap_or(u32::MAX))).await;
        let watchers = &daemon.watchers;
        loop {
            let taken = watchers.taken.notified();
            let newest = watchers.newest.borrow().clone();
            if let Some(newest) = newest.filter(|newest| newest.slot >= slot) {
                return newest;
            }
            if !watchers.is_taking.replace(true) {
                spawn_local(Watchers::take_reading(daemon.clone()));
            }
            taken.await;
        }
    }

    /// Takes a reading, which goes on if the watcher that wanted it leaves.
    async fn take_reading(daemon: Rc<Daemon>) {
        let slot = slot(&daemon);
        daemon.glance(LONGEST_GLANCE).await;
        daemon.look();
        let snapshot = daemon.snapshot();
        let number = snapshot.number;
        let frames = snapshot.frames().unwrap_or_else(|error| {
            tracing::warn!(target: "glake::agent", %error, "a snapshot could not be encoded");
            Vec::new()
        });
        let watchers = &daemon.watchers;
        watchers.newest.replace(Some(Rc::new(Reading { slot, number, frames })));
        watchers.is_taking.set(false);
        watchers.taken.notify_waiters();
    }

    fn take_seat(daemon: &Rc<Daemon>) -> Option<Seat> {
        let count = daemon.watchers.count.get();
        daemon.watchers.count.set(count + usize::from(count < MOST_WATCHERS));
        (count < MOST_WATCHERS).then(|| Seat(daemon.clone()))
    }
}

/// Sends snapshots to a client until it closes the connection.
pub(crate) async fn serve(
    daemon: &Rc<Daemon>,
    every_ms: u64,
    connection: &mut Connection,
) -> std::io::Result<()> {
    let Some(_seat) = Watchers::take_seat(daemon) else {
        let why = format!("{MOST_WATCHERS} clients watch this agent: close one of them (glake top)");
        return connection
            .say(&frame(&Envelope::unnumbered(Answer::Error { why })).map_err(std::io::Error::other)?)
            .await;
    };
    let longest = u64::try_from(LONGEST_INTERVAL.as_millis()).unwrap_or(u64::MAX);
    let every = every_ms.clamp(LEAST_INTERVAL_MS, longest).div_ceil(LEAST_INTERVAL_MS);
    let (mut due, mut seen, mut missed) = (slot(daemon), 0, 0);
    loop {
        let reading = tokio::select! {
            reading = Watchers::reading(daemon, due) => reading,
            () = connection.closed() => return Ok(()),
        };
        let (decisions, changes) = daemon.ask(|agent| agent.decisions(seen));
        let head = Snapshot { number: reading.number, missed, decisions, more: true, ..Snapshot::default() };
        connection.set_send_buffer(SEND_BUFFER.max(reading.frames.len() / 4))?;
        let head = head.frames().map_err(std::io::Error::other)?;
        let said = async {
            connection.say(&head).await?;
            connection.say(&reading.frames).await
        };
        // A client that reads nothing gives its seat to others.
        let Ok(said) = timeout(Ask::TIMEOUT, said).await else { return Ok(()) };
        said?;
        seen = changes;
        // Watchers of the same interval wait for the same slots.
        let next = (due / every + 1) * every;
        let latest = slot(daemon) / every * every;
        due = next.max(latest);
        missed = (due - next) / every;
    }
}

/// Client that watches an agent.
///
/// It has no thread: [`Watch::next`] reads what has arrived, and [`AsFd`] tells when more has.
#[derive(Debug)]
pub struct Watch {
    socket: UnixStream,
    frames: Frames,
    bytes: Vec<u8>,
    /// First parts of a snapshot.
    begun: Option<Snapshot>,
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Watch {
    /// Connects to the agent at a socket and asks for a snapshot at each interval, 100 ms or longer.
    ///
    /// # Errors
    /// [`ClientError`]. A refusal, also that of an agent without `watch`, is the error of the first [`Watch::next`].
    pub fn connect(path: &Path, every: Duration) -> Result<Watch, ClientError> {
        let every_ms = u64::try_from(every.as_millis()).unwrap_or(u64::MAX);
        let socket = link::begin(path, &Request::from(Ask::Watch { every_ms }))?;
        socket.set_nonblocking(true)?;
        Ok(Watch { socket, frames: Frames::default(), bytes: vec![0; 64 << 10], begun: None })
    }

    /// Returns the newest snapshot that has arrived, and waits for one for at most `longest`; `None`: none has arrived. Snapshots that arrived
    /// before the newest one count as missed, and their decisions are in it.
    ///
    /// # Errors
    /// [`ClientError`]: the connection is over.
    pub fn next(&mut self, longest: Duration) -> Result<Option<Snapshot>, ClientError> {
        let until = Instant::now() + longest;
        let mut newest = None;
        loop {
            while let Some(Envelope { message, .. }) = self.frames.take::<Answer>()? {
                if let Some(whole) = self.hear(message)? {
                    newest = Some(match newest {
                        Some(before) => after(before, whole),
                        None => whole,
                    });
                }
            }
            match self.socket.read(&mut self.bytes) {
                Ok(0) => return newest.map_or(Err(ClientError::CommandResult), |whole| Ok(Some(whole))),
                Ok(length) => {
                    self.frames.push(&self.bytes[..length]);
                    // Whoever reads more slowly than snapshots come shows the newest now and then.
                    if newest.is_some() && Instant::now() >= until {
                        return Ok(newest);
                    }
                }
                Err(error) if is_for_now(&error) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if newest.is_some() || !self.wait(left)? {
                        return Ok(newest);
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits until bytes arrive. Returns whether some have.
    fn wait(&self, longest: Duration) -> Result<bool, ClientError> {
        let wait = Timespec {
            tv_sec: longest.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: longest.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&wait)) {
            Ok(count) => Ok(count > 0),
            // A signal, for example of a new size of the terminal: the caller may want to look.
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(std::io::Error::from(error).into()),
        }
    }

    /// Handles a frame. Returns the snapshot that it completes.
    fn hear(&mut self, answer: Answer) -> Result<Option<Snapshot>, ClientError> {
        match answer {
            Answer::Snapshot(part) => {
                let whole = match self.begun.take() {
                    // Without its last part a snapshot is lost, and the next one begins.
                    Some(mut begun) if begun.number == part.number => {
                        begun.append(part);
                        begun
                    }
                    _ => part,
                };
                if whole.more {
                    self.begun = Some(whole);
                    return Ok(None);
                }
                Ok(Some(whole))
            }
            Answer::Error { why } | Answer::Refused { why } => Err(ClientError::Refused(why)),
            _ => Ok(None),
        }
    }
}

/// Returns the later of two snapshots, with the decisions of both.
fn after(before: Snapshot, mut later: Snapshot) -> Snapshot {
    let mut decisions = before.decisions;
    decisions.retain(|old| later.decisions.iter().all(|new| new.number != old.number));
    decisions.append(&mut later.decisions);
    Snapshot { missed: before.missed + later.missed + 1, decisions, ..later }
}
