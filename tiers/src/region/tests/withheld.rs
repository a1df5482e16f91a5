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
    let mut bed = bed();
    for _ in 0..3 {
        bed.add(EXTENT);
    }
    let small = bed.add(Bytes::kib(300));
    bed.add(Bytes::kib(300));
    let stream = OwnedStream::new(&bed.mover.driver, GPU).unwrap();
    let there = PoolStream::of(&*bed.mover.driver, GPU, stream.id()).unwrap();
    for block in [bed.live[2].0, small] {
        assert!(bed.pool.record_stream(block.address, there));
    }
    for _ in 0..2 {
        let (block, _) = bed.live.remove(2);
        let address = Mutex::new(Some(block.address));
        let freeing = Freeing { native: &bed.mover, pool: &bed.pool, address };
        let to = Store::Host(bed.host.clone());
        let report =
            bed.region.shrink(Bytes::MAX, &to, TransferContext { mover: &freeing, checks: None }).unwrap();
        assert_eq!((report.left, report.skipped.len()), (Bytes::ZERO, 0));
        bed.refill().unwrap();
        bed.assert_bytes();
        bed.assert_sound();
    }
    drop(stream);
    bed.end();
}
