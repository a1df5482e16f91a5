//! Pure record of the agent's knowledge of this worker and of the messages to send.
//!
//! ```text
//! refill begins ─► wanted ─► want ──grants──► refill ends ─► refilled │ cancel, failed
//!                               └─ deny ─► sent again later, or the waiting caller gives up
//! ```
//!
//! Invariants: a lease here is the bytes set or granted minus the bytes reported as returned, so that the numbers of hello and of the later
//! messages add up. An open want is sent once. While disconnected, messages that a later one replaces are not kept.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use glake_device::DeviceId;
use glake_units::Bytes;

/// Time without new memory after which a start is over: other workers may load then. The memory stays in use.
const QUIET: Duration = Duration::from_secs(5);
/// Time for which a start repeats a request that was denied for now.
const START: Duration = Duration::from_secs(600);
/// Delay between a change of the holdings and the look at them, so that a burst of changes is reported once.
const LOOK_AFTER: Duration = Duration::from_millis(100);
/// Minimum ratio of the time between two looks to the duration of one: looks take at most 1 % of a core.
const LOOK_PART: u32 = 100;
/// Time without an agent after which a worker with an open want takes memory itself.
const ORPHANED: Duration = Duration::from_secs(10);

/// A message to send; holdings are looked up when it is sent. [`Say::Moved`] becomes [`Say::Changed`] if the holdings differ from the last
/// report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Say {
    Want { within: Duration },
    Cancel,
    Grow { device: DeviceId, bytes: Bytes, within: Duration },
    Returned { device: DeviceId, bytes: Bytes },
    Parked,
    Shrunk,
    Refilled,
    Failed { what: &'static str, why: String },
    Changed,
    Moved,
}

impl Say {
    /// Returns whether the message includes the holdings.
    pub(super) fn tells_holdings(&self) -> bool {
        matches!(self, Say::Shrunk | Say::Refilled | Say::Failed { .. } | Say::Changed | Say::Moved)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Ledger {
    leases: Vec<Bytes>,
    todo: VecDeque<Say>,
    is_heard: bool,
    /// Whether the holdings have changed since the last report.
    is_stale: bool,
    /// Time of the next look at the holdings, if they may have changed.
    look: Option<Instant>,
    /// Duration of the last look at the holdings.
    look_took: Duration,
    refills: usize,
    /// Whether the agent asked for a refill and waits for its result.
    is_refill_asked: bool,
    want: Option<Want>,
    growths: Vec<Growth>,
    start: Option<Start>,
    /// Time at which the connection was lost; `None` while connected.
    lost: Option<Instant>,
}

/// Request for memory that uses wait for.
#[derive(Clone, Debug)]
struct Want {
    since: Instant,
    until: Instant,
    /// Whether the want has been sent to the agent.
    is_said: bool,
    /// Time at which the want is sent again.
    again: Option<Instant>,
    /// Devices on which memory is wanted.
    devices: Vec<DeviceId>,
}

/// Pending request to grow beyond the lease.
#[derive(Clone, Copy, Debug)]
struct Growth {
    device: DeviceId,
    bytes: Bytes,
    until: Instant,
}

/// State of a worker that loads its initial memory.
#[derive(Clone, Copy, Debug)]
struct Start {
    /// Whether the loading thread must wait for the agent.
    waits: bool,
    made: Bytes,
    /// Time at which new memory was created last.
    since: Instant,
}

impl Ledger {
    /// Creates the ledger of a worker without memory.
    pub(super) fn new(devices: usize) -> Ledger {
        Ledger { leases: vec![Bytes::ZERO; devices], ..Ledger::default() }
    }

    /// Sets the leases of all devices.
    pub(super) fn set_leases(&mut self, leases: Vec<Bytes>) {
        self.leases = leases;
    }

    pub(super) fn leases(&self) -> &[Bytes] {
        &self.leases
    }

    pub(super) fn lease(&self, device: DeviceId) -> Bytes {
        at(device).and_then(|at| self.leases.get(at)).copied().unwrap_or_default()
    }

    fn lease_mut(&mut self, device: DeviceId) -> Option<&mut Bytes> {
        self.leases.get_mut(at(device)?)
    }

    /// Takes the pending messages in order.
    pub(super) fn take(&mut self) -> Vec<Say> {
        self.todo.drain(..).collect()
    }

    pub(super) fn has_something_to_say(&self) -> bool {
        !self.todo.is_empty()
    }

    /// Marks the holdings as changed and queues a report.
    pub(super) fn changed(&mut self) {
        self.is_stale = true;
        if self.is_heard && self.todo.back() != Some(&Say::Changed) {
            self.todo.push_back(Say::Changed);
            self.is_stale = false;
        }
    }

    /// Schedules a look at the holdings, which may have changed; repeated calls share one look.
    pub(super) fn moved(&mut self, now: Instant) {
        self.look.get_or_insert(now + LOOK_AFTER.max(self.look_took * LOOK_PART));
    }

    /// Records the duration of a look at the holdings.
    pub(super) fn looked(&mut self, took: Duration) {
        self.look_took = took;
    }

    /// Queues the answer to a command; kept until an agent is connected.
    pub(super) fn answer(&mut self, answer: Say) {
        if answer == Say::Parked {
            // The holdings stay unchanged from here on until the agent has chosen its victims.
            self.changed();
        }
        self.todo.push_back(answer);
    }

    pub(super) fn returned(&mut self, device: DeviceId, bytes: Bytes) {
        if let Some(lease) = self.lease_mut(device) {
            *lease = lease.saturating_sub(bytes);
            self.todo.push_back(Say::Returned { device, bytes });
        }
    }

    /// Adds a grant to the lease. Returns `false` if there is no such device.
    pub(super) fn granted(&mut self, device: DeviceId, bytes: Bytes) -> bool {
        let Some(lease) = self.lease_mut(device) else { return false };
        *lease = lease.saturating_add(bytes);
        self.growths.retain(|growth| growth.device != device);
        true
    }

    pub(super) fn refill_begun(&mut self) {
        self.refills += 1;
    }

    /// Returns whether a refill runs or waits for memory.
    pub(super) fn is_refilling(&self) -> bool {
        self.refills > 0
    }

    /// Records that a refill has ended or was cancelled.
    pub(super) fn refill_ended(&mut self, outcome: Result<(), String>) {
        self.refills = self.refills.saturating_sub(1);
        if self.refills > 0 {
            if outcome.is_err() {
                // The failed refill may have returned memory that another waits for.
                self.changed();
            }
            return;
        }
        let was_said = self.want.take().is_some_and(|want| want.is_said);
        let is_asked = std::mem::take(&mut self.is_refill_asked);
        match outcome {
            _ if !was_said && !is_asked => self.changed(),
            Ok(()) => self.todo.push_back(Say::Refilled),
            Err(why) => {
                // Send both: only the agent knows whether the want was planned. One message ends its wait, the other its plan.
                if was_said {
                    self.todo.push_back(Say::Cancel);
                }
                self.todo.push_back(Say::Failed { what: "refill", why });
            }
        }
    }

    /// Records that the agent asks for all memory to be refilled and waits for the result.
    pub(super) fn refill_asked(&mut self) {
        self.is_refill_asked = true;
    }

    /// Records that a refill on `device` needs a grant.
    pub(super) fn wanted(&mut self, device: DeviceId, timeout: Duration, now: Instant) {
        let want = self.want.get_or_insert_with(|| Want {
            since: now,
            until: now + timeout,
            is_said: false,
            again: None,
            devices: Vec::new(),
        });
        if !want.devices.contains(&device) {
            want.devices.push(device);
        }
        if self.is_heard && want.again.is_none() {
            self.say_want(now);
        }
    }

    /// Sends the want again with the larger amount: more memory has left meanwhile.
    pub(super) fn want_again(&mut self, now: Instant) {
        let Some(want) = self.want.as_mut().filter(|want| want.is_said) else { return };
        if self.is_heard {
            want.is_said = false;
            self.say_want(now);
        }
    }

    fn say_want(&mut self, now: Instant) {
        if let Some(want) = self.want.as_mut().filter(|want| !want.is_said) {
            (want.is_said, want.again) = (true, None);
            let within = want.until.saturating_duration_since(now);
            self.changed();
            self.todo.push_back(Say::Want { within });
        }
    }

    pub(super) fn grows(&mut self, device: DeviceId, bytes: Bytes, within: Duration, now: Instant) {
        self.growths.push(Growth { device, bytes, until: now + within });
        if self.is_heard {
            self.todo.push_back(Say::Grow { device, bytes, within });
        }
    }

    pub(super) fn growth_denied(&mut self, device: DeviceId) {
        self.growths.retain(|growth| growth.device != device);
    }

    /// Handles a denied want. Returns whether the waiting caller must give up; otherwise the want is sent again after `retry`.
    pub(super) fn denied(&mut self, retry: Option<Duration>, now: Instant) -> bool {
        let again = retry.and_then(|retry| now.checked_add(retry));
        match &mut self.start {
            Some(start) if start.waits && again.is_some() && self.want.is_none() => {
                self.want = Some(Want {
                    since: now,
                    until: now + START,
                    is_said: false,
                    again: None,
                    devices: Vec::new(),
                });
            }
            Some(start) => start.waits &= again.is_some(),
            None => {}
        }
        let Some(want) = &mut self.want else { return true };
        want.is_said = false;
        want.again = again.filter(|again| *again < want.until);
        let is_final = want.again.is_none();
        if is_final {
            // Otherwise the want would be sent again before the waiting caller has given up.
            self.want = None;
        }
        is_final
    }

    /// Handles the agent's admission: the whole want is granted.
    pub(super) fn admitted(&mut self) {
        self.release_start();
    }

    /// Records that the worker begins or continues to load its initial memory.
    pub(super) fn starts(&mut self, made: Bytes, now: Instant) {
        self.start = Some(Start { waits: false, made, since: now });
    }

    pub(super) fn is_starting(&self) -> bool {
        self.start.is_some()
    }

    /// Returns whether the thread that began the start must wait.
    pub(super) fn start_waits(&self) -> bool {
        self.start.is_some_and(|start| start.waits)
    }

    /// Makes the thread that began the start wait, at the agent's request.
    pub(super) fn hold_start(&mut self) {
        if let Some(start) = &mut self.start {
            start.waits = start.made.is_zero();
        }
    }

    /// Ends the wait of the thread that began the start.
    pub(super) fn release_start(&mut self) {
        if let Some(start) = &mut self.start {
            start.waits = false;
            self.want.take_if(|_| self.refills == 0);
        }
    }

    /// Ends the start: the worker has loaded its memory.
    pub(super) fn start_is_over(&mut self) {
        self.release_start();
        if self.start.take().is_some() {
            self.todo.push_back(Say::Refilled);
        }
    }

    /// Records the bytes created on all devices during a start. A start that creates nothing new for a time is over.
    pub(super) fn made(&mut self, made: Bytes, now: Instant) {
        let Some(start) = &mut self.start else { return };
        if start.made != made || start.waits {
            (start.made, start.since) = (made, now);
        } else if now.saturating_duration_since(start.since) >= QUIET {
            self.start_is_over();
        }
    }

    /// Records that the connection is lost.
    pub(super) fn lost(&mut self, now: Instant) {
        self.is_heard = false;
        // Report to the next agent.
        self.is_stale |= self.look.take().is_some();
        self.lost.get_or_insert(now);
    }

    /// Returns whether uses wait for memory now; part of hello.
    pub(super) fn wants(&self) -> bool {
        self.want.as_ref().is_some_and(|want| want.again.is_none())
    }

    /// Records that the same agent is connected again.
    pub(super) fn resumed(&mut self, now: Instant) {
        (self.is_heard, self.lost) = (true, None);
        if self.is_stale {
            self.changed();
        }
        self.say_want_if_due(now);
    }

    /// Records that an agent is connected which knows the contents of hello.
    pub(super) fn restarted(&mut self, said_wants: bool, now: Instant) {
        (self.is_heard, self.lost) = (true, None);
        match &mut self.want {
            Some(want) => want.is_said = said_wants,
            // The waiting caller gave up while hello was answered.
            None if said_wants => self.todo.push_back(Say::Cancel),
            None => {}
        }
        self.changed();
        self.say_want_if_due(now);
        self.growths.retain(|growth| growth.until > now);
        for growth in self.growths.clone() {
            let within = growth.until.saturating_duration_since(now);
            self.todo.push_back(Say::Grow { device: growth.device, bytes: growth.bytes, within });
        }
    }

    fn say_want_if_due(&mut self, now: Instant) {
        if self.want.as_ref().is_some_and(|want| want.again.is_none_or(|again| again <= now)) {
            self.say_want(now);
        }
    }

    /// Applies changes that are due by time alone.
    pub(super) fn tick(&mut self, now: Instant) {
        self.growths.retain(|growth| growth.until > now);
        if self.is_heard {
            self.say_want_if_due(now);
        }
        if self.look.take_if(|at| *at <= now).is_some() {
            self.todo.push_back(Say::Moved);
        }
    }

    /// Returns the time at which [`Ledger::tick`] is due.
    pub(super) fn next(&self) -> Option<Instant> {
        let again = self.want.as_ref().filter(|_| self.is_heard).and_then(|want| want.again);
        let start = self.start.map(|start| start.since + QUIET);
        [again, start, self.look].into_iter().flatten().min()
    }

    /// Returns whether a caller waits for memory.
    pub(super) fn is_urgent(&self) -> bool {
        self.want.is_some() || !self.growths.is_empty() || self.start_waits()
    }

    /// Returns whether the agent has been away for so long that the worker no longer waits for it.
    pub(super) fn is_orphan(&self, now: Instant) -> bool {
        self.lost.is_some_and(|lost| now >= lost + ORPHANED)
    }

    /// Returns the devices on which the worker takes memory itself, because it has waited long enough without an agent.
    pub(super) fn orphaned(&self, now: Instant) -> Vec<DeviceId> {
        let since = |want: &Want| Some(want.since.max(self.lost?));
        match &self.want {
            Some(want) if since(want).is_some_and(|since| now >= since + ORPHANED) => want.devices.clone(),
            _ => Vec::new(),
        }
    }
}

fn at(device: DeviceId) -> Option<usize> {
    usize::try_from(device.0).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPU: DeviceId = DeviceId(0);
    const MIB: Bytes = Bytes::mib(1);
    const SECOND: Duration = Duration::from_secs(1);

    /// Returns a connected ledger and the current time.
    fn heard() -> (Ledger, Instant) {
        let now = Instant::now();
        let mut ledger = Ledger::new(2);
        ledger.restarted(false, now);
        assert_eq!(ledger.take(), [Say::Changed]);
        (ledger, now)
    }

    fn failed() -> Say {
        Say::Failed { what: "refill", why: "no".to_owned() }
    }

    #[test]
    fn a_want_is_said_once_while_it_is_open() {
        let (mut ledger, now) = heard();
        ledger.refill_begun();
        ledger.refill_begun();
        ledger.wanted(GPU, 30 * SECOND, now);
        ledger.wanted(DeviceId(1), 30 * SECOND, now + SECOND);
        assert_eq!(ledger.take(), [Say::Changed, Say::Want { within: 30 * SECOND }]);
        assert!(ledger.is_urgent() && ledger.granted(GPU, MIB) && !ledger.granted(DeviceId(9), MIB));
        ledger.refill_ended(Err("no".to_owned()));
        assert_eq!(ledger.take(), [Say::Changed], "another one goes on");
        ledger.refill_ended(Ok(()));
        assert_eq!(ledger.take(), [Say::Refilled]);
        assert!(!ledger.is_urgent() && ledger.lease(GPU) == MIB);
        // A failed refill ends the agent's wait and its plan.
        ledger.refill_begun();
        ledger.wanted(GPU, SECOND, now);
        ledger.refill_ended(Err("no".to_owned()));
        assert_eq!(ledger.take(), [Say::Changed, Say::Want { within: SECOND }, Say::Cancel, failed()]);
        // A refill that needed no grant.
        ledger.refill_begun();
        ledger.refill_ended(Ok(()));
        assert_eq!(ledger.take(), [Say::Changed]);
        ledger.refill_asked();
        ledger.refill_begun();
        ledger.refill_ended(Ok(()));
        assert_eq!(ledger.take(), [Say::Refilled], "the agent asked for it");
    }

    #[test]
    fn what_is_denied_is_asked_again_while_somebody_waits() {
        let (mut ledger, now) = heard();
        ledger.refill_begun();
        ledger.wanted(GPU, 10 * SECOND, now);
        ledger.take();
        assert!(!ledger.denied(Some(2 * SECOND), now));
        ledger.tick(now + SECOND);
        assert_eq!((ledger.take(), ledger.next()), (vec![], Some(now + 2 * SECOND)));
        ledger.tick(now + 2 * SECOND);
        assert_eq!(ledger.take(), [Say::Changed, Say::Want { within: 8 * SECOND }]);
        assert!(ledger.denied(Some(9 * SECOND), now + 2 * SECOND), "it would be too late");
        ledger.refill_ended(Err("no".to_owned()));
        assert_eq!(ledger.take(), [Say::Changed], "the agent has no want of it");
        assert!(ledger.denied(None, now), "of nobody");
    }

    #[test]
    fn while_nobody_hears_only_what_went_back_and_answers_are_kept() {
        let (mut ledger, now) = heard();
        ledger.granted(GPU, Bytes::mib(8));
        ledger.lost(now);
        ledger.changed();
        ledger.refill_begun();
        ledger.wanted(GPU, 30 * SECOND, now);
        ledger.refill_ended(Err("no".to_owned()));
        ledger.returned(GPU, MIB);
        ledger.grows(GPU, MIB, SECOND, now);
        ledger.answer(Say::Shrunk);
        assert_eq!(ledger.take(), [Say::Returned { device: GPU, bytes: MIB }, Say::Shrunk]);
        assert_eq!(ledger.lease(GPU), Bytes::mib(7));
        let mut resumed = ledger.clone();
        resumed.resumed(now);
        assert_eq!(resumed.take(), [Say::Changed]);
        ledger.refill_begun();
        ledger.wanted(GPU, 30 * SECOND, now);
        assert!(ledger.wants());
        let mut resumed = ledger.clone();
        resumed.resumed(now + SECOND);
        assert_eq!(resumed.take(), [Say::Changed, Say::Want { within: 29 * SECOND }]);
        // A new agent learns of the want from hello; growth requests are sent again.
        ledger.restarted(true, now);
        assert_eq!(ledger.take(), [Say::Changed, Say::Grow { device: GPU, bytes: MIB, within: SECOND }]);
    }

    #[test]
    fn a_burst_of_growth_is_looked_at_once() {
        let ms = Duration::from_millis;
        let (mut ledger, now) = heard();
        (0..50).for_each(|at| ledger.moved(now + ms(at)));
        ledger.tick(now + ms(99));
        assert_eq!((ledger.take(), ledger.next()), (vec![], Some(now + LOOK_AFTER)));
        ledger.tick(now + LOOK_AFTER);
        assert_eq!((ledger.take(), ledger.next()), (vec![Say::Moved], None));
        // Slow looks are rare.
        ledger.looked(ms(30));
        ledger.moved(now);
        assert_eq!(ledger.next(), Some(now + ms(3000)));
        // A look that is due when the connection is lost is reported over the next one.
        ledger.lost(now);
        ledger.resumed(now);
        assert_eq!((ledger.take(), ledger.next()), (vec![Say::Changed], None));
    }

    #[test]
    fn who_has_waited_long_enough_without_an_agent_helps_itself() {
        let (mut ledger, now) = heard();
        ledger.refill_begun();
        ledger.wanted(GPU, 60 * SECOND, now);
        assert!(ledger.orphaned(now + 60 * SECOND).is_empty(), "there is an agent");
        ledger.granted(GPU, MIB);
        ledger.lost(now + 5 * SECOND);
        ledger.lost(now + 8 * SECOND);
        assert!(ledger.orphaned(now + 14 * SECOND).is_empty());
        assert_eq!(ledger.orphaned(now + 15 * SECOND), [GPU]);
    }

    #[test]
    fn a_start_is_over_when_nothing_new_is_made() {
        let (mut ledger, now) = heard();
        ledger.starts(Bytes::ZERO, now);
        ledger.hold_start();
        assert!(ledger.start_waits() && ledger.is_urgent());
        ledger.made(Bytes::ZERO, now + 9 * SECOND);
        assert!(ledger.is_starting(), "it waits for the agent");
        assert!(!ledger.denied(Some(SECOND), now + 9 * SECOND));
        ledger.tick(now + 10 * SECOND);
        assert!(matches!(*ledger.take(), [Say::Changed, Say::Want { .. }]) && ledger.start_waits());
        ledger.admitted();
        assert!(!ledger.start_waits() && !ledger.is_urgent());
        ledger.made(MIB, now + 10 * SECOND);
        ledger.made(MIB, now + 14 * SECOND);
        assert!(ledger.is_starting() && ledger.take().is_empty());
        ledger.made(MIB, now + 15 * SECOND);
        assert_eq!((ledger.is_starting(), ledger.take()), (false, vec![Say::Refilled]));
        ledger.start_is_over();
        assert_eq!(ledger.take(), []);
    }
}
