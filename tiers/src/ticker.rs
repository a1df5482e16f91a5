//! Thread that advances completion points while there are frees to cover.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::GpuPool;

/// Thread that ticks a pool every `interval` while there is work, and sleeps otherwise. Dropping it ends the thread.
#[derive(Debug)]
pub struct Ticker {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Ticker {
    /// Starts the thread `glake-completion_events`. It holds the pool weakly and ends with it.
    ///
    /// # Errors
    /// The operating system cannot start a thread.
    pub fn start(pool: &Arc<GpuPool>, interval: Duration) -> std::io::Result<Self> {
        Ticker::start_with(pool, interval, |_| None)
    }

    /// Starts the thread with a function that it calls after each tick (`true`) and before it sleeps (`false`). While there is no work, the
    /// thread sleeps for the returned time; `None`: until it is unparked.
    ///
    /// # Errors
    /// The operating system cannot start a thread.
    pub fn start_with(
        pool: &Arc<GpuPool>,
        interval: Duration,
        look: impl FnMut(bool) -> Option<Duration> + Send + 'static,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let thread = std::thread::Builder::new().name("glake-completion_events".into()).spawn({
            let (pool, stop) = (Arc::downgrade(pool), stop.clone());
            move || run(&pool, &stop, interval, look)
        })?;
        Ok(Ticker { stop, thread: Some(thread) })
    }

    /// Stops the thread and waits for its end. Callable from any thread but the ticker's own, also from one that is exiting and has no
    /// thread-local data left, where a drop could not identify the current thread.
    pub fn stop(mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

/// Ticks until told to stop. A pool may have several tickers, one after another or at once.
fn run(
    pool: &Weak<GpuPool>,
    stop: &AtomicBool,
    interval: Duration,
    mut look: impl FnMut(bool) -> Option<Duration>,
) {
    let thread = std::thread::current();
    // Registered before the first check for work, so that later work wakes the thread.
    if let Some(pool) = pool.upgrade() {
        pool.clock().wakes(thread.clone());
    }
    while !stop.load(Ordering::Acquire) {
        let Some(pool) = pool.upgrade() else { return };
        if !pool.clock().is_ticking() {
            drop(pool);
            match look(false) {
                Some(pause) => std::thread::park_timeout(pause),
                None => std::thread::park(),
            }
            continue;
        }
        if let Err(error) = pool.tick() {
            tracing::warn!(target: "glake::completion", %error, "a completion point could not be recorded; the next one covers it");
        }
        drop(pool);
        look(true);
        pause(stop, interval);
    }
    if let Some(pool) = pool.upgrade() {
        pool.clock().wakes_no_more(thread.id());
    }
}

/// Sleeps for the interval, or until told to stop: frees wake the thread too, and must not make it tick more often.
fn pause(stop: &AtomicBool, interval: Duration) {
    let start = Instant::now();
    while !stop.load(Ordering::Acquire)
        && let Some(left) = interval.checked_sub(start.elapsed()).filter(|left| !left.is_zero())
    {
        std::thread::park_timeout(left);
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // A pool that is dropped on the ticker's own thread must not wait for itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}
