//! Every verb on a domain in each state of its life: active, and released while parts of it live, pend or are elsewhere.

use glake_stitch::SegmentKind;

use super::*;

/// Whose memory it is: a pool of tensors, a graph's.
const KINDS: [fn() -> DomainOptions; 2] = [DomainOptions::own_pool, DomainOptions::private_pool];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Active,
    /// Released with live blocks.
    Living,
    /// Released with nothing but extents that are free and still in use on the GPU.
    Pending,
    /// Released, then evicted.
    Evicted,
    /// Released, evicted and refilled.
    Refilled,
    /// Evicted, then released.
    ReleasedAway,
    /// Released with nothing in it: forgotten.
    Gone,
}

const STATES: [State; 7] = [
    State::Active,
    State::Living,
    State::Pending,
    State::Evicted,
    State::Refilled,
    State::ReleasedAway,
    State::Gone,
];

/// A verb of a region or a pool, which finds what there is of the domain.
type Verb = (&'static str, fn(&Scene));

const VERBS: [Verb; 8] = [
    ("questions", ask),
    ("shrink", |scene| {
        let report = scene.shrink().unwrap();
        assert_eq!((report.resident, report.skipped.len()), (Bytes::ZERO, 0));
        assert_eq!(scene.fixture.used(), Bytes::ZERO);
    }),
    ("refill", |scene| {
        assert_eq!(scene.refill().unwrap().evicted, Bytes::ZERO);
        assert!(scene.region.is_whole());
    }),
    ("what takes a part", |scene| {
        scene.fixture.pool.trim_domain(scene.domain()).unwrap();
        scene.fixture.pool.trim(Bytes::ZERO).unwrap();
        scene.shrink_by(EXTENT).unwrap();
    }),
    ("seal", |scene| {
        scene.region.seal(true).unwrap();
        scene.shrink().unwrap();
        scene.refill().unwrap();
        scene.region.unseal().unwrap();
    }),
    ("export", |scene| {
        let Some((block, _)) = scene.fixture.live.first() else { return };
        let exported = scene.fixture.pool.export(block.address, 0..usize::MAX);
        match scene.is_here() {
            true => assert_eq!(exported.unwrap().size, block.size),
            false => assert!(matches!(exported, Err(PoolError::Evicted { .. }))),
        }
    }),
    ("fix", |scene| {
        let Some((block, _)) = scene.fixture.live.first() else { return };
        if scene.is_here() {
            scene.region.fix(block.address).unwrap();
            assert!(scene.shrink().unwrap().resident >= block.size);
            scene.region.unfix(block.address).unwrap();
        }
    }),
    ("decommit", |scene| {
        // The third block is whole extents.
        let Some(&(block, _)) = scene.fixture.live.get(2) else { return };
        let decommitted = scene.region.decommit(block.address, block.size);
        if matches!(decommitted, Err(RegionError::Captured { .. })) {
            return assert!(scene.is_held());
        }
        decommitted.unwrap();
        let context = TransferContext { mover: &scene.fixture.mover, checks: None, fill: false };
        scene.region.commit(block.address, block.size, context, &NoWait).unwrap();
        scene.refill().unwrap();
        scene.fixture.pool.write(block.address, &pattern(scene.fixture.live[2].1, block.size)).unwrap();
    }),
];

/// What a domain is asked, which changes nothing of it.
fn ask(scene: &Scene) {
    let segments = scene.fixture.pool.report().segments();
    let at_home = segments.iter().filter(|segment| segment.kind != SegmentKind::Stitched);
    let reserved: Bytes = at_home.map(|segment| segment.size.saturating_sub(segment.evicted)).sum();
    assert_eq!(reserved, scene.fixture.pool.reserved());
    let blocks = scene.fixture.pool.blocks_of(scene.domain());
    assert_eq!(blocks.len(), scene.fixture.live.len());

    let (resident, evicted) = scene.region.sizes();
    let held = scene.region.holding();
    assert_eq!((held.resident, held.evicted), (resident, evicted));
    assert_eq!(resident, scene.fixture.pool.reserved());
    assert_eq!(held.dirty.is_zero(), scene.fixture.live.is_empty() || resident.is_zero());
    let placed: Bytes = scene.region.places().iter().map(|(_, size)| *size).sum();
    assert_eq!(placed, evicted);
    assert_eq!(scene.region.is_usable(), scene.region.is_whole());
    assert_eq!(scene.region.decommitted(), Bytes::ZERO);

    scene.region.prepare(&scene.fixture.host).unwrap();
    _ = scene.region.sizes_to_prepare();

    let waited = scene.region.wait(GPU, Stream::LEGACY);
    assert!(scene.region.is_whole() == waited.is_ok(), "{waited:?}");

    let checkpoint = scene.fixture.pool.checkpoint(scene.domain()).unwrap();
    assert_eq!(checkpoint.blocks().len(), scene.fixture.live.len());
    if scene.is_here() {
        let restored = scene.fixture.pool.restore(scene.domain(), &checkpoint).unwrap();
        assert_eq!(restored.freed, restored.claimed);
    }

    if scene.state != State::Active {
        let refused = scene.region.malloc(EXTENT, scene.fixture.here).unwrap_err();
        assert!(is_unknown(&refused), "nothing new is taken from it: {refused}");
        let refused = scene.fixture.pool.release_domain(scene.domain()).unwrap_err();
        assert!(is_unknown(&refused.into()), "it is released once");
    }
}

fn is_unknown(error: &RegionError) -> bool {
    matches!(error, RegionError::Pool(PoolError::Refused { source: StitchError::UnknownDomain { .. }, .. }))
}

/// A domain in a state.
struct Scene {
    fixture: Fixture,
    region: Region,
    state: State,
}

impl Scene {
    fn new(options: DomainOptions, state: State) -> Scene {
        let mut fixture = fixture();
        let domain = fixture.pool.add_domain(options, None);
        let options = RegionOptions {
            policy: Policy::Sealed,
            host_copy: CopyPolicy::Prepare,
            extent: EXTENT,
            ..RegionOptions::of("pool")
        };
        let over = Region::over(&fixture.pool, domain, options);
        // Small, stitchable, whole, and one that goes and leaves free extents.
        for size in [Bytes::kib(40), Bytes::kib(1100), Bytes::mib(4), Bytes::mib(2)] {
            let block = over.malloc(size, fixture.here).unwrap();
            let seed = u8::try_from(11 + fixture.live.len()).unwrap();
            fixture.pool.write(block.address, &pattern(seed, block.size)).unwrap();
            fixture.live.push((block, seed));
        }
        let scene = Scene { fixture, region: over, state };
        scene.enter(domain)
    }

    fn enter(mut self, domain: DomainId) -> Scene {
        let release = |scene: &Scene| scene.fixture.pool.release_domain(domain).unwrap();
        self.fixture.free(3);
        match self.state {
            State::Active => {}
            State::Living => release(&self),
            State::Pending | State::Gone => {
                let time = Duration::from_millis(5);
                self.fixture.sim.enqueue_kernel(GPU, Stream::LEGACY, &[], &[], time, |_| {}).unwrap();
                while !self.fixture.live.is_empty() {
                    self.fixture.free(0);
                }
                release(&self);
                if self.state == State::Gone {
                    self.fixture.pool.settle().unwrap();
                    self.fixture.pool.trim(Bytes::ZERO).unwrap();
                    assert_eq!(self.fixture.pool.reserved(), Bytes::ZERO);
                }
            }
            State::Evicted => {
                release(&self);
                self.shrink().unwrap();
            }
            State::Refilled => {
                release(&self);
                self.shrink().unwrap();
                self.refill().unwrap();
            }
            State::ReleasedAway => {
                self.shrink().unwrap();
                release(&self);
            }
        }
        self
    }

    fn domain(&self) -> DomainId {
        self.region.domain()
    }

    fn is_here(&self) -> bool {
        self.region.is_whole()
    }

    fn is_held(&self) -> bool {
        self.fixture.pool.domains().is_held(self.domain())
    }

    fn shrink(&self) -> Result<Shrunk> {
        self.shrink_by(Bytes::MAX)
    }

    fn shrink_by(&self, amount: Bytes) -> Result<Shrunk> {
        let context = TransferContext { mover: &self.fixture.mover, checks: None, fill: false };
        self.region.shrink(amount, &Store::Host(self.fixture.host.clone()), context)
    }

    fn refill(&self) -> Result<Refilled> {
        self.region.refill(
            Bytes::MAX,
            TransferContext { mover: &self.fixture.mover, checks: None, fill: false },
            &NoWait,
        )
    }

    /// The bytes of live blocks go and come back whatever was done before, and nothing is left behind.
    fn end(self) {
        let Scene { state, .. } = self;
        self.fixture.pool.check().unwrap();
        self.refill().unwrap();
        self.fixture.assert_bytes();
        let report = self.shrink().unwrap();
        // What was exported stays for good.
        assert!(report.skipped.iter().all(|skipped| skipped.reason == SkipReason::Exported));
        let stays = report.skipped.iter().map(|skipped| skipped.size).sum();
        assert_eq!((report.resident, self.fixture.used()), (stays, stays));
        let Scene { fixture, region, .. } = self;
        if state == State::Active {
            fixture.pool.release_domain(region.domain()).unwrap();
        }
        drop(region);
        fixture.end();
    }
}

#[test]
fn every_verb_finds_what_there_is_of_a_domain() {
    for options in KINDS {
        for state in STATES {
            for (name, verb) in VERBS {
                let step = std::panic::catch_unwind(|| {
                    let scene = Scene::new(options(), state);
                    verb(&scene);
                    scene.end();
                });
                assert!(step.is_ok(), "{name} of {:?} that is {state:?}", options());
            }
        }
    }
}

/// What only its own free bytes were kept for has no copy any more once its owner has given it up.
#[test]
fn a_graphs_free_memory_needs_no_copy_once_its_pool_is_released() {
    let scene = Scene::new(DomainOptions::private_pool(), State::ReleasedAway);
    let live: Bytes = scene.fixture.live.iter().map(|(block, _)| block.size).sum();
    let hosted = scene.fixture.host.statistics().in_use;
    assert!(hosted <= live.saturating_add(EXTENT).saturating_add(EXTENT), "{hosted} for {live}");
    scene.end();
}
