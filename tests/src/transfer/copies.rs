//! The copies of a random program: of one range, in small blocks, to several GPUs, of memory that the driver does not know.

use glake_device::Address;
use glake_device::owned::{DeviceSet, Span};
use glake_transfer::{CopyOptions, Priority};
use glake_units::Bytes;

use super::litmus::{BLOCKS, HOSTS, Litmus, Which};
use super::place;

/// What the blocks of a list are cut to: no power of two.
const PART: u64 = 20_011;

#[allow(clippy::unwrap_used)]
impl Litmus<'_> {
    pub(super) fn copy(&mut self) {
        let (host, block) = (self.below(HOSTS as u64), self.below(BLOCKS as u64));
        let Some(block) = self.alike(host, block) else { return };
        self.copy_between(Which::Host(host), Which::Block(block), false);
    }

    /// The same in many blocks.
    pub(super) fn copy_list(&mut self) {
        let (host, block) = (self.below(HOSTS as u64), self.below(BLOCKS as u64));
        let Some(block) = self.alike(host, block) else { return };
        self.copy_between(Which::Host(host), Which::Block(block), true);
    }

    /// To and from memory that no pool gave: of several GPUs, whose copies want the slots of the same relays.
    pub(super) fn copy_plain(&mut self) {
        for _ in 0..=self.below(3) {
            let plain = self.below(self.plain.len() as u64);
            let size = self.plain[plain].place.span.size();
            let hosts: Vec<usize> = (0..HOSTS).filter(|host| self.hosts[*host].span.size() == size).collect();
            let (host, list) = (hosts[self.below(hosts.len() as u64)], self.below(4) == 0);
            self.copy_between(Which::Host(host), Which::Plain(plain), list);
        }
    }

    fn copy_between(&mut self, host: Which, gpu: Which, list: bool) {
        let (to, from) = if self.below(2) == 0 { (gpu, host) } else { (host, gpu) };
        let lane = self.below(self.lanes.len() as u64);
        self.come_after(
            lane,
            &[self.place(from).wrote.into_iter().collect(), self.place(to).before_writing()],
        );
        let by = self.begin_on(lane, gpu);
        let options = self.copy_options();
        let (to_span, from_span) = (self.place(to).span.clone(), self.place(from).span.clone());
        let (engine, on) = (&self.server.engine, self.lanes[lane].user);
        let copied = match list {
            true => engine.copy_list(&parts(&to_span, &from_span), on, options),
            false => engine.copy(&to_span, &from_span, on, options),
        };
        drop(copied.unwrap());
        let seed = self.place(from).seed;
        self.place_mut(from).read_by(by);
        self.place_mut(to).written(by, seed);
        self.tally.copies += 1;
    }

    pub(super) fn copy_to_all(&mut self) {
        let host = self.below(HOSTS as u64);
        let mut blocks = Vec::new();
        for _ in 0..3 {
            let near = self.below(BLOCKS as u64);
            blocks.extend(self.alike(host, near).filter(|block| !blocks.contains(block)));
        }
        let lane = self.below(self.lanes.len() as u64);
        let mut before = vec![self.hosts[host].wrote.into_iter().collect()];
        before.extend(blocks.iter().map(|block| self.blocks[*block].before_writing()));
        self.come_after(lane, &before);
        let Some(by) = blocks.iter().map(|block| self.begin(lane, *block)).last() else { return };
        let options = self.copy_options();
        let to: Vec<Span> = blocks.iter().map(|block| self.blocks[*block].span.clone()).collect();
        let from = self.hosts[host].span.clone();
        drop(self.server.engine.copy_to_all(&to, &from, self.lanes[lane].user, options).unwrap());
        let seed = self.hosts[host].seed;
        self.hosts[host].read_by(by);
        blocks.iter().for_each(|block| self.blocks[*block].written(by, seed));
        self.tally.copies += blocks.len() as u64;
    }

    /// From a vector, and back into another: both calls wait for the stream, so no gate may be shut.
    pub(super) fn copy_pageable(&mut self) {
        self.let_go();
        let block = self.below(BLOCKS as u64);
        let lane = self.below(self.lanes.len() as u64);
        self.come_after(lane, &[self.blocks[block].before_writing()]);
        let by = self.begin(lane, block);
        self.seeds += 1;
        let (seed, span) = (self.seeds, self.blocks[block].span.clone());
        let size = span.size();
        let mut bytes = vec![0_u8; usize::try_from(size.get()).unwrap()];
        place::mark_bytes(&mut bytes, seed);
        let (engine, on) = (&self.server.engine, self.lanes[lane].user);
        let range = |bytes: &mut Vec<u8>| {
            let start = Address(bytes.as_mut_ptr() as u64);
            self.server.sim.span(start, size, DeviceSet::EMPTY).unwrap()
        };
        drop(engine.copy(&span, &range(&mut bytes), on, CopyOptions::default()).unwrap());
        // It has been read.
        bytes.fill(0);
        drop(engine.copy(&range(&mut bytes), &span, on, CopyOptions::default()).unwrap());
        assert!(place::are_marked(&bytes, seed), "{size} of pageable memory are not what was sent");
        self.blocks[block].written(by, Some(seed));
        self.tally.copies += 2;
    }

    /// A block of a host's size, the nearest to one.
    fn alike(&self, host: usize, near: usize) -> Option<usize> {
        let size = self.hosts[host].span.size();
        let turn = |step: usize| (near + step) % BLOCKS;
        (0..BLOCKS).map(turn).find(|block| self.blocks[*block].span.size() == size)
    }

    fn copy_options(&mut self) -> CopyOptions {
        let priority = match self.below(8) {
            0 => Priority::Critical,
            1 => Priority::Background,
            _ => Priority::Normal,
        };
        CopyOptions { priority, verify: false, waited: self.below(4) == 0, unordered: false }
    }
}

/// A copy in blocks, the last first.
fn parts(to: &Span, from: &Span) -> Vec<(Span, Span)> {
    let part = |at: u64| {
        let (offset, left) = (Bytes::new(at), to.size().get() - at);
        let size = Bytes::new(left.min(PART));
        Some((to.part(offset, size)?, from.part(offset, size)?))
    };
    let starts: Vec<u64> = (0..to.size().get()).step_by(usize::try_from(PART).unwrap_or(1)).collect();
    starts.into_iter().rev().filter_map(part).collect()
}
