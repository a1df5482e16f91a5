//! Overview of a server's memory for people: the accounts of GPUs and workers, the operations under way, and the open requests in the order
//! in which they will be served.
//!
//! It is a copy of the ledger at one time and changes nothing. Invariants: the shares of a GPU, with its `reclaiming`, add up to `claimed`;
//! each open want, start and growth is one request.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use glake_units::Bytes;

use crate::arbiter::Arbiter;
use crate::commands::DEMOTION;
use crate::gang::{Gang, Growth, Order, Presence, Share, State};
use crate::ledger::Ledger;
use crate::{GangId, GpuId, WorkerId};

/// State of the arbiter at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Overview {
    pub gpus: BTreeMap<GpuId, GpuAccount>,
    pub workers: BTreeMap<WorkerId, WorkerAccount>,
    pub operations: BTreeMap<GangId, Operation>,
    /// Requests in the order in which they will be served.
    pub requests: Vec<Request>,
    /// Host memory that copies take.
    pub hosted: Bytes,
}

/// Account of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GpuAccount {
    /// Memory that all workers may have if others leave it to them.
    pub budget: Bytes,
    /// Memory that all workers may have now.
    pub limit: Bytes,
    /// Floors, leases and overruns of workers, and `reclaiming`.
    pub claimed: Bytes,
    /// Memory of dead workers that the driver has not freed yet.
    pub reclaiming: Bytes,
    /// Fraction of the last ten seconds in which refills used the link.
    pub link_duty: f64,
}

/// State and accounts of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerAccount {
    /// Name of its state, as `glake ps` prints it.
    pub state: &'static str,
    /// Predicted time until its memory is back; 0 if all of it is resident.
    pub wake: Duration,
    /// Shares in the order of GPUs.
    pub shares: Vec<ShareAccount>,
}

/// Account of a worker on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareAccount {
    pub gpu: GpuId,
    /// Memory of context, modules and libraries; 0 while checkpointed.
    pub floor: Bytes,
    pub lease: Bytes,
    /// Memory beyond floor and lease, as measured.
    pub overrun: Bytes,
}

impl ShareAccount {
    fn of(share: &Share) -> ShareAccount {
        let (gpu, lease) = (share.account.gpu, share.account.lease);
        ShareAccount { gpu, floor: share.floor(), lease, overrun: share.overrun }
    }
}

/// Operation under way with a gang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    pub task: OperationTask,
    /// Gang whose request the memory leaves for.
    pub whom: Option<GangId>,
    pub since: Duration,
    /// Deadline; `None` without one, or after it was missed.
    pub by: Option<Duration>,
    /// Memory that it moves; 0: unknown.
    pub bytes: Bytes,
    /// Granted memory of a refill; memory that has left in a shrink.
    pub done: Bytes,
}

/// Kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationTask {
    Park,
    Shrink,
    Refill,
    Start,
    Demote,
    Checkpoint,
    Restore,
}

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestKind {
    /// Evicted memory.
    Refill,
    /// Memory of a start.
    Start,
    /// Memory beyond the lease.
    Growth,
}

/// Reason why a request is not finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pending {
    /// All memory is granted: its bytes are coming back.
    Copies,
    /// Its turn: others give memory.
    Victims,
    /// Its turn: memory of dead or unmanaged processes has to become free.
    FreeMemory,
    /// Another request is first on one of its GPUs.
    Behind(GangId),
    /// A start is under way on its GPU, during which no memory leaves.
    Start(GangId),
    /// The gang's own memory is still leaving.
    OwnShrink,
    /// The driver brings its contexts back, or is asked again soon.
    Restore,
    /// No worker may give memory yet: all use theirs, or have had it for too short a time.
    Eligible,
}

/// Open request for memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub gang: GangId,
    pub kind: RequestKind,
    /// Whether its turn has come: memory is granted to it as it becomes free.
    pub is_served: bool,
    pub class: i64,
    pub since: Duration,
    /// Deadline; `None` once its memory comes.
    pub by: Option<Duration>,
    /// Predicted time of the copies.
    pub predicted: Duration,
    /// Requested and granted memory of each GPU.
    pub needs: BTreeMap<GpuId, (Bytes, Bytes)>,
    /// Gangs that were asked for its memory, and have not given all of it.
    pub givers: BTreeSet<GangId>,
    pub pending: Pending,
}

impl Overview {
    /// Copies the current state of an arbiter.
    pub fn of(arbiter: &Arbiter) -> Overview {
        let ledger = &arbiter.ledger;
        let gpus = ledger.gpus.iter().map(|(id, gpu)| {
            let account = GpuAccount {
                budget: gpu.most(),
                limit: gpu.limit(),
                claimed: gpu.claimed(),
                reclaiming: gpu.claimed().saturating_sub(gpu.counted),
                link_duty: arbiter.link_duty(*id),
            };
            (*id, account)
        });
        let mut workers: BTreeMap<WorkerId, WorkerAccount> = BTreeMap::new();
        for gang in ledger.gangs.values() {
            let (state, wake) = (gang.state_name(), ledger.predicted_wake(gang));
            for &worker in gang.members.keys() {
                let shares = gang.shares.iter().filter(|share| share.worker == worker).map(ShareAccount::of);
                workers.insert(worker, WorkerAccount { state, wake, shares: shares.collect() });
            }
        }
        let requests = Queue::of(ledger);
        let mut operations: BTreeMap<GangId, Operation> = BTreeMap::new();
        for id in ledger.under_way.iter().chain(&ledger.absent) {
            let operation = ledger.gangs.get(id).and_then(|gang| operation(gang, &arbiter.ledger));
            operations.extend(operation.map(|operation| (*id, operation)));
        }
        for request in &requests {
            for giver in &request.givers {
                let operation = operations.get_mut(giver).filter(|of| of.task == OperationTask::Shrink);
                operation.into_iter().for_each(|of| of.whom = of.whom.or(Some(request.gang)));
            }
        }
        let hosted = ledger.gangs.values().map(Gang::hosted).sum();
        Overview { gpus: gpus.collect(), workers, operations, requests, hosted }
    }
}

fn operation(gang: &Gang, ledger: &Ledger) -> Option<Operation> {
    let of = |task, since, by, bytes, done| Operation { task, whom: None, since, by, bytes, done };
    let sum = |of: fn(&Share) -> Bytes| gang.shares.iter().map(of).fold(Bytes::ZERO, Bytes::saturating_add);
    let moving = |task| of(task, gang.contexts.since, None, Bytes::ZERO, Bytes::ZERO);
    Some(match (gang.contexts.presence, &gang.state) {
        (Presence::Leaving, _) => moving(OperationTask::Checkpoint),
        (Presence::Returning, _) => moving(OperationTask::Restore),
        (_, State::Parking { since, by, takes, whom, .. }) => {
            let bytes = takes.iter().map(|(_, bytes)| *bytes).fold(Bytes::ZERO, Bytes::saturating_add);
            Operation { whom: *whom, ..of(OperationTask::Park, *since, Some(*by), bytes, Bytes::ZERO) }
        }
        (_, State::Shrinking { since, by, leaving, returned, .. }) => {
            of(OperationTask::Shrink, *since, *by, *leaving, (*returned).min(*leaving))
        }
        (_, State::Refilling(refill)) => {
            let (owed, granted) = (sum(|share| share.owed), sum(|share| share.granted));
            let task = if gang.starting { OperationTask::Start } else { OperationTask::Refill };
            of(task, refill.since, Some(refill.by), owed.saturating_add(granted), granted)
        }
        (_, State::Resting) => {
            let by = gang.demoting?;
            let since = by.saturating_sub(DEMOTION).min(ledger.now);
            of(OperationTask::Demote, since, Some(by), Bytes::ZERO, Bytes::ZERO)
        }
    })
}

/// Open requests, collected in the order of service: free bytes go to refills under way, then to growths, then to wants.
struct Queue<'a> {
    ledger: &'a Ledger,
    under_way: Vec<(GangId, &'a Gang)>,
    /// Gangs that are asked to stop their uses, by the gang that waits for them.
    parking: BTreeMap<GangId, BTreeSet<GangId>>,
    /// First request for evicted memory of each GPU.
    first: BTreeMap<GpuId, GangId>,
    requests: Vec<Request>,
}

impl<'a> Queue<'a> {
    fn of(ledger: &'a Ledger) -> Vec<Request> {
        let gang = |id: &GangId| Some((*id, ledger.gangs.get(id)?));
        let under_way: Vec<(GangId, &Gang)> = ledger.under_way.iter().filter_map(gang).collect();
        let mut parking: BTreeMap<GangId, BTreeSet<GangId>> = BTreeMap::new();
        for (id, gang) in &under_way {
            if let State::Parking { whom: Some(whom), .. } = gang.state {
                parking.entry(whom).or_default().insert(*id);
            }
        }
        let mut queue = Queue { ledger, under_way, parking, first: BTreeMap::new(), requests: Vec::new() };
        queue.add_refills();
        queue.add_growths();
        queue.add_wants();
        queue.requests
    }

    fn is_refilling(&self, id: GangId) -> bool {
        let state = self.ledger.gangs.get(&id).map(|gang| &gang.state);
        matches!(state, Some(State::Refilling(refill)) if refill.admitted.is_none())
    }

    /// Returns the gangs that give memory for a request: those of its victims with memory to give, and those that park for it.
    fn givers(&self, id: GangId, victims: &BTreeSet<GangId>) -> BTreeSet<GangId> {
        let is_giving = |id: &&GangId| {
            let state = self.ledger.gangs.get(*id).map(|gang| &gang.state);
            matches!(state, Some(State::Parking { .. } | State::Shrinking { .. }))
        };
        let parking = self.parking.get(&id).into_iter().flatten();
        victims.iter().filter(is_giving).chain(parking).copied().collect()
    }

    fn add_refills(&mut self) {
        let mut requests = Vec::new();
        for &(id, gang) in &self.under_way {
            let State::Refilling(refill) = &gang.state else { continue };
            let mut needs: BTreeMap<GpuId, (Bytes, Bytes)> = BTreeMap::new();
            for share in &gang.shares {
                let (all, granted) = needs.entry(share.account.gpu).or_default();
                *all = all.saturating_add(share.owed).saturating_add(share.granted);
                *granted = granted.saturating_add(share.granted);
                self.first.entry(share.account.gpu).or_insert(id);
            }
            needs.retain(|_, (all, _)| !all.is_zero());
            let (is_admitted, priority) = (refill.admitted.is_some(), gang.profile.priority);
            let givers = if is_admitted { BTreeSet::new() } else { self.givers(id, &refill.victims) };
            requests.push(Request {
                gang: id,
                kind: kind(gang),
                is_served: true,
                class: gang.want.map_or(priority.into(), |want| want.class(priority, self.ledger.now)),
                since: gang.want.map_or(refill.since, |want| want.since),
                by: gang.want.map(|want| want.deadline).filter(|_| !is_admitted),
                predicted: self.ledger.predicted_return(gang),
                needs,
                pending: match is_admitted {
                    true => Pending::Copies,
                    false if !gang.contexts.is_present() => Pending::Restore,
                    false if givers.is_empty() => Pending::FreeMemory,
                    false => Pending::Victims,
                },
                givers,
            });
        }
        requests.sort_by_key(|request| (request.since, request.gang));
        self.requests.append(&mut requests);
    }

    fn add_growths(&mut self) {
        for growth in &self.ledger.growths {
            let Growth { gang: id, gpu, bytes, since, by, victims, .. } = growth;
            let Some(gang) = self.ledger.gangs.get(id) else { continue };
            let givers = self.givers(*id, victims);
            let first = self.first.get(gpu).copied().filter(|other| other != id);
            let is_starting = |other: &GangId| self.ledger.gangs.get(other).is_some_and(|gang| gang.starting);
            let pending = match first {
                _ if self.ledger.absent.contains(id) => Pending::Restore,
                _ if !givers.is_empty() => Pending::Victims,
                Some(other) if is_starting(&other) => Pending::Start(other),
                Some(other) if self.is_refilling(other) => Pending::Behind(other),
                _ if self.ledger.expects_bytes(growth) => Pending::FreeMemory,
                _ => Pending::Eligible,
            };
            self.requests.push(Request {
                gang: *id,
                kind: RequestKind::Growth,
                is_served: !givers.is_empty(),
                class: gang.profile.priority.into(),
                since: *since,
                by: Some(*by),
                predicted: Duration::ZERO,
                needs: BTreeMap::from([(*gpu, (*bytes, Bytes::ZERO))]),
                givers,
                pending,
            });
        }
    }

    fn add_wants(&mut self) {
        let Ledger { now, settings, .. } = self.ledger;
        let wants = self.under_way.iter().filter(|(_, gang)| !matches!(gang.state, State::Refilling(_)));
        let mut wants: Vec<(Order, &Gang)> =
            wants.filter_map(|(id, gang)| Some((gang.order(*id, *now, settings)?, *gang))).collect();
        wants.sort_by_key(|(order, _)| *order);
        for ((class, .., id), gang) in wants {
            let Some(want) = gang.want else { continue };
            let gpus = gang.needs_gpus();
            let ahead = gpus.iter().find_map(|gpu| self.first.get(gpu)).copied();
            let (is_resting, contexts) = (gang.is_resting(), gang.contexts);
            if is_resting {
                gpus.iter().for_each(|gpu| _ = self.first.entry(*gpu).or_insert(id));
            }
            let needs = gpus.into_iter().map(|gpu| (gpu, (gang.wanted(gpu), Bytes::ZERO)));
            let pending = match ahead {
                _ if !is_resting => Pending::OwnShrink,
                _ if contexts.is_moving() || contexts.restore_after > *now => Pending::Restore,
                Some(other) => Pending::Behind(other),
                None => Pending::Eligible,
            };
            self.requests.push(Request {
                gang: id,
                kind: kind(gang),
                is_served: false,
                class: class.0,
                since: want.since,
                by: Some(want.deadline),
                predicted: self.ledger.predicted_return(gang),
                needs: needs.filter(|(_, (all, _))| !all.is_zero()).collect(),
                givers: self.givers(id, &BTreeSet::new()),
                pending,
            });
        }
    }
}

fn kind(gang: &Gang) -> RequestKind {
    if gang.starting { RequestKind::Start } else { RequestKind::Refill }
}
