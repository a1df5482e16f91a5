//! A list of blocks as work for GPUs: by whose memory and which way, in pieces, dealt out in turns. Pure.
//!
//! ```text
//!   blocks   ▌▌▌▌▌██▌▌▌▌▌▌▌▌▌▌▌▌▌▌▌...      a block above 64 KiB is several pieces
//!   turns    │  GPU 0 │  GPU 1 │  GPU 2 │  GPU 0 │ ...     as many as one launch takes; each GPU until its share is full
//! ```

use glake_device::owned::{Blocks, DeviceSet, Piece, Side};
use glake_device::{DeviceId, PointerKind};
use glake_units::Bytes;
use smallvec::SmallVec;

use crate::paths::{Direction, GRAIN};

/// What a block is a copy between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Pinned memory and a GPU's.
    Pinned(DeviceId, Direction),
    /// Anything else: the driver's own to copy.
    Other,
}

/// The blocks of all lists that are of one kind.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) kind: Kind,
    /// How many.
    pub(crate) blocks: u64,
    /// How many pieces.
    pub(crate) pieces: u64,
    pub(crate) size: Bytes,
    /// Every kind of end that occurs.
    pub(crate) ends: SmallVec<[Side; 2]>,
}

/// Where the lists go on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    list: usize,
    block: usize,
    offset: Bytes,
}

/// What one warp copies.
pub(crate) const PIECE: Bytes = Bytes::kib(64);

/// Every kind that occurs, in the order of its first block.
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
        let kind = Kind::of(list);
        let index = groups.iter().position(|group| group.kind == kind).unwrap_or_else(|| {
            let ends = SmallVec::new();
            groups.push(Group { kind, blocks: 0, pieces: 0, size: Bytes::ZERO, ends });
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
    /// The devices whose streams may touch all of it.
    pub(crate) fn reach(&self) -> DeviceSet {
        self.ends.iter().fold(DeviceSet::ALL, |reach, end| reach.intersection(end.reach))
    }
}

impl Kind {
    fn of(list: &Blocks<'_>) -> Kind {
        match (list.to().kind, list.from().kind) {
            (PointerKind::Device { device, .. }, PointerKind::Pinned) => {
                Kind::Pinned(device, Direction::ToGpu)
            }
            (PointerKind::Pinned, PointerKind::Device { device, .. }) => {
                Kind::Pinned(device, Direction::FromGpu)
            }
            _ => Kind::Other,
        }
    }
}

/// The pieces of one kind, from a place on.
pub(crate) struct Pieces<'a> {
    lists: &'a [Blocks<'a>],
    kind: Kind,
    /// What no piece is larger than.
    most: Bytes,
    pub(crate) place: Place,
    /// The list at the place, if it is of the kind.
    list: Option<&'a Blocks<'a>>,
}

impl<'a> Pieces<'a> {
    pub(crate) fn new(lists: &'a [Blocks<'a>], kind: Kind, most: Bytes, place: Place) -> Pieces<'a> {
        let mut pieces = Pieces { lists, kind, most, place, list: None };
        pieces.open();
        pieces
    }

    /// The next one, of no more than this.
    pub(crate) fn next_of(&mut self, most: Bytes) -> Option<Piece<'a>> {
        let usual = self.most;
        self.most = most.min(usual);
        let piece = self.next();
        self.most = usual;
        piece
    }

    fn open(&mut self) {
        self.list = self.lists.get(self.place.list).filter(|list| Kind::of(list) == self.kind);
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

/// Says whose turn it is.
#[derive(Debug)]
pub(crate) struct Dealer {
    /// What each is still to get; nothing where it takes no more.
    left: SmallVec<[Option<Bytes>; 8]>,
    turn: usize,
}

impl Dealer {
    pub(crate) fn new(shares: impl IntoIterator<Item = Bytes>) -> Dealer {
        Dealer { left: shares.into_iter().map(Some).collect(), turn: 0 }
    }

    /// Whose turn it is; `None` where all have theirs.
    pub(crate) fn turn(&mut self) -> Option<usize> {
        let count = self.left.len();
        let gets = |at: &usize| self.left[*at].is_some_and(|left| !left.is_zero());
        self.turn = (0..count).map(|step| (self.turn + step) % count).find(gets)?;
        Some(self.turn)
    }

    /// How large its next piece is at most, of pieces of `usual` at most: so that it gets its share and no more, and no small piece
    /// at the end.
    pub(crate) fn most(&self, usual: Bytes) -> Bytes {
        let left = self.left.get(self.turn).copied().flatten().unwrap_or_default();
        let half = Bytes::new(left.get().div_ceil(2)).align_up(GRAIN).unwrap_or(left);
        if left > usual && half <= usual { half } else { left.min(usual) }
    }

    /// It gets a piece; false where that was its last one.
    pub(crate) fn deal(&mut self, size: Bytes) -> bool {
        let Some(Some(left)) = self.left.get_mut(self.turn) else { return false };
        *left = left.saturating_sub(size);
        !left.is_zero()
    }

    /// The next one's turn.
    pub(crate) fn pass(&mut self) {
        self.turn += 1;
    }

    /// It takes no more: the others get what it was still to get.
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
    use glake_device::{Address, CopyRequest};
    use glake_sim::{SimOptions, SimTopology, Simulator};
    use proptest::prelude::*;

    use super::*;

    /// Two GPUs' memory of 64 MiB, and pageable memory.
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
        let Group { kind, blocks: count, pieces, size, .. } = found[0];
        assert_eq!((kind, count, pieces), (Kind::Other, 3, 1 + 2 + 16));
        assert_eq!(size, Bytes::new((16 + 65 + 1024) << 10));
        let pieces = Pieces::new(&blocks, Kind::Other, PIECE, Place::default());
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
            let mut pieces = Pieces::new(&blocks, Kind::Other, PIECE, Place::default());
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
