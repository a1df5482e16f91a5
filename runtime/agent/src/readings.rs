//! What the meter shows, held against what workers say.

use std::collections::BTreeMap;
use std::time::Duration;

use glake_arbiter::{Event, GpuId, WorkerId};
use glake_meter::GpuMemory;
use glake_units::Bytes;
use glake_wire::Peer;

use crate::Agent;
use crate::translate::holdings;

/// A floor that differs by less is as it was.
const SAME: Bytes = Bytes::mib(1);
/// When the meter is read again, to see whether a floor is another one.
const AGAIN: Duration = Duration::from_millis(50);

impl Agent {
    /// What the pages say that pools hold of a GPU now.
    pub fn made(&self, gpu: GpuId) -> BTreeMap<WorkerId, Bytes> {
        let name = self.roster.gpu_name(gpu);
        self.roster.workers().filter_map(|(id, worker)| Some((id, worker.made(name)?))).collect()
    }

    /// The meter was read. `before`: what pages said before it was.
    pub fn measured(
        &mut self,
        gpu: GpuId,
        memory: &GpuMemory,
        before: &BTreeMap<WorkerId, Bytes>,
        now: Duration,
    ) {
        self.now = now;
        let name = self.roster.gpu_name(gpu).to_owned();
        let users =
            self.roster.workers().filter(|(_, worker)| worker.holdings.iter().any(|held| held.gpu == name));
        let users: Vec<(WorkerId, Peer, Option<Bytes>, bool)> =
            users.map(|(id, worker)| (id, worker.who.peer, worker.made(&name), worker.is_silent)).collect();
        let mut physical = Vec::new();
        for (id, peer, made, is_silent) in users {
            let used = memory.of_process(peer.pid);
            if is_silent {
                self.count_silent(id, gpu, &name, used);
            } else if let Some(made) = made {
                // What is not sure to be a worker's counts as others', so that nobody is given it.
                physical.push((id, made.min(before.get(&id).copied().unwrap_or_default())));
                // Where the meter does not list it, it is in another pid namespace.
                let is_away = self.roster.get(id).is_some_and(|worker| worker.is_away);
                if !used.is_zero() && !is_away {
                    self.set_floor(id, gpu, used.saturating_sub(made));
                }
            }
        }
        self.step(Event::Measured { gpu, used: memory.used, physical });
    }

    /// The meter and the worker's page are not of one moment: what they show counts once they show it twice.
    fn set_floor(&mut self, id: WorkerId, gpu: GpuId, floor: Bytes) {
        let unmeasured = self.roster.file().node.floor();
        let Some(worker) = self.roster.get_mut(id) else { return };
        let same = |known: Bytes| known.max(floor).saturating_sub(known.min(floor)) < SAME;
        if same(worker.floor(gpu, unmeasured)) {
            worker.seen_floors.remove(&gpu);
            return;
        }
        if !worker.seen_floors.insert(gpu, floor).is_some_and(same) {
            self.again.entry(gpu).or_insert(self.now + AGAIN);
            return;
        }
        worker.seen_floors.remove(&gpu);
        worker.floors.insert(gpu, floor);
        if let Some(worker) = self.roster.get(id) {
            let holdings = holdings(&self.roster, worker, &worker.holdings);
            self.step(Event::Changed { worker: id, holdings });
        }
    }

    /// One that is silent may have been granted more than the journal says: it counts with all that the meter shows.
    fn count_silent(&mut self, id: WorkerId, gpu: GpuId, name: &str, used: Bytes) {
        let floor = self.roster.file().node.floor();
        let Some(worker) = self.roster.get_mut(id) else { return };
        let seen = used.saturating_sub(worker.floor(gpu, floor));
        let Some(held) = worker.holdings.iter_mut().find(|held| held.gpu == name) else { return };
        if held.lease < seen {
            held.lease = seen;
            self.join(id, false, true);
        }
    }
}
