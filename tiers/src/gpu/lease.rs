//! How much memory of a GPU a pool may have made: a number that somebody above gives, beside the pool's own limit.
//!
//! ```text
//!            set, grant                      take
//!   agent ───────────────► leased ◄──────────────────
//!                            │ made memory never passes it
//!   plan, refill ─► count ─► made ─► (released) ─► uncounted, or returned: leased goes down with it
//!                     └ too much: "grow" is told, and a grant waited for
//! ```
//!
//! The allocator knows nothing of it: sizes of extents, and what is stitched, are as without one.
//!
//! Invariants: what is counted as made never passes what is leased, but where the lease was set below what is there: then nothing is made
//! until it fits again. An extent is counted before the driver makes it and until the driver has released it. Whoever is told of
//! events is told with no lock held here, and hears of each returned byte once.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use glake_device::DeviceId;
use glake_units::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::PoolError;

/// What a shrink gives back is told when it is so much,
const TOLD_BYTES: Bytes = Bytes::mib(512);
/// or so old.
const TOLD_AFTER: Duration = Duration::from_millis(10);
/// How soon somebody looks again who waits: where a lease allows what the driver does not have, memory of others is on its way back.
const STEP: Duration = Duration::from_millis(5);

/// What whoever gives leases is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseEvent {
    /// Memory is to come back: so much more has to be granted for it, and for the growth after it.
    Want,
    /// A request is so much above the lease, and waits.
    Grow,
    /// A shrink gave so much back: the lease is lower by it.
    Returned,
    /// Somebody still waits for a grant. Told again and again meanwhile, on the thread that waits: it may let others run.
    Waiting,
}

/// Who gives leases.
pub trait LeaseObserver: fmt::Debug + Send + Sync {
    /// Whether anybody listens. Where nobody does nothing is waited for.
    fn is_listening(&self) -> bool;

    /// Is told, on the thread at hand and with no lock of the pool held. It may change the lease; it must not move regions.
    fn told(&self, event: LeaseEvent, device: DeviceId, bytes: Bytes);

    /// So much is made now, in the making included. Called where memory is made and released, and once blocks are in what was made, with locks
    /// held: it must ask nothing of the pool, nor of its lease.
    fn made(&self, _device: DeviceId, _bytes: Bytes) {}
}

/// How long is waited for grants, and what is asked for.
#[derive(Clone, Debug, Default)]
pub struct LeaseOptions {
    /// How long a request waits that is above the lease.
    pub grow_timeout: Duration,
    /// What is asked for beside what comes back, so that growth up to that waits for nobody.
    pub growth: Bytes,
    /// Who is told; `None`: nobody.
    pub observer: Option<Arc<dyn LeaseObserver>>,
}

/// How a lease stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeaseView {
    /// The lease; `None`: there is none.
    pub leased: Option<Bytes>,
    /// Physical memory that is made, or about to be.
    pub made: Bytes,
    /// How often a grant was waited for.
    pub waits: u64,
    /// For how long in all.
    pub waited: Duration,
}

/// Why nothing is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "its lease of {leased} has no room for {wanted} of new memory, {made} are made{}; grant more (glake.lease.grant, glake_lease_grant), \
     raise lease.growth so that a wake is granted more, or free memory",
    if waited.is_zero() { String::new() } else { format!(", and nobody granted more within {waited:.1?}") }
)]
pub struct LeaseShort {
    /// The lease.
    pub leased: Bytes,
    /// What is made.
    pub made: Bytes,
    /// What was to be made.
    pub wanted: Bytes,
    /// How long a grant was waited for.
    pub waited: Duration,
    /// Whether it was said that none would come.
    pub denied: bool,
}

/// The lease of one GPU's pool, and what is made under it.
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
    /// What a shrink gave back and nobody was told of, and since when.
    returned: Bytes,
    returned_since: Option<Instant>,
    /// Changes to the better so far.
    grants: u64,
    /// How often those who wait were told that nothing comes: refills, and requests.
    denials: Denials,
    /// What is to come back, as it was told, and was not granted yet: who is short meanwhile waits for that.
    wanted: Bytes,
    /// What requests have asked for, all together, and was not granted yet.
    asked: Bytes,
    /// How many requests have asked and are not over: where there is none, nothing is waited for.
    asking: usize,
    /// How many of the changes to the better were grants.
    given: u64,
    /// How many refills had been denied when one was wanted last: what is denied after that is denied to it.
    denied_before: Option<u64>,
    /// Nothing is waited for any more.
    stopped: bool,
    waits: u64,
    waited: Duration,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Denials {
    refills: u64,
    growth: u64,
}

/// Memory that is counted as made, until this is dropped.
#[derive(Debug)]
pub(super) struct Counted {
    lease: Arc<Lease>,
    bytes: Bytes,
}

/// One request that may ask for more.
#[derive(Debug)]
pub(super) struct Asking<'a> {
    lease: &'a Lease,
    /// When it gives up; `None`: it has not asked yet.
    until: Option<Instant>,
    /// What it told last that it is short of.
    asked: Bytes,
    short: Option<LeaseShort>,
}

/// A refill that comes back as grants come.
#[derive(Debug)]
pub struct Credits {
    lease: Arc<Lease>,
    timeout: Duration,
    /// When it gives up, the grants that it has seen, and the denials before it.
    seen: Mutex<(Instant, u64, u64)>,
}

impl Lease {
    /// None yet: nothing is bounded.
    pub fn new(device: DeviceId, options: LeaseOptions) -> Arc<Lease> {
        Arc::new(Lease { device, options, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Sets it, whole; `None`: nothing is bounded any more.
    pub fn set(&self, leased: Option<Bytes>) {
        let mut state = self.state.lock();
        let is_more = match (state.leased, leased) {
            (Some(before), Some(leased)) => leased > before,
            (_, leased) => leased.is_none(),
        };
        state.leased = leased;
        // A lease that is set again to what it was brings nothing: who waits for that would wait for ever.
        state.grants += u64::from(is_more);
        (state.wanted, state.asked) = (Bytes::ZERO, Bytes::ZERO);
        drop(state);
        self.changed.notify_all();
    }

    /// Adds to it; a grant of nothing says that there is none to wait for. False where there is no lease.
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

    /// Refills that wait for a grant give up; a request waits on.
    pub fn deny_refills(&self) {
        let mut state = self.state.lock();
        state.denials.refills += 1;
        state.wanted = Bytes::ZERO;
        drop(state);
        self.changed.notify_all();
    }

    /// Requests that wait for a grant give up; a refill waits on.
    pub fn deny_growth(&self) {
        let mut state = self.state.lock();
        state.denials.growth += 1;
        state.asked = Bytes::ZERO;
        drop(state);
        self.changed.notify_all();
    }

    /// Sets it, whole, where no more is made: somebody else gives it from now on. What went back of the one before is told to nobody.
    /// Answers what it was before; `Err`: nothing has changed, and so much is made.
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

    /// Lowers it by what is not made, `most` at most; returns by how much.
    pub fn take_unused(&self, most: Bytes) -> Bytes {
        self.state.lock().take_unused(most)
    }

    /// Memory is about to come back: tells how much more has to be granted for it and for the growth after it.
    pub fn want(&self, evicted: Bytes) {
        let mut state = self.state.lock();
        // Before anybody is told, who may deny it before it is waited for.
        state.denied_before = Some(state.denials.refills);
        let is_leased = state.leased.is_some();
        let wanted = evicted.saturating_add(self.options.growth).saturating_sub(state.room());
        state.wanted = if is_leased { wanted } else { Bytes::ZERO };
        drop(state);
        if is_leased && !wanted.is_zero() {
            self.tell(LeaseEvent::Want, wanted);
        }
    }

    /// What was wanted is granted, as far as it will be: who is short asks as a request does.
    pub fn forget_wanted(&self) {
        self.state.lock().wanted = Bytes::ZERO;
    }

    /// A shrink gives back what it has not made too.
    pub fn give_back_unused(&self) {
        self.give_back(Bytes::MAX);
    }

    /// A shrink has released so much: the lease goes down by it.
    pub(super) fn give_back(&self, bytes: Bytes) {
        let mut state = self.state.lock();
        let given = state.take_unused(bytes);
        state.note_returned(given);
    }

    /// Tells what was given back, all of it or what is due.
    pub fn tell_returned(&self, all: bool) {
        let mut state = self.state.lock();
        let Some(since) = state.returned_since else { return };
        if !all && state.returned < TOLD_BYTES && since.elapsed() < TOLD_AFTER {
            return;
        }
        state.returned_since = None;
        let returned = std::mem::take(&mut state.returned);
        drop(state);
        self.tell(LeaseEvent::Returned, returned);
    }

    /// A refill's wait for grants: it gives up when none has come for so long.
    pub fn credits(self: &Arc<Self>, timeout: Duration) -> Credits {
        let state = self.state.lock();
        let denials = state.denied_before.unwrap_or(state.denials.refills);
        let seen = (Instant::now() + timeout, state.grants, denials);
        drop(state);
        Credits { lease: self.clone(), timeout, seen: Mutex::new(seen) }
    }

    /// What is asked for beside what comes back.
    pub fn growth(&self) -> Bytes {
        self.options.growth
    }

    /// How long a request waits that is above the lease.
    pub fn grow_timeout(&self) -> Duration {
        self.options.grow_timeout
    }

    /// How it stands.
    pub fn view(&self) -> LeaseView {
        let State { leased, made, waits, waited, .. } = *self.state.lock();
        LeaseView { leased, made, waits, waited }
    }

    /// Starts what was counted of waits from zero.
    pub(super) fn reset(&self) {
        let mut state = self.state.lock();
        (state.waits, state.waited) = Default::default();
    }

    /// Nothing is waited for any more: the process ends.
    pub fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    /// What may still be made; [`Bytes::MAX`] where nothing is bounded.
    pub(super) fn room(&self) -> Bytes {
        self.state.lock().room()
    }

    /// Counts memory that is about to be made.
    ///
    /// # Errors
    /// It would pass the lease, and nothing is counted.
    pub(super) fn count(self: &Arc<Self>, bytes: Bytes) -> std::result::Result<Counted, LeaseShort> {
        let mut state = self.state.lock();
        match state.leased {
            Some(leased) if !bytes.is_zero() && state.room() < bytes => {
                let (made, waited) = (state.made, Duration::ZERO);
                return Err(LeaseShort { leased, made, wanted: bytes, waited, denied: false });
            }
            _ => state.made = state.made.saturating_add(bytes),
        }
        self.note_made(state.made);
        Ok(Counted { lease: self.clone(), bytes })
    }

    /// Tells the observer how much is made, again: blocks are in it now.
    pub(super) fn tell_made(&self) {
        let state = self.state.lock();
        self.note_made(state.made);
    }

    /// What a request asks with.
    pub(super) fn asking(&self) -> Asking<'_> {
        Asking { lease: self, until: None, asked: Bytes::ZERO, short: None }
    }

    fn is_listening(&self) -> bool {
        self.options.observer.as_ref().is_some_and(|observer| observer.is_listening())
    }

    /// Waits for a moment, `until` at most.
    fn pause(&self, state: &mut MutexGuard<'_, State>, until: Instant) {
        if self.changed.wait_until(state, until.min(Instant::now() + STEP)).timed_out() {
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

impl Counted {
    /// A part of it, to be dropped by itself.
    pub(super) fn split(&mut self, bytes: Bytes) -> Counted {
        let bytes = bytes.min(self.bytes);
        self.bytes = self.bytes.saturating_sub(bytes);
        Counted { lease: self.lease.clone(), bytes }
    }

    /// It was released by a shrink: nobody else may make it again under this lease.
    pub(super) fn give_back(mut self) {
        let bytes = std::mem::take(&mut self.bytes);
        let mut state = self.lease.state.lock();
        state.made = state.made.saturating_sub(bytes);
        let given = state.take_unused(bytes);
        state.note_returned(given);
        self.lease.note_made(state.made);
    }

    /// It could not be released, and stays counted for good.
    pub(super) fn keep(mut self) {
        self.bytes = Bytes::ZERO;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if !self.bytes.is_zero() {
            let mut state = self.lease.state.lock();
            state.made = state.made.saturating_sub(self.bytes);
            self.lease.note_made(state.made);
            drop(state);
            // Who waits for a grant may have this instead.
            self.lease.changed.notify_all();
        }
    }
}

impl Asking<'_> {
    /// Asks for what is missing and waits for it; returns whether there may be room now. All calls of one request together wait no longer
    /// than `grow_timeout`.
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
        // Before it is told: who is told may grant at once.
        let (denials, mut given) = (state.denials.growth, state.given);
        // What it asked for may have gone to another one, and what that one asked for is still to come.
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
                // It is not asked again.
                self.until = Some(begin);
                denied = !state.stopped;
                break false;
            }
            if Instant::now() >= until {
                break false;
            }
            // All that anybody asked for was granted, and others have it.
            if state.given != given && state.asked.is_zero() {
                given = state.given;
                missing = short.wanted.saturating_sub(state.room());
                continue;
            }
            lease.pause(&mut state, until);
        };
        if !granted {
            // Nobody waits for what is still to come of it.
            state.asked = state.asked.saturating_sub(std::mem::take(&mut self.asked));
        }
        state.note_wait(begin);
        drop(state);
        self.short = (!granted).then(|| LeaseShort { waited: began.elapsed(), denied, ..short });
        granted
    }

    /// What it was refused for.
    pub(super) fn short(&self) -> Option<LeaseShort> {
        self.short
    }
}

impl Drop for Asking<'_> {
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
    /// Waits for the next grant where the lease is what stops the refill, or a moment where the driver has not got what was leased;
    /// returns whether it is worth trying again. Where all that was wanted is granted, and others have it, it asks as a request does. The
    /// refill holds its region's turn meanwhile, and no lock of the pool; `is_over` is asked now and then whether it should wait no more.
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
