//! Copies of both directions over the same relays, each of which has one engine for what it copies with no staging.

use std::sync::Arc;
use std::time::Duration;

use glake_device::DeviceId;
use glake_device::owned::{Buffer, OwnedStream, Registration, Span};
use glake_units::Bytes;

use super::fixture::{Fixture, GPU, ends};
use crate::paths::{Direction, Way};
use crate::{CopyOptions, Priority, UserStream};

/// GPU memory and host memory of one way, and a stream.
struct Flow {
    direction: Direction,
    _stream: OwnedStream,
    on: UserStream,
    host: Arc<Registration>,
    gpu: Arc<Buffer>,
}

impl Flow {
    fn new(fixture: &Fixture, direction: Direction, size: Bytes) -> Flow {
        let stream = fixture.stream(GPU);
        let on = fixture.user(GPU, stream.id());
        let (host, gpu) = (fixture.pinned(size, 1), fixture.mapped(GPU, size));
        Flow { direction, _stream: stream, on, host, gpu }
    }

    fn copy(&self, fixture: &Fixture, size: Bytes, priority: Priority) {
        let host = Span::pinned(&self.host, Bytes::ZERO, size).unwrap();
        let gpu = self.gpu.span(Bytes::ZERO, size).unwrap();
        let (to, from) = ends(self.direction, &host, &gpu);
        let options = CopyOptions { priority, waited: false, ..CopyOptions::default() };
        drop(fixture.engine().copy(to, from, self.on, options).unwrap());
    }
}

/// What copies of a direction went so.
fn went(fixture: &Fixture, direction: Direction, way: Way) -> Bytes {
    let paths = fixture.engine().statistics().paths;
    paths.iter().filter(|path| (path.direction, path.way) == (direction, way)).map(|path| path.bytes).sum()
}

fn of_links(links: u32) -> Fixture {
    let fixture = Fixture::of_times("h200x4");
    fixture.engine().set_relays((0..links).map(DeviceId).collect());
    fixture
}

/// Whatever the other stream has copied since: what is under way is.
#[test]
fn a_copy_takes_no_engine_that_is_busy_the_other_way() {
    let size = Bytes::mib(256);
    for direction in Direction::BOTH {
        for (case, between) in
            [Bytes::ZERO, Bytes::mib(1), Bytes::mib(2), Bytes::mib(64)].into_iter().enumerate()
        {
            let fixture = of_links(4);
            let [busy, later] = [direction, direction.other()].map(|way| Flow::new(&fixture, way, size));
            let plain = fixture.plain(GPU, size);
            for _ in 0..4 {
                busy.copy(&fixture, size, Priority::Normal);
            }
            if !between.is_zero() {
                // Of memory that takes slots, or its own link.
                let host = Span::pinned(&busy.host, Bytes::ZERO, between).unwrap();
                let gpu = plain.span.part(Bytes::ZERO, between).unwrap();
                let (to, from) = ends(direction, &host, &gpu);
                fixture.copy(to, from, busy.on);
            }
            later.copy(&fixture, size, Priority::Normal);
            let crossed = went(&fixture, direction.other(), Way::ZeroStaging);
            assert_eq!(crossed, Bytes::ZERO, "{direction:?}, case {case}");
            assert!(
                went(&fixture, direction.other(), Way::Staged) > Bytes::mib(128),
                "{direction:?}, case {case}"
            );
            [&busy, &later].iter().for_each(|flow| fixture.wait(flow.on));
            // What was under way is over.
            later.copy(&fixture, size, Priority::Normal);
            assert!(
                went(&fixture, direction.other(), Way::ZeroStaging) > Bytes::mib(128),
                "{direction:?}, case {case}"
            );
            fixture.wait(later.on);
            drop((busy, later, plain));
            fixture.end();
        }
    }
}

/// They give way on links, of which each direction has its own, and not on an engine.
#[test]
fn a_copy_takes_no_engine_that_background_copies_keep_busy() {
    let size = Bytes::gib(1);
    for direction in Direction::BOTH {
        let fixture = of_links(2);
        let [busy, later] = [direction, direction.other()].map(|way| Flow::new(&fixture, way, size));
        busy.copy(&fixture, size, Priority::Background);
        assert!(!went(&fixture, direction, Way::ZeroStaging).is_zero());
        later.copy(&fixture, Bytes::mib(64), Priority::Normal);
        assert_eq!(went(&fixture, direction.other(), Way::ZeroStaging), Bytes::ZERO, "{direction:?}");
        [&busy, &later].iter().for_each(|flow| fixture.wait(flow.on));
        drop((busy, later));
        fixture.end();
    }
}

/// Slots of a relay are for two streams at a time: others do without, and no link is idle for it.
#[test]
fn streams_that_have_no_slots_lose_no_relays() {
    let (size, each) = (Bytes::mib(64), 8);
    for (links, streams, least) in [(2, 1, 185.0), (4, 1, 195.0), (2, 4, 130.0), (4, 4, 185.0)] {
        let fixture = of_links(links);
        let flows: Vec<Flow> = Direction::BOTH
            .into_iter()
            .cycle()
            .take(2 * streams)
            .map(|direction| Flow::new(&fixture, direction, size))
            .collect();
        let round = || {
            let start = fixture.sim.now();
            for _ in 0..each {
                flows.iter().for_each(|flow| flow.copy(&fixture, size, Priority::Normal));
            }
            flows.iter().for_each(|flow| fixture.wait(flow.on));
            let took = (fixture.sim.now() - start).as_secs_f64();
            (size.get() * each * flows.len() as u64) as f64 / took / 1e9
        };
        // The first find no lanes yet: they are made by the engine's thread.
        let rounds = (0..12).map(|_| {
            std::thread::sleep(Duration::from_millis(5));
            round()
        });
        let got = rounds.fold(0.0, f64::max);
        println!("{links} links, {streams} streams each way: {got:.1} GB/s");
        assert!(got >= least, "{links} links, {streams} streams each way: {got} GB/s");
        drop(flows);
        fixture.end();
    }
}

#[test]
fn nothing_is_counted_once_it_is_over() {
    let fixture = of_links(4);
    let flows = Direction::BOTH.map(|direction| Flow::new(&fixture, direction, Bytes::mib(64)));
    for round in 0..20 {
        let priority = if round % 3 == 0 { Priority::Background } else { Priority::Normal };
        flows.iter().for_each(|flow| flow.copy(&fixture, Bytes::mib(64), priority));
    }
    flows.iter().for_each(|flow| fixture.wait(flow.on));
    let links = &fixture.engine().shared.links;
    links.lane_sets().refresh(&links.lane_sets().make(0));
    for relay in fixture.gpus.iter() {
        for direction in Direction::BOTH {
            assert_eq!(fixture.engine().shared.ledger.crossings.of(relay, direction), Bytes::ZERO, "{relay}");
        }
    }
    drop(flows);
    fixture.end();
}
