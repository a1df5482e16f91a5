//! Simulated workers, links and shared GPUs in virtual time, under control of the arbiter.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use glake_units::Bytes;

use super::figures::Tally;
use super::load::Request;
use super::model::{Gate, HAIR, Model, equal_part};
use super::policy::{Calibration, Policy, Speeds};
use super::{MOST_WORK, PER_STEP, PER_WORKER, PlanError};
use crate::node::NodeFile;
use crate::predictions::over;
use crate::{Action, Arbiter, Denied, Event, GpuId, Joined, Profile, Settings, UseState, WorkerId};

/// Granularity in which a victim reports returned memory.
const CREDIT: Bytes = Bytes::mib(512);
/// Maximum number of such reports of a shrink: larger ones follow if the memory is larger than any GPU's.
const MOST_CREDITS: u64 = 1024;
const RETRY: Duration = Duration::from_secs(1);

/// Future event of the simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SimulatedEvent {
    Asked(usize),
    Parked(usize, u32),
    Returned(usize, GpuId, Bytes),
    Shrunk(usize),
    Refilled(usize),
    WantsAgain(usize),
}

struct Machine<'a> {
    arbiter: Arbiter,
    speeds: Speeds,
    contention: bool,
    requests: &'a [Request],
    models: Vec<Model>,
    later: BinaryHeap<Reverse<(Duration, u64, SimulatedEvent)>>,
    /// Sequence number: events at the same time occur in order of creation.
    known: u64,
    actions: VecDeque<Action>,
    now: Duration,
    /// End of the unmapping on each GPU; no memory is mapped or copied there meanwhile.
    unmaps: BTreeMap<GpuId, Duration>,
    open: usize,
    /// Work so far, in the units of [`MOST_WORK`].
    work: u64,
    tally: Tally,
}

/// Runs requests to completion under a policy. Workers start resident in the order of the file, as far as they fit.
///
/// # Errors
/// [`PlanError::TooLong`].
pub fn run(
    file: &NodeFile,
    calibration: &Calibration,
    requests: &[Request],
    policy: Policy,
    contention: bool,
) -> Result<Tally, PlanError> {
    let speeds = policy.speeds(calibration);
    let mut machine = Machine {
        arbiter: Arbiter::new(policy.settings(&speeds, &file.node)),
        speeds,
        contention,
        requests,
        models: Vec::new(),
        later: BinaryHeap::new(),
        known: 0,
        actions: VecDeque::new(),
        now: Duration::ZERO,
        unmaps: BTreeMap::new(),
        open: requests.len(),
        work: 0,
        tally: Tally::default(),
    };
    machine.join(file, calibration, policy);
    machine.run()?;
    let gpus =
        file.workers.iter().flat_map(|worker| &worker.gpus).collect::<std::collections::BTreeSet<_>>().len();
    #[allow(clippy::cast_precision_loss)] // a count of GPUs
    let gpu_seconds = machine.now.as_secs_f64() * gpus as f64;
    Ok(Tally { gpu_seconds, ..machine.tally })
}

impl Machine<'_> {
    fn join(&mut self, file: &NodeFile, calibration: &Calibration, policy: Policy) {
        let capacity = file.node.capacity();
        let mut free: BTreeMap<GpuId, Bytes> = BTreeMap::new();
        for gpu in file.workers.iter().flat_map(|worker| &worker.gpus).map(|gpu| GpuId(*gpu)) {
            free.insert(gpu, capacity);
            self.tell(Event::Capacity { gpu, budget: capacity, total: capacity });
        }
        let floor = file.node.floor();
        // Contexts are resident regardless of the rest, except under the policy that stops workers.
        let floors = policy != Policy::StartStop;
        for gpu in
            file.workers.iter().filter(|_| floors).flat_map(|worker| &worker.gpus).map(|gpu| GpuId(*gpu))
        {
            free.entry(gpu).and_modify(|free| *free = free.saturating_sub(floor));
        }
        let mut tenants: Vec<&str> = file.workers.iter().map(|worker| worker.tenant.as_str()).collect();
        tenants.sort_unstable();
        tenants.dedup();
        for (place, worker) in file.workers.iter().enumerate() {
            let needs = if floors { worker.share() } else { worker.share().saturating_add(floor) };
            let gpus = worker.gpus.iter().map(|gpu| GpuId(*gpu));
            let resident = gpus.clone().all(|gpu| free.get(&gpu).is_some_and(|free| *free >= needs));
            let (paced, step_ms) = calibration.paced(worker);
            let model = Model::new(paced, step_ms, floor, &self.speeds, resident);
            for gpu in gpus.filter(|_| resident) {
                free.entry(gpu).and_modify(|free| *free = free.saturating_sub(needs));
            }
            let tenant = tenants.iter().position(|tenant| *tenant == worker.tenant).unwrap_or(0);
            let tenant = u32::try_from(tenant).unwrap_or(u32::MAX);
            let (priority, preempt, max_pause) = (worker.priority, worker.preempt, worker.max_pause());
            let profile = Profile { priority, tenant, preempt, max_pause };
            let joined = Joined { profile, ..Joined::alone(WorkerId(place as u64), model.accounts()) };
            self.models.push(model);
            self.tell(Event::Joined(joined));
        }
    }

    fn run(&mut self) -> Result<(), PlanError> {
        if let Some(first) = self.requests.first() {
            self.later(first.at, SimulatedEvent::Asked(0));
        }
        while self.open > 0 {
            self.work += self.models.iter().map(|model| 1 + model.active.len() as u64).sum::<u64>();
            if self.work > MOST_WORK {
                return Err(PlanError::TooLong { at_s: self.now.as_secs_f64(), left: self.open });
            }
            let later = self.later.peek().map(|Reverse((at, ..))| *at);
            let rates = self.rates();
            let compute =
                self.models.iter().zip(&rates).filter_map(|(model, rate)| Some(model.next()? / (*rate)?));
            // One nanosecond more, so that the event is due by then.
            let compute = compute
                .min_by(f64::total_cmp)
                .map(|s| self.now + Duration::from_secs_f64(s) + Duration::from_nanos(1));
            let deadline = self.arbiter.next_deadline();
            let Some(next) = [later, compute, deadline].into_iter().flatten().min() else { break };
            let passed = next.saturating_sub(self.now).as_secs_f64();
            for (model, rate) in self.models.iter_mut().zip(&rates) {
                model.steps.pass(rate.map_or(0.0, |rate| rate * passed));
            }
            self.now = self.now.max(next);
            for (place, rate) in rates.into_iter().enumerate() {
                if let Some(rate) = rate {
                    self.answer(place, rate);
                }
            }
            while let Some(Reverse((_, _, happening))) =
                self.later.peek().copied().filter(|Reverse((at, ..))| *at <= self.now)
            {
                self.later.pop();
                self.happens(happening);
            }
            if self.arbiter.next_deadline().is_some_and(|at| at <= self.now) {
                self.tell(Event::Tick);
            }
        }
        // Requests that wait for memory that never comes.
        self.tally.denied += self.open;
        Ok(())
    }

    /// Returns the compute rate of each running worker. Workers that share a GPU get equal parts, limited by their demand.
    fn rates(&self) -> Vec<Option<f64>> {
        let mut demands: BTreeMap<u16, Vec<f64>> = BTreeMap::new();
        for model in self.models.iter().filter(|model| self.contention && model.runs()) {
            for gpu in &model.spec.gpus {
                demands.entry(*gpu).or_default().push(model.steps.demand());
            }
        }
        let parts: BTreeMap<u16, f64> =
            demands.into_iter().map(|(gpu, all)| (gpu, equal_part(all))).collect();
        let rate = |model: &Model| {
            let parts = model.spec.gpus.iter().filter_map(|gpu| parts.get(gpu));
            model.runs().then(|| parts.fold(1.0, |rate: f64, part| rate.min(part / model.steps.demand())))
        };
        self.models.iter().map(rate).collect()
    }

    fn later(&mut self, at: Duration, happening: SimulatedEvent) {
        self.known += 1;
        self.later.push(Reverse((at, self.known, happening)));
    }

    fn tell(&mut self, event: Event) {
        self.work += PER_STEP + PER_WORKER * self.models.len() as u64;
        self.actions.extend(self.arbiter.step(event, self.now));
        while let Some(action) = self.actions.pop_front() {
            self.act(&action);
        }
    }

    fn want(&mut self, place: usize, deadline: Option<Duration>) {
        self.tell(Event::Want { worker: WorkerId(place as u64), deadline });
    }

    fn happens(&mut self, happening: SimulatedEvent) {
        match happening {
            SimulatedEvent::Asked(number) => {
                if let Some(next) = self.requests.get(number + 1) {
                    self.later(next.at, SimulatedEvent::Asked(number + 1));
                }
                let asked = self.requests[number];
                let model = &mut self.models[asked.worker];
                model.queue.push_back(asked);
                if model.gate == Gate::Open {
                    self.tally.hits += 1;
                    self.begin(asked.worker);
                } else {
                    let deadline = model.spec.deadline_s.map(Duration::from_secs_f64);
                    self.want(asked.worker, deadline);
                }
            }
            SimulatedEvent::Parked(place, parks) => {
                let model = &mut self.models[place];
                if model.gate != Gate::Parking || model.parks != parks {
                    return;
                }
                model.steps.go_on();
                (model.gate, model.parked_at) = (Gate::Closed, Some(self.now));
                let (worker, waits) = (WorkerId(place as u64), model.waits());
                self.does(place, false);
                self.tell(Event::Parked { worker });
                if waits {
                    self.want(place, None);
                }
            }
            SimulatedEvent::Returned(place, gpu, bytes) => {
                let held = self.models[place].held.iter_mut().filter(|held| held.gpu == gpu);
                held.for_each(|held| held.lease = held.lease.saturating_sub(bytes));
                self.tell(Event::Returned { worker: WorkerId(place as u64), gpu, bytes });
            }
            SimulatedEvent::Shrunk(place) => {
                let model = &mut self.models[place];
                model.shrinks -= 1;
                if model.shrinks == 0 {
                    let accounts = model.accounts();
                    self.tell(Event::Shrunk { worker: WorkerId(place as u64), accounts });
                }
            }
            SimulatedEvent::Refilled(place) => {
                self.models[place].refilled();
                let accounts = self.models[place].accounts();
                self.tell(Event::Refilled { worker: WorkerId(place as u64), accounts });
                self.opens(place);
            }
            SimulatedEvent::WantsAgain(place) => {
                if self.models[place].gate == Gate::Closed && self.models[place].waits() {
                    self.want(place, None);
                }
            }
        }
    }

    fn act(&mut self, action: &Action) {
        let place = |worker: WorkerId| usize::try_from(worker.0).unwrap_or(usize::MAX);
        match *action {
            Action::Grant { worker, gpu, bytes } => {
                let place = place(worker);
                let Some(held) = self.models[place].held.iter().position(|held| held.gpu == gpu) else {
                    return;
                };
                let copied = self.models[place].copied_of(held, bytes);
                let held = &mut self.models[place].held[held];
                held.lease = held.lease.saturating_add(bytes);
                if !self.speeds.restarts {
                    let takes = over(copied, self.speeds.refill);
                    let unmaps = self.unmaps.get(&gpu).copied().unwrap_or_default();
                    held.copied_by = held.copied_by.max(self.now).max(unmaps) + takes;
                    self.carries(copied, takes);
                }
            }
            Action::Admit { worker } => {
                let place = place(worker);
                let model = &self.models[place];
                if model.is_resident() {
                    return self.opens(place);
                }
                let mut by =
                    model.held.iter().map(|held| held.copied_by).max().unwrap_or_default().max(self.now);
                if self.speeds.restarts {
                    let takes = over(model.weights(), self.speeds.refill);
                    let bytes = model.weights();
                    by += takes;
                    self.carries(bytes, takes);
                }
                self.later(by + self.speeds.refill_fixed, SimulatedEvent::Refilled(place));
            }
            Action::Park { worker, .. } => {
                let place = place(worker);
                let rate = self.rates()[place];
                let model = &mut self.models[place];
                (model.gate, model.parks) = (Gate::Parking, model.parks + 1);
                let left = model.steps.stop();
                let step = rate.map_or(0.0, |rate| left / rate);
                let (at, parks) = (self.now + self.speeds.park + Duration::from_secs_f64(step), model.parks);
                self.later(at, SimulatedEvent::Parked(place, parks));
            }
            Action::Unpark { worker } => self.opens(place(worker)),
            Action::Shrink { worker, gpu, bytes, .. } => self.shrinks(place(worker), gpu, bytes),
            Action::Deny { worker, why, retry_after } => self.denied(place(worker), why, retry_after),
            // Simulated workers neither grow, die nor exceed their leases.
            _ => {}
        }
    }

    fn carries(&mut self, bytes: Bytes, takes: Duration) {
        self.tally.refilled = self.tally.refilled.saturating_add(bytes);
        self.tally.link_seconds += takes.as_secs_f64();
    }

    fn shrinks(&mut self, place: usize, gpu: GpuId, bytes: Bytes) {
        let model = &mut self.models[place];
        model.gate = Gate::Closed;
        let (leaves, copied) = model.evict(gpu, bytes);
        model.shrinks += 1;
        let clean = self.speeds.clean_gib.mul_f64(leaves.as_gib());
        let takes = over(copied, self.speeds.shrink);
        let mut begin = self.now + self.speeds.shrink_fixed;
        if !self.speeds.restarts {
            // Memory with a copy is unmapped before another worker gets any of it, one worker at a time.
            let unmaps = self.unmaps.entry(gpu).or_default();
            begin = begin.max(*unmaps) + clean;
            *unmaps = begin;
        }
        let credit = CREDIT.max(Bytes::new(bytes.get().div_ceil(MOST_CREDITS)));
        let parts = u32::try_from(bytes.get().div_ceil(credit.get())).unwrap_or(u32::MAX).max(1);
        let mut left = bytes;
        for part in 1..=parts {
            let returned = left.min(credit);
            left = left.saturating_sub(returned);
            // An ending process returns all of its memory at once.
            let gone =
                if self.speeds.restarts { takes } else { takes.mul_f64(f64::from(part) / f64::from(parts)) };
            self.later(begin + gone, SimulatedEvent::Returned(place, gpu, returned));
        }
        self.later(begin + takes, SimulatedEvent::Shrunk(place));
    }

    fn denied(&mut self, place: usize, why: Denied, retry_after: Option<Duration>) {
        let (now, longest) = (self.now, Settings::default().longest_wait);
        let model = &mut self.models[place];
        let patience = model.spec.deadline_s.map_or(longest, Duration::from_secs_f64);
        let horizon = now + retry_after.unwrap_or_default();
        let before = model.queue.len();
        model.queue.retain(|asked| why == Denied::Deadline && asked.at + patience > horizon);
        let gone = before - model.queue.len();
        self.tally.denied += gone;
        self.open -= gone;
        if self.models[place].waits() {
            self.later(now + retry_after.unwrap_or(RETRY), SimulatedEvent::WantsAgain(place));
        }
    }

    /// Resumes parked uses and starts waiting ones.
    fn opens(&mut self, place: usize) {
        let model = &mut self.models[place];
        model.steps.go_on();
        model.gate = Gate::Open;
        if let Some(parked_at) = model.parked_at.take() {
            let pause = self.now.saturating_sub(parked_at).as_secs_f64() + model.step();
            for running in model.active.iter_mut().filter(|running| running.ttft.is_some()) {
                running.longest_gap = running.longest_gap.max(pause);
            }
        }
        self.begin(place);
    }

    fn begin(&mut self, place: usize) {
        self.work += self.models[place].begin();
        if self.models[place].waits() {
            self.does(place, true);
        }
    }

    fn does(&mut self, place: usize, busy: bool) {
        if self.models[place].busy != busy {
            self.models[place].busy = busy;
            let activity = if busy { UseState::Busy } else { UseState::Idle };
            let (worker, accounts) = (WorkerId(place as u64), self.models[place].accounts());
            self.tell(Event::Activity { worker, activity, idle_for: Duration::ZERO });
            self.tell(Event::Changed { worker, accounts });
        }
    }

    /// Records first tokens and completed requests that are due.
    fn answer(&mut self, place: usize, rate: f64) {
        let now = self.now;
        let model = &mut self.models[place];
        let (progress, step) = (model.steps.progress + HAIR, model.step() / rate);
        let before = model.active.len();
        for running in &mut model.active {
            if running.ttft.is_none() && running.first_at <= progress {
                running.ttft = Some(now.saturating_sub(running.asked.at).as_secs_f64());
            }
            if running.asked.generated > 1 {
                running.longest_gap = running.longest_gap.max(step);
            }
        }
        model.active.retain(|running| {
            let Some(ttft) = running.ttft.filter(|_| running.done_at <= progress) else { return true };
            self.tally.ttft.push(ttft);
            self.tally.e2e.push(now.saturating_sub(running.asked.at).as_secs_f64());
            self.tally.gaps.push(running.longest_gap);
            false
        });
        if model.active.len() == before {
            return;
        }
        self.open -= before - model.active.len();
        if model.gate == Gate::Open {
            self.work += model.begin();
        }
        if model.active.is_empty() && model.gate == Gate::Open {
            self.does(place, false);
        }
    }
}
