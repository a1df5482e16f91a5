//! Random programs of kernels, copies, events, gates and frees over all streams and GPUs of a server.
//!
//! A program orders conflicting steps by events, and no other steps. Its result is therefore that of running its steps one after the
//! other, which is the model. Each kernel that reads memory compares it with the model's contents at the time of its enqueue.

use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::{DeviceSet, Flag, Registration, Span};
use glake_device::{Address, DeviceId, KernelMemory, PointerKind, Stream};
use glake_transfer::{CopyOptions, Priority};
use glake_units::Bytes;
use parking_lot::Mutex;

use super::Server;
use super::state::{self, Lane, Place, Plain, Use};

/// Counts of the steps of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Copies through the engine.
    pub copies: u64,
    /// Kernels that write or check a pattern.
    pub kernels: u64,
    /// Blocks freed and allocated again.
    pub frees: u64,
    /// Times that a stream was held back.
    pub gates: u64,
}

/// A random program in progress.
#[derive(Debug)]
pub struct Litmus<'a> {
    server: &'a Server,
    lanes: Vec<Lane>,
    hosts: Vec<Place>,
    /// Memory of `hosts`.
    memory: Vec<Arc<Registration>>,
    blocks: Vec<Place>,
    /// Device memory that belongs to no pool.
    plain: Vec<Plain>,
    random: u64,
    seeds: u64,
    wrong: Arc<Mutex<Vec<String>>>,
    tally: Tally,
}

/// Index of a place, by kind of memory.
#[derive(Clone, Copy)]
enum Which {
    Host(usize),
    Block(usize),
    Plain(usize),
}

const OWN_STREAMS: usize = 2;
const HOSTS: usize = 24;
const BLOCKS: usize = 24;
const SIZES: [u64; 6] = [3 << 20, 1 << 20, (1 << 20) + 4097, 2 << 20, 64 << 10, (5 << 20) + 511];

#[allow(clippy::unwrap_used)]
impl<'a> Litmus<'a> {
    /// Creates a program with random seed `number` on the first `gpus` GPUs of a server. The other GPUs are idle: their links relay copies,
    /// and several copies compete for their slots.
    pub fn new(server: &'a Server, number: u64, gpus: usize) -> Self {
        let devices: Vec<DeviceId> = server.devices().iter().take(gpus).collect();
        let defaults = [Stream::LEGACY, Stream::PER_THREAD];
        let own = devices.iter().flat_map(|device| [(*device, None); OWN_STREAMS]);
        let defaults = defaults.into_iter().map(|stream| (devices[0], Some(stream)));
        let streams: Vec<(DeviceId, Option<Stream>)> = own.chain(defaults).collect();
        let count = streams.len();
        let gates = Flag::several(&server.completion_events, u32::try_from(count).unwrap()).unwrap();
        let lane = |((device, stream), gate)| Lane::new(&server.driver, device, stream, count, gate);
        let lanes = streams.into_iter().zip(gates).map(lane).collect();
        let size = |index: usize| Bytes::new(SIZES[index % SIZES.len()]);
        let memory: Vec<Arc<Registration>> = (0..HOSTS).map(|index| server.pinned(size(index))).collect();
        let host = |(index, memory)| Place::new(Span::pinned(memory, Bytes::ZERO, size(index)).unwrap());
        let hosts = memory.iter().enumerate().map(host).collect();
        let random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let plain = devices.iter().map(|device| Plain::new(&server.sim, *device, size(5))).collect();
        let (blocks, wrong, tally) = Default::default();
        let mut litmus =
            Litmus { server, lanes, hosts, memory, blocks, plain, random, seeds: 0, wrong, tally };
        for index in 0..BLOCKS {
            let lane = litmus.below(count as u64);
            let block = litmus.allocate(lane, SIZES[index % SIZES.len()]);
            litmus.blocks.push(block);
        }
        litmus
    }

    /// Runs a number of random steps.
    ///
    /// # Panics
    /// A kernel found bytes that differ from the model, or the device refused a step.
    pub fn run(&mut self, steps: u64) -> Tally {
        for step in 0..steps {
            match self.below(100) {
                0..22 => self.copy(),
                22..25 => self.copy_list(),
                25..28 => self.copy_to_all(),
                28..30 => self.copy_plain(),
                30..50 => self.write(),
                50..70 => self.check(),
                70..77 => self.follow(),
                77..78 => self.another_gpu_goes_on(),
                78..80 => self.hold(),
                80..84 => self.let_go_of_one(),
                84..90 => drop(self.server.sim.step()),
                90..94 => self.free(),
                94..96 => self.tick(),
                96..97 => self.look(),
                97..98 => self.copy_pageable(),
                _ => self.copy_plain(),
            }
            if step % 1000 == 999 {
                self.drain();
            }
        }
        self.drain();
        self.tally
    }

    /// Ends the program and frees its memory.
    pub fn end(mut self) {
        self.drain();
        for block in self.blocks.drain(..) {
            self.server.pools[index_of(&block.span)].free(block.span.start()).unwrap();
        }
    }

    fn write(&mut self) {
        let (lane, which) = self.kernel_on();
        self.come_after(lane, &[self.place(which).before_writing()]);
        let by = self.begin_on(lane, which);
        self.seeds += 1;
        let (seed, touch) = (self.seeds, self.place(which).touch());
        let time = Duration::from_micros(self.below(200) as u64);
        let user = self.lanes[lane].user;
        let body = move |memory: &mut dyn KernelMemory| state::mark(memory, touch, seed);
        self.server.sim.enqueue_kernel(user.device, user.raw, &[], &[touch], time, body).unwrap();
        self.place_mut(which).written(by, Some(seed));
        self.tally.kernels += 1;
    }

    fn check(&mut self) {
        let (lane, which) = self.kernel_on();
        let Some(seed) = self.place(which).seed else { return };
        self.come_after(lane, &[self.place(which).wrote.into_iter().collect()]);
        let by = self.begin_on(lane, which);
        let touch = self.place(which).touch();
        let (wrong, number) = (self.wrong.clone(), self.tally.kernels);
        let body = move |memory: &mut dyn KernelMemory| {
            let mut read = |at: Address, into: &mut [u8]| memory.read(at, into).is_ok();
            if !state::is_marked(&mut read, touch, seed) {
                wrong.lock().push(format!("kernel {number} did not find pattern {seed} at {touch:?}"));
            }
        };
        let time = Duration::from_micros(self.below(200) as u64);
        let user = self.lanes[lane].user;
        self.server.sim.enqueue_kernel(user.device, user.raw, &[touch], &[], time, body).unwrap();
        self.place_mut(which).read_by(by);
        self.tally.kernels += 1;
    }

    /// Compares pinned memory with the model on the host, once the stream that wrote it is idle.
    fn look(&mut self) {
        let which = self.below(HOSTS as u64);
        let (Some(seed), Some(wrote)) = (self.hosts[which].seed, self.hosts[which].wrote) else { return };
        self.let_go();
        let user = self.lanes[wrote.lane].user;
        self.server.driver.stream_synchronize(user.device, user.raw).unwrap();
        let touch = self.hosts[which].touch();
        let bytes = self.memory[which].as_slice();
        let mut read = |at: Address, into: &mut [u8]| {
            let found =
                usize::try_from(at.0 - touch.address.0).ok().and_then(|at| bytes.get(at..at + into.len()));
            found.map(|found| into.copy_from_slice(found)).is_some()
        };
        assert!(
            state::is_marked(&mut read, touch, seed),
            "the host did not find pattern {seed} at {touch:?}"
        );
    }

    fn follow(&mut self) {
        let (one, other) = (self.below(self.lanes.len() as u64), self.below(self.lanes.len() as u64));
        self.order(one, other);
    }

    fn hold(&mut self) {
        let lane = self.below(self.lanes.len() as u64);
        self.lanes[lane].hold();
        self.lanes[lane].waits |= 1 << lane;
        self.defaults_wait_for_each_other();
        self.tally.gates += 1;
    }

    fn let_go_of_one(&mut self) {
        let lane = self.below(self.lanes.len() as u64);
        self.lanes[lane].let_go();
        self.lanes.iter_mut().for_each(|other| other.waits &= !(1 << lane));
    }

    /// Applies the implicit order between the default streams of a GPU, the last two lanes.
    fn defaults_wait_for_each_other(&mut self) {
        if let [.., legacy, own] = &mut self.lanes[..] {
            legacy.waits |= own.waits;
            own.waits = legacy.waits;
        }
    }

    /// Waits in a separate thread for each GPU whose streams depend on no lane held back. The wait must return.
    fn another_gpu_goes_on(&self) {
        for device in self.server.devices().iter() {
            let is_held = |lane: &Lane| lane.user.device == device && lane.waits != 0;
            if !self.lanes.iter().any(is_held) {
                let wait = || self.server.driver.context_synchronize(device).unwrap();
                std::thread::scope(|scope| scope.spawn(wait).join().unwrap());
            }
        }
    }

    fn let_go(&mut self) {
        for lane in &mut self.lanes {
            lane.let_go();
            lane.waits = 0;
        }
    }

    /// Frees a block after its uses were reported to the pool, and allocates one of the same size for a random stream, or for another
    /// stream of the same GPU after a tick. That one may reuse the same bytes.
    fn free(&mut self) {
        let which = self.below(BLOCKS as u64);
        let (span, size) = (self.blocks[which].span.clone(), self.blocks[which].span.size().get());
        let pool = &self.server.pools[index_of(&span)];
        pool.free(span.start()).unwrap();
        let mut lane = self.below(self.lanes.len() as u64);
        if self.below(2) == 0 {
            pool.tick().unwrap();
            let turn = |step: usize| (lane + step) % self.lanes.len();
            let near = |lane: &usize| self.lanes[*lane].user.device.0 as usize == index_of(&span);
            lane = (0..self.lanes.len()).map(turn).find(near).unwrap_or(lane);
        }
        self.blocks[which] = self.allocate(lane, size);
        self.tally.frees += 1;
    }

    fn allocate(&mut self, lane: usize, size: u64) -> Place {
        let user = self.lanes[lane].user;
        let pool = &self.server.pools[user.device.0 as usize];
        let key = self.lanes[lane].pool;
        let block = pool.malloc(Bytes::new(size), key).unwrap_or_else(|_| {
            // What was freed may wait behind a gate.
            for lane in &mut self.lanes {
                lane.let_go();
                lane.waits = 0;
            }
            pool.malloc(Bytes::new(size), key).unwrap()
        });
        let span = self.server.sim.span(block.address, Bytes::new(size), self.server.devices()).unwrap();
        // Its stream may use it at once, others after it.
        let by = self.lanes[lane].step(lane);
        let mut place = Place::new(span);
        place.written(by, None);
        place
    }

    fn tick(&mut self) {
        self.server.pools.iter().for_each(|pool| pool.tick().unwrap());
    }

    /// Waits until all enqueued work is done and asserts that no kernel found a mismatch.
    fn drain(&mut self) {
        self.let_go();
        while self.server.sim.step() {}
        for lane in &self.lanes {
            self.server.driver.stream_synchronize(lane.user.device, lane.user.raw).unwrap();
        }
        let wrong = self.wrong.lock();
        assert!(wrong.is_empty(), "{} mismatches, the first: {}", wrong.len(), wrong[0]);
    }

    /// Returns a random lane and a place that its kernels can reach.
    fn kernel_on(&mut self) -> (usize, Which) {
        let lane = self.below(self.lanes.len() as u64);
        match self.below(9) {
            0..4 => (lane, Which::Host(self.below(HOSTS as u64))),
            4..8 => (lane, Which::Block(self.below(BLOCKS as u64))),
            _ => (lane, Which::Plain(self.lanes[lane].user.device.0 as usize)),
        }
    }

    fn come_after(&mut self, lane: usize, uses: &[Vec<Use>]) {
        for earlier in uses.iter().flatten() {
            if !self.lanes[lane].is_after(*earlier) {
                self.order(lane, earlier.lane);
            }
        }
    }

    fn order(&mut self, lane: usize, after: usize) {
        if let Ok([lane, after]) = self.lanes.get_disjoint_mut([lane, after]) {
            lane.follow(&*self.server.driver, after);
        }
        self.defaults_wait_for_each_other();
    }

    fn begin_on(&mut self, lane: usize, which: Which) -> Use {
        match which {
            Which::Block(block) => self.begin(lane, block),
            Which::Host(_) | Which::Plain(_) => self.lanes[lane].step(lane),
        }
    }

    /// Begins a step that uses a block. Reports the use to the pool, because the block may belong to another stream.
    fn begin(&mut self, lane: usize, block: usize) -> Use {
        let span = &self.blocks[block].span;
        self.server.pools[index_of(span)].record_stream(span.start(), self.lanes[lane].pool);
        self.lanes[lane].step(lane)
    }

    fn place(&self, which: Which) -> &Place {
        match which {
            Which::Host(index) => &self.hosts[index],
            Which::Block(index) => &self.blocks[index],
            Which::Plain(index) => &self.plain[index].place,
        }
    }

    fn place_mut(&mut self, which: Which) -> &mut Place {
        match which {
            Which::Host(index) => &mut self.hosts[index],
            Which::Block(index) => &mut self.blocks[index],
            Which::Plain(index) => &mut self.plain[index].place,
        }
    }

    /// Returns a random number below a bound.
    #[allow(clippy::cast_possible_truncation)]
    fn below(&mut self, bound: u64) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32).wrapping_mul(bound).wrapping_shr(32) as usize
    }
}

/// Block size of lists, not a power of two.
const PART: u64 = 20_011;

#[allow(clippy::unwrap_used)]
impl Litmus<'_> {
    fn copy(&mut self) {
        let (host, block) = (self.below(HOSTS as u64), self.below(BLOCKS as u64));
        let Some(block) = self.alike(host, block) else { return };
        self.copy_between(Which::Host(host), Which::Block(block), false);
    }

    /// Copies a range as a list of blocks.
    fn copy_list(&mut self) {
        let (host, block) = (self.below(HOSTS as u64), self.below(BLOCKS as u64));
        let Some(block) = self.alike(host, block) else { return };
        self.copy_between(Which::Host(host), Which::Block(block), true);
    }

    /// Copies to and from memory that belongs to no pool, on several GPUs, so that copies compete for the slots of the same relays.
    fn copy_plain(&mut self) {
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

    fn copy_to_all(&mut self) {
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

    /// Copies from pageable memory and back. Both calls wait for the stream, so no lane may be held back.
    fn copy_pageable(&mut self) {
        self.let_go();
        let block = self.below(BLOCKS as u64);
        let lane = self.below(self.lanes.len() as u64);
        self.come_after(lane, &[self.blocks[block].before_writing()]);
        let by = self.begin(lane, block);
        self.seeds += 1;
        let (seed, span) = (self.seeds, self.blocks[block].span.clone());
        let size = span.size();
        let mut bytes = vec![0_u8; usize::try_from(size.get()).unwrap()];
        state::mark_bytes(&mut bytes, seed);
        let (engine, on) = (&self.server.engine, self.lanes[lane].user);
        let range = |bytes: &mut Vec<u8>| {
            let start = Address(bytes.as_mut_ptr() as u64);
            self.server.sim.span(start, size, DeviceSet::EMPTY).unwrap()
        };
        drop(engine.copy(&span, &range(&mut bytes), on, CopyOptions::default()).unwrap());
        // It has been read.
        bytes.fill(0);
        drop(engine.copy(&range(&mut bytes), &span, on, CopyOptions::default()).unwrap());
        assert!(state::are_marked(&bytes, seed), "{size} of pageable memory are not what was sent");
        self.blocks[block].written(by, Some(seed));
        self.tally.copies += 2;
    }

    /// Returns the block nearest to index `near` that has the size of a host range.
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

/// Cuts a copy into blocks of [`PART`] bytes, the last first.
fn parts(to: &Span, from: &Span) -> Vec<(Span, Span)> {
    let part = |at: u64| {
        let (offset, left) = (Bytes::new(at), to.size().get() - at);
        let size = Bytes::new(left.min(PART));
        Some((to.part(offset, size)?, from.part(offset, size)?))
    };
    let starts: Vec<u64> = (0..to.size().get()).step_by(usize::try_from(PART).unwrap_or(1)).collect();
    starts.into_iter().rev().filter_map(part).collect()
}

fn index_of(span: &Span) -> usize {
    match span.kind() {
        PointerKind::Device { device, .. } => device.0 as usize,
        PointerKind::Managed | PointerKind::Pinned | PointerKind::Pageable => usize::MAX,
    }
}
