//! Random programs on the core, compared with a model that tracks every physical byte.
//!
//! The model is a plain table of cells of 64 KiB. For each address it knows the cell of the extent mapped there, and for each cell its
//! user, its last user, and the events since. It never queries the core's own state.

#![allow(missing_docs)]
// A panic fails the test; the numbers are small.
#![allow(clippy::expect_used, clippy::panic, clippy::cast_possible_truncation)]

use std::collections::{BTreeMap, HashMap, HashSet};

use glake_stitch::{
    Allocator, Borrow, Claim, DomainId, DomainOptions, ExtentId, ExtentState, Grant, HoldId, LiveBlock,
    Outcome, Plan, PointNumber, Request, SMALL_LIMIT, SegmentKind, Settings, Step, StitchError, StreamKey,
    StreamUse, Wait,
};
use glake_units::Bytes;
use proptest::prelude::*;

const CELL: u64 = 64 << 10;
const STREAMS: u64 = 60;

#[derive(Clone, Debug)]
enum Op {
    Malloc { cells: u64, stream: u64, domain: usize, abort: bool, meanwhile: Vec<Quick> },
    Free { which: usize },
    Record { which: usize, stream: u64 },
    Hold { which: usize },
    PassHold { which: usize },
    Close,
    Pass,
    Trim { keep: u64, abort: bool, meanwhile: Vec<Quick> },
    TrimDomain { which: usize },
    Claim { at: usize, cells: u64, stream: u64, again: bool },
    Checkpoint { which: usize },
    Restore,
    Collect,
    Limit { quarters: u64 },
    AddDomain { alias: bool, lend: bool, keep: bool, plain: bool },
    ReleaseDomain { which: usize },
    Seal { which: usize, sealed: bool },
    Leave { which: usize },
    Left { which: usize },
    Enter { which: usize, made: bool },
    CameBack { which: usize },
}

/// Actions of other threads while the driver executes a plan; none of them waits for the driver.
#[derive(Clone, Debug)]
enum Quick {
    Hit { cells: u64, stream: u64, domain: usize },
    Free { which: usize },
    Record { which: usize, stream: u64 },
    Hold { which: usize },
    PassHold { which: usize },
    Close,
    Pass,
    Release { which: usize },
}

/// Generates streams: a few do most of the work, others appear and are rarely seen again.
fn stream() -> impl Strategy<Value = u64> {
    prop_oneof![2 => 0..4u64, 1 => 0..STREAMS]
}

fn meanwhile() -> impl Strategy<Value = Vec<Quick>> {
    let quick = prop_oneof![
        3 => (prop_oneof![1..=16u64, 17..=300u64], stream(), 0..3usize)
            .prop_map(|(cells, stream, domain)| Quick::Hit { cells, stream, domain }),
        3 => any::<usize>().prop_map(|which| Quick::Free { which }),
        1 => (any::<usize>(), stream()).prop_map(|(which, stream)| Quick::Record { which, stream }),
        2 => any::<usize>().prop_map(|which| Quick::Hold { which }),
        2 => any::<usize>().prop_map(|which| Quick::PassHold { which }),
        2 => Just(Quick::Close),
        2 => Just(Quick::Pass),
        1 => any::<usize>().prop_map(|which| Quick::Release { which }),
    ];
    prop_oneof![2 => Just(Vec::new()), 1 => prop::collection::vec(quick, 1..6)]
}

fn op() -> impl Strategy<Value = Op> {
    let malloc = (
        prop_oneof![1..=16u64, 17..=300u64, 100..=900u64],
        stream(),
        0..3usize,
        prop::bool::weighted(0.1),
        meanwhile(),
    );
    prop_oneof![
        12 => malloc.prop_map(|(cells, stream, domain, abort, meanwhile)| Op::Malloc { cells, stream, domain, abort, meanwhile }),
        11 => any::<usize>().prop_map(|which| Op::Free { which }),
        2 => (any::<usize>(), stream()).prop_map(|(which, stream)| Op::Record { which, stream }),
        5 => any::<usize>().prop_map(|which| Op::Hold { which }),
        3 => any::<usize>().prop_map(|which| Op::PassHold { which }),
        4 => Just(Op::Close),
        4 => Just(Op::Pass),
        1 => (0..2000u64, prop::bool::weighted(0.3), meanwhile())
            .prop_map(|(keep, abort, meanwhile)| Op::Trim { keep, abort, meanwhile }),
        1 => any::<usize>().prop_map(|which| Op::TrimDomain { which }),
        3 => (any::<usize>(), prop_oneof![1..=16u64, 17..=100u64], stream(), any::<bool>())
            .prop_map(|(at, cells, stream, again)| Op::Claim { at, cells, stream, again }),
        1 => any::<usize>().prop_map(|which| Op::Checkpoint { which }),
        1 => Just(Op::Restore),
        1 => Just(Op::Collect),
        1 => (1..=4u64).prop_map(|quarters| Op::Limit { quarters }),
        1 => any::<[bool; 4]>().prop_map(|[alias, lend, keep, plain]| Op::AddDomain { alias, lend, keep, plain }),
        1 => any::<usize>().prop_map(|which| Op::ReleaseDomain { which }),
        1 => (any::<usize>(), prop::bool::weighted(0.2)).prop_map(|(which, sealed)| Op::Seal { which, sealed }),
        3 => any::<usize>().prop_map(|which| Op::Leave { which }),
        3 => any::<usize>().prop_map(|which| Op::Left { which }),
        2 => (any::<usize>(), prop::bool::weighted(0.8)).prop_map(|(which, made)| Op::Enter { which, made }),
        3 => any::<usize>().prop_map(|which| Op::CameBack { which }),
    ]
}

/// State of one physical cell.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    live: bool,
    /// Last use: stream, completion point of the free, other uses, address, time.
    last: Option<Last>,
}

#[derive(Clone, Copy, Debug)]
struct Last {
    stream: u64,
    point: PointNumber,
    /// Number of the model's free that freed the cell; none if the cell was not resident.
    free: Option<usize>,
    address: u64,
    at: usize,
}

/// Live blocks of a domain at one time.
#[derive(Debug)]
struct Checkpoint {
    domain: DomainId,
    claims: Vec<Claim>,
    /// Whether their memory cannot have been released since.
    owned: bool,
}

#[derive(Debug)]
struct Block {
    grant: Grant,
    stream: u64,
    /// Other uses of the block.
    others: Others,
    /// Grant of the block.
    cells: Vec<(ExtentId, u64, u64)>,
}

/// Uses of a block beside its own stream.
#[derive(Clone, Debug, Default)]
struct Others {
    /// Holds that must pass.
    holds: Vec<HoldId>,
    /// Other streams that the block was recorded on.
    recorded: Vec<u64>,
    /// Use holds that must pass as well once the block is freed.
    uses: Vec<HoldId>,
    /// Whether the block was claimed: the core may know of uses whose end is never reported.
    claimed: bool,
    /// Whether such uses exist; then only the completion point ends them.
    unknown: bool,
}

/// Domains by the memory that they keep.
#[derive(Clone, Debug, Default)]
struct Owners {
    /// Domains that keep their free extents.
    kept: HashSet<DomainId>,
    /// Subset of these without aliases and lending.
    private: HashSet<DomainId>,
    /// Domains whose blocks lie in one extent each.
    plain: HashSet<DomainId>,
    /// Released domains, with the time of the release if they kept free memory: a graph's replay may write to all of it.
    released: HashMap<DomainId, Option<PointNumber>>,
}

#[derive(Debug, Default)]
struct Model {
    extents: HashMap<ExtentId, (DomainId, Vec<Cell>)>,
    /// Cell mapped at each address, and whether access is set.
    mapped: BTreeMap<u64, (ExtentId, u64, bool)>,
    blocks: Vec<Block>,
    /// Extents that are being evicted or are evicted; whether they have memory.
    elsewhere: BTreeMap<ExtentId, bool>,
    owners: Owners,
    /// Existing domains.
    domains: Vec<DomainId>,
    checkpoint: Option<Checkpoint>,
    /// Freed blocks: address, number of cells, stream.
    gone: Vec<(Bytes, Bytes, u64)>,
    /// Uses of each freed block.
    frees: Vec<Others>,
    /// Pending holds, use holds included.
    holding: Vec<HoldId>,
    /// Use holds without a recorded event; these never pass.
    lost: Vec<HoldId>,
    /// Time of each stream's last completion edge.
    edges: Vec<usize>,
    open: PointNumber,
    passed: PointNumber,
    now: usize,
    /// Open completion point at the last failed restore or release of a domain.
    given_up: Option<PointNumber>,
}

impl Model {
    /// Applies a plan made when domains kept `kept`. Memory that the plan releases belonged to no graph then and was handed out to no one
    /// since, so a release of its domain meanwhile is irrelevant.
    fn execute(&mut self, plan: &Plan, then: &Owners) {
        for step in &plan.steps {
            match step {
                Step::Create { extent, size, domain } => {
                    let cells = vec![Cell::default(); (size.get() / CELL) as usize];
                    assert!(self.extents.insert(*extent, (*domain, cells)).is_none(), "created twice");
                }
                Step::Map { extent, offset, size } => {
                    assert_eq!(size.get() / CELL, self.extents[extent].1.len() as u64, "mapped whole");
                    for cell in 0..size.get() / CELL {
                        let before = self.mapped.insert(offset.get() + cell * CELL, (*extent, cell, false));
                        assert!(before.is_none(), "mapped over a mapping");
                    }
                }
                Step::Access { offset, size, domain } => {
                    let range = offset.get()..offset.get() + size.get();
                    let extents = &self.extents;
                    let open = |(_, cell): (_, &mut (ExtentId, u64, bool))| {
                        assert_eq!(extents[&cell.0].0, *domain, "access to another domain's memory");
                        cell.2 = true;
                    };
                    let cells = self.mapped.range_mut(range).map(open).count();
                    assert_eq!(cells as u64, size.get() / CELL, "access to what is not mapped");
                }
                Step::Unmap { offset, size, extents } => {
                    let elsewhere = |extent| self.elsewhere.contains_key(extent);
                    assert!(!extents.iter().any(elsewhere), "unmapped on its way");
                    let mut seen = Vec::new();
                    for cell in 0..size.get() / CELL {
                        let (extent, _, _) =
                            self.mapped.remove(&(offset.get() + cell * CELL)).expect("not mapped");
                        seen.push(extent);
                    }
                    seen.dedup();
                    assert_eq!(&seen, extents, "the extents of the range");
                    for block in &self.blocks {
                        let (start, end) =
                            (block.grant.offset.get(), block.grant.offset.get() + block.grant.size.get());
                        let apart = end <= offset.get() || offset.get() + size.get() <= start;
                        assert!(apart, "unmapped under a live block");
                    }
                    let replayed = |extent| then.released.get(&self.extents[extent].0).copied().flatten();
                    let replays = extents.iter().filter_map(replayed).any(|point| point > self.passed);
                    assert!(!replays, "unmapped under a graph's replay");
                    // Work may still run on the range, but none that used it at these addresses after the passed point.
                    for (index, extent) in extents.iter().enumerate() {
                        let _ = index;
                        for cell in &self.extents[extent].1 {
                            if let Some(last) = cell.last {
                                let here = (offset.get()..offset.get() + size.get()).contains(&last.address);
                                assert!(!here || last.point <= self.passed, "unmapped under running work");
                            }
                        }
                    }
                }
                Step::Release { extent, domain, .. } => {
                    let evicted = self.elsewhere.remove(extent);
                    // Evicted memory without live blocks is forgotten, unless a graph may write to it.
                    let is_forgotten = evicted == Some(false) && !then.private.contains(domain);
                    assert!(!then.kept.contains(domain) || is_forgotten, "a domain keeps its extents");
                    assert!(evicted != Some(true), "released on its way");
                    let (_, cells) = self.extents.remove(extent).expect("released twice");
                    assert!(cells.iter().all(|cell| !cell.live), "released under a live block");
                    let pending =
                        cells.iter().filter_map(|cell| cell.last).any(|last| last.point > self.passed);
                    // Evicted cells have no memory to use: all work on them ended before the eviction, none was enqueued since, and a
                    // free there is pending in name only. Aliases over other, resident extents are unmapped once their point has passed.
                    assert!(!pending || evicted.is_some(), "released under running work");
                    let replayed =
                        then.released.get(domain).copied().flatten().is_some_and(|point| point > self.passed);
                    assert!(!replayed || evicted.is_some(), "released under a graph's replay");
                    assert!(self.mapped.values().all(|(other, ..)| other != extent), "released while mapped");
                }
            }
        }
    }

    /// Picks a domain that exists or existed: parts of a released domain may live.
    fn any_domain(&self, which: usize) -> DomainId {
        let mut all: Vec<DomainId> = self.owners.released.keys().copied().collect();
        all.sort_unstable();
        all.extend(&self.domains);
        all[which % all.len()]
    }

    fn cells(&self, grant: &Grant) -> Vec<(ExtentId, u64, u64)> {
        (0..grant.size.get().div_ceil(CELL))
            .map(|cell| {
                let address = grant.offset.get() + cell * CELL;
                let (extent, index, access) = self.mapped[&address];
                assert!(access, "a block without access");
                (extent, index, address)
            })
            .collect()
    }

    /// Checks a new block against the model, and records it.
    fn take(&mut self, grant: Grant, stream: u64, domain: DomainId) {
        if grant.edge {
            self.edges[stream as usize] = self.now;
        }
        let given = self.cells(&grant);
        let is_one = given.windows(2).all(|pair| pair[0].0 == pair[1].0);
        assert!(is_one || !self.owners.plain.contains(&domain), "a plain block spans two allocations");
        for &(extent, index, address) in &given {
            assert!(!self.elsewhere.contains_key(&extent), "memory that is not there is handed out");
            let edge = self.edges[stream as usize];
            let (owner, cells) = self.extents.get_mut(&extent).expect("mapped extents exist");
            assert_eq!(*owner, domain, "domains never share an extent");
            let cell = &mut cells[index as usize];
            assert!(!cell.live, "two live blocks share a byte");
            cell.live = true;
            if let Some(last) = cell.last
                && last.point > self.passed
            {
                let (none, holding) = (Others::default(), |hold: &&HoldId| self.holding.contains(hold));
                let others = last.free.map_or(&none, |free| &self.frees[free]);
                assert!(!others.unknown, "reused before the completion point of unknown uses");
                assert_eq!(others.uses.iter().find(holding), None, "reused before a recorded stream's event");
                let waited = grant.waits.contains(&Wait::Stream(StreamKey(last.stream)));
                let mut holds = others.holds.iter().filter(holding);
                let held = holds.clone().next().is_some();
                assert!(!held || last.stream == stream, "held bytes are their stream's alone");
                assert!(
                    holds.all(|hold| grant.waits.contains(&Wait::Hold(*hold))),
                    "held bytes without a wait for what holds them"
                );
                assert!(
                    last.stream == stream || waited,
                    "another stream's bytes before their completion point"
                );
                let covered = last.address == address || waited || edge >= last.at;
                assert!(covered, "bytes moved to another address without a completion edge");
            }
        }
        self.blocks.push(Block { grant, stream, others: Others::default(), cells: given });
    }

    /// Returns whether a block was handed out at the cell of this address.
    fn is_live(&self, address: u64) -> bool {
        let mut blocks = self
            .blocks
            .iter()
            .map(|block| block.grant.offset.get()..block.grant.offset.get() + block.grant.size.get());
        blocks.any(|range| range.contains(&address))
    }

    /// Returns the cells of a range of home if all are mapped, belong to one domain, and none is live.
    fn claimable(&self, offset: Bytes, size: Bytes) -> Option<Vec<(ExtentId, u64)>> {
        let addresses = (0..size.get().div_ceil(CELL)).map(|cell| offset.get() + cell * CELL);
        let mapped: Option<Vec<_>> = addresses.map(|at| self.mapped.get(&at).copied()).collect();
        let cells: Vec<(ExtentId, u64)> =
            mapped?.into_iter().map(|(extent, index, _)| (extent, index)).collect();
        let owner = |cell: &(ExtentId, u64)| self.extents[&cell.0].0;
        let free = |cell: &(ExtentId, u64)| !self.extents[&cell.0].1[cell.1 as usize].live;
        let claimable = cells.iter().all(|cell| owner(cell) == owner(&cells[0]) && free(cell));
        claimable.then_some(cells)
    }

    /// Records a claimed block: pending users of its cells delay later reuse.
    fn claim(&mut self, offset: Bytes, size: Bytes, stream: u64) {
        let grant = Grant { offset, size, edge: false, waits: Default::default() };
        let mut unknown = false;
        let given = self.cells(&grant);
        for &(extent, index, address) in &given {
            assert!(!self.elsewhere.contains_key(&extent), "memory that is not there is claimed");
            let cell = &mut self.extents.get_mut(&extent).expect("mapped extents exist").1[index as usize];
            assert!(!cell.live, "two live blocks share a byte");
            cell.live = true;
            let pending = cell.last.filter(|last| last.point > self.passed);
            let in_use = |last: Last| {
                last.free.is_some_and(|free| self.frees[free].is_pending(&self.holding))
                    || last.stream != stream
                    || last.address != address
            };
            unknown |= pending.is_some_and(in_use);
        }
        let others = Others { claimed: true, unknown, ..Others::default() };
        self.blocks.push(Block { grant, stream, others, cells: given });
    }

    /// Picks an extent that is moving, or one that is evicted.
    fn nth_elsewhere(&self, which: usize, moving: bool) -> Option<ExtentId> {
        let extents = self.elsewhere.iter().filter(|(_, there)| **there == moving);
        let extents: Vec<ExtentId> = extents.map(|(extent, _)| *extent).collect();
        extents.get(which % extents.len().max(1)).copied()
    }

    fn free(&mut self, index: usize) -> Grant {
        let block = self.blocks.swap_remove(index);
        self.gone.push((block.grant.offset, block.grant.size, block.stream));
        self.frees.push(block.others);
        for (extent, index, address) in block.cells {
            // Evicted cells have no uses; resident cells may be used by other streams, whether or not the whole block is resident.
            let apart = self.elsewhere.contains_key(&extent);
            let cell = &mut self.extents.get_mut(&extent).expect("mapped extents exist").1[index as usize];
            cell.live = false;
            cell.last = Some(Last {
                stream: block.stream,
                point: self.open,
                free: (!apart).then_some(self.frees.len() - 1),
                address,
                at: self.now,
            });
        }
        block.grant
    }

    /// Checks the reported uses of the last freed block, and records an event for each, or for none.
    fn end_uses(&mut self, uses: &mut impl Iterator<Item = StreamUse>) {
        let others = self.frees.last_mut().expect("one was freed");
        let uses: Vec<StreamUse> = uses.take(others.recorded.len()).collect();
        let told: Vec<u64> = uses.iter().map(|used| used.stream.0).collect();
        assert!(told == others.recorded || told.is_empty() && others.claimed, "{told:?} of {others:?}");
        assert!(told.is_empty() || !others.unknown, "uses of which not all are known");
        others.unknown |= told.len() < others.recorded.len();
        for used in uses {
            others.uses.push(used.hold);
            self.holding.push(used.hold);
            if used.stream.0 % 7 == 3 {
                self.lost.push(used.hold);
            }
        }
    }

    /// Picks a hold that can pass, and passes it.
    fn pass_hold(&mut self, which: usize) -> Option<HoldId> {
        let can_pass: Vec<HoldId> =
            self.holding.iter().copied().filter(|hold| !self.lost.contains(hold)).collect();
        let hold = *can_pass.get(which % can_pass.len().max(1))?;
        self.holding.retain(|other| *other != hold);
        Some(hold)
    }
}

impl Others {
    /// Returns whether any pending use of the block is left.
    fn is_pending(&self, holding: &[HoldId]) -> bool {
        self.unknown || self.holds.iter().chain(&self.uses).any(|hold| holding.contains(hold))
    }
}

/// State that an abort must leave unchanged.
fn picture(core: &mut Allocator) -> (Vec<glake_stitch::Segment>, glake_stitch::Stats) {
    let mut segments = core.report().segments();
    segments.sort_by_key(|segment| segment.offset);
    for segment in &mut segments {
        // An abort need not preserve the division of free bytes (a slab kept open, pieces of two free lists).
        segment.blocks.dedup_by(|next, block| {
            let joined = !next.live && !block.live;
            if joined {
                block.size = Bytes::new(block.size.get() + next.size.get());
                block.stream = None;
            }
            joined
        });
        for block in segment.blocks.iter_mut().filter(|block| !block.live) {
            (block.stream, block.lent, block.pending, block.withheld) = (None, false, false, false);
        }
    }
    let mut stats = core.stats();
    stats.counters = Default::default();
    stats.waste = Default::default();
    (stats.inactive_small, stats.inactive_large) = Default::default();
    (segments, stats)
}

/// Compares the kept statistics with sums over all segments. The check that follows compares those of each free list, which are all up to date
/// then.
fn check_kept(core: &mut Allocator) {
    let stats = core.stats();
    let segments = core.report().segments();
    let blocks = || segments.iter().flat_map(|segment| &segment.blocks);
    let live: u64 = blocks().filter(|block| block.live).map(|block| block.size.get()).sum();
    let requested: u64 = blocks().filter(|block| block.live).map(|block| block.requested.get()).sum();
    let withheld: u64 = blocks().filter(|block| block.withheld).map(|block| block.size.get()).sum();
    assert_eq!(stats.all.allocated_bytes.current, live);
    assert_eq!(stats.all.requested_bytes.current, requested);
    assert_eq!(stats.all.active_bytes.current, live + withheld);
    let count = blocks().filter(|block| block.live).count() as u64;
    assert_eq!(stats.all.allocation.current, count);
    for (pool, kind) in [(&stats.small_pool, SegmentKind::Slabs), (&stats.large_pool, SegmentKind::Home)] {
        let own = segments.iter().filter(|segment| segment.kind == kind);
        let (size, evicted) = own.fold((0, 0), |(size, evicted), segment| {
            (size + segment.size.get(), evicted + segment.evicted.get())
        });
        assert_eq!(pool.reserved_bytes.current, size - evicted, "{kind:?}");
    }
}

fn settings(borrow: Borrow) -> Settings {
    let mut settings = Settings::for_memory(Bytes::mib(256));
    settings.extent = Bytes::mib(8);
    settings.borrow = borrow;
    settings.max_mappings = 300;
    settings.idle_aliases = Bytes::mib(256);
    settings
}

fn run(borrow: Borrow, program: Vec<Op>) {
    let mut core = Allocator::new(settings(borrow)).expect("the settings are in range");
    let mut model = Model {
        open: PointNumber(1),
        edges: vec![0; STREAMS as usize],
        domains: vec![Allocator::default_domain()],
        ..Model::default()
    };
    for op in program {
        model.now += 1;
        match op {
            Op::Malloc { cells, stream, domain, abort, meanwhile } => {
                let domain = model.domains[domain % model.domains.len()];
                let request = Request { size: Bytes::new(cells * CELL), stream: StreamKey(stream), domain };
                let most = core.largest(domain, Bytes::MAX).expect("it exists");
                let before = model.blocks.len();
                malloc(&mut core, &mut model, &request, stream, abort, &meanwhile);
                let served = model.blocks.len() > before;
                assert!(
                    !meanwhile.is_empty() || !served || request.size <= most,
                    "more than {most} was served"
                );
            }
            Op::Free { which } => quick(&mut core, &mut model, &Quick::Free { which }),
            Op::Record { which, stream } => quick(&mut core, &mut model, &Quick::Record { which, stream }),
            Op::Hold { which } => quick(&mut core, &mut model, &Quick::Hold { which }),
            Op::PassHold { which } => quick(&mut core, &mut model, &Quick::PassHold { which }),
            Op::Close => quick(&mut core, &mut model, &Quick::Close),
            Op::Pass => quick(&mut core, &mut model, &Quick::Pass),
            Op::Trim { keep, abort, meanwhile } => {
                let plan = core.plan_trim(Bytes::new(keep * CELL));
                finish(&mut core, &mut model, plan, abort, &meanwhile);
            }
            Op::TrimDomain { which } => {
                let domain = model.any_domain(which);
                let kept = model.owners.kept.remove(&domain);
                if let Some(checkpoint) = &mut model.checkpoint {
                    checkpoint.owned &= checkpoint.domain != domain;
                }
                let plan = core.plan_trim_domain(domain);
                finish(&mut core, &mut model, plan, false, &[]);
                model.owners.kept.extend(kept.then_some(domain));
            }
            Op::Claim { at, cells, stream, again } => claim(&mut core, &mut model, at, cells, stream, again),
            Op::Checkpoint { which } => {
                let domain = model.any_domain(which);
                let owned = model.owners.private.contains(&domain);
                match core.checkpoint(domain) {
                    Ok(claims) => model.checkpoint = Some(Checkpoint { domain, claims, owned }),
                    Err(error) => assert!(!owned, "{error}"),
                }
            }
            Op::Restore => restore(&mut core, &mut model),
            Op::Collect => {
                let plan = core.plan_due_collection();
                finish(&mut core, &mut model, plan, false, &[]);
            }
            Op::Limit { quarters } => core.set_limit(Bytes::mib(64 * quarters)),
            Op::AddDomain { alias, lend, keep, plain } if model.domains.len() < 4 => {
                let domain = core.add_domain(DomainOptions {
                    alias: alias && !plain,
                    lend,
                    keep,
                    extent: None,
                    plain,
                });
                assert!(
                    !model.owners.released.contains_key(&domain),
                    "a number that names something is never used again"
                );
                model.domains.push(domain);
                if keep {
                    model.owners.kept.insert(domain);
                }
                if plain {
                    model.owners.plain.insert(domain);
                }
                if keep && (!alias || plain) && !lend {
                    model.owners.private.insert(domain);
                }
            }
            Op::ReleaseDomain { which } => quick(&mut core, &mut model, &Quick::Release { which }),
            Op::Seal { which, sealed } => {
                core.seal_domain(model.any_domain(which), sealed);
            }
            Op::Leave { which } => {
                let domain = model.any_domain(which);
                begin_evict(&mut core, &mut model, domain, which);
            }
            Op::Left { which } => finish_evict(&mut core, &mut model, which),
            Op::Enter { which, made } => begin_refill(&mut core, &mut model, which, made),
            Op::CameBack { which } => {
                if let Some(extent) = model.nth_elsewhere(which, true) {
                    core.evictions().finish_refill(extent).expect("it moves");
                    model.elsewhere.remove(&extent);
                }
            }
            _ => {}
        }
        emptied(&mut core, &model);
        if model.now.is_multiple_of(3) {
            check_kept(&mut core);
        }
        core.check().unwrap_or_else(|broken| panic!("{broken}"));
        let here = model.extents.iter().filter(|(extent, _)| model.elsewhere.get(extent) != Some(&false));
        let held: u64 = here.map(|(_, (_, cells))| cells.len() as u64 * CELL).sum();
        assert_eq!(core.reserved_bytes().get(), held, "reserved counts every physical byte");
        if model.now.is_multiple_of(8) {
            finds(&core, &model);
        }
    }
    end(core, model);
}

/// Checks the extents that are not resident and lost their last live block; called after each free.
fn emptied(core: &mut Allocator, model: &Model) {
    for extent in core.take_emptied() {
        let (domain, cells) = &model.extents[&extent];
        assert!(cells.iter().all(|cell| !cell.live), "something in it is live");
        assert!(!model.owners.private.contains(domain), "a graph's bytes count, live or not");
    }
}

/// Executes an operation that needs no driver.
fn quick(core: &mut Allocator, model: &mut Model, quick: &Quick) {
    match *quick {
        Quick::Hit { cells, stream, domain } => {
            let domain = model.domains[domain % model.domains.len()];
            let request = Request { size: Bytes::new(cells * CELL), stream: StreamKey(stream), domain };
            if let Some(grant) = core.take(&request) {
                model.take(grant, stream, domain);
            }
        }
        Quick::Free { which } if !model.blocks.is_empty() => {
            let grant = model.free(which % model.blocks.len());
            assert_eq!(core.free(grant.offset), Ok(grant.size));
            assert!(core.free(grant.offset).is_err(), "a double free is refused");
            let mut uses = core.take_uses().into_iter();
            model.end_uses(&mut uses);
            assert_eq!(uses.next(), None);
            emptied(core, model);
        }
        Quick::Record { which, stream } if !model.blocks.is_empty() => {
            let index = which % model.blocks.len();
            let block = &mut model.blocks[index];
            if block.stream != stream && !block.others.recorded.contains(&stream) {
                block.others.recorded.push(stream);
            }
            assert!(core.record_stream(block.grant.offset, StreamKey(stream)));
        }
        Quick::Hold { which } if !model.blocks.is_empty() => {
            let index = which % model.blocks.len();
            let offset = model.blocks[index].grant.offset;
            let generation = core.generation(offset).expect("it is live");
            assert_eq!(core.hold(offset, generation + 1), None, "another block's");
            let hold = core.hold(offset, generation).expect("it is live");
            model.blocks[index].others.holds.push(hold);
            model.holding.push(hold);
        }
        Quick::PassHold { which } => {
            if let Some(hold) = model.pass_hold(which) {
                core.pass_hold(hold);
            }
        }
        Quick::Close => {
            model.open = PointNumber(core.close_point().0 + 1);
        }
        Quick::Pass => {
            let next = PointNumber(model.passed.0 + 1);
            if next < model.open {
                model.passed = next;
                core.pass_point(next);
            }
        }
        Quick::Release { which } if model.domains.len() > 1 => {
            let domain = model.domains.remove(1 + which % (model.domains.len() - 1));
            core.release_domain(domain).expect("it exists");
            let kept = model.owners.kept.remove(&domain);
            model.owners.released.insert(domain, kept.then_some(model.open));
            model.given_up = Some(model.open);
            model.owners.private.remove(&domain);
            model.checkpoint.take_if(|checkpoint| checkpoint.domain == domain);
            assert!(core.release_domain(domain).is_err());
        }
        Quick::Free { .. } | Quick::Record { .. } | Quick::Hold { .. } | Quick::Release { .. } => {}
    }
}

fn malloc(
    core: &mut Allocator,
    model: &mut Model,
    request: &Request,
    stream: u64,
    abort: bool,
    meanwhile: &[Quick],
) {
    if let Some(grant) = core.take(request) {
        return model.take(grant, stream, request.domain);
    }
    loop {
        let before = picture(core);
        match core.plan(request, true) {
            Ok(Outcome::Ready(grant)) => return model.take(grant, stream, request.domain),
            Ok(Outcome::Work(plan)) if abort => {
                meanwhile.iter().for_each(|step| quick(core, model, step));
                core.abort(plan.id);
                assert!(
                    !meanwhile.is_empty() || picture(core) == before,
                    "an abort leaves everything as it was"
                );
                return;
            }
            Ok(Outcome::Work(plan)) => {
                let then = model.owners.clone();
                meanwhile.iter().for_each(|step| quick(core, model, step));
                model.execute(&plan, &then);
                if let Some(grant) = core.commit(plan.id) {
                    return model.take(grant, stream, request.domain);
                }
            }
            Ok(Outcome::Wait(point)) => {
                while point >= model.open {
                    model.open = PointNumber(core.close_point().0 + 1);
                }
                model.passed = point;
                core.pass_point(point);
            }
            Err(StitchError::OutOfMemory { .. } | StitchError::LargerThanDevice { .. }) => return,
            Err(StitchError::Sealed { .. }) => return,
            Err(StitchError::UnknownDomain { domain }) if model.owners.released.contains_key(&domain) => {
                return;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// Claims a freed block, or some mapped cells.
fn claim(core: &mut Allocator, model: &mut Model, at: usize, cells: u64, stream: u64, again: bool) {
    let (offset, requested, stream) = if again && !model.gone.is_empty() {
        model.gone[at % model.gone.len()]
    } else if let Some(&address) = model.mapped.keys().nth(at % model.mapped.len().max(1)) {
        (Bytes::new(address), Bytes::new(cells * CELL), stream)
    } else {
        return;
    };
    let cells = model.claimable(offset, requested);
    let owner = cells.as_ref().and_then(|cells| model.extents.get(&cells[0].0)).map(|(domain, _)| *domain);
    let domain = owner.unwrap_or(Allocator::default_domain());
    let claim = Claim { offset, size: requested, requested, stream: StreamKey(stream), slab: None };
    let before = (core.report().segments(), core.blocks().count());
    match core.claim(domain, &claim) {
        Ok(()) => {
            assert!(cells.is_some(), "claimed what is not free");
            model.claim(offset, requested, stream);
        }
        Err(StitchError::NotClaimable { obstacle, .. }) => {
            assert_eq!(
                (core.report().segments(), core.blocks().count()),
                before,
                "a refusal changes nothing"
            );
            let large = requested > SMALL_LIMIT && offset.get() < 2 * core.settings().memory.get();
            assert!(cells.is_none() || !large, "{obstacle}, and yet all of it is free");
        }
        Err(StitchError::UnknownDomain { .. } | StitchError::Evicted { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

fn restore(core: &mut Allocator, model: &mut Model) {
    let Some(Checkpoint { domain, claims, owned }) = model.checkpoint.take() else { return };
    let before = core.blocks().of(domain);
    match core.restore(&[(domain, &claims)]) {
        Ok(restored) => {
            assert_eq!(restored.freed, before);
            let stays = |claim: &Claim, block: &LiveBlock| {
                (claim.offset, claim.requested, claim.stream) == (block.offset, block.requested, block.stream)
            };
            let gone: Vec<Bytes> = before
                .iter()
                .filter(|block| !claims.iter().any(|claim| stays(claim, block)))
                .map(|block| block.offset)
                .collect();
            let mut freed = model.blocks.iter().filter(|block| gone.contains(&block.grant.offset));
            // The core may know no uses of claimed blocks: then uses cannot be matched to blocks, and none passes.
            let told = !freed.any(|block| block.others.claimed && !block.others.recorded.is_empty());
            let mut uses = core.take_uses().into_iter();
            for offset in gone {
                let index = model.blocks.iter().position(|known| known.grant.offset == offset);
                model.free(index.expect("what was freed was live"));
                if told {
                    model.end_uses(&mut uses);
                } else {
                    let others = model.frees.last_mut().expect("one was freed");
                    others.unknown |= !others.recorded.is_empty();
                }
            }
            assert!(!told || uses.next().is_none());
            for block in restored.claimed.iter().filter(|block| !before.contains(block)) {
                model.claim(block.offset, block.size, block.stream.0);
            }
            let told: Vec<_> = restored.claimed.iter().map(|block| (block.offset, block.requested)).collect();
            let then: Vec<_> = claims.iter().map(|claim| (claim.offset, claim.requested)).collect();
            assert_eq!(told, then, "what was live then is live now");
        }
        Err(StitchError::Evicted { .. }) => assert_eq!(core.blocks().of(domain), before),
        Err(error) => {
            assert!(!owned, "the domain still has its memory: {error}");
            assert_eq!(core.blocks().of(domain), before, "a failure leaves what was live");
            core.take_uses();
            model.blocks.iter_mut().for_each(|block| block.others.claimed = true);
            model.given_up = Some(model.open);
        }
    }
}

/// Checks the core's answers about live blocks, queried by any of their bytes and by their domain.
fn finds(core: &Allocator, model: &Model) {
    for block in &model.blocks {
        let (start, size) = (block.grant.offset.get(), block.grant.size.get());
        for at in [start, start + size / 3, start + size - 1] {
            let found = core.blocks().find(Bytes::new(at)).expect("a live block is found by its bytes");
            assert_eq!((found.offset, found.size), (block.grant.offset, block.grant.size));
            assert_eq!(found.stream, StreamKey(block.stream));
        }
        let around = [start.checked_sub(1), Some(start + size)].into_iter().flatten();
        for found in around.filter_map(|at| core.blocks().find(Bytes::new(at))) {
            assert!(found.offset != block.grant.offset, "a block ends where it ends");
        }
    }
    let mut free = model.mapped.keys().filter(|&&at| !model.is_live(at));
    assert!(free.all(|&at| core.blocks().find(Bytes::new(at)).is_none()), "a block where none is live");
    for &domain in &model.domains {
        let told: Vec<Bytes> = core.blocks().of(domain).iter().map(|block| block.offset).collect();
        let owner = |block: &&Block| model.extents[&block.cells[0].0].0 == domain;
        let mut known: Vec<Bytes> =
            model.blocks.iter().filter(owner).map(|block| block.grant.offset).collect();
        known.sort();
        assert_eq!(told, known, "the blocks of a domain");
    }
}

/// Begins the eviction of an extent of a domain.
fn begin_evict(core: &mut Allocator, model: &mut Model, domain: DomainId, which: usize) {
    let extents = core.extents().of(domain);
    let Some(view) = extents.get(which % extents.len().max(1)) else { return };
    let cells = &model.extents[&view.extent].1;
    let before = picture(core);
    match core.evictions().begin(view.extent) {
        Ok(()) => {
            assert_eq!(view.state, ExtentState::Resident);
            let live = |cell: &u64| cells[(cell / CELL) as usize].live;
            let (at, size) = (view.offset.get(), view.size.get());
            let kept = core.extents().kept_ranges(view.extent);
            let is_kept = |cell: u64| {
                kept.iter().any(|range| {
                    (range.offset.get()..(range.offset.get() + range.size.get())).contains(&(at + cell))
                })
            };
            let all = model.owners.private.contains(&domain);
            for cell in (0..size).step_by(CELL as usize) {
                assert_eq!(is_kept(cell), all || live(&cell), "live bytes are kept, and no others");
            }
            model.elsewhere.insert(view.extent, true);
        }
        Err(StitchError::WrongExtentState { .. }) => assert_ne!(view.state, ExtentState::Resident),
        Err(StitchError::Withheld { .. }) => {
            let mut used = cells.iter().filter_map(|cell| cell.last);
            // A failed restore has freed blocks and claimed them again: memory beside them waits for one more completion point. So
            // does memory of a released domain that other streams used.
            let given_up = model.given_up.is_some_and(|point| point > model.passed);
            let is_used = used.any(|last| last.point > model.passed);
            assert!(is_used || given_up, "nothing in it is used any more");
            assert_eq!(picture(core), before, "a refusal changes nothing");
        }
        Err(error) => panic!("{error}"),
    }
}

/// Unmaps a moving extent everywhere and releases it once all work on it is done.
fn finish_evict(core: &mut Allocator, model: &mut Model, which: usize) {
    let Some(extent) = model.nth_elsewhere(which, true) else { return };
    let mut told = core.extents().addresses_of(extent);
    let of_extent = |(address, found): (&u64, &(ExtentId, u64, bool))| {
        (found.0 == extent && found.1 == 0).then_some(Bytes::new(*address))
    };
    let known: Vec<Bytes> = model.mapped.iter().filter_map(of_extent).collect();
    told.sort();
    assert_eq!(told, known, "all addresses of an extent");
    core.evictions().finish(extent).expect("it moves");
    assert!(core.evictions().finish(extent).is_err());
    model.mapped.retain(|_, found| found.0 != extent);
    for cell in &mut model.extents.get_mut(&extent).expect("it is known").1 {
        cell.last = None;
    }
    model.elsewhere.insert(extent, false);
}

/// Refills an evicted extent at its addresses, if the limit and the driver allow it.
fn begin_refill(core: &mut Allocator, model: &mut Model, which: usize, made: bool) {
    let Some(extent) = model.nth_elsewhere(which, false) else { return };
    let size = model.extents[&extent].1.len() as u64 * CELL;
    match core.evictions().begin_refill(extent) {
        Ok(()) => core.evictions().refill_made(extent, made),
        Err(StitchError::OutOfMemory { .. }) => {
            let limit = core.settings().limit.get();
            return assert!(core.reserved_bytes().get() + size > limit);
        }
        Err(error) => panic!("{error}"),
    }
    if !made {
        return;
    }
    for address in core.extents().addresses_of(extent) {
        for cell in 0..size / CELL {
            let before = model.mapped.insert(address.get() + cell * CELL, (extent, cell, true));
            assert!(before.is_none(), "its addresses stayed its own");
        }
    }
    model.elsewhere.insert(extent, true);
}

fn finish(core: &mut Allocator, model: &mut Model, plan: Option<Plan>, abort: bool, meanwhile: &[Quick]) {
    let Some(plan) = plan else { return };
    let then = model.owners.clone();
    meanwhile.iter().for_each(|step| quick(core, model, step));
    if abort {
        core.abort(plan.id);
    } else {
        model.execute(&plan, &then);
        assert_eq!(core.commit(plan.id), None);
    }
}

/// Frees everything, passes all points and trims: every gauge is at zero.
fn end(mut core: Allocator, mut model: Model) {
    while !model.blocks.is_empty() {
        let grant = model.free(0);
        core.free(grant.offset).expect("it is live");
    }
    while model.domains.len() > 1 {
        quick(&mut core, &mut model, &Quick::Release { which: 0 });
    }
    while let Some(extent) = model.nth_elsewhere(0, true) {
        core.evictions().finish_refill(extent).expect("it moves");
        model.elsewhere.remove(&extent);
    }
    let last = core.close_point();
    model.passed = last;
    core.pass_point(last);
    while let Some(plan) = core.plan_trim(Bytes::ZERO) {
        finish(&mut core, &mut model, Some(plan), false, &[]);
    }
    let plan = core.plan_collection(Bytes::ZERO);
    finish(&mut core, &mut model, plan, false, &[]);
    core.check().unwrap_or_else(|broken| panic!("{broken}"));
    assert_eq!(core.held_bytes(), Bytes::ZERO, "a completion point is behind every hold");
    let stats = core.stats();
    for pool in [stats.all, stats.small_pool, stats.large_pool] {
        for gauge in [
            pool.allocation,
            pool.allocated_bytes,
            pool.requested_bytes,
            pool.active,
            pool.active_bytes,
            pool.extents,
            pool.reserved_bytes,
        ] {
            assert_eq!(gauge.current, 0, "a gauge is left: {stats:?}");
        }
    }
    assert_eq!((stats.mappings, stats.alias_bytes), (0, Bytes::ZERO));
    assert!(model.extents.is_empty() && model.mapped.is_empty(), "nothing is leaked");
    assert!(core.report().segments().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 4000, ..ProptestConfig::default() })]

    #[test]
    fn completed(program in prop::collection::vec(op(), 1..400)) {
        run(Borrow::Completed, program);
    }

    #[test]
    fn off(program in prop::collection::vec(op(), 1..300)) {
        run(Borrow::Off, program);
    }

    #[test]
    fn wait(program in prop::collection::vec(op(), 1..400)) {
        run(Borrow::Wait, program);
    }
}

/// A thousand cycles of growth and trimming, each too large to fit beside the previous one in the device's memory, stay inside the
/// reservation: offsets are reused.
#[test]
fn growth_and_trimming_stay_inside_the_reservation() {
    let mut core = Allocator::new(settings(Borrow::Completed)).expect("the settings are in range");
    let mut model = Model { open: PointNumber(1), edges: vec![0; STREAMS as usize], ..Model::default() };
    let domain = Allocator::default_domain();
    let mut offsets = HashSet::new();
    for cycle in 0..1000u64 {
        for index in 0..6 {
            let size = Bytes::mib(3 + (cycle * 7 + index * 11) % 50);
            malloc(
                &mut core,
                &mut model,
                &Request { size, stream: StreamKey(index % 2), domain },
                index % 2,
                false,
                &[],
            );
        }
        for keep in [4, 2, 0] {
            while model.blocks.len() > keep {
                let grant = model.free(0);
                offsets.insert(grant.offset);
                core.free(grant.offset).expect("it is live");
            }
            malloc(
                &mut core,
                &mut model,
                &Request { size: Bytes::mib(90), stream: StreamKey(0), domain },
                0,
                false,
                &[],
            );
        }
        while !model.blocks.is_empty() {
            let grant = model.free(0);
            core.free(grant.offset).expect("it is live");
        }
        model.open = PointNumber(core.close_point().0 + 1);
        model.passed = PointNumber(model.open.0 - 1);
        core.pass_point(model.passed);
        let plan = core.plan_trim(Bytes::ZERO);
        finish(&mut core, &mut model, plan, false, &[]);
        core.check().unwrap_or_else(|broken| panic!("{broken}"));
        assert_eq!(core.reserved_bytes(), Bytes::ZERO);
    }
    assert!(offsets.iter().all(|&offset| offset < core.address_space()));
}

/// The domain, a graph's pool, is released while the driver executes the trim, which then fails.
#[test]
fn an_alias_whose_trim_fails_waits_for_the_release_of_its_domain() {
    use Op::*;
    let m = |cells, stream, domain| Malloc { cells, stream, domain, abort: false, meanwhile: vec![] };
    let program = vec![
        Limit { quarters: 1 },
        AddDomain { alias: true, lend: true, keep: true, plain: false },
        m(33, 0, 1),
        Free { which: 0 },
        Free { which: 0 },
        m(1, 0, 0),
        Limit { quarters: 3 },
        m(322, 1, 1),
        Free { which: 583452518128013244 },
        Close,
        Malloc { cells: 33, stream: 0, domain: 2, abort: false, meanwhile: vec![Quick::Pass] },
        m(831, 0, 1),
        m(257, 1, 0),
        m(353, 2, 0),
        AddDomain { alias: false, lend: false, keep: false, plain: false },
        AddDomain { alias: false, lend: false, keep: false, plain: false },
        m(1, 0, 0),
        Free { which: 0 },
        m(865, 3, 0),
        Leave { which: 3989112740458461385 },
        Free { which: 3429782359287743094 },
        Free { which: 13504791183771450057 },
        m(225, 0, 2),
        Left { which: 0 },
        Trim { keep: 0, abort: true, meanwhile: vec![Quick::Release { which: 1379890016246487552 }] },
        m(33, 0, 2),
    ];
    run(Borrow::Completed, program);
}
