//! Digests over the simulated device: the host's and the GPU's agree, whatever the spans and launches are like.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::sync::Arc;

use glake_device::owned::digest::*;
use glake_device::owned::*;
use glake_device::*;
use glake_sim::{Census, SimOptions, SimTopology, Simulator};
use glake_units::Bytes;

const OWNER: DeviceId = DeviceId(0);
const STRANGER: DeviceId = DeviceId(1);

struct Harness {
    sim: Arc<Simulator>,
    faults: Arc<Faults>,
    completion_events: Arc<CompletionEvents>,
    digests: Digests,
}

fn harness() -> Harness {
    let topology = SimTopology::uniform(2, Bytes::mib(512));
    let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
    let faults = Arc::new(Faults::new(sim.clone()));
    let driver: Arc<dyn Driver> = faults.clone();
    let completion_events = CompletionEvents::new(driver);
    Harness { sim, faults, digests: Digests::new(&completion_events, OWNER).unwrap(), completion_events }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at.wrapping_mul(167) + (at >> 8) + (at >> 16) * 3).to_le_bytes()[0]).collect()
}

impl Harness {
    fn buffer(&self, bytes: &[u8]) -> Arc<Buffer> {
        let size = Bytes::new(bytes.len() as u64);
        let buffer = Buffer::new(&self.completion_events, OWNER, size, DeviceSet::EMPTY).unwrap();
        buffer.write(Bytes::ZERO, bytes).unwrap();
        Arc::new(buffer)
    }

    fn digest(&self, spans: &[Span]) -> Digest {
        self.digests.enqueue(self.digests.stream(), spans).unwrap().wait().unwrap()
    }

    fn end(self) {
        let Harness { sim, completion_events, digests, .. } = self;
        drop((digests, completion_events));
        assert_eq!(sim.census(), Census::default());
    }
}

#[test]
fn gpu_and_host_digests_agree_for_any_split() {
    let harness = harness();
    let bytes = pattern((3 << 20) + 77);
    let buffer = harness.buffer(&bytes);
    let span = |from: usize, to: usize| {
        buffer.span(Bytes::new(from as u64), Bytes::new((to - from) as u64)).unwrap()
    };
    for end in [0, 1, 15, 16, 17, 4096, (32 << 10) + 8, bytes.len()] {
        assert_eq!(harness.digest(&[span(0, end)]), Digest::of(&bytes[..end]), "{end} bytes");
    }
    let whole = Digest::of(&bytes);
    for cuts in [vec![16], vec![512, 1024, 1 << 20], (1..2000).map(|at| at * 512).collect()] {
        let ends = cuts.iter().copied().chain([bytes.len()]);
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let spans: Vec<Span> = starts.zip(ends).map(|(from, to)| span(from, to)).collect();
        assert_eq!(harness.digest(&spans), whole, "{} spans", spans.len());
    }
    let turned = [span(1 << 20, 2 << 20), span(0, 1 << 20)];
    assert_ne!(harness.digest(&turned), Digest::of(&bytes[..2 << 20]));
    // Bytes that lie apart are those of a packed copy.
    let packed = [&bytes[512..1024], &bytes[1 << 20..(1 << 20) + 5]].concat();
    assert_eq!(harness.digest(&[span(512, 1024), span(1 << 20, (1 << 20) + 5)]), Digest::of(&packed));
    drop((turned, buffer));
    harness.end();
}

#[test]
fn one_flipped_bit_is_found() {
    let harness = harness();
    let mut bytes = pattern(100_003);
    let buffer = harness.buffer(&bytes);
    let span = [buffer.span(Bytes::ZERO, Bytes::new(100_003)).unwrap()];
    let whole = harness.digest(&span);
    for at in [0, 8, 32 << 10, 65_535, 99_999, 100_002] {
        bytes[at] ^= 16;
        buffer.write(Bytes::new(at as u64), &bytes[at..=at]).unwrap();
        let changed = harness.digest(&span);
        assert!(changed != whole && changed == Digest::of(&bytes), "{at}");
        bytes[at] ^= 16;
        buffer.write(Bytes::new(at as u64), &bytes[at..=at]).unwrap();
    }
    assert_eq!(harness.digest(&span), whole);
    drop((span, buffer));
    harness.end();
}

#[test]
fn more_than_one_list_and_many_at_once() {
    let harness = harness();
    let bytes = pattern(200 << 20);
    let buffer = harness.buffer(&bytes);
    let span = |mib, count| buffer.span(Bytes::mib(mib), Bytes::mib(count)).unwrap();
    assert_eq!(harness.digest(&[span(0, 200)]), Digest::of(&bytes), "two launches");
    let part = |at: u64| &bytes[usize::try_from(at).unwrap() << 20..][..1 << 20];
    let stream = harness.digests.stream();
    let begun: Vec<_> = (0..40).map(|at| harness.digests.enqueue(stream, &[span(at, 1)]).unwrap()).collect();
    for (at, digesting) in (0..).zip(begun) {
        assert_eq!(digesting.wait().unwrap(), Digest::of(part(at)), "{at}");
    }
    // Dropped under way: its buffer is used again only once it has run.
    drop(harness.digests.enqueue(stream, &[span(0, 100)]).unwrap());
    assert_eq!(harness.digest(&[span(3, 1)]), Digest::of(part(3)));
    drop(buffer);
    harness.end();
}

#[test]
fn invalid_spans_are_refused() {
    let harness = harness();
    let buffer = harness.buffer(&pattern(4096));
    let span = |from, size| buffer.span(Bytes::new(from), Bytes::new(size)).unwrap();
    let refusal = |digests: &Digests, spans: &[Span]| match digests.enqueue(digests.stream(), spans) {
        Err(DriverError::Refused { verb: Verb::Launch, reason, .. }) => reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(refusal(&harness.digests, &[span(8, 16)]), Refusal::InvalidValue);
    assert_eq!(refusal(&harness.digests, &[span(0, 8), span(16, 16)]), Refusal::InvalidValue);
    let strange = Digests::new(&harness.completion_events, STRANGER).unwrap();
    assert_eq!(refusal(&strange, &[span(0, 16)]), Refusal::NoPeerAccess);
    drop((strange, buffer));
    harness.end();
}

#[test]
fn a_failure_leaves_nothing_behind() {
    let verbs =
        [Verb::HostRegister, Verb::Launch, Verb::EventCreate, Verb::EventRecord, Verb::EventSynchronize];
    for verb in verbs {
        let harness = harness();
        let bytes = pattern(4096);
        let buffer = harness.buffer(&bytes);
        let span = [buffer.span(Bytes::ZERO, Bytes::new(4096)).unwrap()];
        harness.faults.set(&[Fault { verb: Some(verb), when: When::Nth(1), error: Injected::Failed(1) }]);
        let failed = harness.digests.enqueue(harness.digests.stream(), &span).and_then(Digesting::wait);
        harness.faults.set(&[]);
        assert!(failed.is_err(), "{verb:?}");
        assert_eq!(harness.digest(&span), Digest::of(&bytes), "{verb:?}");
        drop((span, buffer));
        harness.end();
    }
}
