//! Lease: upper bound of a pool's physical memory, granted from outside and independent of the pool's own limit.
//!
//! ```text
//!            set, grant                      take
//!   agent ───────────────► leased ◄──────────────────
//!                            │ created memory never exceeds it
//!   plan, refill ─► count ─► made ─► (released) ─► uncounted, or returned: leased is lowered with it
//!                     └ too much: sends "grow" and waits for a grant
//! ```
//!
//! The allocator does not know the lease: extent sizes and stitching are the same without one.
//!
//! Invariants: counted memory never exceeds the lease, unless the lease was set below the existing memory; then nothing is created until it
//! fits again. An extent is counted before the driver creates it and until the driver has released it. Observers are called with no lease
//! lock held, and every returned byte is reported once.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::DeviceId;
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::PoolError;

/// Bytes returned by shrinks after which they are reported to the observer.
const REPORTED_BYTES: Bytes = Bytes::mib(512);
/// Age after which smaller returns are reported too.
const REPORT_INTERVAL: Duration = Duration::from_millis(10);
/// Polling interval of waiting threads: if the lease allows memory that the driver lacks, other processes are about to release some.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Event reported to the grantor of leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseEvent {
    /// Memory is about to be refilled: this many more bytes are needed, for it and for the growth after it.
    Want,
    /// A waiting request exceeds the lease by this many bytes.
    Grow,
    /// A shrink returned this many bytes: the lease was lowered by them.
    Returned,
    /// A request is still waiting for a grant. Reported repeatedly by the waiting thread, which lets other work run meanwhile.
    Waiting,
}

/// Grantor of leases, usually the node agent's client.
pub trait LeaseObserver: fmt::Debug + Send + Sync {
    /// Returns whether there is a grantor. Without one, requests do not wait.
    fn is_listening(&self) -> bool;

    /// Reports an event, on the calling thread and with no lock of the pool held. The observer may change the lease but must not move
    /// regions.
    fn told(&self, event: LeaseEvent, device: DeviceId, bytes: Bytes);

    /// Reports the amount of physical memory, including memory being created. Called when memory is created or released, and once blocks
    /// use created memory, with locks held: the observer must not call the pool or its lease.
    fn made(&self, _device: DeviceId, _bytes: Bytes) {}
}

/// Timeouts and amounts of lease requests.
#[derive(Clone, Debug, Default)]
pub struct LeaseOptions {
    /// Timeout for an allocation that exceeds the lease.
    pub grow_timeout: Duration,
    /// Extra bytes requested with a refill, so that the growth after it does not wait.
    pub growth: Bytes,
    /// Observer of lease events; `None`: nobody is notified.
    pub observer: Option<Arc<dyn LeaseObserver>>,
}

/// Snapshot of a lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseView {
    /// Bytes of the lease; `None`: there is no lease.
    pub leased: Option<Bytes>,
    /// Physical memory that exists or is being created.
    pub made: Bytes,
    /// Number of waits for a grant.
    pub waits: u64,
    /// Total duration of these waits.
    pub waited: Duration,
}

/// Reason why memory was not created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "its lease of {leased} has no room for {wanted} of new memory, {made} are made{}; it takes a larger lease \
     (glake.lease.grant, glake_lease_grant, or a grant of the node agent), or less memory",
    if waited.is_zero() { String::new() } else { format!(", and nobody granted more within {waited:.1?}") }
)]
pub struct LeaseShort {
    /// Bytes of the lease.
    pub leased: Bytes,
    /// Physical memory that exists.
    pub made: Bytes,
    /// Requested new memory in bytes.
    pub wanted: Bytes,
    /// Time spent waiting for a grant.
    pub waited: Duration,
    /// Whether the grantor denied the request.
    pub denied: bool,
}

/// Lease of one GPU's pool, with the account of its physical memory.
#[derive(Debug)]
pub struct Lease {
    device: DeviceId,
    options: LeaseOptions,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    leased: Option<Bytes>,
    made: Bytes,
    /// Bytes returned by shrinks and not reported yet, with the time of the first.
    returned: Bytes,
    returned_since: Option<Instant>,
    /// Number of increases of the lease or decreases of created memory so far.
    grants: u64,
    /// Number of denials to refills and to requests.
    denials: Denials,
    /// Bytes announced for refills and not granted yet; requests that fall short meanwhile wait for these grants.
    wanted: Bytes,
    /// Bytes asked for by all waiting requests and not granted yet.
    asked: Bytes,
    /// Number of requests that have asked and still wait; without any, returned memory wakes nobody.
    asking: usize,
    /// Number of grants, out of `grants`.
    given: u64,
    /// Refill denials before the last announcement; later denials apply to it.
    denied_before: Option<u64>,
    /// Whether waiting has been disabled, because the process ends.
    stopped: bool,
    waits: u64,
    waited: Duration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Denials {
    refills: u64,
    growth: u64,
}

/// Memory counted as created until this guard is dropped.
#[derive(Debug)]
pub(super) struct LeaseCharge {
    lease: Arc<Lease>,
    bytes: Bytes,
}

/// Request that may ask for a larger lease.
#[derive(Debug)]
pub(super) struct LeaseRequest<'a> {
    lease: &'a Lease,
    /// Deadline of the request; `None`: it has not asked yet.
    until: Option<Instant>,
    /// Shortfall in bytes that was last reported.
    asked: Bytes,
    short: Option<LeaseShort>,
}

/// Wait of a refill for its grants.
#[derive(Debug)]
pub struct Credits {
    lease: Arc<Lease>,
    timeout: Duration,
    /// Deadline, number of grants seen, and number of denials at the start.
    seen: Mutex<(Instant, u64, u64)>,
}

impl Lease {
    /// Creates an unbounded lease.
    pub fn new(device: DeviceId, options: LeaseOptions) -> Arc<Lease> {
        Arc::new(Lease { device, options, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Sets the lease; `None` removes the bound.
    pub fn set(&self, leased: Option<Bytes>) {
        let mut state = self.state.lock();
        let is_more = match (state.leased, leased) {
            (Some(before), Some(leased)) => leased > before,
            (_, leased) => leased.is_none(),
        };
        state.leased = leased;
        // Setting the same lease again is no increase: waiters must not count on more.
        state.grants += u64::from(is_more);
        (state.wanted, state.asked) = (Bytes::ZERO, Bytes::ZERO);
        drop(state);
        self.changed.notify_all();
    }

    /// Adds to the lease. A grant of 0 tells waiters that no more is available. Returns false if there is no lease.
    pub fn grant(&self, bytes: Bytes) -> bool {
        let mut state = self.state.lock();
        let Some(leased) = &mut state.leased else { return false };
        *leased = leased.saturating_add(bytes);
        match bytes.is_zero() {
            true => {
                (state.denials.refills, state.denials.growth) =
                    (state.denials.refills + 1, state.denials.growth + 1);
                (state.wanted, state.asked) = (Bytes::ZERO, Bytes::ZERO);
            }
            false => {
                state.grants += 1;
                state.given += 1;
                let rest = bytes.saturating_sub(state.wanted);
                state.wanted = state.wanted.saturating_sub(bytes);
                state.asked = state.asked.saturating_sub(rest);
            }
        }
        drop(state);
        self.changed.notify_all();
        true
    }

    /// Makes refills that wait for a grant give up; requests keep waiting.
    pub fn deny_refills(&self) {
        let mut state = self.state.lock();
        state.denials.refills += 1;
        state.wanted = Bytes::ZERO;
        drop(state);
        self.changed.notify_all();
    }

    /// Makes requests that wait for a grant give up; refills keep waiting.
    pub fn deny_growth(&self) {
        let mut state = self.state.lock();
        state.denials.growth += 1;
        state.asked = Bytes::ZERO;
        drop(state);
        self.changed.notify_all();
    }

    /// Sets the lease if no more memory exists than that: another grantor takes over. Bytes returned under the previous lease are not
    /// reported. Returns the previous lease; `Err` holds the amount of existing memory, and nothing has changed.
    pub fn hand_over(&self, leased: Bytes) -> std::result::Result<Option<Bytes>, Bytes> {
        let mut state = self.state.lock();
        if state.made > leased {
            return Err(state.made);
        }
        let before = state.leased.replace(leased);
        (state.returned, state.returned_since) = (Bytes::ZERO, None);
        (state.wanted, state.asked) = (Bytes::ZERO, Bytes::ZERO);
        drop(state);
        self.changed.notify_all();
        Ok(before)
    }

    /// Lowers the lease by its unused part, at most `most`. Returns the number of bytes taken.
    pub fn take_unused(&self, most: Bytes) -> Bytes {
        self.state.lock().take_unused(most)
    }

    /// Announces a refill: reports the bytes needed beyond the lease for it and for the growth after it.
    pub fn want(&self, evicted: Bytes) {
        let mut state = self.state.lock();
        // Before the observer is notified: it may deny the refill before the wait begins.
        state.denied_before = Some(state.denials.refills);
        let is_leased = state.leased.is_some();
        let wanted = evicted.saturating_add(self.options.growth).saturating_sub(state.room());
        state.wanted = if is_leased { wanted } else { Bytes::ZERO };
        drop(state);
        if is_leased && !wanted.is_zero() {
            self.tell(LeaseEvent::Want, wanted);
        }
    }

    /// Ends the announcement of a refill, because no more will be granted for it. Later shortfalls ask like any request.
    pub fn forget_wanted(&self) {
        self.state.lock().wanted = Bytes::ZERO;
    }

    /// Returns the unused part of the lease after a shrink.
    pub fn give_back_unused(&self) {
        self.give_back(Bytes::MAX);
    }

    /// Lowers the lease by bytes that a shrink released.
    pub(super) fn give_back(&self, bytes: Bytes) {
        let mut state = self.state.lock();
        let given = state.take_unused(bytes);
        state.note_returned(given);
    }

    /// Reports returned bytes to the observer: all of them, or only if due.
    pub fn tell_returned(&self, all: bool) {
        let mut state = self.state.lock();
        let Some(since) = state.returned_since else { return };
        if !all && state.returned < REPORTED_BYTES && since.elapsed() < REPORT_INTERVAL {
            return;
        }
        state.returned_since = None;
        let returned = std::mem::take(&mut state.returned);
        drop(state);
        self.tell(LeaseEvent::Returned, returned);
    }

    /// Creates a refill's wait for grants, which gives up after `timeout` without one.
    pub fn credits(self: &Arc<Self>, timeout: Duration) -> Credits {
        let state = self.state.lock();
        let denials = state.denied_before.unwrap_or(state.denials.refills);
        let seen = (Instant::now() + timeout, state.grants, denials);
        drop(state);
        Credits { lease: self.clone(), timeout, seen: Mutex::new(seen) }
    }

    /// Returns the extra bytes requested with a refill.
    pub fn growth(&self) -> Bytes {
        self.options.growth
    }

    /// Returns the timeout of an allocation that exceeds the lease.
    pub fn grow_timeout(&self) -> Duration {
        self.options.grow_timeout
    }

    /// Returns a snapshot of the lease.
    pub fn view(&self) -> LeaseView {
        let State { leased, made, waits, waited, .. } = *self.state.lock();
        LeaseView { leased, made, waits, waited }
    }

    /// Resets the statistics of waits.
    pub(super) fn reset(&self) {
        let mut state = self.state.lock();
        (state.waits, state.waited) = Default::default();
    }

    /// Disables waiting, because the process ends.
    pub fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Returns the memory that may still be created; [`Bytes::MAX`] without a lease.
    pub(super) fn room(&self) -> Bytes {
        self.state.lock().room()
    }

    /// Counts memory before it is created.
    ///
    /// # Errors
    /// The memory would exceed the lease; nothing is counted.
    pub(super) fn count(self: &Arc<Self>, bytes: Bytes) -> std::result::Result<LeaseCharge, LeaseShort> {
        let mut state = self.state.lock();
        match state.leased {
            Some(leased) if !bytes.is_zero() && state.room() < bytes => {
                let (made, waited) = (state.made, Duration::ZERO);
                return Err(LeaseShort { leased, made, wanted: bytes, waited, denied: false });
            }
            _ => state.made = state.made.saturating_add(bytes),
        }
        self.note_made(state.made);
        Ok(LeaseCharge { lease: self.clone(), bytes })
    }

    /// Reports the amount of created memory again, once blocks use it.
    pub(super) fn tell_made(&self) {
        let state = self.state.lock();
        self.note_made(state.made);
    }

    /// Begins a request that may ask for a larger lease.
    pub(super) fn asking(&self) -> LeaseRequest<'_> {
        LeaseRequest { lease: self, until: None, asked: Bytes::ZERO, short: None }
    }

    fn is_listening(&self) -> bool {
        self.options.observer.as_ref().is_some_and(|observer| observer.is_listening())
    }

    /// Waits for a change, one polling interval at most and not beyond `until`.
    fn pause(&self, state: &mut MutexGuard<'_, State>, until: Instant) {
        if self.changed.wait_until(state, until.min(Instant::now() + POLL_INTERVAL)).timed_out() {
            MutexGuard::unlocked(state, || self.tell(LeaseEvent::Waiting, Bytes::ZERO));
        }
    }

    fn note_made(&self, made: Bytes) {
        if let Some(observer) = &self.options.observer {
            observer.made(self.device, made);
        }
    }

    fn tell(&self, event: LeaseEvent, bytes: Bytes) {
        if let Some(observer) = &self.options.observer {
            observer.told(event, self.device, bytes);
        }
    }
}

impl State {
    fn room(&self) -> Bytes {
        self.leased.map_or(Bytes::MAX, |leased| leased.saturating_sub(self.made))
    }

    fn take_unused(&mut self, most: Bytes) -> Bytes {
        let taken = self.room().min(most);
        match &mut self.leased {
            Some(leased) => {
                *leased = leased.saturating_sub(taken);
                taken
            }
            None => Bytes::ZERO,
        }
    }

    fn note_returned(&mut self, bytes: Bytes) {
        if !bytes.is_zero() {
            self.returned = self.returned.saturating_add(bytes);
            self.returned_since.get_or_insert_with(Instant::now);
        }
    }

    fn note_wait(&mut self, since: Instant) {
        self.waits += 1;
        self.waited += since.elapsed();
    }
}

impl LeaseCharge {
    /// Splits off a part, which can be dropped separately.
    pub(super) fn split(&mut self, bytes: Bytes) -> LeaseCharge {
        let bytes = bytes.min(self.bytes);
        self.bytes = self.bytes.saturating_sub(bytes);
        LeaseCharge { lease: self.lease.clone(), bytes }
    }

    /// Removes memory that a shrink released, and lowers the lease by it so that no other request can use it.
    pub(super) fn give_back(mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut state = self.lease.state.lock();
        state.made = state.made.saturating_sub(bytes);
        let given = state.take_unused(bytes);
        state.note_returned(given);
        self.lease.note_made(state.made);
    }

    /// Keeps memory counted for good, because it could not be released.
    pub(super) fn keep(mut self) {
        self.bytes = Bytes::ZERO;
    }
}

impl Drop for LeaseCharge {
    fn drop(&mut self) {
        if !self.bytes.is_zero() {
            let mut state = self.lease.state.lock();
            state.made = state.made.saturating_sub(self.bytes);
            self.lease.note_made(state.made);
            drop(state);
            // A waiter may use this memory in place of a grant.
            self.lease.changed.notify_all();
        }
    }
}

impl LeaseRequest<'_> {
    /// Asks for the missing bytes and waits. Returns whether there may be room now. All calls of one request together wait at most
    /// `grow_timeout`.
    pub(super) fn ask(&mut self, short: LeaseShort) -> bool {
        let begin = Instant::now();
        let lease = self.lease;
        let is_first = self.until.is_none();
        let until = *self.until.get_or_insert(begin + lease.options.grow_timeout);
        if is_first {
            lease.state.lock().asking += 1;
        }
        let began = until.checked_sub(lease.options.grow_timeout).unwrap_or(begin);
        let denied = self.short.is_some_and(|before| before.denied);
        self.short = Some(LeaseShort { waited: begin - began, denied, ..short });
        if begin >= until || !lease.is_listening() {
            return false;
        }
        let mut state = lease.state.lock();
        // Before the notification: the observer may grant at once.
        let (denials, mut given) = (state.denials.growth, state.given);
        // Its grant may have gone to another request, whose own grant is still to come.
        let mut missing = match !self.asked.is_zero() && !state.asked.is_zero() {
            true => Bytes::ZERO,
            false => short.wanted.saturating_sub(state.room()),
        };
        let mut denied = false;
        let granted = loop {
            if !missing.is_zero() {
                self.asked = missing;
                state.asked = state.asked.saturating_add(missing);
                MutexGuard::unlocked(&mut state, || lease.tell(LeaseEvent::Grow, missing));
                missing = Bytes::ZERO;
            }
            if state.room() >= short.wanted {
                break true;
            }
            if state.denials.growth != denials || state.stopped {
                // The amount is not requested again.
                self.until = Some(begin);
                denied = !state.stopped;
                break false;
            }
            if Instant::now() >= until {
                break false;
            }
            // All requested memory was granted, and other requests have used it.
            if state.given != given && state.asked.is_zero() {
                given = state.given;
                missing = short.wanted.saturating_sub(state.room());
                continue;
            }
            lease.pause(&mut state, until);
        };
        if !granted {
            // No request waits for the rest of it any more.
            state.asked = state.asked.saturating_sub(std::mem::take(&mut self.asked));
        }
        state.note_wait(begin);
        drop(state);
        self.short = (!granted).then(|| LeaseShort { waited: began.elapsed(), denied, ..short });
        granted
    }

    /// Returns the shortfall of the last refusal.
    pub(super) fn short(&self) -> Option<LeaseShort> {
        self.short
    }
}

impl Drop for LeaseRequest<'_> {
    fn drop(&mut self) {
        if self.until.is_some() {
            let mut state = self.lease.state.lock();
            state.asking -= 1;
            if state.asking == 0 {
                state.asked = Bytes::ZERO;
            }
        }
    }
}

impl Credits {
    /// Waits for the next grant if the lease stops the refill, or one polling interval if the driver lacks leased memory. Returns whether
    /// to retry. If all announced memory was granted but others use it, asks like a request. The refill holds its region's turn during the
    /// wait, and no lock of the pool. `is_over` is polled: true cancels the wait.
    pub fn wait(&self, refused: &PoolError, is_over: &dyn Fn() -> bool) -> bool {
        let begin = Instant::now();
        let (until, grants, denials) = &mut *self.seen.lock();
        let mut state = self.lease.state.lock();
        if state.grants == *grants && (state.leased.is_none() || !self.lease.is_listening()) {
            return false;
        }
        let mut asked = Bytes::ZERO;
        let worth = loop {
            if state.grants != *grants {
                (*until, *grants) = (Instant::now() + self.timeout, state.grants);
                break true;
            }
            if matches!(refused, PoolError::Leased { short, .. } if state.room() >= short.wanted) {
                break true;
            }
            if state.stopped || state.denials.refills != *denials || Instant::now() >= *until || is_over() {
                break false;
            }
            if matches!(refused, PoolError::Refused { .. }) {
                break false;
            }
            if let PoolError::Leased { short, .. } = refused
                && state.wanted.is_zero()
                && asked.is_zero()
            {
                asked = short.wanted.saturating_sub(state.room());
                state.asked = state.asked.saturating_add(asked);
                MutexGuard::unlocked(&mut state, || self.lease.tell(LeaseEvent::Grow, asked));
                continue;
            }
            self.lease.pause(&mut state, *until);
            if !matches!(refused, PoolError::Leased { .. }) {
                break true;
            }
        };
        if !worth {
            state.asked = state.asked.saturating_sub(asked);
        }
        state.note_wait(begin);
        worth
    }
}
