//! Blocks that other threads free while a shrink is under way.

use parking_lot::Mutex;

use super::*;

/// Frees a block when it is first asked to copy: as another thread would, in between.
#[derive(Debug)]
struct Freeing<'a> {
    native: &'a Native,
    pool: &'a GpuPool,
    address: Mutex<Option<Address>>,
}

impl Mover for Freeing<'_> {
    fn enqueue(&self, copies: &[(Span, Span)]) -> std::result::Result<Box<dyn Moving>, MoveError> {
        if let Some(address) = self.address.lock().take() {
            self.pool.free(address)?;
        }
        self.native.enqueue(copies)
    }

    fn mark(&self) -> std::result::Result<Arc<dyn Mark>, MoveError> {
        self.native.mark()
    }
}

#[test]
fn what_is_freed_meanwhile_is_waited_for() {
    let mut fixture = fixture();
    for _ in 0..3 {
        fixture.add(EXTENT);
    }
    let small = fixture.add(Bytes::kib(300));
    fixture.add(Bytes::kib(300));
    let stream = OwnedStream::new(&fixture.mover.driver, GPU).unwrap();
    let there = PoolStream::of(&*fixture.mover.driver, GPU, stream.id()).unwrap();
    for block in [fixture.live[2].0, small] {
        assert!(fixture.pool.record_stream(block.address, there));
    }
    for _ in 0..2 {
        let (block, _) = fixture.live.remove(2);
        let address = Mutex::new(Some(block.address));
        let freeing = Freeing { native: &fixture.mover, pool: &fixture.pool, address };
        let to = Store::Host(fixture.host.clone());
        let report = fixture
            .region
            .shrink(Bytes::MAX, &to, TransferContext { mover: &freeing, checks: None, fill: false })
            .unwrap();
        assert_eq!((report.resident, report.skipped.len()), (Bytes::ZERO, 0));
        fixture.refill().unwrap();
        fixture.assert_bytes();
        fixture.assert_sound();
    }
    drop(stream);
    fixture.end();
}
