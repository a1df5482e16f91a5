//! Source of the frames: an agent, and where none answers the counters pages of processes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use glake_agent::{ClientError, Watch};
use glake_meter::{GpuMemory, Meter};
use glake_wire::Snapshot;
use rustix::time::{ClockId, clock_gettime};

use super::pages::Pages;
use super::processes::Reading;
use super::scene::{clean, span};

/// Time between two attempts to reach an agent.
const RETRY: Duration = Duration::from_secs(2);
/// Silence after which an agent counts as stopped.
const LATE: Duration = Duration::from_secs(3);
/// Time between two readings of the meter.
const METER_INTERVAL: Duration = Duration::from_secs(1);

/// Contents of the next frame.
#[derive(Clone, Debug)]
pub enum Update {
    /// A snapshot of the agent, and the pages of processes for what it does not know.
    Agent(Box<Snapshot>, Reading),
    /// No agent answers: the pages of processes.
    Pages(Reading),
}

/// Source of the frames.
pub struct Feed {
    socket: Option<PathBuf>,
    /// Whether the user named the socket.
    is_named: bool,
    interval: Duration,
    watch: Option<Watch>,
    retry_at: Instant,
    /// Time of the next reading of the pages.
    due: Instant,
    pages: Pages,
    reading: Reading,
    meter: Option<Receiver<Vec<(String, GpuMemory)>>>,
    /// Time of the last snapshot, or of the connection.
    heard: Instant,
    /// Whether an agent has answered.
    had_agent: bool,
    /// Why none answers.
    why: Option<String>,
}

impl Feed {
    /// Connects to the agent of a socket, if there is one. `meter` reads the GPUs while there is none; `backend` is its name.
    pub fn open(
        socket: Option<PathBuf>,
        is_named: bool,
        interval: Duration,
        meter: Option<Arc<dyn Meter>>,
        backend: String,
    ) -> Feed {
        let now = Instant::now();
        let mut feed = Feed {
            socket,
            is_named,
            interval,
            watch: None,
            retry_at: now,
            due: now,
            pages: Pages::default(),
            reading: Reading { backend, ..Reading::default() },
            meter: meter.map(read_in_background),
            heard: now,
            had_agent: false,
            why: None,
        };
        feed.connect(now);
        feed
    }

    /// Returns the socket of the connected agent.
    pub fn agent(&self) -> Option<&Path> {
        self.watch.as_ref().and(self.socket.as_deref())
    }

    /// Returns what is wrong, if anything is.
    pub fn notice(&self) -> Option<String> {
        if self.watch.is_some() {
            let silence = self.heard.elapsed();
            let is_late = silence > self.interval.saturating_mul(2).max(LATE);
            return is_late.then(|| {
                let since = span(silence.as_secs_f64());
                format!("The agent has not answered for {since}: is it stopped? The figures are as old.")
            });
        }
        let why = self.why.as_deref()?;
        if self.had_agent {
            return Some(format!(
                "The agent is gone, these are processes' own counters; trying again. {why}"
            ));
        }
        self.is_named.then(|| format!("No agent answers; trying again. {why}"))
    }

    /// Returns the contents of the next frame, if there are new ones; waits for them at most for `most`.
    pub fn next(&mut self, most: Duration) -> Option<Update> {
        let now = Instant::now();
        if self.watch.is_none() && now >= self.retry_at {
            self.connect(now);
        }
        if let Some(watch) = &mut self.watch {
            match watch.next(most) {
                Ok(Some(snapshot)) => {
                    self.heard = now;
                    if now >= self.due {
                        self.due = now + METER_INTERVAL;
                        self.read_pages(now);
                    }
                    return Some(Update::Agent(Box::new(snapshot), self.reading.clone()));
                }
                Ok(None) => return None,
                Err(error) => {
                    self.watch = None;
                    self.fails(&error);
                    (self.retry_at, self.due) = (now + RETRY, now);
                }
            }
        }
        let rest = self.due.saturating_duration_since(Instant::now());
        if rest > most {
            std::thread::sleep(most);
            return None;
        }
        std::thread::sleep(rest);
        let now = Instant::now();
        self.due = now + self.interval;
        self.read_pages(now);
        Some(Update::Pages(self.reading.clone()))
    }

    /// Waits for the first reading of the meter.
    pub fn wait_for_meter(&mut self, most: Duration) {
        if let Some(gpus) = self.meter.as_ref().and_then(|meter| meter.recv_timeout(most).ok()) {
            self.reading.gpus = gpus;
        }
    }

    fn connect(&mut self, now: Instant) {
        self.retry_at = now + RETRY;
        let Some(socket) = &self.socket else { return };
        match Watch::connect(socket, self.interval) {
            Ok(watch) => {
                (self.watch, self.had_agent, self.why) = (Some(watch), true, None);
                self.heard = now;
            }
            Err(error) => self.fails(&error),
        }
    }

    fn fails(&mut self, error: &ClientError) {
        self.why = Some(clean(&error.to_string(), 120));
    }

    fn read_pages(&mut self, now: Instant) {
        if let Some(gpus) = self.meter.as_ref().and_then(|meter| meter.try_iter().last()) {
            self.reading.gpus = gpus;
        }
        self.reading.processes = self.pages.read(now);
        let clock = clock_gettime(ClockId::Monotonic);
        let seconds = u64::try_from(clock.tv_sec).unwrap_or_default();
        let nanoseconds = u64::try_from(clock.tv_nsec).unwrap_or_default();
        self.reading.now_ns = seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds);
    }
}

/// Reads a meter once a second on a thread of its own, because a driver may be slow or hang; ends with the receiver.
fn read_in_background(meter: Arc<dyn Meter>) -> Receiver<Vec<(String, GpuMemory)>> {
    let (send, receive) = sync_channel(1);
    let read = move || {
        loop {
            let gpus = meter.gpus().into_iter();
            let gpus = gpus.filter_map(|gpu| meter.read(&gpu).ok().map(|memory| (gpu, memory)));
            if send.send(gpus.collect()).is_err() {
                return;
            }
            std::thread::sleep(METER_INTERVAL);
        }
    };
    // Without the thread there is no meter, as without a driver.
    let _ = std::thread::Builder::new().name("glake-meter".to_owned()).spawn(read);
    receive
}
