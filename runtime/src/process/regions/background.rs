//! Background jobs: one thread with its own async runtime, started on demand.
//!
//! Invariant: no part of a job runs after [`Background::stop`] has returned.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tokio::runtime;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::super::{ProcessError, Result};

type Job = Box<dyn FnOnce() + Send>;

/// Purpose of the thread in error texts.
const WHAT: &str = "refills in the background";
/// Maximum number of concurrent jobs; each waits for copies most of the time.
const AT_ONCE: usize = 4;

/// Background thread, once it is started.
#[derive(Debug, Default)]
pub(in super::super) struct Background {
    running: Mutex<Option<Running>>,
    stopped: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Running {
    jobs: UnboundedSender<Job>,
    thread: JoinHandle<()>,
}

impl Background {
    /// Queues a job. After a stop the job is dropped.
    ///
    /// # Errors
    /// [`ProcessError::NoThread`].
    pub(super) fn spawn(&self, job: impl FnOnce() + Send + 'static) -> Result<()> {
        let mut running = self.running.lock();
        if self.stopped.load(Ordering::Acquire) {
            return Ok(());
        }
        let jobs = match &*running {
            Some(running) => &running.jobs,
            None => &running.insert(start()?).jobs,
        };
        let stopped = self.stopped.clone();
        let job = move || {
            if !stopped.load(Ordering::Acquire) {
                job();
            }
        };
        jobs.send(Box::new(job))
            .map_err(|_| ProcessError::NoThread { what: WHAT, source: std::io::ErrorKind::BrokenPipe.into() })
    }

    /// Waits for running jobs; jobs that have not begun are dropped.
    pub(in super::super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        let running = self.running.lock().take();
        if let Some(Running { jobs, thread }) = running {
            drop(jobs);
            // The job has reported its panic itself.
            let _ = thread.join();
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.stop();
    }
}

fn start() -> Result<Running> {
    let no_thread = |source| ProcessError::NoThread { what: WHAT, source };
    let runtime = runtime::Builder::new_current_thread()
        .thread_name("glake-worker")
        .max_blocking_threads(AT_ONCE)
        .build()
        .map_err(no_thread)?;
    let (jobs, mut asked) = unbounded_channel::<Job>();
    let run = move || {
        runtime.block_on(async {
            while let Some(job) = asked.recv().await {
                // Driver calls and copies block: not on the runtime's own thread.
                runtime.spawn_blocking(job);
            }
        });
        // Waits for running jobs.
        drop(runtime);
    };
    let named = std::thread::Builder::new().name("glake-runtime".to_owned());
    Ok(Running { jobs, thread: named.spawn(run).map_err(no_thread)? })
}
