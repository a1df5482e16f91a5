//! The memory that a list's blocks lie in: few spans, found by address.

use glake_device::owned::{DeviceSet, Span};
use glake_device::{Address, CopyRequest, DeviceId, PointerKind};
use glake_units::Bytes;

use crate::{Result, TransferError};

/// Spans, in the order of their starts.
#[derive(Debug)]
pub(super) struct Within<'a> {
    spans: Vec<&'a Span>,
}

/// Looks blocks up one after another: most lie where the last one did.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finder<'a> {
    within: &'a Within<'a>,
    last: [usize; 2],
}

/// A block, and the spans that its ends lie in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block<'a> {
    pub(super) request: CopyRequest,
    pub(super) to: &'a Span,
    pub(super) from: &'a Span,
}

impl<'a> Within<'a> {
    pub(super) fn new(spans: &'a [Span]) -> Within<'a> {
        let mut spans: Vec<&Span> = spans.iter().collect();
        spans.sort_unstable_by_key(|span| span.start());
        Within { spans }
    }

    pub(super) fn finder(&'a self) -> Finder<'a> {
        Finder { within: self, last: [0; 2] }
    }

    /// The spans that copies between a GPU and pinned memory may touch.
    pub(super) fn of(&self, target: DeviceId) -> impl Iterator<Item = &'a Span> + Clone {
        let touched = move |span: &&Span| match span.kind() {
            PointerKind::Device { device, .. } => device == target,
            PointerKind::Pinned => true,
            PointerKind::Pageable => false,
        };
        self.spans.iter().copied().filter(touched)
    }

    /// The devices whose streams may touch all of them.
    pub(super) fn reach(&self, target: DeviceId) -> DeviceSet {
        self.of(target).fold(DeviceSet::ALL, |reach, span| reach.intersection(span.reach()))
    }

    fn position(&self, start: Address, size: Bytes) -> Option<usize> {
        let after = self.spans.partition_point(|span| span.start() <= start);
        // Mostly the nearest; where spans overlap, perhaps one that begins before it.
        self.spans[..after].iter().rposition(|span| span.holds(start, size))
    }
}

impl<'a> Finder<'a> {
    /// # Errors
    /// [`TransferError::Outside`].
    pub(super) fn block(&mut self, request: CopyRequest) -> Result<Block<'a>> {
        let to = self.span(0, request.to, request.size)?;
        let from = self.span(1, request.from, request.size)?;
        Ok(Block { request, to, from })
    }

    fn span(&mut self, side: usize, start: Address, size: Bytes) -> Result<&'a Span> {
        let last = self.within.spans.get(self.last[side]);
        if let Some(span) = last.filter(|span| span.holds(start, size)) {
            return Ok(span);
        }
        match self.within.position(start, size) {
            Some(position) => {
                self.last[side] = position;
                Ok(self.within.spans[position])
            }
            None => Err(TransferError::Outside { address: start, size }),
        }
    }
}

impl Block<'_> {
    /// A part of it; nothing past its end.
    pub(super) fn part(mut self, offset: Bytes, size: Bytes) -> Self {
        let CopyRequest { to, from, .. } = &mut self.request;
        (to.0, from.0) = (to.0.wrapping_add(offset.get()), from.0.wrapping_add(offset.get()));
        self.request.size = self.request.size.saturating_sub(offset).min(size);
        self
    }

    /// Its ends as spans of their own, to and from.
    pub(super) fn ends(&self) -> Option<(Span, Span)> {
        let end = |span: &Span, start: Address| {
            span.part(Bytes::new(start.0.checked_sub(span.start().0)?), self.request.size)
        };
        Some((end(self.to, self.request.to)?, end(self.from, self.request.from)?))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use glake_device::sim::{SimOptions, Simulator};

    use super::*;

    #[test]
    fn a_block_is_found_in_the_span_that_holds_it_all() {
        let sim = Arc::new(Simulator::new(SimOptions::default()).unwrap());
        let span =
            |start: u64, size| sim.span(Address(start << 20), Bytes::mib(size), DeviceSet::EMPTY).unwrap();
        // The second lies in the first, the third begins where the first ends.
        let spans = [span(100, 10), span(102, 2), span(110, 5), span(10, 1)];
        let within = Within::new(&spans);
        let mut finder = within.finder();
        let mut find = |to: u64, from: u64, size| {
            let request =
                CopyRequest { to: Address(to << 20), from: Address(from << 20), size: Bytes::mib(size) };
            finder.block(request).map(|block| (block.to.start().0 >> 20, block.from.start().0 >> 20))
        };
        assert_eq!(find(103, 10, 1).unwrap(), (102, 10));
        assert_eq!(find(100, 110, 5).unwrap(), (100, 110));
        // The one found last holds it too.
        assert_eq!(find(103, 10, 1).unwrap(), (100, 10));
        assert_eq!(find(103, 112, 3).unwrap(), (100, 110));
        for (to, size) in [(109, 2), (9, 1), (11, 1), (500, 1), (114, 2)] {
            assert!(
                matches!(find(to, 100, size), Err(TransferError::Outside { address, .. }) if address.0 == to << 20)
            );
        }
    }

    #[test]
    fn a_part_stays_in_its_block() {
        let sim = Arc::new(Simulator::new(SimOptions::default()).unwrap());
        let spans = [sim.span(Address(1 << 20), Bytes::mib(2), DeviceSet::EMPTY).unwrap()];
        let within = Within::new(&spans);
        let request = CopyRequest { to: Address(1 << 20), from: Address(2 << 20), size: Bytes::kib(100) };
        let block = within.finder().block(request).unwrap().part(Bytes::kib(64), Bytes::kib(64));
        assert_eq!(block.request.size, Bytes::kib(36));
        let (to, from) = block.ends().unwrap();
        assert_eq!((to.start().0, from.start().0), ((1 << 20) + (64 << 10), (2 << 20) + (64 << 10)));
        assert_eq!(to.size(), Bytes::kib(36));
    }
}
