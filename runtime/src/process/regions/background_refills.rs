//! Refills that go on whoever waits for them.
//!
//! ```text
//! gate, refill with a timeout ─► Coming ─ job in the background ─► over: told to the first who waits
//!                      └─ waits ─► told, or its time is over: the job goes on
//! ```
//!
//! Invariants: uses of the same tags wait for one job, as long as it runs. A job is over however it ends, without having begun too;
//! it leaves the list before that is told, so that nobody joins one that is over. A failure is told to somebody, or logged. Of two wishes
//! the later one holds: what is shrunk after a refill was asked for that nobody waits for stays away.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use glake_device::DeviceId;

use super::super::gate::Tags;
use super::super::{ProcessError, Result};
use super::tagged::Tagged;
use super::{Refill, RefillReport, Regions};
use crate::sync::{Condvar, Mutex};

/// The refills that uses have begun and that are under way.
#[derive(Debug, Default)]
pub(super) struct BackgroundRefills {
    of_uses: Mutex<Vec<(Vec<String>, Arc<BackgroundRefill>)>>,
    /// All that have not ended.
    requests: Mutex<Vec<Weak<RefillRequest>>>,
}

/// A refill that goes on in the background.
#[derive(Debug, Default)]
pub(super) struct BackgroundRefill {
    state: Mutex<State>,
    changed: Condvar,
    /// How many wait for it.
    waiting: AtomicUsize,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    UnderWay,
    Over(Result<RefillReport>),
    /// Somebody was told how it ended.
    Told,
    /// It never began, or did not end by itself.
    GivenUp,
}

/// A refill that goes on whoever waits for it, as it was requested.
#[derive(Debug)]
pub(super) struct RefillRequest {
    /// How often each of its tags had been shrunk then, by device.
    shrinks: Vec<(Arc<Tagged>, Vec<u64>)>,
    /// Who may wait for it; `None`: nobody does.
    waits: Option<Arc<BackgroundRefill>>,
}

/// Whether a refill of a tag on a device is still wanted; the default: it is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wanted<'a>(Option<(&'a RefillRequest, &'a Tagged, DeviceId)>);

impl<'a> Wanted<'a> {
    /// `None`: somebody waits for it until it ends.
    pub(super) fn by(request: Option<&'a RefillRequest>, tagged: &'a Tagged, device: DeviceId) -> Self {
        Wanted(request.map(|request| (request, tagged, device)))
    }

    /// Not once the tag was shrunk there after the request, and nobody waits for it any more.
    pub(super) fn is_still(&self) -> bool {
        let Some((request, tagged, device)) = self.0 else { return true };
        let then = request.shrinks.iter().find(|(of, _)| std::ptr::eq(&raw const **of, tagged));
        let on_device = |shrinks: &Vec<u64>| shrinks.get(usize::try_from(device.0).ok()?).copied();
        let now = usize::try_from(device.0).ok().and_then(|place| tagged.shrinks().nth(place));
        then.is_none_or(|(_, shrinks)| on_device(shrinks) == now)
            || request.waits.as_ref().is_some_and(|refill| refill.waiting.load(Ordering::SeqCst) > 0)
    }
}

/// How a wait for a refill ended.
#[derive(Debug)]
enum Waited {
    /// The refill is over.
    Over(Result<RefillReport>),
    /// It is over, and somebody else was told how.
    OthersTold,
    /// It goes on.
    GoesOn,
    /// It was given up: it got no thread, or the process ends.
    GivenUp,
}

/// Says that a refill is over, whatever becomes of its job.
#[derive(Debug)]
struct Ending {
    background_refills: Arc<BackgroundRefills>,
    coming: Arc<BackgroundRefill>,
}

impl BackgroundRefills {
    /// The refill of these tags that is under way, or a new one, which the caller begins.
    fn join(&self, tags: Vec<String>) -> (Arc<BackgroundRefill>, bool) {
        let mut under_way = self.of_uses.lock();
        if let Some((_, coming)) = under_way.iter().find(|(of, _)| *of == tags) {
            return (coming.clone(), false);
        }
        let coming = Arc::<BackgroundRefill>::default();
        under_way.push((tags, coming.clone()));
        (coming, true)
    }

    /// Whether one of a tag goes on that is not wanted any more on a device.
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
                // What has changed by then is looked at once more.
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
    /// Brings back what a use of `tags` found evicted; `begin` and `timeout` are the use's. Where its time ends the refill goes on.
    ///
    /// # Errors
    /// What the refill meets; [`ProcessError::HeldTooLong`], [`ProcessError::RefillGivenUp`].
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
            Waited::GivenUp => Err(ProcessError::RefillGivenUp { tags: tags.clone() }),
        }
    }

    /// A refill that is waited for so long, and goes on after that.
    ///
    /// # Errors
    /// What the refill meets; [`ProcessError::StillComing`], [`ProcessError::RefillGivenUp`].
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
            Waited::GivenUp => Err(ProcessError::RefillGivenUp { tags: tags() }),
        }
    }

    fn begin_refill(&self, ask: Refill, coming: &Arc<BackgroundRefill>) -> Result<()> {
        let ending =
            Ending { background_refills: self.set.background_refills.clone(), coming: coming.clone() };
        let request = self.request(&ask, Some(coming.clone()))?;
        let regions = self.set.clone();
        self.background.spawn(move || ending.end(State::Over(regions.refill_requested(&ask, Some(&request)))))
    }

    /// A refill that is requested now.
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

    /// Uses of the same tags share one job; whoever waits is woken, and one of them is told.
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

    /// A job that never runs wakes whoever waits for it.
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
