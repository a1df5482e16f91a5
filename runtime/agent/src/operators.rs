//! Commands of operators: the worker that a name means, its shrinks and refills, and their progress.

use std::collections::BTreeMap;
use std::time::Duration;

use glake_arbiter::WorkerId;
use glake_units::Bytes;
use glake_wire::ToWorker;

use crate::Agent;
use crate::roster::{Worker, base};
use crate::supervisor::{LONGEST_START, Presence, Progress, View};

impl Agent {
    /// Returns the present workers, the GPUs with starts that are not the supervisor's, and the free memory.
    pub(crate) fn view(&self, is_started: impl Fn(&str) -> bool, now: Duration) -> View {
        let mut view = View::default();
        // Joined ranks, all ranks, and whether a rank is starting.
        let mut gangs: BTreeMap<&str, (u32, u32, bool)> = BTreeMap::new();
        for (id, worker) in self.roster.workers() {
            let name = base(&worker.name);
            let until = worker.starts_since.map(|since| since + LONGEST_START).filter(|until| now < *until);
            let (known, ranks, starts) = gangs.entry(name).or_default();
            view.joined_as.insert(worker.who.peer.pid, worker.name.clone());
            (*known, *ranks, *starts) = (*known + 1, worker.ranks, *starts || until.is_some());
            if let Some(until) = until.filter(|_| !is_started(name)) {
                let of_file = self.roster.size_of(id).map(|(_, gpus)| gpus);
                let held = || worker.holdings.iter().filter_map(|held| self.roster.gpu(&held.gpu)).collect();
                view.starts.extend(of_file.unwrap_or_else(held).into_iter().map(|gpu| (gpu, until)));
            }
        }
        let presence = |(known, ranks, starts)| match starts || known < ranks {
            true => Presence::Starting,
            false => Presence::Joined,
        };
        let free = |gpu| self.arbiter.limit(gpu).saturating_sub(self.arbiter.claimed(gpu));
        view.free = self.roster.gpus().map(|(gpu, _)| (gpu, free(gpu))).collect();
        view.present = gangs.into_iter().map(|(name, of)| (name.to_owned(), presence(of))).collect();
        view
    }

    /// Finds the worker for an operator's name.
    pub(crate) fn find(&self, name: &str) -> Result<WorkerId, String> {
        // Names of ranks end with their number: the first rank represents all.
        let rank = || self.roster.workers().find(|(_, worker)| base(&worker.name) == name).map(|(id, _)| id);
        self.roster.named(name).or_else(rank).ok_or_else(|| {
            let known: Vec<&str> = self.roster.workers().map(|(_, worker)| worker.name.as_str()).collect();
            match known.is_empty() {
                true => format!(
                    "no worker is called {name:?}: none has joined (glake.join(), or GLAKE_AGENT=SOCKET)"
                ),
                false => format!("no worker is called {name:?}: there are {}", listed(&known)),
            }
        })
    }

    /// Returns whether a shrink of the worker can start; false if an operation is under way and the operator must wait.
    pub(crate) fn may_shrink(&self, id: WorkerId) -> Result<bool, String> {
        match self.arbiter.state(id) {
            Some("resident" | "asleep" | "waiting" | "checkpointed") => Ok(true),
            Some("silent") => Err(silent(&self.name(id))),
            Some("failed") => Err(format!("{}: {LOST}", self.name(id))),
            Some(_) => Ok(false),
            None => Err(format!("{}: it is gone", self.name(id))),
        }
    }

    /// Starts an operator's shrink of a worker, whose uses have `within` to stop.
    pub(crate) fn ask_to_shrink(&mut self, id: WorkerId, within: Duration, now: Duration) {
        self.now = now;
        if let Some(worker) = self.roster.get_mut(id) {
            (worker.failed, worker.stayed) = (None, None);
        }
        self.step(glake_arbiter::Event::Shrink { worker: id, within });
    }

    /// Starts an operator's refill of a worker.
    pub(crate) fn ask_to_refill(&mut self, id: WorkerId, now: Duration) -> Result<(), String> {
        self.now = now;
        let Some(worker) = self.roster.get_mut(id) else { return Err("it is gone".to_owned()) };
        if worker.is_silent {
            return Err(silent(&self.name(id)));
        }
        if worker.lost_since.is_some() {
            return Err(format!("{} has no connection now: it connects again by itself", worker.name));
        }
        if self.arbiter.state(id) == Some("failed") {
            return Err(LOST.to_owned());
        }
        worker.failed = None;
        worker.asked_since.get_or_insert(now);
        // A checkpointed worker receives the message after its restore.
        self.step(glake_arbiter::Event::Refill { worker: id });
        self.say(id, ToWorker::Refill);
        Ok(())
    }

    /// Returns the leased memory of a worker that can leave.
    pub(crate) fn removable(&self, id: WorkerId) -> Bytes {
        let leased: Bytes = self.arbiter.footprints().filter(|of| of.worker == id).map(|of| of.lease).sum();
        let holdings = self.roster.get(id).map(|worker| worker.holdings.as_slice()).unwrap_or_default();
        leased.saturating_sub(holdings.iter().map(|held| held.fixed).sum())
    }

    pub(crate) fn shrink_progress(&self, id: WorkerId) -> Progress {
        let Some(worker) = self.roster.get(id) else { return Progress::Failed("it died".to_owned()) };
        let stayed = worker.stayed.unwrap_or_else(|| self.removable(id));
        match (self.arbiter.state(id), &worker.failed) {
            // Also while it is late.
            (Some("parking" | "shrinking"), _) => Progress::UnderWay,
            (_, Some(why)) => Progress::Failed(why.clone()),
            (Some("failed"), None) => Progress::Failed(LOST.to_owned()),
            _ if stayed.is_zero() => Progress::Done,
            _ if worker.stayed.is_none() => Progress::Failed(NOT_PARKED.to_owned()),
            _ => Progress::Failed(format!(
                "{stayed} of it stayed: a use that runs holds it, or it cannot leave"
            )),
        }
    }

    /// Returns whether a shrink failed because the worker's uses did not stop, so that another attempt may succeed.
    pub(crate) fn has_not_parked(&self, id: WorkerId) -> bool {
        let has_failed = |worker: &Worker| worker.failed.as_ref().map(|why| why.starts_with("park: "));
        self.roster.get(id).is_some_and(|worker| has_failed(worker).unwrap_or(worker.stayed.is_none()))
    }

    /// Returns the event that an operator's command for a worker waits for.
    pub(crate) fn awaited(&self, id: WorkerId) -> String {
        let Some(worker) = self.roster.get(id) else { return "it is gone".to_owned() };
        let evicted: Bytes = worker.holdings.iter().map(|held| held.evicted).sum();
        match self.arbiter.state(id).unwrap_or_default() {
            "parking" => "its uses have to end, or to stop at a safe point".to_owned(),
            "shrinking" if self.arbiter.is_late(id) => LATE.to_owned(),
            "shrinking" => format!("{} have to leave its GPUs", self.removable(id)),
            "waiting" => "no GPU memory is free for it yet (glake explain)".to_owned(),
            "refilling" => format!("{evicted} have to come back"),
            "starting" => "it loads its memory".to_owned(),
            "checkpointing" => "the driver checkpoints its process".to_owned(),
            "restoring" => "the driver restores its process".to_owned(),
            "silent" => "it has not joined since the agent was started".to_owned(),
            _ => worker.failed.clone().unwrap_or_else(|| "it has not answered yet".to_owned()),
        }
    }

    pub(crate) fn refill_progress(&self, id: WorkerId) -> Progress {
        let Some(worker) = self.roster.get(id) else { return Progress::Failed("it died".to_owned()) };
        let evicted: Bytes = worker.holdings.iter().map(|held| held.evicted).sum();
        match (self.arbiter.state(id), &worker.failed) {
            (_, Some(why)) => Progress::Failed(why.clone()),
            (Some("failed"), None) => Progress::Failed(LOST.to_owned()),
            // Room to grow, and room of discarded memory, is optional: do not wait for it.
            (Some("resident" | "asleep"), None) if evicted.is_zero() => Progress::Done,
            _ => Progress::UnderWay,
        }
    }
}

/// Returns the first names of a list, and the number of the others.
fn listed(names: &[&str]) -> String {
    const MOST: usize = 20;
    match names.len().saturating_sub(MOST) {
        0 => names.join(", "),
        more => format!("{} and {more} more (glake ps)", names[..MOST].join(", ")),
    }
}

/// Message of a shrink without an answer in time.
const LATE: &str = "it does not answer (is its process stopped?); its memory leaves once it does";

/// Message of a shrink whose worker did not park.
const NOT_PARKED: &str = "its uses have not stopped at a safe point or ended";

/// Message of any request for a lost worker.
const LOST: &str = "the driver does not restore its process, which is lost: end it, and start it again";

fn silent(name: &str) -> String {
    format!(
        "{name} has not joined since the agent was started: it does so within two seconds, if it is not stopped"
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // also in the functions that tests call
mod tests {
    use glake_arbiter::node::NodeFile;
    use glake_wire::{Activity, Hello, Holding, LoggedDecision, Peer, ToAgent};

    use super::*;
    use crate::Identity;

    const MIB: fn(u64) -> Bytes = Bytes::mib;
    const NOW: Duration = Duration::ZERO;
    const LONG: Duration = Duration::from_secs(30);

    fn agent(file: &str) -> Agent {
        let gpus = ["0", "1"].map(|gpu| (gpu.to_owned(), Bytes::gib(24))).to_vec();
        Agent::new(NodeFile::parse(file).unwrap(), gpus, 1)
    }

    fn held(gpu: &str, [lease, resident, evicted, room]: [u64; 4]) -> Holding {
        let [lease, resident, evicted, room] = [lease, resident, evicted, room].map(MIB);
        Holding { gpu: gpu.to_owned(), lease, resident, evicted, room, ..Holding::default() }
    }

    fn join(agent: &mut Agent, starting: bool, held: Holding) -> WorkerId {
        let name = "model".to_owned();
        let hello = Hello { name, holdings: vec![held], ranks: 1, starting, ..Hello::default() };
        let who = Identity { peer: Peer { pid: 1, start: 1 }, uid: 0 };
        agent.hello(who, hello, NOW).unwrap().0
    }

    fn state(agent: &Agent) -> String {
        agent.snapshot().workers[0].row.state.clone()
    }

    fn saw(agent: &mut Agent, id: WorkerId, made: Bytes, begun: u64) {
        let mut activity = glake_wire::Activity { begun, ..glake_wire::Activity::default() };
        activity.made[0] = made.get();
        agent.saw(id, Some(crate::PageReading { activity, idle_for: NOW }), NOW);
    }

    /// Returns the destination of a shrink's copies.
    fn shrink(agent: &mut Agent, id: WorkerId) -> glake_wire::Tier {
        agent.ask_to_shrink(id, LONG, NOW);
        let mut frames = glake_wire::Frames::default();
        while let Some(frame) = agent.frame(id).unwrap() {
            frames.push(&frame);
        }
        let said = std::iter::from_fn(|| frames.take::<ToWorker>().unwrap());
        let tier = |message| if let ToWorker::Shrink { tier, .. } = message { Some(tier) } else { None };
        said.filter_map(|envelope| tier(envelope.message)).last().unwrap()
    }

    /// Neither a prediction nor the pause that a worker allows others shortens an operator's time.
    #[test]
    fn an_operators_shrink_gives_running_uses_its_own_time() {
        for parks in [false, true] {
            let mut agent = agent("[[worker]]\nname = \"model\"\nmax_pause = 0.05\n");
            let id = join(&mut agent, false, held("0", [512, 512, 0, 0]));
            let activity = Activity { begun: 1, uses: 1, parks, ..Activity::default() };
            agent.saw(id, Some(crate::PageReading { activity, idle_for: NOW }), NOW);
            agent.ask_to_shrink(id, LONG, NOW);
            for second in [1, 29] {
                agent.tick(Duration::from_secs(second));
                assert_eq!(
                    (state(&agent).as_str(), agent.shrink_progress(id)),
                    ("parking", Progress::UnderWay)
                );
            }
            // The worker refuses, and is asked again without being left alone.
            let failed =
                ToAgent::Failed { what: "park".to_owned(), why: "no".to_owned(), holdings: Vec::new() };
            agent.hear(id, 1, 0, failed, LONG).unwrap();
            assert!(agent.has_not_parked(id) && agent.may_shrink(id) == Ok(true));
            assert_eq!(agent.awaited(id), "park: no");
            agent.ask_to_shrink(id, LONG, LONG);
            agent.hear(id, 2, 0, ToAgent::Parked, LONG).unwrap();
            assert_eq!(state(&agent), "shrinking");
            agent.hear(id, 3, 0, ToAgent::Returned { gpu: "0".to_owned(), bytes: MIB(512) }, LONG).unwrap();
            agent
                .hear(id, 4, 0, ToAgent::Shrunk { holdings: vec![held("0", [0, 0, 512, 0])] }, LONG)
                .unwrap();
            // The parked uses have their memory back before the operator looks.
            agent.hear(id, 5, 0, ToAgent::Want { deadline_ms: None }, LONG).unwrap();
            assert_eq!((state(&agent).as_str(), agent.shrink_progress(id)), ("refilling", Progress::Done));
        }
    }

    /// A worker reports its holdings after it has grown, and earlier releases never do: its page shows the growth at once.
    #[test]
    fn unreported_memory_counts_as_resident_and_dirty() {
        let mut agent = agent("[node]\nhost_budget = \"300MiB\"\n");
        let id = join(&mut agent, false, held("0", [512, 0, 0, 0]));
        assert_eq!(state(&agent), "resident");
        saw(&mut agent, id, MIB(0), 0);
        assert_eq!(state(&agent), "joined");
        saw(&mut agent, id, MIB(512), 0);
        assert_eq!(
            (state(&agent).as_str(), agent.snapshot().workers[0].row.resident),
            ("loaded", MIB(512)),
            "it announces no uses"
        );
        let text = crate::metrics::text(&agent);
        assert!(text.contains("{worker=\"model\",place=\"resident\"} 536870912"), "{text}");
        saw(&mut agent, id, MIB(512), 1);
        assert_eq!(state(&agent), "idle");
        for (captures, uses, found) in [(false, 1, "busy"), (true, 0, "busy")] {
            let activity = Activity { begun: uses, uses, captures, ..Activity::default() };
            agent.saw(id, Some(crate::PageReading { activity, idle_for: NOW }), NOW);
            assert_eq!((state(&agent).as_str(), agent.snapshot().workers[0].row.idle_s), (found, None));
        }
        saw(&mut agent, id, MIB(512), 1);
        assert_eq!(shrink(&mut agent, id), glake_wire::Tier::File, "512 MiB of a host budget of 300");
    }

    /// Uses that began after the report may have written to memory that was free then.
    #[test]
    fn free_memory_counts_as_written_once_another_use_has_begun() {
        let told = |unused, as_of| {
            let held = held("0", [512, 512, 0, 0]);
            Holding { dirty: MIB(100), discardable: MIB(412), unused, as_of, ..held }
        };
        // Discarded memory is never copied.
        let cases = [
            (told(Some(MIB(412)), Some(3)), glake_wire::Tier::Host),
            (told(Some(MIB(412)), Some(2)), glake_wire::Tier::File),
            (told(Some(MIB(0)), Some(2)), glake_wire::Tier::Host),
            (told(Some(MIB(412)), None), glake_wire::Tier::File),
            (told(None, None), glake_wire::Tier::File),
        ];
        for (told, tier) in cases {
            let mut agent = agent("[node]\nhost_budget = \"300MiB\"\n");
            let id = join(&mut agent, false, told.clone());
            saw(&mut agent, id, MIB(512), 3);
            assert_eq!(shrink(&mut agent, id), tier, "{told:?}");
        }
    }

    /// The journal knows only its lease.
    #[test]
    fn a_silent_worker_counts_with_its_lease() {
        let mut agent = agent("");
        let told = crate::JournalRecord {
            name: "silent".to_owned(),
            ranks: 1,
            leases: vec![("0".to_owned(), MIB(512))],
            ..crate::JournalRecord::default()
        };
        agent.expect(Identity { peer: Peer { pid: 7, start: 1 }, uid: 0 }, &told, NOW);
        assert_eq!((state(&agent).as_str(), agent.snapshot().workers[0].row.resident), ("silent", MIB(512)));
    }

    /// An operator does not wait for room that a worker could also have.
    #[test]
    fn a_refill_is_over_when_nothing_is_evicted() {
        let mut agent = agent("");
        let id = join(&mut agent, false, held("0", [0, 0, 2048, 256]));
        assert_eq!(agent.refill_progress(id), Progress::UnderWay);
        agent.ask_to_refill(id, NOW).unwrap();
        assert_eq!((state(&agent).as_str(), agent.refill_progress(id)), ("asleep", Progress::UnderWay));
        agent.hear(id, 1, 0, ToAgent::Want { deadline_ms: None }, NOW).unwrap();
        assert_eq!((state(&agent).as_str(), agent.refill_progress(id)), ("refilling", Progress::UnderWay));
        let holdings = vec![held("0", [2304, 2048, 0, 512])];
        agent.hear(id, 2, 0, ToAgent::Refilled { holdings }, NOW).unwrap();
        assert_eq!((state(&agent).as_str(), agent.refill_progress(id)), ("asleep", Progress::Done));
    }

    /// The memory of a stopped worker returns once it continues; an operator must not wait forever.
    #[test]
    fn decisions_show_denied_growths_and_names_of_ended_workers() {
        let mut agent = agent("[node]\nreserve = \"0B\"\nfloor = \"1GiB\"\n");
        let id = join(&mut agent, false, held("0", [8192, 8192, 0, 0]));
        let grow = |gib| ToAgent::Grow { gpu: "0".to_owned(), bytes: Bytes::gib(gib), within_ms: 1000 };
        agent.hear(id, 1, 0, grow(20), NOW).unwrap();
        agent.hear(id, 2, 0, grow(30), NOW).unwrap();
        agent.died(Peer { pid: 1, start: 1 }, NOW).unwrap();
        let (rows, _) = agent.decisions(0);
        let row = |of: &LoggedDecision| (of.row.worker.clone(), of.row.needed, of.row.outcome.clone());
        let denied = "growth denied: all that others could give is not enough".to_owned();
        assert_eq!(rows.iter().map(row).collect::<Vec<_>>(), [("model".to_owned(), Bytes::gib(30), denied)]);
        // Time passes without events.
        agent.tick(LONG);
        assert_eq!(agent.decisions(0).0[0].row.ago_s, 30.0);
    }

    /// The worker wants again by itself, within the operator's time.
    #[test]
    fn a_refill_goes_on_after_a_denial_for_now() {
        let mut agent = agent("[[worker]]\nname = \"model\"\ndeadline_s = 0.2\n");
        let id = join(&mut agent, false, held("0", [0, 0, 8192, 0]));
        let other = Hello {
            name: "other".to_owned(),
            ranks: 1,
            holdings: vec![held("0", [20_480, 20_480, 0, 0])],
            ..Hello::default()
        };
        agent.hello(Identity { peer: Peer { pid: 2, start: 1 }, uid: 0 }, other, NOW).unwrap();
        agent.ask_to_refill(id, NOW).unwrap();
        agent.hear(id, 1, 1, ToAgent::Want { deadline_ms: Some(30_000) }, NOW).unwrap();
        agent.tick(Duration::from_millis(300));
        assert_eq!((state(&agent).as_str(), agent.refill_progress(id)), ("asleep", Progress::UnderWay));
    }

    /// An operator's time counts also if it is longer than the arbiter's patience.
    #[test]
    fn a_late_shrink_is_under_way() {
        let mut agent = agent("");
        let id = join(&mut agent, false, held("0", [512, 512, 0, 0]));
        saw(&mut agent, id, MIB(512), 1);
        agent.ask_to_shrink(id, LONG, NOW);
        agent.tick(4 * LONG);
        assert_eq!((state(&agent).as_str(), agent.shrink_progress(id)), ("shrinking", Progress::UnderWay));
        assert!(agent.awaited(id).contains("is its process stopped?"), "{}", agent.awaited(id));
    }

    #[test]
    fn a_refill_of_a_stopped_process_ends() {
        let mut agent = agent("");
        let id = join(&mut agent, false, held("0", [0, 0, 2048, 256]));
        agent.ask_to_refill(id, NOW).unwrap();
        let late = agent.next_deadline().unwrap();
        agent.tick(late);
        let Progress::Failed(why) = agent.refill_progress(id) else { panic!("it is still waited for") };
        assert!(why.contains("has not answered within 10 s"), "{why}");
        assert_eq!(agent.next_deadline(), None, "it is told once");
        agent.hear(id, 1, 0, ToAgent::Want { deadline_ms: None }, late).unwrap();
        let holdings = vec![held("0", [2304, 2048, 0, 512])];
        agent.hear(id, 2, 0, ToAgent::Refilled { holdings }, late).unwrap();
        assert_eq!(agent.refill_progress(id), Progress::Done);
    }

    #[test]
    fn an_acknowledged_refill_is_awaited() {
        let mut agent = agent("");
        let id = join(&mut agent, false, held("0", [0, 0, 2048, 256]));
        agent.ask_to_refill(id, NOW).unwrap();
        while agent.frame(id).unwrap().is_some() {}
        agent.hear(id, 0, 1, ToAgent::Ack, NOW).unwrap();
        agent.tick(Duration::from_secs(3600));
        assert_eq!(agent.refill_progress(id), Progress::UnderWay);
    }

    const FILE: &str = "[[worker]]\nname = \"model\"\nweights = \"2GiB\"\nkv = \"1GiB\"\n";

    /// For example, only the machine's second GPU is visible to the worker.
    #[test]
    fn a_worker_on_another_gpu_than_in_the_file_counts_there() {
        let mut agent = agent(FILE);
        let id = join(&mut agent, true, held("1", [0; 4]));
        let leases = agent.arbiter.footprints().map(|of| (of.gpu.0, of.lease)).collect::<Vec<_>>();
        assert_eq!((leases, state(&agent).as_str()), (vec![(1, Bytes::gib(3))], "starting"));
        let holdings = vec![held("1", [3072, 2816, 0, 0])];
        agent.hear(id, 1, 0, ToAgent::Refilled { holdings }, NOW).unwrap();
        assert_eq!(agent.arbiter.state(id), Some("resident"));
    }

    /// The agent restarted while the worker was loading.
    #[test]
    fn a_start_under_a_new_agent_gets_the_rest_of_its_size() {
        let mut agent = agent(FILE);
        let id = join(&mut agent, true, held("0", [1536, 1024, 0, 0]));
        agent
            .hear(id, 1, 0, ToAgent::Changed { holdings: vec![held("0", [1536, 1024, 0, 0])] }, NOW)
            .unwrap();
        let leases = agent.arbiter.footprints().map(|of| of.lease).collect::<Vec<_>>();
        assert_eq!((leases, state(&agent).as_str()), (vec![Bytes::gib(3)], "starting"));
    }

    /// A worker may use its memory before its page is read, and before its first use.
    #[test]
    fn a_worker_counts_as_idle_only_by_its_page() {
        let mut agent = agent("");
        let loads = join(&mut agent, false, held("0", [20_480, 20_480, 0, 0]));
        let hello = Hello {
            name: "other".to_owned(),
            ranks: 1,
            holdings: vec![held("0", [0, 0, 8192, 0])],
            ..Hello::default()
        };
        let who = Identity { peer: Peer { pid: 2, start: 1 }, uid: 0 };
        let (other, _) = agent.hello(who, hello, NOW).unwrap();
        let page = |begun, idle_since_ns| {
            let activity = glake_wire::Activity { begun, idle_since_ns, ..glake_wire::Activity::default() };
            Some(crate::agent::PageReading { activity, idle_for: Duration::ZERO })
        };
        let at = Duration::from_secs;
        agent.hear(other, 1, 0, ToAgent::Want { deadline_ms: None }, at(1)).unwrap();
        for (second, page) in [(2, None), (3, page(0, 0)), (9, page(0, 0))] {
            agent.saw(loads, page, at(second));
            agent.tick(at(second));
            assert_eq!(agent.arbiter.state(loads), Some("resident"), "{page:?}");
        }
        agent.saw(loads, page(1, 0), at(10));
        agent.tick(at(11));
        assert_eq!(agent.arbiter.state(loads), Some("shrinking"));
    }

    #[test]
    fn a_taken_name_is_a_temporary_refusal_and_an_invalid_one_is_permanent() {
        let mut agent = agent("");
        let id = join(&mut agent, false, held("0", [0; 4]));
        let hello = |name: &str, gpu| Hello {
            name: name.to_owned(),
            ranks: 1,
            holdings: vec![held(gpu, [0; 4])],
            ..Hello::default()
        };
        let other = Identity { peer: Peer { pid: 2, start: 1 }, uid: 0 };
        for (name, gpu, passes) in [("model", "0", true), ("a b", "0", false), ("other", "9", false)] {
            let refusal = agent.hello(other, hello(name, gpu), NOW).unwrap_err();
            assert_eq!(refusal.passes(), passes, "{refusal}");
        }
        // The worker left unnoticed and joins under another name.
        let own = Identity { peer: Peer { pid: 1, start: 1 }, uid: 0 };
        assert!(agent.hello(own, hello("code", "0"), NOW).unwrap_err().passes());
        agent.lost(id, NOW);
        agent.hello(own, hello("code", "0"), NOW).unwrap();
        agent.hello(other, hello("model", "0"), NOW).unwrap();
    }

    /// The worker got memory of a GPU unknown to it, and returned it.
    #[test]
    fn a_worker_needs_no_memory_of_an_unused_gpu() {
        let mut agent = agent(&format!("{FILE}gpus = [0, 1]\n"));
        let id = join(&mut agent, true, held("0", [0; 4]));
        let (gpu, bytes) = ("1".to_owned(), MIB(1536));
        agent.hear(id, 1, 0, ToAgent::Returned { gpu, bytes }, NOW).unwrap();
        let holdings = vec![held("0", [1536, 1400, 0, 0])];
        agent.hear(id, 2, 0, ToAgent::Refilled { holdings }, NOW).unwrap();
        assert_eq!(agent.arbiter.state(id), Some("resident"));
    }
}
