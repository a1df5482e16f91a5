//! Streams that wait for a refill.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use super::*;

/// Tells of its first copy, and enqueues slow work before each.
#[derive(Debug)]
struct Slow<'a> {
    native: &'a Native,
    sim: &'a Simulator,
    begun: mpsc::SyncSender<()>,
    marks: bool,
}

impl Mover for Slow<'_> {
    fn enqueue(&self, copies: &[(Span, Span)]) -> std::result::Result<Box<dyn Moving>, MoveError> {
        let _ = self.begun.try_send(());
        let time = Duration::from_millis(1);
        self.sim.enqueue_kernel(GPU, self.native.stream.id(), &[], &[], time, |_| {})?;
        self.native.enqueue(copies)
    }

    fn mark(&self) -> std::result::Result<Arc<dyn Mark>, MoveError> {
        if self.marks { self.native.mark() } else { Err("no marks".into()) }
    }
}

fn is_away(outcome: Result<()>) -> bool {
    matches!(outcome, Err(RegionError::Evicted { .. }))
}

#[test]
fn a_stream_finds_the_bytes_behind_it() {
    for marks in [true, false] {
        let mut fixture = fixture();
        fixture.furnish();
        let stream = OwnedStream::new(&fixture.mover.driver, PEER).unwrap();
        fixture.recorder.take_log();
        fixture.region.wait(PEER, stream.id()).unwrap();
        assert!(fixture.recorder.take_log().is_empty(), "nothing is evicted");
        fixture.shrink().unwrap();
        assert!(is_away(fixture.region.wait(PEER, stream.id())));
        let (begun, begins) = mpsc::sync_channel(1);
        let slow = Slow { native: &fixture.mover, sim: &fixture.sim, begun, marks };
        let found = Arc::new(AtomicUsize::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                fixture
                    .region
                    .refill(Bytes::MAX, TransferContext { mover: &slow, checks: None, fill: false }, &NoWait)
                    .unwrap()
            });
            begins.recv().unwrap();
            fixture.region.wait(PEER, stream.id()).unwrap();
            for (block, seed) in fixture.live.clone() {
                let reads = [Touch { address: block.address, size: block.size }];
                let found = found.clone();
                let work = move |memory: &mut dyn glake_device::KernelMemory| {
                    let mut bytes = vec![0; usize::try_from(block.size.get()).unwrap()];
                    memory.read(block.address, &mut bytes).unwrap();
                    found.fetch_add(usize::from(bytes == pattern(seed, block.size)), Ordering::Relaxed);
                };
                fixture
                    .sim
                    .enqueue_kernel(PEER, stream.id(), &reads, &[], Duration::from_micros(1), work)
                    .unwrap();
            }
            stream.synchronize().unwrap();
        });
        assert_eq!(found.load(Ordering::Relaxed), fixture.live.len());
        fixture.region.wait(PEER, stream.id()).unwrap();
        drop(stream);
        fixture.end();
    }
}

#[test]
fn a_part_is_not_all() {
    let mut fixture = fixture();
    for _ in 0..4 {
        fixture.add(EXTENT);
    }
    fixture.shrink().unwrap();
    fixture.refill_by(EXTENT).unwrap();
    assert!(is_away(fixture.region.wait(GPU, Stream::LEGACY)));
    let (begun, begins) = mpsc::sync_channel(1);
    let slow = Slow { native: &fixture.mover, sim: &fixture.sim, begun, marks: true };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            fixture
                .region
                .refill(EXTENT, TransferContext { mover: &slow, checks: None, fill: false }, &NoWait)
                .unwrap()
        });
        begins.recv().unwrap();
        assert!(is_away(fixture.region.wait(GPU, Stream::LEGACY)));
    });
    fixture.refill().unwrap();
    fixture.region.wait(GPU, Stream::LEGACY).unwrap();
    fixture.assert_bytes();
    fixture.end();
}
