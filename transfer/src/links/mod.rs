//! Links used by copies: the GPUs that relay, the lanes of each program stream, and the work in flight there.
//!
//! ```text
//!   lane_sets ─► lane_set ─► lane   streams, events and slots of one program stream on all relays
//!   relays                          GPUs that relay, and relays that were lost
//!   ledger                          copies in flight, and totals
//!   unjoined                        work of failed copies that no stream waits for yet
//!   suspension                      results of releasing relays and their contexts
//!   Contexts                        drivers of the program's and of GLake's own contexts
//!   requests                        queue of the engine's thread
//! ```
//!
//! Invariant: work on the program's streams is enqueued by the program's driver, work of relays by GLake's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use glake_device::owned::{CompletionEvents, DeviceSet};
use glake_device::{CaptureState, DeviceId, Driver, DriverError, StreamId, Verb};
use lane_set::{LaneSet, LaneSetState};
use lane_sets::LaneSets;
use relays::{Relays, Suspensions, UnsuspendedRelay, WhyUnsuspended};
use unjoined::UnjoinedSlots;

use crate::links::lane::StagingStream;
use crate::links::ledger::Ledger;
use crate::links::requests::Requests;
use crate::{Result, UserStream};

pub(crate) mod lane;
pub(crate) mod lane_set;
pub(crate) mod lane_sets;
pub(crate) mod ledger;
pub(crate) mod relays;
pub(crate) mod requests;
pub(crate) mod unjoined;

/// Maximum age of the answer to which relays the program uses. A query before each copy cost 1 to 3 % of copies of 2 and 4 MiB over two
/// links; creating a context takes a program about 100 times as long.
const ANSWER_LASTS_US: u64 = 1000;

/// Relays and the lane sets on them.
#[derive(Debug)]
pub(crate) struct Links {
    contexts: Arc<Contexts>,
    relays: Arc<Relays>,
    lane_sets: LaneSets,
    ledger: Arc<Ledger>,
    unjoined: UnjoinedSlots,
    suspensions: Suspensions,
    requests: Arc<Requests>,
    /// Maximum number of lane sets.
    most: usize,
    made: Instant,
    /// Time of the last check which relays the program uses, in microseconds since creation; 0: never.
    looked: AtomicU64,
}

impl Links {
    /// Creates the links with at most `most` lane sets.
    pub(crate) fn new(
        contexts: &Arc<Contexts>,
        relays: &Arc<Relays>,
        lane_sets: LaneSets,
        ledger: &Arc<Ledger>,
        requests: &Arc<Requests>,
        streams: usize,
    ) -> Links {
        Links {
            contexts: contexts.clone(),
            relays: relays.clone(),
            lane_sets,
            ledger: ledger.clone(),
            unjoined: UnjoinedSlots::default(),
            suspensions: Suspensions::default(),
            requests: requests.clone(),
            most: streams.max(1),
            made: Instant::now(),
            looked: AtomicU64::new(0),
        }
    }

    pub(crate) fn relays(&self) -> &Arc<Relays> {
        &self.relays
    }

    /// Returns the assignment of lane sets to streams.
    pub(crate) fn lane_sets(&self) -> &LaneSets {
        &self.lane_sets
    }

    pub(crate) fn contexts(&self) -> &Contexts {
        &self.contexts
    }

    pub(crate) fn suspensions(&self) -> &Suspensions {
        &self.suspensions
    }

    /// Returns the maximum number of lane sets.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Prepares a copy: reports losses, checks which relays the program uses unless that happened just now, and orders the copy behind
    /// unjoined work of earlier copies.
    ///
    /// # Errors
    /// [`crate::TransferError::Lost`] for earlier copies, once; the driver's, if earlier work still cannot be joined.
    pub(crate) fn begin_copy(&self, on: UserStream) -> Result<()> {
        self.relays.tell()?;
        if self.ledger.has_unjoined() {
            self.join_late(on)?;
        }
        if !self.relays.are_shared() {
            let now = u64::try_from(self.made.elapsed().as_micros()).unwrap_or(u64::MAX);
            if now.saturating_sub(self.looked.load(Ordering::Relaxed)) >= ANSWER_LASTS_US {
                self.looked.store(now, Ordering::Relaxed);
                self.look_around();
            }
        }
        Ok(())
    }

    /// Records work of a pageable copy that could not be waited for. Its slot is not used again.
    pub(crate) fn leave_unjoined(&self, of: Arc<StagingStream>, slot: usize) {
        self.unjoined.leave(of, slot, &self.ledger);
    }

    /// Polls for the completion of unjoined work.
    pub(crate) fn look_unjoined(&self) {
        if let Err(error) = self.unjoined.settle(&self.ledger, None) {
            tracing::debug!(target: "glake::transfer", %error, "what a failed copy left is not known to be over");
        }
    }

    /// Makes a stream wait for unjoined work of earlier copies. A capturing stream cannot: its graph runs at an unknown time.
    fn join_late(&self, on: UserStream) -> Result<()> {
        let is_captured = self.contexts.driver().capture_state(on.device, on.raw)? != CaptureState::None;
        let on = (!is_captured).then(|| on.of_driver(&**self.contexts.driver()));
        let is_over = self.lane_sets.settle(on)? & self.unjoined.settle(&self.ledger, on)?;
        if is_captured && !is_over {
            let (verb, code) = (Verb::StreamWaitEvent, DriverError::CAPTURING);
            return Err(DriverError::Capturing { verb, code }.into());
        }
        Ok(())
    }

    /// Calls `run` with the lane set of a stream, locked; `None` if all lane sets have work of other streams in flight. Then requests
    /// another one, up to the limit.
    pub(crate) fn with<T>(
        &self,
        stream: StreamId,
        run: impl FnOnce(&Arc<LaneSet>, &mut LaneSetState) -> T,
    ) -> Option<T> {
        let outcome = self.lane_sets.with(stream, run);
        if outcome.is_none() && self.lane_sets.len() < self.most {
            self.requests.more_lane_sets();
        }
        outcome
    }

    /// Requests a fork event for streams of a device.
    pub(crate) fn want_fork_event(&self, device: DeviceId) {
        self.requests.fork_event(device);
    }

    /// Checks which relays the program has begun to use, that is, has created a primary context on.
    pub(crate) fn look_around(&self) {
        if self.relays.are_shared() {
            return;
        }
        for relay in self.relays.usable().iter() {
            // Asked again by the next copy where the answer says nothing: what it is left to is for ever.
            if matches!(self.contexts.driver().has_context(relay), Ok(true)) {
                self.leave_to_program(relay);
            }
        }
    }

    /// Returns the GPUs that the program uses, judged by their primary contexts; empty if GPUs are shared.
    pub(crate) fn of_program(&self) -> DeviceSet {
        match self.relays.are_shared() {
            true => DeviceSet::EMPTY,
            false => self.contexts.may_be_in_use(self.relays.wanted()).union(self.relays.left()),
        }
    }

    /// Excludes a GPU that the program uses from the relays, unless GPUs are shared.
    pub(crate) fn leave_to_program(&self, device: DeviceId) {
        if self.relays.leave_to_program(device) {
            tracing::info!(target: "glake::transfer", gpu = %device, "the program uses this GPU: copies of other GPUs' memory no longer take its link");
            self.suspend(DeviceSet::of(device));
        }
    }

    /// Excludes relays from new copies; the engine's thread releases their resources.
    pub(crate) fn suspend(&self, relays: DeviceSet) {
        if self.requests.is_served() {
            self.relays.suspend(relays);
            self.requests.suspend(self.suspensions.ask());
        }
    }

    /// Returns the suspended relays whose contexts still exist, with the reason, after all requested suspensions have ended or `timeout`
    /// has elapsed.
    pub(crate) fn unsuspended(&self, timeout: Duration) -> Vec<UnsuspendedRelay> {
        self.suspensions.unsuspended(&self.relays, timeout)
    }

    pub(crate) fn note_unsuspended(&self, relay: DeviceId, why: WhyUnsuspended) {
        let context = self.relays.cost(relay).map(|cost| cost.context).unwrap_or_default();
        tracing::info!(target: "glake::transfer", %relay, %context, %why, "the context of a relay stays");
        self.suspensions.note_unsuspended(UnsuspendedRelay { relay, context, why });
    }
}

/// Both drivers, each with the clock of its completion points.
#[derive(Debug)]
pub(crate) struct Contexts {
    program: Arc<CompletionEvents>,
    own: Arc<CompletionEvents>,
    devices: usize,
}

impl Contexts {
    /// Wraps the driver of a clock. Creates no context.
    ///
    /// # Errors
    /// What the driver answers.
    pub(crate) fn new(program: Arc<CompletionEvents>) -> Result<Arc<Contexts>> {
        let devices = program.driver().devices()?.len();
        let own = CompletionEvents::new(program.driver().own_contexts()?);
        Ok(Arc::new(Contexts { program, own, devices }))
    }

    /// Returns the clock of the program's contexts.
    pub(crate) fn program(&self) -> &Arc<CompletionEvents> {
        &self.program
    }

    /// Returns the driver of the program's contexts.
    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        self.program.driver()
    }

    /// Returns the clock of GLake's own contexts, in which relays work.
    pub(crate) fn own(&self) -> &Arc<CompletionEvents> {
        &self.own
    }

    /// Returns the driver of GLake's own contexts.
    pub(crate) fn own_driver(&self) -> &Arc<dyn Driver> {
        self.own.driver()
    }

    /// Returns the number of GPUs.
    pub(crate) fn devices(&self) -> usize {
        self.devices
    }

    /// Returns the GPUs with a primary context.
    pub(crate) fn in_use(&self) -> DeviceSet {
        self.all().filter(|device| matches!(self.driver().has_context(*device), Ok(true))).collect()
    }

    /// Returns those of `devices` that have a primary context. A failed query counts as having one.
    pub(crate) fn may_be_in_use(&self, devices: DeviceSet) -> DeviceSet {
        devices.iter().filter(|device| self.driver().has_context(*device).unwrap_or(true)).collect()
    }

    /// Returns the GPUs whose work can access a relay's memory.
    pub(crate) fn reaching(&self, relay: DeviceId) -> DeviceSet {
        let reach = |device: &DeviceId| {
            *device == relay || matches!(self.driver().can_access_peer(*device, relay), Ok(true))
        };
        self.all().filter(reach).collect()
    }

    /// Returns whether a stream is known not to be capturing. A failed query counts as capturing.
    pub(crate) fn is_plain(&self, on: UserStream) -> bool {
        matches!(self.driver().capture_state(on.device, on.raw), Ok(CaptureState::None))
    }

    /// Blocks until all work of a stream has completed.
    ///
    /// # Errors
    /// What the driver answers.
    pub(crate) fn synchronize(&self, on: UserStream) -> Result<()> {
        Ok(self.driver().stream_synchronize(on.device, on.raw)?)
    }

    fn all(&self) -> impl Iterator<Item = DeviceId> {
        (0_u32..).map(DeviceId).take(self.devices)
    }
}

#[cfg(test)]
mod tests {
    use glake_device::owned::CompletionEvents;
    use glake_device::{Driver, Stream};
    use glake_sim::{SimOptions, SimTopology, Simulator};
    use glake_units::Bytes;

    use super::*;
    use crate::links::lane_set::Observe;

    /// Observer of lane sets without timed copies.
    #[derive(Debug)]
    struct Untimed;

    impl Observe for Untimed {
        fn observe(&self, _: &LaneSet, _: &mut LaneSetState) {}
    }

    const RELAY: DeviceId = DeviceId(1);
    const ON: UserStream = UserStream { device: DeviceId(0), raw: Stream::LEGACY, id: StreamId(1) };

    /// Creates links with two GPUs, one of them ready as a relay.
    fn links() -> (Arc<Simulator>, Arc<Requests>, Links) {
        let topology = SimTopology::uniform(2, Bytes::mib(64));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let driver: Arc<dyn Driver> = sim.clone();
        let contexts = Contexts::new(CompletionEvents::new(driver)).unwrap();
        let relays = Arc::new(Relays::new(2, DeviceSet::of(RELAY), false));
        relays.add_ready(RELAY);
        let ledger = Ledger::new(&relays, 2);
        let requests = Arc::new(Requests::default());
        let lane_sets = LaneSets::new(&ledger, Arc::new(Untimed));
        let links = Links::new(&contexts, &relays, lane_sets, &ledger, &requests, 1);
        (sim, requests, links)
    }

    #[test]
    fn a_gpu_that_the_program_begins_to_use_is_left_to_it() {
        let (sim, requests, links) = links();
        requests.set_served(true);
        links.begin_copy(ON).unwrap();
        assert_eq!(links.relays().usable(), DeviceSet::of(RELAY));
        assert!(links.of_program().is_empty());
        sim.hold_context(RELAY).unwrap();
        std::thread::sleep(Duration::from_micros(ANSWER_LASTS_US + 1));
        links.begin_copy(ON).unwrap();
        assert!(links.relays().usable().is_empty());
        assert_eq!(links.of_program(), DeviceSet::of(RELAY));
        assert_eq!(requests.next(None).suspend, Some(1));
        links.relays().resume();
        assert!(links.relays().usable().is_empty(), "for ever");
    }

    #[test]
    fn a_stream_without_a_lane_set_asks_for_one_up_to_the_limit() {
        let (_sim, requests, links) = links();
        let [first, second] = [5, 6].map(StreamId);
        assert!(links.with(first, |_, _| ()).is_none());
        assert!(requests.next(None).more_lane_sets && links.lane_sets().is_short());
        links.lane_sets().add(links.lane_sets().make(2));
        assert!(!links.lane_sets().is_short());
        let owner = links.with(first, |_, state| state.owner);
        assert_eq!(owner.flatten(), Some(first));
        // Idle, it goes to whoever asks; there is none more than one.
        assert_eq!(links.with(second, |_, state| state.owner).flatten(), Some(second));
        links.with(second, |_, _| assert!(links.with(first, |_, _| ()).is_none()));
        assert!(!requests.next(Some(Duration::from_millis(1))).more_lane_sets);
    }

    #[test]
    fn nothing_is_suspended_where_no_thread_gives_it_up() {
        let (_sim, requests, links) = links();
        links.suspend(DeviceSet::of(RELAY));
        assert!(links.relays().suspended().is_empty() && links.unsuspended(Duration::ZERO).is_empty());
        requests.set_served(true);
        links.suspend(DeviceSet::of(RELAY));
        assert_eq!(links.relays().suspended(), DeviceSet::of(RELAY));
    }
}

#[cfg(test)]
mod contexts_tests {
    use glake_device::Stream;
    use glake_device::owned::OwnedStream;
    use glake_sim::{SimOptions, SimTopology, Simulator};
    use glake_units::Bytes;

    use super::*;

    #[test]
    fn making_it_makes_no_context() {
        let topology = SimTopology::uniform(3, Bytes::mib(64));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let driver: Arc<dyn Driver> = sim.clone();
        let contexts = Contexts::new(CompletionEvents::new(driver.clone())).unwrap();
        assert_eq!(contexts.devices(), 3);
        assert!(contexts.in_use().is_empty());
        let gpu = DeviceId(1);
        sim.hold_context(gpu).unwrap();
        assert_eq!(contexts.in_use(), DeviceSet::of(gpu));
        let others = DeviceSet::of(DeviceId(0)).union(DeviceSet::of(gpu));
        assert_eq!(contexts.may_be_in_use(others), DeviceSet::of(gpu));
        assert!(contexts.reaching(gpu).contains(gpu));
        let stream = OwnedStream::new(&driver, gpu).unwrap();
        let on = UserStream::of(&*driver, gpu, stream.id()).unwrap();
        assert!(contexts.is_plain(on) && on.raw != Stream::PER_THREAD);
        contexts.synchronize(on).unwrap();
    }
}
