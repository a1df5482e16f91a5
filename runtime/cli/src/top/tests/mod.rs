//! Frames of four scenes, as files that a reader who knows nothing of GLake is meant to understand; keys; hostile texts; and sums.
//!
//! `UPDATE=1` writes the files anew.

use std::fmt::Write as _;

use glake_meter::{GpuMemory, ProcessMemory};
use glake_units::Bytes;
use glake_wire::{
    Counters, DecisionRow, GpuCounters, GpuRow, LoggedDecision, NeedRow, OperationKind, OperationRow,
    RequestKind, RequestPhase, RequestRow, Snapshot, VictimRow, WatchedWorker, WorkerGpuRow, WorkerRow,
};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

use super::app::{Action, App, Key, Wish};
use super::paint::Look;
use super::print;
use super::processes::{Process, Reading};
use super::scene::{Owner, Scene};

mod random;

const GIB: fn(u64) -> Bytes = Bytes::gib;

fn worker(name: &str, state: &str, gpu: &str, [context, resident, evicted]: [u64; 3]) -> WatchedWorker {
    let gpus = vec![WorkerGpuRow {
        gpu: gpu.to_owned(),
        used: Some(Bytes::mib(512 * context).saturating_add(GIB(resident))),
        context: Bytes::mib(512 * context),
        leased: GIB(resident),
        resident: GIB(resident),
        evicted: GIB(evicted),
        in_files: Some(Bytes::ZERO),
        in_peers: Some(Bytes::ZERO),
        ..WorkerGpuRow::default()
    }];
    let row = WorkerRow {
        worker: name.to_owned(),
        pid: 4000 + u32::try_from(name.len()).unwrap(),
        tenant: "default".to_owned(),
        gpus: vec![gpu.to_owned()],
        state: state.to_owned(),
        leased: GIB(resident),
        resident: GIB(resident),
        evicted: GIB(evicted),
        idle_s: matches!(state, "idle" | "asleep").then_some(95.0),
        predicted_wake_s: evicted as f64 / 50.0,
        note: None,
    };
    WatchedWorker { row, gpus, operation: None }
}

/// A GPU whose workers are those of the snapshot.
fn gpu(name: &str, unmanaged: u64, workers: &[WatchedWorker]) -> GpuRow {
    let own = workers.iter().flat_map(|worker| &worker.gpus).filter(|of| of.gpu == name);
    let of_workers: Bytes = own.filter_map(|of| of.used).sum();
    GpuRow {
        gpu: name.to_owned(),
        total: GIB(80),
        used: Some(of_workers.saturating_add(GIB(unmanaged))),
        read_ago_s: Some(0.2),
        driver: Bytes::mib(600),
        unmanaged: GIB(unmanaged),
        budget: GIB(78),
        limit: GIB(78 - unmanaged),
        ..GpuRow::default()
    }
}

fn decision(
    number: u64,
    ago_s: f64,
    worker: &str,
    outcome: &str,
    taken: &[(&str, u64, &str)],
) -> LoggedDecision {
    let victim = |(worker, bytes, why): &(&str, u64, &str)| VictimRow {
        worker: (*worker).to_owned(),
        gpu: "0".to_owned(),
        bytes: GIB(*bytes),
        why: (*why).to_owned(),
    };
    let row = DecisionRow {
        ago_s,
        worker: worker.to_owned(),
        needed: GIB(38),
        taken: taken.iter().map(victim).collect(),
        predicted_s: 1.1,
        real_s: (outcome == "refilled").then_some(1.3),
        outcome: outcome.to_owned(),
        ..DecisionRow::default()
    };
    LoggedDecision { number, row }
}

fn snapshot(gpus: &[(&str, u64)], workers: Vec<WatchedWorker>) -> Snapshot {
    Snapshot {
        number: 7,
        agent: "0.1.0".to_owned(),
        pid: 812,
        up_s: 11_000.0,
        gpus: gpus.iter().map(|(name, unmanaged)| gpu(name, *unmanaged, &workers)).collect(),
        workers,
        ..Snapshot::default()
    }
}

fn calm() -> Snapshot {
    let workers = vec![
        worker("chat", "busy", "0000:3b:00.0", [1, 44, 0]),
        worker("code", "idle", "0000:3b:00.0", [1, 30, 0]),
        worker("draft", "asleep", "0000:5e:00.0", [1, 0, 38]),
        worker("summaries", "idle", "0000:5e:00.0", [1, 40, 0]),
    ];
    Snapshot {
        decisions: vec![
            decision(1, 340.0, "code", "refilled", &[]),
            decision(2, 95.0, "summaries", "refilled", &[("draft", 38, "idle")]),
        ],
        ..snapshot(&[("0000:3b:00.0", 0), ("0000:5e:00.0", 12)], workers)
    }
}

fn waiting() -> Snapshot {
    let mut workers = vec![
        worker("chat", "parking", "0000:3b:00.0", [1, 44, 0]),
        worker("code", "shrinking", "0000:3b:00.0", [1, 18, 12]),
        worker("draft", "waiting", "0000:3b:00.0", [1, 4, 38]),
        worker("eval", "waiting", "0000:3b:00.0", [1, 0, 60]),
        worker("summaries", "refilling", "0000:5e:00.0", [1, 30, 10]),
    ];
    let operation = |what, whom: Option<&str>, bytes, done| OperationRow {
        what,
        whom: whom.map(str::to_owned),
        since_s: 0.8,
        left_s: Some(9.2),
        bytes: GIB(bytes),
        granted: Bytes::ZERO,
        done: GIB(done),
    };
    workers[0].operation = Some(operation(OperationKind::Parking, Some("draft"), 44, 0));
    workers[1].operation = Some(operation(OperationKind::Shrinking, Some("draft"), 30, 12));
    workers[4].operation = Some(operation(OperationKind::Refilling, None, 40, 30));
    let request = |worker: &str, kind, phase, bytes, granted, waited_s| RequestRow {
        worker: worker.to_owned(),
        kind,
        phase,
        waited_s,
        needs: vec![NeedRow { gpu: "0000:3b:00.0".to_owned(), bytes: GIB(bytes), granted: GIB(granted) }],
        ..RequestRow::default()
    };
    let requests = vec![
        RequestRow {
            needs: vec![NeedRow { gpu: "0000:5e:00.0".to_owned(), bytes: GIB(40), granted: GIB(40) }],
            ..request("summaries", RequestKind::Refill, RequestPhase::Filling, 40, 40, 0.9)
        },
        RequestRow {
            givers: vec!["code".to_owned(), "chat".to_owned()],
            giver_count: 2,
            why: "the uses of code and chat have to end, or to stop at a safe point".to_owned(),
            ..request("draft", RequestKind::Refill, RequestPhase::Granting, 38, 16, 2.1)
        },
        RequestRow {
            behind: Some("draft".to_owned()),
            why: "draft comes first on its GPU".to_owned(),
            ..request("eval", RequestKind::Refill, RequestPhase::Waiting, 60, 0, 0.4)
        },
    ];
    Snapshot {
        requests,
        decisions: vec![
            decision(1, 400.0, "code", "refilled", &[]),
            decision(2, 30.0, "chat", "growth denied: not enough came within its time", &[]),
            decision(
                3,
                2.0,
                "draft",
                "under way",
                &[("code", 30, "idle"), ("chat", 8, "busy for its quantum, and parked")],
            ),
        ],
        ..snapshot(&[("0000:3b:00.0", 6), ("0000:5e:00.0", 12)], workers)
    }
}

/// Forty workers on eight GPUs.
fn crowd() -> Snapshot {
    let gpus: Vec<String> = (0..8).map(|gpu| format!("0000:{:02x}:00.0", 0x1b + 16 * gpu)).collect();
    let states = ["busy", "idle", "asleep", "checkpointed", "asleep"];
    let workers = (0..40).map(|number: usize| {
        let state = states[number % 5];
        let sizes = match state {
            "busy" => [1, 48, 0],
            "idle" => [1, 20, 0],
            "asleep" => [1, 0, 38],
            _ => [0, 0, 38],
        };
        let mut worker = worker(&format!("model-{number:02}"), state, &gpus[number / 5], sizes);
        if number == 3 {
            (worker.row.state, worker.row.pid, worker.gpus) = ("ended".to_owned(), 0, Vec::new());
            worker.row.note = Some("exit code 1 after 3 s; it is started again in 20 s".to_owned());
        }
        if state == "checkpointed" {
            worker.gpus.iter_mut().for_each(|gpu| gpu.in_files = Some(GIB(38)));
        }
        worker
    });
    let named: Vec<(&str, u64)> = gpus.iter().map(|gpu| (gpu.as_str(), 0)).collect();
    snapshot(&named, workers.collect())
}

/// Processes without an agent: two of GLake, and one of another kind.
fn no_agent() -> Reading {
    let process = |pid, command: &str, quiet_s: u64, gpu: GpuCounters| Process {
        pid,
        page: 1,
        command: command.to_owned(),
        counters: Counters {
            pid,
            start: 1,
            changed_ns: 1_000_000_000_000 - quiet_s * 1_000_000_000,
            backend: "cuda".to_owned(),
            gpus: vec![gpu],
        },
    };
    let counters = |reserved, live, hard| GpuCounters {
        gpu: "0000:3b:00.0".to_owned(),
        total: GIB(80),
        reserved: GIB(reserved),
        live: GIB(live),
        waste_hard: GIB(hard),
        waste_soft: GIB(reserved - live - hard),
        ..GpuCounters::default()
    };
    let asleep = GpuCounters { evicted_host: GIB(24), evicted_files: GIB(4), ..counters(0, 0, 0) };
    let used = |pid, gib| ProcessMemory { pid, used: GIB(gib) };
    let memory = GpuMemory {
        total: GIB(80),
        used: GIB(61),
        reserved: Bytes::mib(600),
        processes: vec![used(4711, 46), used(4802, 1), used(5000, 14)],
    };
    let other = GpuMemory { total: GIB(80), used: GIB(3), reserved: Bytes::mib(600), processes: Vec::new() };
    Reading {
        processes: vec![
            process(4711, "python train.py --config big.yaml", 0, counters(45, 36, 2)),
            process(4802, "/usr/bin/python3 -u serve.py", 240, asleep),
        ],
        backend: "cuda".to_owned(),
        gpus: vec![("0000:3b:00.0".to_owned(), memory), ("0000:5e:00.0".to_owned(), other)],
        now_ns: 1_000_000_000_000,
    }
}

/// Draws an app on a terminal of the backend for tests.
fn frame(app: &mut App, width: u16, height: u16) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal
        .draw(|frame| {
            let area = frame.area();
            app.draw(area, frame.buffer_mut());
        })
        .unwrap();
    terminal.backend().buffer().clone()
}

/// Returns the app after a minute in which the memory grew.
fn watched(show: impl Fn(&mut App, u64, u64)) -> App {
    let mut app = App::new(Look::Hatched);
    for second in 0..=60 {
        show(&mut app, second, 30 + 70 * second / 60);
    }
    app
}

/// Returns so many hundredths of the memory.
fn part(bytes: Bytes, hundredths: u64) -> Bytes {
    Bytes::new(bytes.get() / 100 * hundredths)
}

fn with_agent(snapshot: &Snapshot) -> App {
    let mut app = watched(|app, second, share| {
        let mut then = snapshot.clone();
        then.gpus.iter_mut().for_each(|gpu| gpu.used = gpu.used.map(|used| part(used, share)));
        app.show_snapshot(&then, &Reading::default(), second);
    });
    app.set_may_command(true);
    app
}

#[test]
fn frames_of_four_scenes_are_as_in_their_files() {
    let pages = no_agent();
    let mut gone = watched(|app, second, share| {
        let mut then = pages.clone();
        then.gpus.iter_mut().for_each(|(_, memory)| memory.used = part(memory.used, share).max(GIB(47)));
        app.show_pages(&then, second);
    });
    gone.show_pages(&pages, 61);
    gone.set_notice(Some("The agent is gone, these are processes' own counters; trying again.".to_owned()));
    let mut chosen = with_agent(&waiting());
    chosen.press(Key::Down);
    let scenes = [
        ("calm", with_agent(&calm())),
        ("waiting", chosen),
        ("crowd", with_agent(&crowd())),
        ("no_agent", gone),
    ];
    let mut differs = String::new();
    for (name, mut app) in scenes {
        for (width, height) in [(80, 24), (200, 50)] {
            let drawn = print::text(&frame(&mut app, width, height), false) + "\n";
            let path = format!("{}/src/top/frames/{name}_{width}x{height}.txt", env!("CARGO_MANIFEST_DIR"));
            if std::env::var_os("UPDATE").is_some() {
                std::fs::write(&path, &drawn).unwrap();
            }
            if std::fs::read_to_string(&path).unwrap_or_default() != drawn {
                let _ = writeln!(differs, "{path} (UPDATE=1 writes it anew):\n{drawn}");
            }
        }
    }
    assert!(differs.is_empty(), "{differs}");
}

#[test]
fn a_small_screen_shows_memory_first_and_nothing_outside_of_it() {
    let mut app = with_agent(&waiting());
    let small = print::text(&frame(&mut app, 20, 5), false);
    assert!(small.starts_with("3b:00.0 │") && small.contains("5e:00.0 │"), "{small}");
    for (width, height) in [(1, 1), (2, 1), (1, 9), (7, 3), (20, 5), (40, 8), (500, 200)] {
        let text = print::text(&frame(&mut app, width, height), false);
        let longest = text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
        assert!(longest <= usize::from(width) && text.lines().count() <= usize::from(height));
    }
}

#[test]
fn without_colours_no_colour_is_used_and_without_blocks_only_ascii() {
    for (look, is_ascii) in [(Look::Hatched, false), (Look::Ascii, true), (Look::Rgb, false)] {
        let mut app = App::new(look);
        app.show_snapshot(&waiting(), &Reading::default(), 1);
        let buffer = frame(&mut app, 80, 24);
        let has_colours = print::text(&buffer, true).contains(";2;");
        assert_eq!(has_colours, look.has_colours(), "{look:?}");
        assert_eq!(print::text(&buffer, false).is_ascii(), is_ascii, "{look:?}");
    }
}

#[test]
fn hostile_names_are_shown_harmless_and_cut() {
    let hostile = [
        "\u{1b}[2J\u{1b}]0;x\u{7}".to_owned(),
        "n".repeat(10_000),
        "\u{202e}\u{200b}\n\r\t".to_owned(),
        "界".repeat(5_000),
    ];
    for name in hostile {
        let mut snapshot = waiting();
        snapshot.agent = name.clone();
        for worker in &mut snapshot.workers {
            worker.row.worker = format!("{name}{}", worker.row.worker);
            worker.row.note = Some(name.clone());
            worker.operation.iter_mut().for_each(|of| of.whom = Some(name.clone()));
        }
        for request in &mut snapshot.requests {
            (request.worker, request.why) = (name.clone(), name.clone());
            (request.givers, request.behind) = (vec![name.clone(); 9], Some(name.clone()));
        }
        for decision in &mut snapshot.decisions {
            (decision.row.worker, decision.row.outcome) = (name.clone(), name.clone());
        }
        let mut reading = no_agent();
        for process in &mut reading.processes {
            (process.command, process.counters.backend) = (name.clone(), name.clone());
            process.counters.gpus.iter_mut().for_each(|gpu| gpu.gpu = name.clone());
        }
        let mut app = App::new(Look::Rgb);
        app.set_may_command(true);
        for at in 0..4 {
            match at {
                0 => app.show_snapshot(&snapshot, &reading, 0),
                1 => {
                    app.press(Key::Down);
                    app.press(Key::Character('s'));
                }
                2 => app.say(&name),
                _ => app.show_pages(&reading, 3),
            }
            for (width, height) in [(20, 5), (80, 24), (200, 50)] {
                let buffer = frame(&mut app, width, height);
                let symbols = buffer.content.iter().flat_map(|cell| cell.symbol().chars());
                let acts = |letter: char| letter.is_control() || ('\u{202a}'..='\u{202e}').contains(&letter);
                assert!(!symbols.clone().any(acts), "{}", print::text(&buffer, false));
            }
        }
    }
}

#[test]
fn a_command_is_asked_once_and_only_for_ones_own_agent() {
    let mut app = App::new(Look::Hatched);
    app.show_snapshot(&calm(), &Reading::default(), 1);
    assert_eq!(app.press(Key::Character('s')), Wish::Draw, "nothing is chosen");
    app.press(Key::Down);
    app.press(Key::Character('s'));
    let text = print::text(&frame(&mut app, 80, 24), false);
    assert!(text.contains("another user's"), "{text}");
    app.set_may_command(true);
    app.press(Key::Character('s'));
    let text = print::text(&frame(&mut app, 80, 24), false);
    assert!(text.contains("Put chat to sleep?"), "{text}");
    assert_eq!(app.press(Key::Character('n')), Wish::Draw);
    assert_eq!(app.press(Key::Character('y')), Wish::Draw, "the question is over");
    app.press(Key::Character('s'));
    assert_eq!(app.press(Key::Character('y')), Wish::Command(Action::Sleep, "chat".to_owned()));
    assert_eq!(app.press(Key::Character('y')), Wish::Draw, "once");
    app.press(Key::Character('w'));
    let text = print::text(&frame(&mut app, 80, 24), false);
    assert!(text.contains("chat has no memory that could come back"), "{text}");
    app.show_pages(&no_agent(), 2);
    app.press(Key::Down);
    app.press(Key::Character('s'));
    let text = print::text(&frame(&mut app, 80, 24), false);
    assert!(text.contains("only an agent puts workers to sleep"), "{text}");
    assert_eq!(app.press(Key::Character('q')), Wish::Quit);
}

/// The chosen row stays chosen when rows change places, and is seen wherever it is.
#[test]
fn the_chosen_row_is_always_seen() {
    let mut app = App::new(Look::Hatched);
    app.set_may_command(true);
    let mut snapshot = crowd();
    app.show_snapshot(&snapshot, &Reading::default(), 1);
    for _ in 0..30 {
        app.press(Key::Down);
    }
    app.press(Key::Character('w'));
    let text = print::text(&frame(&mut app, 80, 24), false);
    let question = text.lines().last().unwrap();
    let name = question.split_whitespace().nth(1).unwrap().trim_end_matches('?').to_owned();
    assert!(text.lines().filter(|line| line.contains(&name)).count() >= 2, "{name}: {text}");
    snapshot.workers.reverse();
    app.show_snapshot(&snapshot, &Reading::default(), 2);
    assert_eq!(app.press(Key::Enter), Wish::Command(Action::Wake, name));
}

/// In random states, the parts of each bar are the used memory, the rows hold what the bars show of them, and the queue is the requests'.
#[test]
fn sums_of_random_states_are_those_of_the_meter() {
    let random = &mut fastrand::Rng::with_seed(7);
    let sizes = |random: &mut fastrand::Rng| Bytes::mib(random.u64(0..100_000));
    for _ in 0..10_000 {
        let names: Vec<String> = (0..random.usize(1..5)).map(|gpu| gpu.to_string()).collect();
        let mut snapshot = Snapshot::default();
        for number in 0..random.usize(0..6) {
            let mut own = names.clone();
            own.retain(|_| random.bool());
            let gpus = own.iter().map(|gpu| WorkerGpuRow {
                gpu: gpu.clone(),
                used: random.bool().then(|| sizes(random)),
                context: sizes(random),
                resident: sizes(random),
                ..WorkerGpuRow::default()
            });
            let gpus = gpus.collect();
            let row = WorkerRow { worker: format!("w{number}"), ..WorkerRow::default() };
            snapshot.workers.push(WatchedWorker { row, gpus, operation: None });
        }
        for name in &names {
            let own = snapshot.workers.iter().flat_map(|worker| &worker.gpus).filter(|of| of.gpu == *name);
            let held = |of: &WorkerGpuRow| of.used.unwrap_or_else(|| of.context.saturating_add(of.resident));
            let (of_workers, unmanaged, driver): (Bytes, _, _) =
                (own.map(held).sum(), sizes(random), sizes(random));
            let used = Some(of_workers.saturating_add(unmanaged));
            let total = Bytes::gib(random.u64(0..1000));
            let gpu = name.clone();
            snapshot.gpus.push(GpuRow { gpu, total, used, unmanaged, driver, ..GpuRow::default() });
        }
        for number in 0..random.usize(0..4) {
            let worker = format!("w{number}");
            let needs = vec![NeedRow { gpu: "0".to_owned(), bytes: sizes(random), ..NeedRow::default() }];
            snapshot.requests.push(RequestRow { worker, needs, ..RequestRow::default() });
        }
        let scene = Scene::from_snapshot(&snapshot, std::iter::empty(), &std::collections::BTreeMap::new());
        let mut of_rows = Bytes::ZERO;
        for (gpu, row) in scene.gpus.iter().zip(&snapshot.gpus) {
            let parts: Bytes = gpu.parts.iter().map(|part| part.bytes).sum();
            assert_eq!((parts, gpu.total), (row.used.unwrap().saturating_add(row.driver), row.total));
            assert_eq!(gpu.used, parts);
            let own = gpu.parts.iter().filter(|part| matches!(part.owner, Owner::Row(_)));
            of_rows = of_rows.saturating_add(own.map(|part| part.bytes).sum());
        }
        assert_eq!(scene.rows.iter().map(|row| row.on_gpu).sum::<Bytes>(), of_rows);
        let queue: Vec<(&str, Bytes)> =
            scene.queue.iter().map(|waiter| (waiter.name.as_str(), waiter.needs)).collect();
        let requests = snapshot.requests.iter();
        let requests: Vec<(&str, Bytes)> =
            requests.map(|request| (request.worker.as_str(), request.needs[0].bytes)).collect();
        assert_eq!(queue, requests);
    }
}

/// The parts of each bar are the used memory: what the meter says, and whose it is.
#[test]
fn parts_add_up_to_the_used_memory() {
    for snapshot in [calm(), waiting(), crowd()] {
        let scene = Scene::from_snapshot(&snapshot, std::iter::empty(), &std::collections::BTreeMap::new());
        for (gpu, row) in scene.gpus.iter().zip(&snapshot.gpus) {
            let parts: Bytes = gpu.parts.iter().map(|part| part.bytes).sum();
            assert_eq!(
                (parts, gpu.used),
                (gpu.used, row.used.unwrap().saturating_add(row.driver)),
                "{}",
                gpu.name
            );
        }
        let of_rows: Bytes = scene.rows.iter().map(|row| row.on_gpu).sum();
        let own = |owner: &Owner| matches!(owner, Owner::Row(_));
        let parts = scene.gpus.iter().flat_map(|gpu| &gpu.parts).filter(|part| own(&part.owner));
        assert_eq!(parts.map(|part| part.bytes).sum::<Bytes>(), of_rows);
        assert_eq!(scene.queue.len(), snapshot.requests.len());
    }
    let scene = Scene::from_pages(&no_agent());
    let parts: Bytes = scene.gpus[0].parts.iter().map(|part| part.bytes).sum();
    assert_eq!((parts, scene.gpus.len()), (scene.gpus[0].used, 2));
    let train = scene.rows.iter().find(|row| row.pid == 4711).unwrap();
    assert_eq!((train.on_gpu, train.waste, train.label.as_str()), (GIB(46), Some(GIB(9)), "train.py"));
    let others = scene.gpus[0].parts.iter().find(|part| part.owner == Owner::Others).unwrap();
    assert_eq!(others.bytes, GIB(14));
}
