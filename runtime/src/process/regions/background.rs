//! Background jobs, on one thread with its own async runtime that is started on demand; and the refills that run there independently of
//! their waiters.
//!
//! Invariant: no part of a job runs after [`Background::stop`] has returned.
//!
//! ```text
//! gate, refill with a timeout ─► request ─ job in the background ─► over: the first waiter gets the result
//!                      └─ waits ─► gets the result, or its timeout expires: the job continues
//! ```
//!
//! Invariants: uses of the same tags wait for one job as long as it runs. A job can end without having begun. It leaves the list before its
//! end is published, so that no use joins a finished job. An error is returned to one waiter or logged. The latest request wins: memory
//! that is shrunk after an unattended refill was requested stays evicted.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use glake_device::DeviceId;
use tokio::runtime;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use super::super::gate::Tags;
use super::super::{ProcessError, Result};
use super::table::Tagged;
use super::{Refill, RefillReport, Regions};
use crate::sync::{Condvar, Mutex};

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

/// Refills begun by uses that are in progress.
#[derive(Debug, Default)]
pub(super) struct BackgroundRefills {
    of_uses: Mutex<Vec<(Vec<String>, Arc<BackgroundRefill>)>>,
    /// Requests that have not ended.
    requests: Mutex<Vec<Weak<RefillRequest>>>,
}

/// A refill in the background and its waiters.
#[derive(Debug, Default)]
pub(super) struct BackgroundRefill {
    state: Mutex<State>,
    changed: Condvar,
    /// Number of waiters.
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    UnderWay,
    Over(Result<RefillReport>),
    /// Finished; a waiter has taken the result.
    Told,
    /// Never begun, or cancelled.
    GivenUp,
}

/// Request of a refill, with the state at the time of the request.
#[derive(Debug)]
pub(super) struct RefillRequest {
    /// Number of shrinks of each tag at the time of the request, by device.
    shrinks: Vec<(Arc<Tagged>, Vec<u64>)>,
    /// Job whose waiters may want the refill; `None` if it has none.
    waits: Option<Arc<BackgroundRefill>>,
}

/// Check whether a refill of a tag on a device is still wanted; the default always is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted<'a>(Option<(&'a RefillRequest, &'a Tagged, DeviceId)>);

impl<'a> Wanted<'a> {
    /// Creates the check for a request; `None` if the caller waits until the refill ends.
    pub(super) fn by(request: Option<&'a RefillRequest>, tagged: &'a Tagged, device: DeviceId) -> Self {
        Wanted(request.map(|request| (request, tagged, device)))
    }

    /// Returns whether the refill is still wanted: a waiter exists, or the tag was not shrunk there after the request.
    pub(super) fn is_still(&self) -> bool {
        let Some((request, tagged, device)) = self.0 else { return true };
        let then = request.shrinks.iter().find(|(of, _)| std::ptr::eq(&raw const **of, tagged));
        let on_device = |shrinks: &Vec<u64>| shrinks.get(usize::try_from(device.0).ok()?).copied();
        let now = usize::try_from(device.0).ok().and_then(|place| tagged.shrinks().nth(place));
        then.is_none_or(|(_, shrinks)| on_device(shrinks) == now)
            || request.waits.as_ref().is_some_and(|refill| refill.waiting.load(Ordering::SeqCst) > 0)
    }
}

/// Result of a wait for a refill.
#[derive(Debug)]
enum Waited {
    /// The refill has ended.
    Over(Result<RefillReport>),
    /// The refill has ended, and another waiter took the result.
    OthersTold,
    /// The refill is still running.
    GoesOn,
    /// The refill was cancelled: it got no thread, or the process ends.
    GivenUp,
}

/// Guard that publishes the end of a refill even if its job is dropped.
#[derive(Debug)]
struct Ending {
    background_refills: Arc<BackgroundRefills>,
    coming: Arc<BackgroundRefill>,
}

impl BackgroundRefills {
    /// Returns the refill of these tags in progress, or a new one that the caller must begin.
    fn join(&self, tags: Vec<String>) -> (Arc<BackgroundRefill>, bool) {
        let mut under_way = self.of_uses.lock();
        if let Some((_, coming)) = under_way.iter().find(|(of, _)| *of == tags) {
            return (coming.clone(), false);
        }
        let coming = Arc::<BackgroundRefill>::default();
        under_way.push((tags, coming.clone()));
        (coming, true)
    }

    /// Returns whether a refill of a tag on a device is in progress that is no longer wanted.
    pub(super) fn has_unwanted(&self, tagged: &Tagged, device: DeviceId) -> bool {
        let is_unwanted =
            |request: Arc<RefillRequest>| !Wanted::by(Some(&request), tagged, device).is_still();
        self.requests.lock().iter().filter_map(Weak::upgrade).any(is_unwanted)
    }
}

impl BackgroundRefill {
    fn wait(&self, until: Option<Instant>) -> Waited {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let waited = self.wait_until(until);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        waited
    }

    fn wait_until(&self, until: Option<Instant>) -> Waited {
        let mut state = self.state.lock();
        loop {
            match std::mem::replace(&mut *state, State::Told) {
                State::Over(outcome) => return Waited::Over(outcome),
                State::Told => return Waited::OthersTold,
                State::GivenUp => {
                    *state = State::GivenUp;
                    return Waited::GivenUp;
                }
                State::UnderWay => *state = State::UnderWay,
            }
            match until {
                None => self.changed.wait(&mut state),
                Some(until) if until <= Instant::now() => return Waited::GoesOn,
                // The condition is checked once more after the deadline.
                Some(until) => _ = self.changed.wait_until(&mut state, until),
            }
        }
    }
}

impl Drop for BackgroundRefill {
    fn drop(&mut self) {
        if let State::Over(Err(error)) = self.state.get_mut() {
            tracing::warn!(target: "glake::regions", %error, "a refill that nobody waited for any more failed");
        }
    }
}

impl Ending {
    fn end(&self, outcome: State) {
        self.background_refills.of_uses.lock().retain(|(_, coming)| !Arc::ptr_eq(coming, &self.coming));
        let mut state = self.coming.state.lock();
        if matches!(*state, State::UnderWay) {
            *state = outcome;
        }
        drop(state);
        self.coming.changed.notify_all();
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.end(State::GivenUp);
    }
}

impl Regions {
    /// Refills the evicted memory of a use. `begin` and `timeout` are the use's; after the timeout the refill continues.
    ///
    /// # Errors
    /// Errors of the refill; [`ProcessError::HeldTooLong`], [`ProcessError::Refused`] if the refill is cancelled.
    pub(super) fn refill_for_use(
        &self,
        tags: &Tags,
        evicted: Vec<String>,
        begin: Instant,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let ask = Refill { tags: Some(evicted.clone()), ..Refill::default() };
        let Some(timeout) = timeout else { return self.set.refill(&ask).map(|_| ()) };
        let (coming, is_new) = self.set.background_refills.join(evicted);
        if is_new {
            self.begin_refill(ask, &coming)?;
        }
        match coming.wait(begin.checked_add(timeout)) {
            Waited::Over(outcome) => outcome.map(|_| ()),
            Waited::OthersTold => Ok(()),
            Waited::GoesOn => Err(ProcessError::HeldTooLong { tags: tags.clone(), waited: begin.elapsed() }),
            Waited::GivenUp => Err(ProcessError::refill_given_up(tags)),
        }
    }

    /// Refills and waits up to `timeout`; the refill continues afterwards.
    ///
    /// # Errors
    /// Errors of the refill; [`ProcessError::StillComing`], [`ProcessError::Refused`] if the refill is cancelled.
    pub(super) fn refill_within(&self, ask: &Refill, timeout: Duration) -> Result<RefillReport> {
        let begin = Instant::now();
        let coming = Arc::<BackgroundRefill>::default();
        let tags = || ask.tags.as_deref().map_or(Tags::All, Tags::of);
        self.begin_refill(ask.clone(), &coming)?;
        match coming.wait(begin.checked_add(timeout)) {
            Waited::Over(outcome) => outcome,
            Waited::OthersTold | Waited::GoesOn => {
                Err(ProcessError::StillComing { tags: tags(), waited: begin.elapsed() })
            }
            Waited::GivenUp => Err(ProcessError::refill_given_up(&tags())),
        }
    }

    fn begin_refill(&self, ask: Refill, coming: &Arc<BackgroundRefill>) -> Result<()> {
        let ending =
            Ending { background_refills: self.set.background_refills.clone(), coming: coming.clone() };
        let request = self.request(&ask, Some(coming.clone()))?;
        let regions = self.set.clone();
        self.background.spawn(move || ending.end(State::Over(regions.refill_requested(&ask, Some(&request)))))
    }

    /// Creates a request with the current shrink counts.
    pub(super) fn request(
        &self,
        ask: &Refill,
        waits: Option<Arc<BackgroundRefill>>,
    ) -> Result<Arc<RefillRequest>> {
        self.set.table.cover(&self.set.registry.devices);
        let tags = self.set.table.named(ask.tags.as_deref())?;
        let shrinks = tags.into_iter().map(|tagged| (tagged.clone(), tagged.shrinks().collect())).collect();
        let request = Arc::new(RefillRequest { shrinks, waits });
        let mut all = self.set.background_refills.requests.lock();
        all.retain(|request| request.strong_count() > 0);
        all.push(Arc::downgrade(&request));
        Ok(request)
    }
}

#[cfg(test)]
#[cfg(schedules)]
mod schedules {
    use shuttle::thread;

    use super::*;
    use crate::sync::schedules;

    fn report() -> RefillReport {
        RefillReport::default()
    }

    /// Uses of the same tags share one job; all waiters wake up, and one gets the result.
    #[test]
    fn uses_share_a_job_and_all_are_woken() {
        schedules(|| {
            let background_refills = Arc::new(BackgroundRefills::default());
            let jobs = Arc::new(std::sync::atomic::AtomicUsize::new(0));
            let uses: Vec<_> = (0..3)
                .map(|_| {
                    let (background_refills, jobs) = (background_refills.clone(), jobs.clone());
                    thread::spawn(move || {
                        let (coming, is_new) = background_refills.join(vec!["weights".to_owned()]);
                        let job = is_new.then(|| {
                            jobs.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                            let ending = Ending { background_refills, coming: coming.clone() };
                            thread::spawn(move || ending.end(State::Over(Ok(report()))))
                        });
                        let waited = coming.wait(None);
                        if let Some(job) = job {
                            job.join().unwrap();
                        }
                        assert!(matches!(waited, Waited::Over(_) | Waited::OthersTold), "{waited:?}");
                        usize::from(matches!(waited, Waited::Over(_)))
                    })
                })
                .collect();
            let told: usize = uses.into_iter().map(|thread| thread.join().unwrap()).sum();
            assert_eq!(told, jobs.load(std::sync::atomic::Ordering::SeqCst), "each job is told once");
            assert!(background_refills.of_uses.lock().is_empty());
        });
    }

    /// A job that never runs wakes its waiters.
    #[test]
    fn a_job_that_is_given_up_wakes_everybody() {
        schedules(|| {
            let background_refills = Arc::new(BackgroundRefills::default());
            let (coming, _) = background_refills.join(vec![]);
            let ending = Ending { background_refills: background_refills.clone(), coming: coming.clone() };
            let waits: Vec<_> = (0..2)
                .map(|_| {
                    let coming = coming.clone();
                    thread::spawn(move || assert!(matches!(coming.wait(None), Waited::GivenUp)))
                })
                .collect();
            drop(ending);
            waits.into_iter().for_each(|thread| thread.join().unwrap());
            assert!(background_refills.of_uses.lock().is_empty());
        });
    }
}
