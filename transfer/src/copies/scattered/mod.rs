//! Lists of many small blocks between pinned memory and GPUs, copied by kernels of every GPU that can access both.
//!
//! ```text
//!   list    ▌▌▌▌▌▌▌▌▌▌▌▌▌▌▌▌▌▌▌▌▌...
//!   user's stream ──┤mark├── own turns ──────────┤join├──
//!                       ├─► lane of relay 1 ── its turns ──┤     a turn: one launch over a list in pinned memory
//!                       └─► lane of relay 2 ── its turns ──┘
//! ```
//!
//! A native copy takes 3.5 us per block, however small; a kernel copies one block per warp. Blocks of 1 MiB and more are left to the copy
//! engines and distributed over the lanes.
//!
//! Invariants:
//! - Every piece is enqueued once without an error, or the call returns one.
//! - No call waits for a list that is in use: if none is free, the rest is copied natively.

mod list;

use std::sync::Arc;

use glake_device::owned::{Blocks, DeviceSet, Gather, OwnedStream, Side, StreamRef};
use glake_device::{DeviceId, DriverError, PointerKind};
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::copies::fork::Fork;
use crate::copies::handle::Parts;
use crate::copies::resources::KernelSet;
use crate::copies::scattered::list::{Dealer, Group, PIECE, Pieces, Place, groups};
use crate::copies::shared::{Route, Shared};
use crate::links::lane_set::LaneSetState;
use crate::links::ledger::Path;
use crate::paths::{Ask, Direction, Shares, Way, split};
use crate::{CopyHandle, CopyOptions, Priority, Result, TransferError, UserStream};

/// Minimum number of blocks for the engine; fewer are left to the driver.
const FEW: u64 = 64;
const SMALL: Bytes = Bytes::mib(1);
/// Block size from which evenly dealt single copies keep a link busy.
const LARGE: Bytes = Bytes::mib(1);
/// Number of pieces that large blocks are dealt in: some for each link, so that shares are exact. Each costs one call on the host.
const PIECES: u64 = 16;

/// Lists on a stream of the program.
#[derive(Clone, Copy)]
struct List<'a> {
    kernels: &'a KernelSet,
    blocks: &'a [Blocks<'a>],
    on: UserStream,
    priority: Priority,
}

/// Group that several GPUs or kernels copy.
#[derive(Clone, Copy)]
struct Spread<'a> {
    group: &'a Group,
    target: DeviceId,
    direction: Direction,
    /// Maximum size of a piece.
    most: Bytes,
    /// Whether kernels copy it, rather than copy engines.
    by_kernels: bool,
}

/// GPU that takes turns.
struct Taker<'a> {
    path: Path,
    size: Bytes,
    /// Whether its part is enqueued on the user's own stream.
    own: bool,
    /// Kernels and the stream to launch them on, if kernels copy.
    kernels: Option<(&'a Gather, StreamRef<'a>)>,
    carried: Bytes,
    launches: u64,
}

/// Turn of a taker: `pieces` pieces from a position on.
struct Turn {
    relay: DeviceId,
    place: Place,
    pieces: usize,
}

/// Outcome of dealing out a group.
#[derive(Default)]
struct Turns {
    taken: Vec<Turn>,
    /// Turns that were not enqueued.
    left: Vec<Turn>,
    /// Position from which no taker took pieces.
    rest: Option<Place>,
}

/// List copies of one engine.
#[derive(Debug)]
pub(crate) struct ScatteredCopies {
    pub(crate) shared: Arc<Shared>,
}

impl ScatteredCopies {
    /// Enqueues all lists as one copy.
    ///
    /// # Errors
    /// As [`crate::Engine::copy_blocks`].
    pub(crate) fn copy(
        &self,
        blocks: &[Blocks<'_>],
        on: UserStream,
        options: CopyOptions,
    ) -> Result<CopyHandle> {
        let groups = groups(blocks);
        self.shared.links.begin_copy(on)?;
        let _call = self.shared.traffic.urgent_call(options.priority);
        let kernels = &*self.shared.resources.kernels.now();
        let list = List { kernels, blocks, on, priority: options.priority };
        let mut spreads: SmallVec<[Spread<'_>; 2]> =
            groups.iter().filter_map(|group| self.spread_of(kernels, group)).collect();
        // A graph would outlive the lists that kernels read; and an answer that says nothing is no permission.
        if !spreads.is_empty() && !self.shared.contexts.is_plain(on) {
            spreads.clear();
        }
        let parts = self.enqueue_groups(list, &groups, &spreads);
        let ends = blocks.iter().flat_map(|block| [block.to().kind, block.from().kind]);
        let parts = self.shared.covered(parts, ends.filter_map(PointerKind::device).collect(), on)?;
        self.shared.handle(on, options, parts)
    }

    /// Enqueues groups, spread over links where planned. Returns the parts of the spread ones.
    fn enqueue_groups(
        &self,
        list: List<'_>,
        groups: &[Group],
        spreads: &[Spread<'_>],
    ) -> Result<Option<Parts>> {
        let parts = match spreads.is_empty() {
            true => None,
            false => self.scatter(list, spreads)?,
        };
        let is_spread = |group: &&Group| spreads.iter().any(|spread| spread.group.route == group.route);
        for group in groups.iter().filter(|group| !is_spread(group)) {
            self.native_list(list, group.route, Place::default(), usize::MAX, Bytes::MAX)?;
        }
        Ok(parts)
    }

    /// Plans how a group is spread; `None` if the driver is the better choice.
    fn spread_of<'a>(&self, kernels: &KernelSet, group: &'a Group) -> Option<Spread<'a>> {
        let Route { target, direction, .. } = group.route?;
        let mean = Bytes::new(group.size.get() / group.blocks.max(1));
        if group.size < SMALL || (group.blocks < FEW && mean < LARGE) {
            return None;
        }
        let mapped =
            |end: &Side| matches!(end.kind, PointerKind::Pinned | PointerKind::Device { mapped: true, .. });
        if mean >= LARGE && group.ends.iter().all(mapped) {
            let most = Bytes::new(group.size.get() / PIECES).max(LARGE);
            return Some(Spread { group, target, direction, most, by_kernels: false });
        }
        if kernels.target(target).is_none() {
            self.shared.resources.want(target);
            return None;
        }
        let reached =
            group.ends.iter().all(|end| kernels.target(target).is_some_and(|own| own.reaches(*end)));
        reached.then_some(Spread { group, target, direction, most: PIECE, by_kernels: true })
    }

    /// Copies groups over the lanes of their stream. Returns no parts if all of it took the user's own stream.
    fn scatter(&self, list: List<'_>, spreads: &[Spread<'_>]) -> Result<Option<Parts>> {
        let leased = self.shared.links.with(list.on.id, |lane_set, state| {
            state.withdraw();
            // One mark for all, so that they run side by side.
            let Ok(Some(mark)) = Fork::mark(lane_set, list.on) else {
                self.shared.links.want_fork_event(list.on.device);
                return Ok::<_, TransferError>(None);
            };
            let mut parts: Option<Parts> = None;
            for spread in spreads {
                let shares = self.shares(list.kernels, *spread, state);
                if shares.iter().all(|share| share.relay == list.on.device) {
                    self.scatter_alone(list, *spread)?;
                    continue;
                }
                let mut fork = Fork::begin(&self.shared, lane_set, state, list.on, Some(mark));
                let links = self.shared.routes.most_links();
                let turn =
                    self.shared.traffic.prioritize(list.priority, spread.direction, spread.group.size, links);
                let spread = Spread { most: spread.most.min(turn.slice()), ..*spread };
                fork.take(turn, shares.iter().map(|share| share.relay));
                fork.poll();
                let (used, serial) = self.scatter_over(fork, list, spread, &shares)?;
                let used = parts.map_or(used, |parts| parts.used.union(used));
                parts = Some(Parts {
                    relays: self.shared.links.relays().clone(),
                    lane_set: Arc::downgrade(lane_set),
                    used,
                    serial,
                    shares: None,
                });
            }
            Ok(Some(parts))
        });
        match leased.transpose()?.flatten() {
            Some(parts) => {
                self.shared.links.relays().tell()?;
                Ok(parts)
            }
            None => {
                spreads.iter().try_for_each(|spread| self.scatter_alone(list, *spread))?;
                Ok(None)
            }
        }
    }

    /// Returns the share of each GPU.
    fn shares(&self, kernels: &KernelSet, spread: Spread<'_>, state: &LaneSetState) -> Shares {
        let Spread { group, target, direction, by_kernels, .. } = spread;
        let reach = match by_kernels {
            true => kernels.relays_reaching(group.ends.iter().copied()),
            false => group.reach(),
        };
        let reach = reach.intersection(self.shared.links.relays().usable()).without(state.broken());
        let reach = reach.without(DeviceSet::of(target));
        // Kernels need no buffer, whatever the memory.
        let staged = if by_kernels { reach } else { DeviceSet::EMPTY };
        let load = &self.shared.ledger.load;
        split(
            &self.shared.routes.graph(),
            &Ask { target, direction, size: group.size, zero_staging: reach, staged, load, expected: 0 },
        )
    }

    /// Copies a group behind its fork. Returns the lanes with work of it, and the copy's serial number in the lane set.
    fn scatter_over(
        &self,
        mut fork: Fork<'_>,
        list: List<'_>,
        spread: Spread<'_>,
        shares: &Shares,
    ) -> Result<(DeviceSet, u64)> {
        let Spread { group, target, direction, .. } = spread;
        let mut takers: SmallVec<[Taker<'_>; 8]> = SmallVec::new();
        let mut refused = Bytes::ZERO;
        for share in shares {
            let path = Path { target, relay: share.relay, direction, way: share.way };
            let own = share.way == Way::Direct && target == list.on.device;
            let (gather, stream) = match own {
                true => (list.kernels.target(target), Some(self.shared.native.stream(list.on))),
                false => (list.kernels.relay(share.relay), fork.stream(share.relay).map(OwnedStream::of)),
            };
            let kernels = gather.filter(|_| spread.by_kernels).zip(stream);
            if stream.is_some() && kernels.is_some() == spread.by_kernels {
                let (carried, launches) = (Bytes::ZERO, 0);
                takers.push(Taker { path, size: share.size, own, kernels, carried, launches });
            } else {
                refused = refused.saturating_add(share.size);
            }
        }
        if let Some(first) = takers.first_mut() {
            first.size = first.size.saturating_add(refused);
        }
        let turns = self.deal(list, spread, &mut takers, Some(&mut fork));
        // Elsewhere the barrier of the stream's own link is that of a lane, which opens it.
        if takers.iter().any(|taker| taker.own) {
            fork.end_own_turn();
        }
        for taker in takers.iter().filter(|taker| taker.launches > 0) {
            match taker.own {
                true => self.shared.ledger.counters.sent(taker.path, taker.carried, taker.launches),
                false => fork.sent(taker.path, taker.carried, taker.launches),
            }
        }
        let (used, serial) = (fork.forked(), fork.state.serial);
        let dead = fork.join()?;
        let lost = turns.taken.iter().filter(|turn| dead.contains(turn.relay));
        for turn in turns.left.iter().chain(lost) {
            let way = if turn.relay == target { Way::Direct } else { Way::ZeroStaging };
            self.shared.ledger.counters.retried(Path { target, relay: turn.relay, direction, way });
            self.native_list(list, group.route, turn.place, turn.pieces, spread.most)?;
        }
        if let Some(place) = turns.rest {
            self.native_list(list, group.route, place, usize::MAX, Bytes::MAX)?;
        }
        self.shared.ledger.counters.split();
        tracing::debug!(
            target: "glake::transfer",
            size = %group.size, blocks = group.blocks, %target, ?direction, paths = takers.len(),
            "a list of blocks over several links"
        );
        Ok((used.without(dead), serial))
    }

    /// Copies a group by its own GPU's kernels on the user's stream, or by the driver if that is another GPU's stream.
    fn scatter_alone(&self, list: List<'_>, spread: Spread<'_>) -> Result<()> {
        let Spread { group, target, direction, .. } = spread;
        let kernels = list.kernels.target(target).filter(|_| spread.by_kernels && list.on.device == target);
        let Some(kernels) = kernels else {
            return self.native_list(list, group.route, Place::default(), usize::MAX, Bytes::MAX);
        };
        let path = Path { target, relay: target, direction, way: Way::Direct };
        let kernels = Some((kernels, self.shared.native.stream(list.on)));
        let (size, carried, launches) = (group.size, Bytes::ZERO, 0);
        let mut takers = [Taker { path, size, own: true, kernels, carried, launches }];
        let turns = self.deal(list, spread, &mut takers, None);
        self.shared.ledger.counters.sent(path, takers[0].carried, takers[0].launches);
        for turn in &turns.left {
            self.shared.ledger.counters.retried(path);
            self.native_list(list, group.route, turn.place, turn.pieces, PIECE)?;
        }
        turns.rest.map_or(Ok(()), |place| self.native_list(list, group.route, place, usize::MAX, PIECE))
    }

    /// Enqueues a group in turns.
    fn deal(
        &self,
        list: List<'_>,
        spread: Spread<'_>,
        takers: &mut [Taker<'_>],
        mut fork: Option<&mut Fork<'_>>,
    ) -> Turns {
        let mut turns = Turns::default();
        let mut dealer = Dealer::new(takers.iter().map(|taker| taker.size));
        let route = spread.group.route;
        let mut pieces = Pieces::new(list.blocks, route, spread.most, Place::default());
        while let Some(index) = dealer.turn() {
            let (place, taker) = (pieces.place, &mut takers[index]);
            let fork = fork.as_deref_mut();
            let (pieces, taken) = match taker.kernels {
                Some((gather, stream)) => launch(gather, stream, &mut pieces, &mut dealer, taker, fork),
                None => send(&mut pieces, spread.most, &mut dealer, taker, fork),
            };
            let turn = Turn { relay: taker.path.relay, place, pieces };
            match taken {
                true if pieces == 0 => return turns,
                true => turns.taken.push(turn),
                false => {
                    // The others share the rest.
                    turns.left.extend((pieces > 0).then_some(turn));
                    dealer.give_up();
                }
            }
            dealer.pass();
        }
        let place = pieces.place;
        turns.rest = pieces.next().map(|_| place);
        turns
    }

    /// Copies `pieces` pieces from a position on by the driver, on the user's stream.
    fn native_list(
        &self,
        list: List<'_>,
        route: Option<Route>,
        place: Place,
        pieces: usize,
        most: Bytes,
    ) -> Result<()> {
        self.shared.native.copy_pieces(Pieces::new(list.blocks, route, most, place).take(pieces), list.on)
    }
}

/// Runs a kernel turn: as many pieces as a list holds or the taker still gets. Returns their number and whether they were enqueued.
fn launch(
    gather: &Gather,
    stream: StreamRef<'_>,
    pieces: &mut Pieces<'_>,
    dealer: &mut Dealer,
    taker: &mut Taker<'_>,
    mut fork: Option<&mut Fork<'_>>,
) -> (usize, bool) {
    let is_turn = fork.as_deref_mut().is_none_or(|fork| match taker.own {
        true => fork.is_own_turn(),
        false => fork.is_turn(stream),
    });
    if !is_turn {
        return (0, false);
    }
    let mut blocks = match gather.list() {
        Ok(Some(blocks)) => blocks,
        Ok(None) => return (0, false),
        Err(error) => {
            blame(fork, taker, &error);
            return (0, false);
        }
    };
    let mut count = 0;
    for piece in pieces.by_ref() {
        count += 1;
        // The kernels reach all spans of the list: what is refused all the same goes another way.
        if blocks.push(&piece).is_err() {
            return (count, false);
        }
        if !dealer.deal(piece.size()) || blocks.is_full() {
            break;
        }
    }
    let size = blocks.size();
    if let Err(error) = gather.gather(stream.id(), blocks) {
        blame(fork, taker, &error);
        return (count, false);
    }
    taker.carried = taker.carried.saturating_add(size);
    taker.launches += u64::from(count > 0);
    (count, true)
}

/// Blames the lane of a taker for an error.
fn blame(fork: Option<&mut Fork<'_>>, taker: &Taker<'_>, error: &DriverError) {
    if let Some(fork) = fork.filter(|_| !taker.own) {
        fork.blame(taker.path.relay, error);
    }
}

/// Runs a copy engine's turn: one piece.
fn send(
    pieces: &mut Pieces<'_>,
    most: Bytes,
    dealer: &mut Dealer,
    taker: &Taker<'_>,
    fork: Option<&mut Fork<'_>>,
) -> (usize, bool) {
    let Some(piece) = pieces.next_of(dealer.most(most)) else { return (0, true) };
    dealer.deal(piece.size());
    let Some(fork) = fork else { return (1, false) };
    let sent = match taker.own {
        true => fork.send_own_piece(taker.path, &piece),
        false => fork.send_piece(taker.path, &piece),
    };
    (1, sent)
}
