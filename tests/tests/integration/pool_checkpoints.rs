//! Private pools whose live blocks are put back as they were.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::time::Duration;

use glake_stitch::{Allocator, DomainId, DomainOptions, Obstacle, Settings, StitchError};
use glake_tests::pool::{Fixture, Lane, Shape};
use glake_tiers::{Block, Checkpoint, LiveBlock, PoolError};
use glake_units::Bytes;
use proptest::prelude::*;

struct Scene {
    fixture: Fixture,
    lanes: Vec<Lane>,
    domain: DomainId,
}

impl Scene {
    fn new() -> Self {
        Self::tuned(|_| ())
    }

    fn tuned(tune: impl FnOnce(&mut Settings)) -> Self {
        let fixture = Fixture::tuned(Shape { memory: Bytes::mib(256), ..Shape::default() }, tune);
        let domain = fixture.pool.add_domain(DomainOptions::private_pool(), None);
        Scene { lanes: vec![fixture.lane(), fixture.lane()], fixture, domain }
    }

    fn malloc(&self, size: Bytes, stream: usize) -> Block {
        self.fixture.pool.malloc_in(self.domain, size, self.lanes[stream].pool).unwrap()
    }

    fn free(&self, block: Block) {
        self.fixture.pool.free(block.address).unwrap();
    }

    fn checkpoint(&self) -> Checkpoint {
        self.fixture.pool.checkpoint(self.domain).unwrap()
    }

    fn live(&self) -> Vec<LiveBlock> {
        self.fixture.pool.blocks_of(self.domain)
    }

    fn end(self) {
        for block in self.live() {
            self.fixture.pool.free(block.address).unwrap();
        }
        self.fixture.pool.release_domain(self.domain).unwrap();
        drop(self.lanes);
        self.fixture.end();
    }
}

const SIZES: [Bytes; 6] =
    [Bytes::new(1), Bytes::kib(3), Bytes::kib(700), Bytes::mib(1), Bytes::mib(3), Bytes::mib(14)];

#[test]
fn what_was_live_is_live_again_with_its_bytes() {
    let scene = Scene::new();
    let blocks: Vec<Block> = SIZES.iter().map(|&size| scene.malloc(size, 0)).collect();
    for (block, byte) in blocks.iter().zip(1u8..) {
        scene
            .fixture
            .pool
            .write(block.address, &vec![byte; usize::try_from(block.size.get()).unwrap()])
            .unwrap();
    }
    let then = scene.checkpoint();
    assert_eq!(then.blocks().len(), SIZES.len());
    // All but the last go; what replaces them lies elsewhere, and has other sizes.
    blocks[..5].iter().for_each(|&block| scene.free(block));
    let others = [Bytes::kib(40), Bytes::mib(2)].map(|size| scene.malloc(size, 0));
    let restored = scene.fixture.pool.restore(scene.domain, &then).unwrap();
    assert_eq!(restored.freed.len(), 3, "the last one too, though it stays");
    assert!(others.iter().all(|other| restored.freed.iter().any(|freed| freed.address == other.address)));
    assert_eq!(restored.claimed, then.blocks());
    assert_eq!(scene.live(), then.blocks());
    scene.fixture.pool.check().unwrap();
    for (block, byte) in blocks.iter().zip(1u8..) {
        let mut bytes = vec![0; usize::try_from(block.size.get()).unwrap()];
        scene.fixture.pool.read(block.address, &mut bytes).unwrap();
        assert!(bytes.iter().all(|found| *found == byte));
    }
    let next = scene.malloc(Bytes::mib(3), 0);
    assert!(blocks.iter().all(|block| block.address != next.address), "they are not handed out again");
    scene.end();
}

#[test]
fn a_trimmed_pool_says_that_its_memory_is_gone_and_stays_as_it_is() {
    let scene = Scene::new();
    let small = scene.malloc(Bytes::kib(9), 0);
    let large = scene.malloc(Bytes::mib(30), 0);
    let then = scene.checkpoint();
    scene.free(large);
    scene.fixture.pool.settle().unwrap();
    scene.fixture.pool.trim_domain(scene.domain).unwrap();
    scene.free(small);
    let other = scene.malloc(Bytes::kib(600), 0);
    let before = scene.live();
    let refused = scene.fixture.pool.restore(scene.domain, &then);
    let Err(PoolError::Refused { source: StitchError::NotClaimable { obstacle, .. }, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(obstacle, Obstacle::OtherMemory);
    assert_eq!(scene.live(), before);
    scene.fixture.pool.check().unwrap();
    scene.free(other);
    assert!(scene.fixture.pool.restore(Allocator::default_domain(), &then).is_err());
    let elsewhere = Scene::new();
    assert!(
        elsewhere.fixture.pool.restore(elsewhere.domain, &then).is_err(),
        "the checkpoint of another pool"
    );
    elsewhere.end();
    scene.end();
}

/// A block that another stream still reads is claimed at once, and once it is freed again it waits for that stream.
#[test]
fn what_is_still_read_is_remembered() {
    let scene = Scene::new();
    let block = scene.malloc(Bytes::mib(4), 0);
    let then = scene.checkpoint();
    scene.lanes[1].busy(Duration::from_millis(1));
    assert!(scene.fixture.pool.record_stream(block.address, scene.lanes[1].pool));
    scene.free(block);
    scene.fixture.pool.restore(scene.domain, &then).unwrap();
    assert_eq!(scene.fixture.pool.stats().all.active.current, 1);
    scene.free(block);
    assert_ne!(scene.malloc(Bytes::mib(4), 0).address, block.address, "it is nobody's yet");
    scene.fixture.run_dry();
    scene.fixture.pool.settle().unwrap();
    assert_eq!(scene.malloc(Bytes::mib(4), 0).address, block.address);
    scene.end();
}

#[derive(Clone, Debug)]
enum Op {
    Malloc { size: usize, stream: usize },
    Free { which: usize },
    Record { which: usize },
    Tick,
    Trim,
    Checkpoint,
    Restore { which: usize },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..SIZES.len(), 0..2usize).prop_map(|(size, stream)| Op::Malloc { size, stream }),
        7 => any::<usize>().prop_map(|which| Op::Free { which }),
        1 => any::<usize>().prop_map(|which| Op::Record { which }),
        2 => Just(Op::Tick),
        1 => Just(Op::Trim),
        2 => Just(Op::Checkpoint),
        2 => any::<usize>().prop_map(|which| Op::Restore { which }),
    ]
}

proptest! {
    /// Any checkpoint of a private pool can be restored at any time, over and over, trims in between; where slabs lie at
    /// multiples of their size, and where they do not.
    #[test]
    fn a_private_pool_can_always_be_restored(odd in any::<bool>(), program in prop::collection::vec(op(), 1..150)) {
        let scene = Scene::tuned(|settings| {
            if odd {
                let six = Bytes::mib(6);
                (settings.slab, settings.extent, settings.extent_near_limit) = (Bytes::mib(4), six, six);
            }
        });
        let pool = &scene.fixture.pool;
        let mut checkpoints: Vec<Checkpoint> = Vec::new();
        for op in program {
            let live = scene.live();
            match op {
                Op::Malloc { size, stream } if pool.reserved() < Bytes::mib(200) => {
                    scene.malloc(SIZES[size], stream);
                }
                Op::Free { which } if !live.is_empty() => {
                    pool.free(live[which % live.len()].address).unwrap();
                }
                Op::Record { which } if !live.is_empty() => {
                    scene.lanes[1].busy(Duration::from_micros(50));
                    pool.record_stream(live[which % live.len()].address, scene.lanes[1].pool);
                }
                Op::Tick => {
                    scene.fixture.sim.step();
                    pool.tick().unwrap();
                }
                Op::Trim => _ = pool.trim(Bytes::ZERO).unwrap(),
                Op::Checkpoint => checkpoints.push(scene.checkpoint()),
                Op::Restore { which } if !checkpoints.is_empty() => {
                    let then = &checkpoints[which % checkpoints.len()];
                    let restored = pool.restore(scene.domain, then).unwrap();
                    prop_assert_eq!(restored.freed, live);
                    prop_assert_eq!(&restored.claimed, then.blocks());
                    prop_assert_eq!(scene.live(), then.blocks());
                }
                _ => {}
            }
            pool.check().unwrap();
            let starts: HashMap<u64, u64> =
                scene.live().iter().map(|block| (block.address.0, block.size.get())).collect();
            prop_assert_eq!(starts.len(), scene.live().len());
        }
        scene.fixture.run_dry();
        scene.end();
    }
}
