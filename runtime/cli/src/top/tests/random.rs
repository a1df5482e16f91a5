//! Random contents, also impossible ones, at random sizes: no panic, and no growth.

use super::*;

fn random_text(random: &mut fastrand::Rng) -> String {
    match random.u8(0..6) {
        0 => String::new(),
        1 => "\u{1b}[31m".to_owned(),
        2 => (0..random.usize(0..80)).map(|_| random.char(..)).collect(),
        3 => "0000:3b:00.0".to_owned(),
        _ => format!("w{}", random.u8(0..20)),
    }
}

fn random_bytes(random: &mut fastrand::Rng) -> Bytes {
    match random.u8(0..5) {
        0 => Bytes::ZERO,
        1 => Bytes::new(u64::MAX),
        2 => Bytes::new(random.u64(..)),
        _ => GIB(random.u64(0..200)),
    }
}

fn random_seconds(random: &mut fastrand::Rng) -> f64 {
    let odd = [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300];
    if random.u8(0..4) == 0 { odd[random.usize(0..odd.len())] } else { random.f64() * 1e4 }
}

fn random_snapshot(random: &mut fastrand::Rng) -> Snapshot {
    let few = |random: &mut fastrand::Rng| {
        let most = [3, 5, 20][random.usize(0..3)];
        random.usize(0..most)
    };
    let states =
        ["busy", "idle", "asleep", "waiting", "parking", "shrinking", "refilling", "silent", "ended", "?"];
    let kinds = [
        OperationKind::Parking,
        OperationKind::Shrinking,
        OperationKind::Refilling,
        OperationKind::Demoting,
        OperationKind::Unknown,
    ];
    let mut snapshot =
        Snapshot { agent: random_text(random), up_s: random_seconds(random), ..Snapshot::default() };
    for _ in 0..few(random) {
        snapshot.gpus.push(GpuRow {
            gpu: random_text(random),
            total: random_bytes(random),
            used: random.bool().then(|| random_bytes(random)),
            driver: random_bytes(random),
            unmanaged: random_bytes(random),
            ..GpuRow::default()
        });
    }
    for _ in 0..few(random) {
        let gpus = (0..random.usize(0..3)).map(|_| WorkerGpuRow {
            gpu: random_text(random),
            used: random.bool().then(|| random_bytes(random)),
            context: random_bytes(random),
            resident: random_bytes(random),
            evicted: random_bytes(random),
            in_files: random.bool().then(|| random_bytes(random)),
            in_peers: random.bool().then(|| random_bytes(random)),
            ..WorkerGpuRow::default()
        });
        let gpus = gpus.collect();
        let operation = random.bool().then(|| OperationRow {
            what: kinds[random.usize(0..kinds.len())],
            whom: random.bool().then(|| random_text(random)),
            bytes: random_bytes(random),
            done: random_bytes(random),
            ..OperationRow::default()
        });
        let row = WorkerRow {
            worker: random_text(random),
            pid: random.u32(0..5),
            state: states[random.usize(0..states.len())].to_owned(),
            resident: random_bytes(random),
            evicted: random_bytes(random),
            idle_s: random.bool().then(|| random_seconds(random)),
            predicted_wake_s: random_seconds(random),
            note: random.bool().then(|| random_text(random)),
            ..WorkerRow::default()
        };
        snapshot.workers.push(WatchedWorker { row, gpus, operation });
    }
    for _ in 0..few(random) {
        let needs = (0..random.usize(0..3)).map(|_| NeedRow {
            gpu: random_text(random),
            bytes: random_bytes(random),
            granted: random_bytes(random),
        });
        snapshot.requests.push(RequestRow {
            needs: needs.collect(),
            worker: random_text(random),
            waited_s: random_seconds(random),
            givers: (0..random.usize(0..5)).map(|_| random_text(random)).collect(),
            giver_count: random.u32(..),
            behind: random.bool().then(|| random_text(random)),
            why: random_text(random),
            ..RequestRow::default()
        });
    }
    for number in 0..few(random) {
        let mut decision =
            decision(number as u64, random_seconds(random), &random_text(random), &random_text(random), &[]);
        decision.row.real_s = random.bool().then(|| random_seconds(random));
        snapshot.decisions.push(decision);
    }
    snapshot
}

fn random_reading(random: &mut fastrand::Rng) -> Reading {
    let mut reading = Reading { backend: random_text(random), now_ns: random.u64(..), ..Reading::default() };
    for _ in 0..random.usize(0..4) {
        let processes = (0..random.usize(0..3))
            .map(|_| ProcessMemory { pid: random.u32(0..5), used: random_bytes(random) });
        let processes = processes.collect();
        let memory = GpuMemory {
            total: random_bytes(random),
            used: random_bytes(random),
            reserved: random_bytes(random),
            processes,
        };
        reading.gpus.push((random_text(random), memory));
    }
    for page in 0..random.usize(0..6) {
        let gpus = (0..random.usize(0..4)).map(|_| GpuCounters {
            gpu: random_text(random),
            total: random_bytes(random),
            reserved: random_bytes(random),
            live: random_bytes(random),
            waste_hard: random_bytes(random),
            waste_stream: random_bytes(random),
            evicted_host: random_bytes(random),
            discarded: random_bytes(random),
            relays: random_bytes(random),
            ..GpuCounters::default()
        });
        let counters = Counters {
            gpus: gpus.collect(),
            backend: ["cuda", "sim:h200x4", "sim:h200x4@/tmp/gpus", ""][random.usize(0..4)].to_owned(),
            changed_ns: random.u64(..),
            ..Counters::default()
        };
        let command = random_text(random);
        reading.processes.push(Process { pid: random.u32(0..5), page: page as u64, command, counters });
    }
    reading
}

/// Draws random contents, one after the other, in one app at random sizes, with random keys.
fn draw_random(rounds: u32, seed: u64) {
    let random = &mut fastrand::Rng::with_seed(seed);
    let looks = [Look::Rgb, Look::Indexed, Look::Hatched, Look::Ascii];
    let mut app = App::new(looks[random.usize(0..4)]);
    for round in 0..rounds {
        if random.u8(0..20) == 0 {
            app = App::new(looks[random.usize(0..4)]);
        }
        app.set_may_command(random.bool());
        app.set_notice(random.bool().then(|| "notice".to_owned()));
        // Each is drawn at two sizes.
        match round % 4 {
            0 => app.show_snapshot(&random_snapshot(random), &random_reading(random), random.u64(0..200)),
            2 => app.show_pages(&random_reading(random), random.u64(0..200)),
            _ => {}
        }
        let keys =
            [Key::Up, Key::Down, Key::Enter, Key::Character('s'), Key::Character('w'), Key::Character('x')];
        for _ in 0..random.usize(0..4) {
            app.press(keys[random.usize(0..keys.len())]);
        }
        let (width, height) = match random.u8(0..4) {
            0 => (random.u16(1..30), random.u16(1..12)),
            1 => (80, 24),
            _ => (random.u16(1..100), random.u16(1..30)),
        };
        let area = Rect::new(0, 0, width, height);
        let mut buffer = Buffer::empty(area);
        app.draw(area, &mut buffer);
        if round % 64 == 0 {
            let _ = print::text(&buffer, random.bool());
            let _ = app.height_once();
        }
    }
}

#[test]
fn random_contents_are_drawn_at_any_size() {
    let seed = std::env::var("GLAKE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    draw_random(10_000, seed);
}

#[test]
fn soak_a_million_random_contents_are_drawn() {
    if std::env::var_os("GLAKE_SOAK").is_some() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/statm").unwrap();
            status.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
        };
        draw_random(200_000, 2);
        let before = resident();
        draw_random(1_800_000, 3);
        let after = resident();
        assert!(after < before + (16 << 20), "{before} bytes became {after}");
    }
}
