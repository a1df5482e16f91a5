//! A list of blocks as work for GPUs: by whose memory and which way, in pieces, dealt out in turns. Pure.
//!
//! ```text
//!   blocks   ▌▌▌▌▌██▌▌▌▌▌▌▌▌▌▌▌▌▌▌▌...      a block above 64 KiB is several pieces
//!   turns    │  GPU 0 │  GPU 1 │  GPU 2 │  GPU 0 │ ...     as many as one launch takes; each GPU until its share is full
//! ```

use glake_device::owned::{DeviceSet, Span};
use glake_device::{Address, CopyRequest, DeviceId};
use glake_units::Bytes;
use smallvec::SmallVec;

use super::super::ends::Ends;
use crate::Result;
use crate::graph::Direction;

/// What a block is a copy between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Pinned memory and a GPU's.
    Pinned(DeviceId, Direction),
    /// Anything else: the driver's own to copy.
    Other,
}

/// A copy of a list: to, from.
pub(super) type Block = (Span, Span);

/// The blocks of a list that are of one kind.
#[derive(Clone, Debug)]
pub(super) struct Group<'a> {
    pub(super) kind: Kind,
    /// How many.
    pub(super) blocks: u64,
    /// How many pieces.
    pub(super) pieces: u64,
    pub(super) size: Bytes,
    /// Ends that stand for all: who may touch these may touch the others.
    pub(super) ends: Vec<&'a Span>,
}

/// Where a list goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    block: usize,
    offset: Bytes,
}

/// What one warp copies.
pub(super) const PIECE: Bytes = Bytes::kib(64);

/// Every kind that occurs, in the order of its first block.
///
/// # Errors
/// [`crate::TransferError::SizesDiffer`].
pub(super) fn groups(blocks: &[Block]) -> Result<SmallVec<[Group<'_>; 2]>> {
    let mut groups: SmallVec<[Group<'_>; 2]> = SmallVec::new();
    let mut last = 0;
    for (to, from) in blocks {
        let kind = Kind::of(Ends::of(to, from)?);
        let size = to.size();
        if size.is_zero() {
            continue;
        }
        if groups.get(last).is_none_or(|group| group.kind != kind) {
            last = groups.iter().position(|group| group.kind == kind).unwrap_or_else(|| {
                let ends = Vec::new();
                groups.push(Group { kind, blocks: 0, pieces: 0, size: Bytes::ZERO, ends });
                groups.len() - 1
            });
        }
        groups[last].add(to, from);
    }
    Ok(groups)
}

impl<'a> Group<'a> {
    fn add(&mut self, to: &'a Span, from: &'a Span) {
        self.blocks += 1;
        self.pieces += to.size().get().div_ceil(PIECE.get());
        self.size = self.size.saturating_add(to.size());
        for end in [to, from] {
            let stands = |other: &&Span| other.kind() == end.kind() && other.reach() == end.reach();
            if self.kind != Kind::Other && !self.ends.iter().any(stands) {
                self.ends.push(end);
            }
        }
    }

    /// The devices whose streams may touch all of it.
    pub(super) fn reach(&self) -> DeviceSet {
        self.ends.iter().fold(DeviceSet::ALL, |reach, span| reach.intersection(span.reach()))
    }
}

impl Kind {
    fn of(ends: Ends) -> Kind {
        match ends {
            Ends::HostAndGpu { target, direction, pinned: true } => Kind::Pinned(target, direction),
            Ends::HostAndGpu { .. } | Ends::Other => Kind::Other,
        }
    }
}

/// A part of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece<'a> {
    pub(super) to: &'a Span,
    pub(super) from: &'a Span,
    offset: Bytes,
    pub(super) size: Bytes,
}

impl Piece<'_> {
    /// Where it begins and ends.
    pub(super) fn request(&self) -> CopyRequest {
        let at = |span: &Span| Address(span.start().0 + self.offset.get());
        CopyRequest { to: at(self.to), from: at(self.from), size: self.size }
    }

    /// Its ends as spans of their own, to and from.
    pub(super) fn ends(&self) -> Option<Block> {
        Some((self.to.part(self.offset, self.size)?, self.from.part(self.offset, self.size)?))
    }
}

/// The pieces of one kind, from a place on.
pub(super) struct Pieces<'a> {
    blocks: &'a [Block],
    kind: Kind,
    /// What no piece is larger than.
    most: Bytes,
    pub(super) place: Place,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(blocks: &'a [Block], kind: Kind, most: Bytes, place: Place) -> Pieces<'a> {
        Pieces { blocks, kind, most, place }
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = Piece<'a>;

    fn next(&mut self) -> Option<Piece<'a>> {
        loop {
            let (to, from) = self.blocks.get(self.place.block)?;
            let left = to.size().saturating_sub(self.place.offset);
            // Their sizes were compared when the list was grouped.
            let kind = Ends::of(to, from).map(Kind::of);
            if !left.is_zero() && kind.is_ok_and(|kind| kind == self.kind) {
                let piece = Piece { to, from, offset: self.place.offset, size: left.min(self.most) };
                self.place.offset = piece.offset.saturating_add(piece.size);
                return Some(piece);
            }
            self.place = Place { block: self.place.block + 1, offset: Bytes::ZERO };
        }
    }
}

/// Says whose turn it is.
#[derive(Debug)]
pub(super) struct Dealer {
    /// What each is still to get; nothing where it takes no more.
    left: SmallVec<[Option<Bytes>; 8]>,
    turn: usize,
}

impl Dealer {
    pub(super) fn new(shares: impl IntoIterator<Item = Bytes>) -> Dealer {
        Dealer { left: shares.into_iter().map(Some).collect(), turn: 0 }
    }

    /// Whose turn it is; `None` where all have theirs.
    pub(super) fn turn(&mut self) -> Option<usize> {
        let count = self.left.len();
        let gets = |at: &usize| self.left[*at].is_some_and(|left| !left.is_zero());
        self.turn = (0..count).map(|step| (self.turn + step) % count).find(gets)?;
        Some(self.turn)
    }

    /// It gets a piece; false where that was its last one.
    pub(super) fn deal(&mut self, size: Bytes) -> bool {
        let Some(Some(left)) = self.left.get_mut(self.turn) else { return false };
        *left = left.saturating_sub(size);
        !left.is_zero()
    }

    /// The next one's turn.
    pub(super) fn pass(&mut self) {
        self.turn += 1;
    }

    /// It takes no more: the others get what it was still to get.
    pub(super) fn give_up(&mut self) {
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

    use glake_device::sim::{SimOptions, SimTopology, Simulator};
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
        let blocks = [
            block(&a, &host, Bytes::kib(16)),
            block(&a, &b, Bytes::kib(65)),
            block(&a, &host, Bytes::ZERO),
            block(&b, &host, Bytes::mib(1)),
        ];
        let found = groups(&blocks).unwrap();
        // Pageable memory is the driver's to copy, as another GPU's is.
        assert_eq!(found.len(), 1);
        let Group { kind, blocks: count, pieces, size, .. } = found[0];
        assert_eq!((kind, count, pieces), (Kind::Other, 3, 1 + 2 + 16));
        assert_eq!(size, Bytes::new((16 + 65 + 1024) << 10));
        let pieces = Pieces::new(&blocks, Kind::Other, PIECE, Place::default());
        let sizes: Vec<u64> = pieces.map(|piece| piece.size.get() >> 10).collect();
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

    proptest! {
        #[test]
        fn pieces_are_the_list_and_each_gets_its_share(
            sizes in prop::collection::vec(0_u64..300_000, 0..60),
            weights in prop::collection::vec(1_u64..10, 1..5),
            list in 1_usize..9,
        ) {
            let (_sim, [a, _, host]) = spans();
            let mut at = 0;
            let blocks: Vec<Block> = sizes.iter().map(|size| {
                let part = |span: &Span| span.part(Bytes::new(at), Bytes::new(*size)).unwrap();
                let block = (part(&a), part(&host));
                at += size;
                block
            }).collect();
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
                    let Some(piece) = pieces.next() else { break 'all };
                    prop_assert_eq!(piece.request().to.0, expected);
                    prop_assert!(piece.size <= PIECE && !piece.size.is_zero());
                    expected += piece.size.get();
                    got[turn] += piece.size.get();
                    if !dealer.deal(piece.size) { break }
                }
                dealer.pass();
            }
            prop_assert!(pieces.next().is_none());
            prop_assert_eq!(got.iter().sum::<u64>(), all);
            for (got, share) in got.iter().zip(&shares) {
                prop_assert!(*got < share.get() + PIECE.get());
            }
        }
    }
}
