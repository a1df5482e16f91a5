//! Tests in virtual time: two workers of GPU 0, one of GPU 1, one on request, one started by hand.

use super::*;

const FILE: &str = r#"
[[worker]]
name = "a"
command = ["a"]
[[worker]]
name = "b"
command = ["b"]
[[worker]]
name = "c"
command = ["c"]
gpus = [1]
[[worker]]
name = "asked"
command = ["d"]
gpus = [2]
start = "request"
[[worker]]
name = "never"
command = ["e"]
start = "never"
[[worker]]
name = "by-hand"
"#;

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Supervisor, its inputs, and the time.
struct World {
    supervisor: Supervisor,
    view: View,
    now: Duration,
}

impl World {
    fn new() -> World {
        let supervisor = Supervisor::new(&NodeFile::parse(FILE).unwrap());
        World { supervisor, view: View::default(), now: s(100) }
    }

    /// Returns the names of the workers to launch now.
    fn launches(&mut self) -> Vec<String> {
        let acts = self.supervisor.step(&self.view, self.now).into_iter();
        acts.map(|act| if let Act::Launch { name } = act { name } else { panic!("{act:?}") }).collect()
    }

    fn up(&mut self, name: &str) {
        assert_eq!(self.supervisor.launched(name, Ok(7), self.now), None);
    }

    fn joins(&mut self, name: &str, presence: Presence) {
        self.view.present.insert(name.to_owned(), presence);
    }

    /// Joins a worker and completes its start.
    fn runs(&mut self, name: &str) {
        self.up(name);
        self.joins(name, Presence::Joined);
    }

    fn ends(&mut self, name: &str) {
        self.view.present.remove(name);
        self.supervisor.exited(name, "exit 1".to_owned(), self.now);
        assert_eq!(self.launches(), [""; 0], "not before all of it is gone");
        self.supervisor.gone(name, self.now);
    }

    fn rows(&self) -> Vec<WorkerRow> {
        self.supervisor.rows(&self.view, self.now, |gpu| gpu.0.to_string())
    }

    fn state(&self, name: &str) -> (String, String) {
        let row = self.rows().into_iter().find(|row| row.worker == name).unwrap();
        (row.state, row.note.unwrap_or_default())
    }

    fn due(&self) -> Option<Duration> {
        self.supervisor.next_deadline(&self.view, self.now)
    }
}

#[test]
fn at_boot_one_worker_of_a_gpu_starts_at_a_time() {
    let mut world = World::new();
    assert_eq!(world.launches(), ["a", "c"]);
    assert_eq!(world.launches(), [""; 0], "they are being made");
    world.up("a");
    world.up("c");
    assert_eq!((world.launches(), world.state("b").0), (vec![], "queued".to_owned()));
    world.joins("a", Presence::Starting);
    assert_eq!(world.launches(), [""; 0], "it loads");
    world.joins("a", Presence::Joined);
    assert_eq!(world.launches(), ["b"]);
    assert_eq!(world.state("c"), ("starting".to_owned(), "has not joined yet".to_owned()));
    let rows = world.rows();
    let names: Vec<&str> = rows.iter().map(|row| row.worker.as_str()).collect();
    assert_eq!(names, ["b", "c", "asked"], "who has joined is told of by the agent");
}

#[test]
fn starts_by_hand_block_others_until_their_timeout() {
    let mut world = World::new();
    world.view.starts.insert(GpuId(0), s(150));
    assert_eq!((world.launches(), world.due()), (vec!["c".to_owned()], Some(s(150))));
    world.now = s(150);
    assert_eq!(world.launches(), ["a"]);
}

#[test]
fn a_known_name_is_not_started_again() {
    let mut world = World::new();
    world.joins("a", Presence::Joined);
    assert_eq!(world.launches(), ["b", "c"]);
    world.runs("b");
    world.view.present.remove("a");
    assert_eq!(world.launches(), ["a"], "that one has ended");
}

#[test]
fn restarts_back_off() {
    let mut world = World::new();
    world.launches();
    for wait in [1, 2, 4, 8, 16, 32, 60, 60, 60] {
        world.up("c");
        world.ends("c");
        let (state, note) = world.state("c");
        assert_eq!((state, note), ("ended".to_owned(), format!("exit 1; started again in {wait} s")));
        assert_eq!(world.due(), Some(world.now + s(wait)));
        world.now += s(wait) - Duration::from_millis(1);
        assert_eq!(world.launches(), [""; 0]);
        world.now += Duration::from_millis(1);
        assert_eq!(world.launches(), ["c"]);
    }
    // A long life resets the delay.
    world.runs("c");
    world.now += LONGEST_BACK_OFF;
    world.ends("c");
    assert!(world.state("c").1.ends_with("again in 1 s"));
}

#[test]
fn a_failed_start_is_retried_and_does_not_block_others() {
    let mut world = World::new();
    assert_eq!(world.launches(), ["a", "c"]);
    world.supervisor.launched("a", Err("no program".to_owned()), world.now);
    assert_eq!(world.state("a"), ("ended".to_owned(), "no program; started again in 1 s".to_owned()));
    assert_eq!(world.launches(), ["b"]);
    world.runs("b");
    world.now += s(1);
    assert_eq!(world.launches(), ["a"]);
    world.supervisor.launched("a", Err("no program".to_owned()), world.now);
    assert!(world.state("a").1.ends_with("again in 2 s"));
}

#[test]
fn a_worker_that_never_joins_blocks_others_only_until_its_timeout() {
    let mut world = World::new();
    world.launches();
    world.up("a");
    world.runs("c");
    assert_eq!((world.launches(), world.due()), (vec![], Some(s(100) + NOTES[0])));
    world.now += LONGEST_START;
    assert_eq!(world.launches(), ["b"]);
    assert_eq!(world.state("a").0, "running");
    assert!(
        matches!(world.supervisor.progress("a", None), Progress::Failed(why) if why.contains("not joined"))
    );
}

#[test]
fn a_new_file_adds_and_removes_workers_of_a_running_agent() {
    let worker =
        |name: &str, lines: &str| format!("[[worker]]\nname = {name:?}\ncommand = [\"x\"]\n{lines}\n");
    let parse = |workers: &[String]| NodeFile::parse(&workers.concat()).unwrap();
    let mut world = World::new();
    assert_eq!(world.launches(), ["a", "c"]);
    world.runs("a");
    world.runs("c");
    assert_eq!(world.launches(), ["b"]);
    world.up("b");
    // "a" stays and moves, "b" and "c" are missing, "asked" is wanted now, "new" is new.
    let asked = worker("asked", "gpus = [2]");
    world.supervisor.set_file(&parse(&[worker("a", "gpus = [3]"), asked, worker("new", "gpus = [4]")]));
    assert_eq!(world.launches(), ["asked", "new"]);
    assert!(
        world.supervisor.runs("c") && world.supervisor.ask("c", world.now).unwrap_err().contains("any more")
    );
    world.ends("c");
    world.now += LONGEST_BACK_OFF;
    assert!(world.launches().is_empty() && !world.supervisor.has("c"));
    // A removed worker can be stopped, and comes back with its process.
    assert!(matches!(world.supervisor.stop("b", world.now), Ok(Some(Act::Terminate { .. }))));
    world.supervisor.set_file(&parse(&[worker("a", ""), worker("b", "")]));
    assert_eq!(world.state("b").0, "stopping");
    world.supervisor.exited("b", "exit 1".to_owned(), world.now);
    world.supervisor.gone("b", world.now);
    world.now += LONGEST_BACK_OFF;
    assert_eq!((world.launches(), world.state("b").0), (vec![], "stopped".to_owned()));
    // A worker that others start from now on.
    world.supervisor.set_file(&parse(&[worker("a", "start = \"never\"")]));
    assert!(world.supervisor.runs("a"));
    world.ends("a");
    assert!(world.supervisor.ask("a", world.now).unwrap_err().contains("start it yourself"));
}

/// A command that never joins keeps only its memory from others, once it is late and all sizes are known.
#[test]
fn a_late_start_lets_others_start_where_memory_is_free() {
    let gib = Bytes::gib;
    let sized = |name: &str, weights: &str| {
        format!("[[worker]]\nname = {name:?}\nweights = {weights:?}\ncommand = [\"x\"]\n")
    };
    let file = |first: &str| {
        let node = "[node]\nfloor = \"1GiB\"\n".to_owned();
        NodeFile::parse(&(node + &sized("late", first) + &sized("next", "8GiB") + &sized("last", "8GiB")))
            .unwrap()
    };
    let mut world = World { supervisor: Supervisor::new(&file("4GiB")), view: View::default(), now: s(100) };
    assert_eq!(world.launches(), ["late"]);
    world.up("late");
    world.view.free.insert(GpuId(0), gib(14));
    assert_eq!((world.launches(), world.due()), (vec![], Some(world.now + NOTES[0])));
    assert_eq!(world.state("next").1, "waits for the start of late, which has not joined yet");
    world.now += NOTES[0];
    assert_eq!((world.launches(), world.due()), (vec![], Some(s(100) + LATE_START)));
    assert_eq!(world.state("late"), ("starting".to_owned(), "has not joined for 30 s".to_owned()));
    world.now = s(100) + LATE_START;
    // 5 GiB of the late one, 9 GiB of the next one.
    world.view.free.insert(GpuId(0), gib(14).saturating_sub(Bytes::new(1)));
    assert_eq!((world.launches(), world.due()), (vec![], Some(world.now + LATE_LOOK)));
    assert!(world.supervisor.is_held_up(world.now));
    world.view.free.insert(GpuId(0), gib(14));
    assert_eq!(world.launches(), ["next"], "one at a time");
    world.up("next");
    world.view.free.insert(GpuId(0), gib(80));
    assert_eq!(world.launches(), [""; 0], "next is not late");
    world.joins("next", Presence::Joined);
    world.view.free.insert(GpuId(0), gib(5));
    assert_eq!(world.launches(), [""; 0]);
    world.joins("late", Presence::Joined);
    assert_eq!(world.launches(), ["last"], "the arbiter finds memory for it");
    // The size of the late one is not known: it may take all.
    let mut world = World { supervisor: Supervisor::new(&file("0B")), view: View::default(), now: s(100) };
    world.launches();
    world.up("late");
    world.view.free.insert(GpuId(0), gib(80));
    world.now += LATE_START;
    assert_eq!(world.launches(), [""; 0]);
    world.now = s(100) + LONGEST_START;
    assert_eq!(world.launches(), ["next"]);
}

#[test]
fn a_worker_that_joins_under_another_name_does_not_block_starts() {
    let mut world = World::new();
    world.launches();
    world.up("a");
    world.view.joined_as.insert(7, "other".to_owned());
    assert_eq!(world.launches(), ["b"]);
    assert_eq!(world.state("a"), ("running".to_owned(), "has joined as other".to_owned()));
}

#[test]
fn a_worker_on_request_starts_at_its_first_request() {
    let mut world = World::new();
    assert_eq!(world.launches(), ["a", "c"]);
    assert_eq!(world.state("asked").0, "stopped");
    world.supervisor.ask("asked", world.now).unwrap();
    assert_eq!(world.launches(), ["asked"]);
    assert_eq!(world.supervisor.progress("asked", None), Progress::UnderWay);
    world.runs("asked");
    assert_eq!(world.supervisor.progress("asked", Some(Presence::Starting)), Progress::UnderWay);
    assert_eq!(world.supervisor.progress("asked", Some(Presence::Joined)), Progress::Done);
    world.launches();
    // A request during the end waits for the next start and learns of its end.
    world.ends("asked");
    assert_eq!(world.supervisor.progress("asked", None), Progress::UnderWay);
    world.now += s(1);
    assert_eq!(world.launches(), ["asked"]);
    world.up("asked");
    world.ends("asked");
    assert!(
        matches!(world.supervisor.progress("asked", None), Progress::Failed(why) if why.contains("exit 1"))
    );
    // A request skips the back-off.
    world.supervisor.ask("asked", world.now).unwrap();
    assert_eq!(world.launches(), ["asked"]);
    for (name, says) in
        [("never", "start it yourself"), ("by-hand", "start it yourself"), ("other", "has a, b, c, asked")]
    {
        let error = world.supervisor.ask(name, world.now).unwrap_err();
        assert!(error.contains(says), "{error}");
        assert!(
            world
                .supervisor
                .stop(name, world.now)
                .unwrap_err()
                .contains("is no worker that this agent has started")
        );
    }
}

#[test]
fn a_stopped_worker_stays_down_until_requested() {
    let mut world = World::new();
    world.launches();
    world.runs("c");
    world.launches();
    let act = world.supervisor.stop("c", world.now).unwrap();
    assert_eq!(act, Some(Act::Terminate { name: "c".to_owned() }));
    assert_eq!(world.supervisor.stop("c", world.now).unwrap(), None, "it was asked already");
    assert!(!world.supervisor.is_down("c"));
    world.now += GRACE;
    assert_eq!(world.supervisor.step(&world.view, world.now), [Act::Kill { name: "c".to_owned() }]);
    assert_eq!(world.launches(), [""; 0], "it is killed once");
    world.ends("c");
    assert!(world.supervisor.is_down("c"));
    assert_eq!(world.state("c"), ("stopped".to_owned(), "exit 1".to_owned()));
    world.now += s(1000);
    world.launches();
    assert!(world.supervisor.is_down("c") && world.supervisor.stopped() == ["c".to_owned()].into());
    world.supervisor.ask("c", world.now).unwrap();
    assert!(world.launches().contains(&"c".to_owned()));
    assert!(world.supervisor.stopped().is_empty());
    // While the process is being created.
    assert_eq!(world.supervisor.stop("c", world.now).unwrap(), None);
    let act = world.supervisor.launched("c", Ok(8), world.now);
    assert_eq!(act, Some(Act::Terminate { name: "c".to_owned() }));
}

#[test]
fn the_next_agent_knows_running_and_stopped_workers() {
    let mut world = World::new();
    world.supervisor.adopt("b", 7, world.now);
    world.supervisor.adopt("asked", 8, world.now);
    world.supervisor.keep_stopped("c");
    assert_eq!(world.launches(), [""; 0], "b may be starting");
    world.joins("b", Presence::Joined);
    assert_eq!(world.launches(), ["a"]);
    world.ends("asked");
    world.now += s(1);
    assert_eq!(world.launches(), ["asked"], "it was asked for before");
}

#[test]
fn end_of_an_adopted_process_is_not_a_failed_start() {
    let mut world = World::new();
    world.supervisor.adopt("asked", 8, world.now);
    world.launches();
    world.supervisor.ask("asked", world.now).unwrap();
    world.ends("asked");
    assert_eq!(world.supervisor.progress("asked", None), Progress::UnderWay);
}

#[test]
fn the_next_agent_does_not_restart_a_stopping_worker() {
    let mut world = World::new();
    world.supervisor.keep_stopped("c");
    world.supervisor.adopt("c", 7, world.now);
    assert_eq!(world.launches(), ["a"]);
    world.ends("c");
    world.now += LONGEST_BACK_OFF;
    assert_eq!((world.launches(), world.state("c").0), (vec![], "stopped".to_owned()));
}

#[test]
fn an_ending_agent_starts_no_worker() {
    let mut world = World::new();
    world.supervisor.end();
    assert_eq!((world.launches(), world.due(), world.supervisor.looks()), (vec![], None, false));
}

/// State of a worker in the random walk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Is {
    Down,
    Up { joined: bool, since: Duration },
    Ending,
}

#[test]
fn random_events_never_start_a_worker_twice_or_two_on_a_gpu() {
    let names = ["a", "b", "c", "asked"];
    let gpu = |name: &str| if name == "b" { "a" } else { name }.to_owned();
    for seed in 0..200_u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut random = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state % below as u64).unwrap()
        };
        let (mut world, mut is) = (World::new(), BTreeMap::from(names.map(|name| (name, Is::Down))));
        for _ in 0..300 {
            let name = names[random(names.len())];
            match (is[name], random(6)) {
                (Is::Up { since, .. }, 0 | 1) => {
                    world.joins(name, Presence::Joined);
                    is.insert(name, Is::Up { joined: true, since });
                }
                (Is::Up { .. }, 2) => {
                    world.view.present.remove(name);
                    world.supervisor.exited(name, "exit 1".to_owned(), world.now);
                    is.insert(name, Is::Ending);
                }
                (Is::Ending, _) => {
                    world.supervisor.gone(name, world.now);
                    is.insert(name, Is::Down);
                }
                // Started by hand, and gone again.
                (Is::Down, 0) => world.joins(name, Presence::Joined),
                (Is::Down, 1) => drop(world.view.present.remove(name)),
                (_, 3) => world.supervisor.ask(name, world.now).unwrap(),
                (_, 4) => drop(world.supervisor.stop(name, world.now).unwrap()),
                _ => world.now += Duration::from_millis(1 << random(18)),
            }
            for act in world.supervisor.step(&world.view, world.now) {
                let Act::Launch { name } = act else { continue };
                let known = names.into_iter().find(|known| *known == name).unwrap();
                assert!(is[known] == Is::Down && !world.view.present.contains_key(known), "{known} {is:?}");
                assert!(!world.supervisor.stopped().contains(known));
                let starts = |of: &Is| matches!(of, Is::Up { joined: false, since } if *since + LONGEST_START > world.now);
                let beside = is.iter().filter(|(other, of)| gpu(other) == gpu(known) && starts(of));
                assert_eq!(beside.count(), 0, "{known} {is:?}");
                if random(4) == 0 {
                    world.supervisor.launched(known, Err("no".to_owned()), world.now);
                } else {
                    world.supervisor.launched(known, Ok(7), world.now);
                    is.insert(known, Is::Up { joined: false, since: world.now });
                }
            }
            assert!(names.iter().all(|name| world.supervisor.is_down(name) == (is[name] == Is::Down)));
        }
        // No worker is forgotten: every wanted worker runs once the others have finished their starts.
        for name in names {
            if is[name] == Is::Ending {
                world.supervisor.gone(name, world.now);
            }
            world.view.present.remove(name);
            world.supervisor.ask(name, world.now).unwrap();
        }
        for _ in 0..8 {
            world.now += LONGEST_START;
            for act in world.supervisor.step(&world.view, world.now) {
                if let Act::Launch { name } = act {
                    world.supervisor.launched(&name, Ok(7), world.now);
                    world.joins(&name, Presence::Joined);
                }
            }
        }
        assert!(names.iter().all(|name| world.supervisor.runs(name)), "{seed}");
    }
}
