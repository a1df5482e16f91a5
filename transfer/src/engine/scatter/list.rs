//! A list of blocks as work for GPUs: by whose memory and which way, in pieces, dealt out in turns. Pure.
//!
//! ```text
//!   blocks   ▌▌▌▌▌██▌▌▌▌▌▌▌▌▌▌▌▌▌▌▌...      a block above 64 KiB is several pieces
//!   turns    │  GPU 0 │  GPU 1 │  GPU 2 │  GPU 0 │ ...     as many as one launch takes; each GPU until its share is full
//! ```

use glake_device::owned::Span;
use glake_device::{CopyRequest, DeviceId, PointerKind};
use glake_units::Bytes;
use smallvec::SmallVec;

use super::within::{Block, Within};
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

/// The blocks of a list that are of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) kind: Kind,
    /// How many.
    pub(super) blocks: u64,
    /// How many pieces.
    pub(super) pieces: u64,
    pub(super) size: Bytes,
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
/// [`crate::TransferError::Outside`].
pub(super) fn groups(blocks: &[CopyRequest], within: &Within<'_>) -> Result<SmallVec<[Group; 2]>> {
    let mut groups: SmallVec<[Group; 2]> = SmallVec::new();
    let mut finder = within.finder();
    let mut last = 0;
    for request in blocks.iter().filter(|request| !request.size.is_zero()) {
        let block = finder.block(*request)?;
        let kind = Kind::of(block.to, block.from);
        if groups.get(last).is_none_or(|group| group.kind != kind) {
            last = groups.iter().position(|group| group.kind == kind).unwrap_or_else(|| {
                groups.push(Group { kind, blocks: 0, pieces: 0, size: Bytes::ZERO });
                groups.len() - 1
            });
        }
        let group = &mut groups[last];
        group.blocks += 1;
        group.pieces += request.size.get().div_ceil(PIECE.get());
        group.size = group.size.saturating_add(request.size);
    }
    Ok(groups)
}

impl Kind {
    pub(super) fn of(to: &Span, from: &Span) -> Kind {
        match (to.kind(), from.kind()) {
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
pub(super) struct Pieces<'a> {
    blocks: &'a [CopyRequest],
    finder: super::within::Finder<'a>,
    kind: Kind,
    /// What no piece is larger than.
    most: Bytes,
    pub(super) place: Place,
}

impl<'a> Pieces<'a> {
    pub(super) fn new(
        blocks: &'a [CopyRequest],
        within: &'a Within<'a>,
        kind: Kind,
        most: Bytes,
        place: Place,
    ) -> Pieces<'a> {
        Pieces { blocks, finder: within.finder(), kind, most, place }
    }
}

impl<'a> Iterator for Pieces<'a> {
    type Item = Block<'a>;

    fn next(&mut self) -> Option<Block<'a>> {
        loop {
            let request = self.blocks.get(self.place.block)?;
            let offset = self.place.offset;
            if offset < request.size {
                // Every block was looked up when the list was grouped.
                let block = self.finder.block(*request).ok()?;
                if Kind::of(block.to, block.from) == self.kind {
                    let piece = block.part(offset, self.most);
                    self.place.offset = offset.saturating_add(piece.request.size);
                    return Some(piece);
                }
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

    use glake_device::Address;
    use glake_device::owned::DeviceSet;
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
        let block = |to: &Span, from: &Span, size| CopyRequest { to: to.start(), from: from.start(), size };
        let blocks = [
            block(&a, &host, Bytes::kib(16)),
            block(&a, &b, Bytes::kib(65)),
            block(&a, &host, Bytes::ZERO),
            block(&b, &host, Bytes::mib(1)),
        ];
        let spans = [a, b, host];
        let within = Within::new(&spans);
        let found = groups(&blocks, &within).unwrap();
        // Pageable memory is the driver's to copy, as another GPU's is.
        let size = Bytes::new((16 + 65 + 1024) << 10);
        assert_eq!(found[..], [Group { kind: Kind::Other, blocks: 3, pieces: 1 + 2 + 16, size }]);
        let pieces = Pieces::new(&blocks, &within, Kind::Other, PIECE, Place::default());
        let sizes: Vec<u64> = pieces.map(|piece| piece.request.size.get() >> 10).collect();
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
            let blocks: Vec<CopyRequest> = sizes.iter().map(|size| {
                let block = CopyRequest {
                    to: Address(a.start().0 + at),
                    from: Address(host.start().0 + at),
                    size: Bytes::new(*size),
                };
                at += size;
                block
            }).collect();
            let spans = [a.clone(), host];
            let within = Within::new(&spans);
            let all: u64 = sizes.iter().sum();
            let total: u64 = weights.iter().sum();
            let mut shares: Vec<Bytes> = weights.iter().map(|weight| Bytes::new(all * weight / total)).collect();
            shares[0] = Bytes::new(all - shares[1..].iter().map(|share| share.get()).sum::<u64>());
            let mut dealer = Dealer::new(shares.clone());
            let mut pieces = Pieces::new(&blocks, &within, Kind::Other, PIECE, Place::default());
            let mut got = vec![0; shares.len()];
            let mut expected = a.start().0;
            // In turns of at most `list` pieces, until every one has its share.
            'all: while let Some(turn) = dealer.turn() {
                for _ in 0..list {
                    let Some(piece) = pieces.next() else { break 'all };
                    prop_assert_eq!(piece.request.to.0, expected);
                    prop_assert!(piece.request.size <= PIECE && !piece.request.size.is_zero());
                    expected += piece.request.size.get();
                    got[turn] += piece.request.size.get();
                    if !dealer.deal(piece.request.size) { break }
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
