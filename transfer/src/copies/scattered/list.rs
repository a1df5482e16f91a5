//! List of blocks as work for GPUs: grouped by GPU and direction, cut into pieces, and dealt out in turns. Pure.
//!
//! ```text
//!   blocks   ▌▌▌▌▌██▌▌▌▌▌▌▌▌▌▌▌▌▌▌▌...      a block above 64 KiB is several pieces
//!   turns    │  GPU 0 │  GPU 1 │  GPU 2 │  GPU 0 │ ...     as many as one launch takes; each GPU until its share is full
//! ```

use glake_device::owned::{Blocks, DeviceSet, Piece, Side};
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::copies::shared::Route;
use crate::paths::GRAIN;

/// All blocks of one route.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    /// Route between pinned memory and a GPU; `None` for all other blocks, which the driver copies.
    pub(crate) route: Option<Route>,
    /// Number of blocks.
    pub(crate) blocks: u64,
    /// Number of pieces.
    pub(crate) pieces: u64,
    pub(crate) size: Bytes,
    /// Every combination of registrations or reservations that occurs.
    pub(crate) ends: SmallVec<[Side; 2]>,
}

/// Position within the lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    list: usize,
    block: usize,
    offset: Bytes,
}

/// Bytes that one warp copies.
pub(crate) const PIECE: Bytes = Bytes::kib(64);

/// Returns a group for every route that occurs, in the order of its first block.
pub(crate) fn groups(lists: &[Blocks<'_>]) -> SmallVec<[Group; 2]> {
    let mut groups: SmallVec<[Group; 2]> = SmallVec::new();
    for list in lists {
        let (mut blocks, mut pieces, mut size) = (0, 0, Bytes::ZERO);
        for request in list.requests() {
            blocks += u64::from(!request.size.is_zero());
            pieces += request.size.get().div_ceil(PIECE.get());
            size = size.saturating_add(request.size);
        }
        if blocks == 0 {
            continue;
        }
        let route = route(list);
        let index = groups.iter().position(|group| group.route == route).unwrap_or_else(|| {
            let ends = SmallVec::new();
            groups.push(Group { route, blocks: 0, pieces: 0, size: Bytes::ZERO, ends });
            groups.len() - 1
        });
        let group = &mut groups[index];
        group.blocks += blocks;
        group.pieces += pieces;
        group.size = group.size.saturating_add(size);
        for end in [list.to(), list.from()] {
            if !group.ends.contains(&end) {
                group.ends.push(end);
            }
        }
    }
    groups
}

impl Group {
    /// Returns the devices whose streams can access all blocks.
    pub(crate) fn reach(&self) -> DeviceSet {
        self.ends.iter().fold(DeviceSet::ALL, |reach, end| reach.intersection(end.reach))
    }
}

/// Returns the route of a list; `None` if the driver copies its blocks.
fn route(list: &Blocks<'_>) -> Option<Route> {
    Route::pinned(list.to().kind, list.from().kind)
}

/// Iterator over the pieces of one route from a position on.
pub(crate) struct Pieces<'a> {
    lists: &'a [Blocks<'a>],
    route: Option<Route>,
    /// Maximum size of a piece.
    most: Bytes,
    pub(crate) place: Place,
    /// List at the position, if it is of the route.
    list: Option<&'a Blocks<'a>>,
}

impl<'a> Pieces<'a> {
    pub(crate) fn new(
        lists: &'a [Blocks<'a>],
        route: Option<Route>,
        most: Bytes,
        place: Place,
    ) -> Pieces<'a> {
        let mut pieces = Pieces { lists, route, most, place, list: None };
        pieces.open();
        pieces
    }

    /// Returns the next piece, at most `most` bytes.
    pub(crate) fn next_of(&mut self, most: Bytes) -> Option<Piece<'a>> {
        let usual = self.most;
        self.most = most.min(usual);
        let piece = self.next();
        self.most = usual;
        piece
    }

    fn open(&mut self) {
        self.list = self.lists.get(self.place.list).filter(|list| route(list) == self.route);
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = Piece<'a>;

    #[inline]
    fn next(&mut self) -> Option<Piece<'a>> {
        loop {
            let count = self.list.map_or(0, |list| list.requests().len());
            while let Some(list) = self.list.filter(|_| self.place.block < count) {
                if let Some(piece) = list.piece(self.place.block, self.place.offset, self.most) {
                    self.place.offset = self.place.offset.saturating_add(piece.size());
                    return Some(piece);
                }
                (self.place.block, self.place.offset) = (self.place.block + 1, Bytes::ZERO);
            }
            self.lists.get(self.place.list)?;
            self.place = Place { list: self.place.list + 1, ..Place::default() };
            self.open();
        }
    }
}

/// Deals pieces out to takers in turns.
#[derive(Debug)]
pub(crate) struct Dealer {
    /// Bytes that each taker may still get; `None` after it has dropped out.
    left: SmallVec<[Option<Bytes>; 8]>,
    turn: usize,
}

impl Dealer {
    pub(crate) fn new(shares: impl IntoIterator<Item = Bytes>) -> Dealer {
        Dealer { left: shares.into_iter().map(Some).collect(), turn: 0 }
    }

    /// Returns the taker whose turn it is; `None` if all have their shares.
    pub(crate) fn turn(&mut self) -> Option<usize> {
        let count = self.left.len();
        let gets = |at: &usize| self.left[*at].is_some_and(|left| !left.is_zero());
        self.turn = (0..count).map(|step| (self.turn + step) % count).find(gets)?;
        Some(self.turn)
    }

    /// Returns the maximum size of the next piece, for a usual maximum of `usual`. The share is met exactly, without a small last piece.
    pub(crate) fn most(&self, usual: Bytes) -> Bytes {
        let left = self.left.get(self.turn).copied().flatten().unwrap_or_default();
        let half = Bytes::new(left.get().div_ceil(2)).align_up(GRAIN).unwrap_or(left);
        if left > usual && half <= usual { half } else { left.min(usual) }
    }

    /// Deals `size` bytes to the current taker. Returns `false` if its share is complete.
    pub(crate) fn deal(&mut self, size: Bytes) -> bool {
        let Some(Some(left)) = self.left.get_mut(self.turn) else { return false };
        *left = left.saturating_sub(size);
        !left.is_zero()
    }

    /// Passes the turn to the next taker.
    pub(crate) fn pass(&mut self) {
        self.turn += 1;
    }

    /// Removes the current taker and distributes the rest of its share among the others.
    pub(crate) fn give_up(&mut self) {
        let rest = self.left.get_mut(self.turn).and_then(Option::take).unwrap_or_default();
        let others = self.left.iter().flatten().count() as u64;
        if others == 0 {
            return;
        }
        // Rounded up: each may get a byte more than there is.
        let each = Bytes::new(rest.get().div_ceil(others));
        for left in self.left.iter_mut().flatten() {
            *left = left.saturating_add(each);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use glake_device::owned::Span;
    use glake_device::{Address, CopyRequest, DeviceId};
    use glake_sim::{SimOptions, SimTopology, Simulator};
    use proptest::prelude::*;

    use super::*;

    /// Creates memory of 64 MiB on two GPUs, and pageable memory.
    fn spans() -> (Arc<Simulator>, [Span; 3]) {
        let topology = SimTopology::uniform(2, Bytes::mib(64));
        let sim = Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap());
        let [a, b] = [0, 1].map(|device| {
            let device = DeviceId(device);
            let start = sim.plain_alloc(device, Bytes::mib(64)).unwrap();
            sim.span(start, Bytes::mib(64), DeviceSet::of(device)).unwrap()
        });
        let host = sim.span(Address(1 << 20), Bytes::mib(64), DeviceSet::EMPTY).unwrap();
        (sim, [a, b, host])
    }

    #[test]
    fn blocks_are_grouped_by_what_they_are_between() {
        let (_sim, [a, b, host]) = spans();
        let block = |to: &Span, from: &Span, size: Bytes| {
            (to.part(Bytes::ZERO, size).unwrap(), from.part(Bytes::ZERO, size).unwrap())
        };
        let spans = [
            block(&a, &host, Bytes::kib(16)),
            block(&a, &b, Bytes::kib(65)),
            block(&a, &host, Bytes::ZERO),
            block(&b, &host, Bytes::mib(1)),
        ];
        let blocks = spans.each_ref().map(|(to, from)| Blocks::pair(to, from).unwrap());
        let found = groups(&blocks);
        // Pageable memory is the driver's to copy, as another GPU's is.
        assert_eq!(found.len(), 1);
        let Group { route, blocks: count, pieces, size, .. } = found[0];
        assert_eq!((route, count, pieces), (None, 3, 1 + 2 + 16));
        assert_eq!(size, Bytes::new((16 + 65 + 1024) << 10));
        let pieces = Pieces::new(&blocks, None, PIECE, Place::default());
        let sizes: Vec<u64> = pieces.map(|piece| piece.size().get() >> 10).collect();
        assert_eq!(sizes[..5], [16, 64, 1, 64, 64]);
        assert_eq!(sizes.len(), 19);
    }

    #[test]
    fn who_gives_up_leaves_its_share_to_the_others() {
        let mut dealer = Dealer::new([10, 20, 30].map(Bytes::new));
        assert_eq!(dealer.turn(), Some(0));
        assert!(dealer.deal(Bytes::new(4)));
        dealer.give_up();
        dealer.pass();
        assert_eq!(dealer.turn(), Some(1));
        assert!(dealer.deal(Bytes::new(22)) && !dealer.deal(Bytes::new(1)));
        dealer.pass();
        assert_eq!(dealer.turn(), Some(2));
        assert!(dealer.deal(Bytes::new(32)));
        dealer.give_up();
        assert_eq!(dealer.turn(), Some(1), "there is one left");
        dealer.give_up();
        assert_eq!(dealer.turn(), None);
    }

    #[test]
    fn the_last_pieces_of_a_share_are_cut_to_it() {
        let mut dealer = Dealer::new([Bytes::mib(11), Bytes::mib(4)]);
        let mut pieces = Vec::new();
        while dealer.turn() == Some(0) {
            let size = dealer.most(Bytes::mib(4));
            dealer.deal(size);
            pieces.push(size);
        }
        assert_eq!(pieces, [Bytes::mib(4), Bytes::kib(3584), Bytes::kib(3584)]);
        assert_eq!(dealer.most(Bytes::mib(4)), Bytes::mib(4), "the other one's");
    }

    proptest! {
        #[test]
        fn pieces_are_the_list_and_each_gets_its_share(
            sizes in prop::collection::vec(0_u64..300_000, 0..60),
            weights in prop::collection::vec(1_u64..10, 1..5),
            list in 1_usize..9,
            exact: bool,
        ) {
            let (_sim, [a, _, host]) = spans();
            let mut at = 0;
            let requests: Vec<CopyRequest> = sizes.iter().map(|size| {
                let place = |span: &Span| Address(span.start().0 + at);
                let request = CopyRequest { to: place(&a), from: place(&host), size: Bytes::new(*size) };
                at += size;
                request
            }).collect();
            // Cut somewhere: a list goes on in the next one.
            let (first, second) = requests.split_at(requests.len() / 3);
            let blocks = [first, second].map(|list| Blocks::between(&a, &host, list).unwrap());
            let all: u64 = sizes.iter().sum();
            let total: u64 = weights.iter().sum();
            let mut shares: Vec<Bytes> = weights.iter().map(|weight| Bytes::new(all * weight / total)).collect();
            shares[0] = Bytes::new(all - shares[1..].iter().map(|share| share.get()).sum::<u64>());
            let mut dealer = Dealer::new(shares.clone());
            let mut pieces = Pieces::new(&blocks, None, PIECE, Place::default());
            let mut got = vec![0; shares.len()];
            let mut expected = a.start().0;
            // In turns of at most `list` pieces, until every one has its share.
            'all: while let Some(turn) = dealer.turn() {
                for _ in 0..list {
                    let most = if exact { dealer.most(PIECE) } else { PIECE };
                    let Some(piece) = pieces.next_of(most) else { break 'all };
                    prop_assert_eq!(piece.request().to.0, expected);
                    prop_assert!(piece.size() <= PIECE && !piece.size().is_zero());
                    expected += piece.size().get();
                    got[turn] += piece.size().get();
                    if !dealer.deal(piece.size()) { break }
                }
                dealer.pass();
            }
            prop_assert!(pieces.next().is_none());
            prop_assert_eq!(got.iter().sum::<u64>(), all);
            for (got, share) in got.iter().zip(&shares) {
                let over = if exact { 1 } else { PIECE.get() };
                prop_assert!(*got < share.get() + over);
            }
        }
    }
}
