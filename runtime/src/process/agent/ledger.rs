//! What the agent knows of this worker, and what it is to be told: pure.
//!
//! ```text
//! refill begins ─► wanted ─► want ──grants──► refill ends ─► refilled │ cancel, failed
//!                             └─ deny ─► said again later, or whoever waits gives up
//! ```
//!
//! Invariants: a lease here is what was set or granted less what it was said that went back, so that hello's numbers and the messages
//! after it make the same sum. A want is said once while it is open. What can be said by a later message is not kept while nobody hears.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use glake_device::DeviceId;
use glake_units::Bytes;

/// How long a start may make nothing new before it is over: others may load from then on. Its memory stays in use.
const QUIET: Duration = Duration::from_secs(5);
/// How long a start asks again that was denied for now.
const START: Duration = Duration::from_secs(600);
/// How long after holdings moved they are looked at: what a burst of growth changes is said once.
const LOOK_AFTER: Duration = Duration::from_millis(100);
/// Least ratio of the time between two looks to the time that one takes: looks take 1 % of a core at most.
const LOOK_PART: u32 = 100;
/// How long a want is open without any agent before its worker helps itself.
const ORPHANED: Duration = Duration::from_secs(10);

/// Something to be said. What is held is looked up when it is. [`Say::Moved`] says as [`Say::Changed`] does, where what is held differs from
/// what was said.
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
    /// Whether what is held is said with it.
    pub(super) fn tells_holdings(&self) -> bool {
        matches!(self, Say::Shrunk | Say::Refilled | Say::Failed { .. } | Say::Changed | Say::Moved)
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct Ledger {
    leases: Vec<Bytes>,
    todo: VecDeque<Say>,
    is_heard: bool,
    /// Something else is held than was said.
    is_stale: bool,
    /// When the holdings are looked at, as they may have moved.
    look: Option<Instant>,
    /// How long the last look took.
    look_took: Duration,
    refills: usize,
    /// The agent asked for a refill, and hears how it ends.
    is_refill_asked: bool,
    want: Option<Want>,
    growths: Vec<Growth>,
    start: Option<Start>,
    /// Since when nobody hears.
    lost: Option<Instant>,
}

/// Uses wait for memory.
#[derive(Clone, Debug)]
struct Want {
    since: Instant,
    until: Instant,
    /// The agent knows of it.
    is_said: bool,
    /// When it is to be said again.
    again: Option<Instant>,
    /// On these.
    devices: Vec<DeviceId>,
}

/// A request above the lease waits.
#[derive(Clone, Copy, Debug)]
struct Growth {
    device: DeviceId,
    bytes: Bytes,
    until: Instant,
}

/// The worker loads what it will hold.
#[derive(Clone, Copy, Debug)]
struct Start {
    /// Whoever began it waits for the agent.
    waits: bool,
    made: Bytes,
    /// When something new was made last.
    since: Instant,
}

impl Ledger {
    /// A worker that holds nothing yet.
    pub(super) fn new(devices: usize) -> Ledger {
        Ledger { leases: vec![Bytes::ZERO; devices], ..Ledger::default() }
    }

    /// The leases are these.
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

    /// What is to be said now, in order.
    pub(super) fn take(&mut self) -> Vec<Say> {
        self.todo.drain(..).collect()
    }

    pub(super) fn has_something_to_say(&self) -> bool {
        !self.todo.is_empty()
    }

    /// What is held is another than was said.
    pub(super) fn changed(&mut self) {
        self.is_stale = true;
        if self.is_heard && self.todo.back() != Some(&Say::Changed) {
            self.todo.push_back(Say::Changed);
            self.is_stale = false;
        }
    }

    /// The holdings may be other than was said: they are looked at soon, once however often this is told.
    pub(super) fn moved(&mut self, now: Instant) {
        self.look.get_or_insert(now + LOOK_AFTER.max(self.look_took * LOOK_PART));
    }

    /// A look at the holdings took so long.
    pub(super) fn looked(&mut self, took: Duration) {
        self.look_took = took;
    }

    /// An answer to a command, which is kept until it is heard.
    pub(super) fn answer(&mut self, answer: Say) {
        if answer == Say::Parked {
            // Nothing of it changes from here on until the agent has chosen what leaves.
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

    /// A grant came. False: there is no such device.
    pub(super) fn granted(&mut self, device: DeviceId, bytes: Bytes) -> bool {
        let Some(lease) = self.lease_mut(device) else { return false };
        *lease = lease.saturating_add(bytes);
        self.growths.retain(|growth| growth.device != device);
        true
    }

    pub(super) fn refill_begun(&mut self) {
        self.refills += 1;
    }

    /// Whether memory comes back, or waits for that.
    pub(super) fn is_refilling(&self) -> bool {
        self.refills > 0
    }

    /// A refill has ended, or was given up.
    pub(super) fn refill_ended(&mut self, outcome: Result<(), String>) {
        self.refills = self.refills.saturating_sub(1);
        if self.refills > 0 {
            if outcome.is_err() {
                // It may have given back what another waits for.
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
                // Whether it was planned already is the agent's to know: the one ends its wait, the other what was planned.
                if was_said {
                    self.todo.push_back(Say::Cancel);
                }
                self.todo.push_back(Say::Failed { what: "refill", why });
            }
        }
    }

    /// The agent wants all memory back, and hears when it is.
    pub(super) fn refill_asked(&mut self) {
        self.is_refill_asked = true;
    }

    /// Memory of a device is to come back, for which more has to be granted.
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

    /// What is wanted is more than was said: memory left meanwhile.
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

    /// A want ends without memory. Whether whoever waits is to give up; else it is said again after that time.
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
            // Or it would be said again before whoever waits has given up.
            self.want = None;
        }
        is_final
    }

    /// All that was wanted is granted.
    pub(super) fn admitted(&mut self) {
        self.release_start();
    }

    /// The worker begins, or goes on, to load what it will hold.
    pub(super) fn starts(&mut self, made: Bytes, now: Instant) {
        self.start = Some(Start { waits: false, made, since: now });
    }

    pub(super) fn is_starting(&self) -> bool {
        self.start.is_some()
    }

    /// Whether whoever began the start is to wait.
    pub(super) fn start_waits(&self) -> bool {
        self.start.is_some_and(|start| start.waits)
    }

    /// The agent says that whoever began the start is to wait.
    pub(super) fn hold_start(&mut self) {
        if let Some(start) = &mut self.start {
            start.waits = start.made.is_zero();
        }
    }

    /// Whoever waited for the agent waits no more.
    pub(super) fn release_start(&mut self) {
        if let Some(start) = &mut self.start {
            start.waits = false;
            self.want.take_if(|_| self.refills == 0);
        }
    }

    /// It holds what it will.
    pub(super) fn start_is_over(&mut self) {
        self.release_start();
        if self.start.take().is_some() {
            self.todo.push_back(Say::Refilled);
        }
    }

    /// What is made on all devices, while it starts: a start that makes nothing new is over.
    pub(super) fn made(&mut self, made: Bytes, now: Instant) {
        let Some(start) = &mut self.start else { return };
        if start.made != made || start.waits {
            (start.made, start.since) = (made, now);
        } else if now.saturating_duration_since(start.since) >= QUIET {
            self.start_is_over();
        }
    }

    /// Nobody hears what is said.
    pub(super) fn lost(&mut self, now: Instant) {
        self.is_heard = false;
        // Whoever hears next is told.
        self.is_stale |= self.look.take().is_some();
        self.lost.get_or_insert(now);
    }

    /// What hello says of it: whether uses wait now.
    pub(super) fn wants(&self) -> bool {
        self.want.as_ref().is_some_and(|want| want.again.is_none())
    }

    /// The agent that knew it hears it again.
    pub(super) fn resumed(&mut self, now: Instant) {
        (self.is_heard, self.lost) = (true, None);
        if self.is_stale {
            self.changed();
        }
        self.say_want_if_due(now);
    }

    /// An agent hears it that knows what hello said.
    pub(super) fn restarted(&mut self, said_wants: bool, now: Instant) {
        (self.is_heard, self.lost) = (true, None);
        match &mut self.want {
            Some(want) => want.is_said = said_wants,
            // Whoever waited gave up while hello was answered.
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

    /// What time alone changes.
    pub(super) fn tick(&mut self, now: Instant) {
        self.growths.retain(|growth| growth.until > now);
        if self.is_heard {
            self.say_want_if_due(now);
        }
        if self.look.take_if(|at| *at <= now).is_some() {
            self.todo.push_back(Say::Moved);
        }
    }

    /// When [`Ledger::tick`] is due.
    pub(super) fn next(&self) -> Option<Instant> {
        let again = self.want.as_ref().filter(|_| self.is_heard).and_then(|want| want.again);
        let start = self.start.map(|start| start.since + QUIET);
        [again, start, self.look].into_iter().flatten().min()
    }

    /// Whether somebody waits for memory.
    pub(super) fn is_urgent(&self) -> bool {
        self.want.is_some() || !self.growths.is_empty() || self.start_waits()
    }

    /// Whether there has been no agent for so long that nothing is waited for.
    pub(super) fn is_orphan(&self, now: Instant) -> bool {
        self.lost.is_some_and(|lost| now >= lost + ORPHANED)
    }

    /// Where its worker takes memory for itself: it has waited for so long, and there is no agent.
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

    /// One that is heard, and the time.
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
        // One that fails ends the agent's wait, and what was planned.
        ledger.refill_begun();
        ledger.wanted(GPU, SECOND, now);
        ledger.refill_ended(Err("no".to_owned()));
        assert_eq!(ledger.take(), [Say::Changed, Say::Want { within: SECOND }, Say::Cancel, failed()]);
        // One that nobody had to grant anything for.
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
        // A new agent hears of the want in hello, and of who waits for growth.
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
        // Looks that take long are rare.
        ledger.looked(ms(30));
        ledger.moved(now);
        assert_eq!(ledger.next(), Some(now + ms(3000)));
        // One that is due when the connection is lost is told over the next.
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
