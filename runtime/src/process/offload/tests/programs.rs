//! Random programs, each block's bytes known: what comes back is what went, whoever had the memory meanwhile.
//!
//! What is checked comes back as it was when its block was freed, the rest as it was when it went.
//!
//! 48 programs, and one of 5,000 steps, which has 100,000 with GLAKE_SOAK set.

use glake_tiers::HostBlock;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use super::super::{CheckState, SaveId};
use super::*;

#[derive(Clone, Debug)]
enum Op {
    Malloc { kib: u64 },
    Write { which: usize },
    Check { which: usize },
    Offload { which: usize, from: u64, words: u64, frees: bool, site: u64 },
    Free { which: usize },
    Begin { which: usize },
    Wait { which: usize },
    Release { which: usize },
    Foreign { kib: u64 },
    DelayOut,
    DelayIn,
    Step { count: usize },
    Tick,
    Settle,
    Trim,
    Shrink,
    Again { site: u64 },
    NoHost,
    Host,
    Reserve { kib: u64 },
    HostWrite { which: usize },
    HostRead { which: usize },
    Load { which: usize },
    Store { which: usize, block: usize },
    GiveBack { which: usize },
}

fn op() -> impl Strategy<Value = Op> {
    let kib = prop_oneof![1 => 1..1024u64, 3 => 1025..5000u64, 1 => 5000..11_000u64];
    let any = any::<usize>;
    prop_oneof![
        6 => kib.clone().prop_map(|kib| Op::Malloc { kib }),
        4 => any().prop_map(|which| Op::Write { which }),
        2 => any().prop_map(|which| Op::Check { which }),
        8 => (any(), 0..2000u64, 1..2_000_000u64, prop::bool::weighted(0.7), 0..4u64)
            .prop_map(|(which, from, words, frees, site)| Op::Offload { which, from, words, frees, site }),
        3 => any().prop_map(|which| Op::Free { which }),
        6 => any().prop_map(|which| Op::Begin { which }),
        6 => any().prop_map(|which| Op::Wait { which }),
        4 => any().prop_map(|which| Op::Release { which }),
        1 => kib.prop_map(|kib| Op::Foreign { kib }),
        1 => Just(Op::DelayOut),
        1 => Just(Op::DelayIn),
        3 => (1..20usize).prop_map(|count| Op::Step { count }),
        3 => Just(Op::Tick),
        1 => Just(Op::Settle),
        1 => Just(Op::Trim),
        1 => Just(Op::Shrink),
        1 => (1..3u64).prop_map(|site| Op::Again { site }),
        1 => Just(Op::NoHost),
        2 => Just(Op::Host),
        2 => (1..6000u64).prop_map(|kib| Op::Reserve { kib }),
        1 => any().prop_map(|which| Op::HostWrite { which }),
        1 => any().prop_map(|which| Op::HostRead { which }),
        4 => any().prop_map(|which| Op::Load { which }),
        2 => (any(), any()).prop_map(|(which, block)| Op::Store { which, block }),
        1 => any().prop_map(|which| Op::GiveBack { which }),
    ]
}

/// A block of the program: what is in it, or nothing yet that may be read.
#[derive(Clone, Copy, Debug)]
struct Block {
    address: Address,
    size: Bytes,
    written: Option<Written>,
    /// Whether copies out may still read it.
    is_read: bool,
    /// Whether a copy in may still write it, and its stream does not wait for that.
    is_loading: bool,
}

#[derive(Clone, Copy, Debug)]
struct Packed {
    id: u64,
    written: Written,
    /// Where its last way back goes, as long as that block is there, and what comes: a way back that is begun before the block is freed
    /// has the first copy.
    target: Option<(Address, Written)>,
    /// Its block, while that lives and what is copied is not final; and its save.
    checked: Option<(Address, SaveId)>,
}

/// Reserved host memory, and the bytes that it has, at their own address.
#[derive(Clone, Copy, Debug)]
struct Place {
    id: u64,
    written: Written,
}

struct Run {
    scene: Scene,
    places: Vec<Place>,
    blocks: Vec<Block>,
    packed: Vec<Packed>,
    seed: u64,
    /// Saves that changed.
    changed: Vec<SaveId>,
    /// All host memory, held by somebody else.
    host: Vec<HostBlock>,
}

impl Run {
    fn malloc(&mut self, size: Bytes) -> Option<usize> {
        match self.scene.malloc_on(self.scene.own, size) {
            Ok(address) => {
                let block = Block { address, size, written: None, is_read: false, is_loading: false };
                self.blocks.push(block);
                self.write(self.blocks.len() - 1);
                Some(self.blocks.len() - 1)
            }
            Err(ProcessError::Pool(error)) if error.is_out_of_memory() => None,
            Err(error) => panic!("{error}"),
        }
    }

    fn write(&mut self, index: usize) {
        self.seed += 1;
        let Block { address, size, is_read, is_loading, .. } = self.blocks[index];
        if is_loading {
            self.scene.synchronize(Direction::ToGpu);
            self.blocks[index].is_loading = false;
        }
        if is_read {
            // Who writes to what is on its way out says so, or its copy is anything.
            self.scene.synchronize(Direction::FromGpu);
            self.blocks[index].is_read = false;
        }
        let written = Written { address, size: Bytes::new(size.get() / 8 * 8), seed: self.seed, skipped: 0 };
        for packed in &mut self.packed {
            packed.target.take_if(|(target, _)| *target == address);
        }
        self.scene.write_on(self.scene.own, written, US(self.seed * 7 % 41));
        self.blocks[index].written = Some(written);
    }

    fn check(&self, index: usize) {
        if let Some(written) = self.blocks[index].written {
            self.scene.check_on(self.scene.own, written, US(self.seed % 13));
        }
    }

    fn offload(&mut self, index: usize, from: u64, words: u64, frees: bool, site: u64) {
        let Some(written) = self.blocks[index].written else { return };
        let all = written.size.get() / 8;
        let from = from.min(all - 1);
        let part = written.part(from, words.min(all - from));
        // Several saves have the same number, as where a program's passes differ.
        let save = SaveId { site, save: words % 3 };
        let offload = &self.scene.offload;
        let is_checked = site > 0 && offload.check_state(save) != CheckState::Fine;
        let id = match is_checked {
            true => offload.offload_checked(self.scene.own, part.address, part.size, save),
            false => offload.offload(self.scene.own, part.address, part.size),
        };
        let id = match id {
            Ok(id) => id,
            Err(ProcessError::Host(error)) if error.is_shortage() => return,
            Err(error) => panic!("{error}"),
        };
        let checked = is_checked.then_some((written.address, save));
        self.packed.push(Packed { id, written: part, target: None, checked });
        self.blocks[index].is_read = true;
        if frees {
            self.free(index);
        }
    }

    fn free(&mut self, index: usize) {
        let Block { address, written, .. } = self.blocks.swap_remove(index);
        for packed in &mut self.packed {
            packed.target.take_if(|(target, _)| *target == address);
            if let Some((_, save)) = packed.checked.take_if(|(block, _)| *block == address)
                && let Some(now) = written
            {
                let from = (packed.written.address.0 - address.0) / 8;
                let now = now.part(from, packed.written.size.get() / 8);
                if now != packed.written {
                    self.changed.push(save);
                }
                packed.written = now;
            }
        }
        self.scene.free(address);
    }

    fn begin(&mut self, which: usize) {
        let Packed { id, written, .. } = self.packed[which];
        let Some(index) = self.malloc(written.size) else { return };
        let address = self.blocks[index].address;
        self.scene.offload.begin_reload(id, self.scene.own, address).unwrap();
        (self.blocks[index].written, self.blocks[index].is_loading) = (None, true);
        self.packed[which].target = Some((address, written));
    }

    fn wait(&mut self, which: usize) {
        let Packed { id, target, .. } = self.packed[which];
        let Some((address, written)) = target else { return };
        self.scene.offload.wait_reload(id, self.scene.own).unwrap();
        self.packed[which].target = None;
        let block = self.blocks.iter_mut().find(|block| block.address == address).unwrap();
        (block.written, block.is_loading) = (Some(Written { address, ..written }), false);
        self.scene.check_on(self.scene.own, Written { address, ..written }, US(3));
    }

    fn reserve(&mut self, size: Bytes) {
        let id = match self.scene.offload.reserve(0, size) {
            Ok(id) => id,
            Err(ProcessError::Host(error)) if error.is_shortage() => return,
            Err(error) => panic!("{error}"),
        };
        let address = self.scene.offload.host_address(id).unwrap();
        self.places.push(Place { id, written: Written { address, size, seed: 0, skipped: 0 } });
        self.host_writes(self.places.len() - 1);
    }

    /// The host writes to reserved memory once its copies have ended.
    fn host_writes(&mut self, which: usize) {
        self.seed += 1;
        let Place { id, written: Written { address, size, .. } } = self.places[which];
        assert_eq!(self.scene.offload.host_address(id).unwrap(), address);
        let written = Written { address, size, seed: self.seed, skipped: 0 };
        self.scene.write_on(self.scene.own, written, NONE);
        self.places[which].written = written;
    }

    /// The host reads reserved memory once its copies have ended.
    fn host_reads(&self, Place { id, written }: Place) {
        assert_eq!(self.scene.offload.host_address(id).unwrap(), written.address);
        self.scene.check_on(self.scene.own, written, NONE);
    }

    fn load(&mut self, which: usize) {
        let Place { id, written } = self.places[which];
        let Some(index) = self.malloc(written.size) else { return };
        let address = self.blocks[index].address;
        self.scene.offload.reload(id, self.scene.own, address).unwrap();
        self.blocks[index].written = Some(Written { address, ..written });
        self.check(index);
    }

    fn store(&mut self, which: usize, block: usize) {
        let (place, Block { address, written, .. }) = (self.places[which], self.blocks[block]);
        let Some(written) = written.filter(|written| written.size >= place.written.size) else { return };
        self.scene.offload.store(place.id, self.scene.own, address).unwrap();
        self.blocks[block].is_read = true;
        let Place { written: Written { address, size, .. }, .. } = place;
        self.places[which].written = Written { address, size, ..written };
    }

    fn apply(&mut self, op: &Op) {
        let (blocks, packed, places) = (self.blocks.len(), self.packed.len(), self.places.len());
        match *op {
            Op::Malloc { kib } => drop(self.malloc(Bytes::kib(kib))),
            Op::Write { which } if blocks > 0 => self.write(which % blocks),
            Op::Check { which } if blocks > 0 => self.check(which % blocks),
            Op::Offload { which, from, words, frees, site } if blocks > 0 => {
                self.offload(which % blocks, from, words, frees, site);
            }
            Op::Free { which } if blocks > 0 => self.free(which % blocks),
            Op::Begin { which } if packed > 0 => self.begin(which % packed),
            Op::Wait { which } if packed > 0 => self.wait(which % packed),
            Op::Release { which } if packed > 0 => {
                let Packed { id, .. } = self.packed.swap_remove(which % packed);
                self.scene.offload.release(id).unwrap();
            }
            // Another stream of the program takes memory, writes there and gives it back.
            Op::Foreign { kib } => {
                let size = Bytes::kib(kib);
                if let Ok(address) = self.scene.malloc_on(self.scene.other, size) {
                    let written = Written { address, size, seed: 1 << 20, skipped: 0 };
                    self.scene.write_on(self.scene.other, written, US(30));
                    self.scene.free(address);
                }
            }
            Op::DelayOut => self.scene.delay(Direction::FromGpu, US(300)),
            Op::DelayIn => self.scene.delay(Direction::ToGpu, US(300)),
            Op::Step { count } => (0..count).for_each(|_| _ = self.scene.sim.step()),
            Op::Tick => self.scene.pool().tick().unwrap(),
            Op::Settle => self.scene.pool().settle().unwrap(),
            Op::Trim => {
                self.scene.pool().trim(Bytes::ZERO).unwrap();
                self.scene.offload.trim();
            }
            // What leaves needs host memory.
            Op::Shrink if self.host.is_empty() && self.scene.stats().host_bytes < 256 << 20 => {
                self.scene.shrink()
            }
            Op::Again { site } => self.scene.offload.checks.again(site),
            Op::NoHost => {
                self.scene.offload.trim();
                let host = self.scene.regions.set().stores.host(GPU).unwrap();
                while let Ok(block) = host.take(Bytes::mib(8)) {
                    self.host.push(block);
                }
            }
            Op::Host => self.host.clear(),
            Op::Reserve { kib } => self.reserve(Bytes::kib(kib)),
            Op::HostWrite { which } if places > 0 => self.host_writes(which % places),
            Op::HostRead { which } if places > 0 => self.host_reads(self.places[which % places]),
            Op::Load { which } if places > 0 => self.load(which % places),
            Op::Store { which, block } if places > 0 && blocks > 0 => {
                self.store(which % places, block % blocks)
            }
            Op::GiveBack { which } if places > 0 => {
                let Place { id, .. } = self.places.swap_remove(which % places);
                self.scene.offload.release(id).unwrap();
            }
            _ => {}
        }
        self.scene.pool().check().unwrap_or_else(|broken| panic!("{broken}"));
        assert_eq!(self.scene.stats().entries, (self.packed.len() + self.places.len()) as u64);
    }

    /// Most of what there is goes.
    fn pass_ends(&mut self) {
        for Packed { id, .. } in self.packed.split_off(self.packed.len().min(2)) {
            self.scene.offload.release(id).unwrap();
        }
        for Place { id, .. } in self.places.split_off(self.places.len().min(4)) {
            self.scene.offload.release(id).unwrap();
        }
        while self.blocks.len() > 2 {
            self.free(2);
        }
        self.scene.run_dry();
        assert_eq!(*self.scene.wrong.lock(), Vec::<String>::new());
    }

    fn end(mut self) {
        self.host.clear();
        (0..self.packed.len()).for_each(|which| self.wait(which));
        (0..self.blocks.len()).for_each(|index| self.check(index));
        for Packed { id, .. } in std::mem::take(&mut self.packed) {
            self.scene.offload.release(id).unwrap();
        }
        self.places.iter().for_each(|place| self.host_reads(*place));
        self.scene.run_dry();
        for Place { id, .. } in std::mem::take(&mut self.places) {
            self.scene.offload.release(id).unwrap();
        }
        while !self.blocks.is_empty() {
            self.free(0);
        }
        self.scene.run_dry();
        let stats = self.scene.stats();
        assert_eq!(stats.changed == 0, self.changed.is_empty(), "{stats:?}");
        for save in &self.changed {
            assert_eq!(self.scene.offload.check_state(*save), CheckState::Changed);
        }
        self.scene.end();
    }
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(32)
}

impl Run {
    /// On a process whose host memory has an end.
    fn new() -> Run {
        let scene = Scene::with(|config| config.tiers.host_budget = Some(Bytes::mib(384)));
        let (places, blocks, packed, changed, host) = Default::default();
        Run { scene, places, blocks, packed, seed: 0, changed, host }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 600, ..ProptestConfig::default() })]

    #[test]
    fn what_comes_back_is_what_went(program in prop::collection::vec(op(), 1..80)) {
        let mut run = Run::new();
        program.iter().for_each(|op| run.apply(op));
        run.end();
    }
}

#[test]
fn soak_what_comes_back_is_what_went() {
    let steps = if std::env::var_os("GLAKE_SOAK").is_some() { 100_000 } else { 5_000 };
    let seed = std::env::var("GLAKE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1_u8);
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]);
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
    let ops = op();
    let mut run = Run::new();
    for step in 0..steps {
        let op = ops.new_tree(&mut runner).unwrap().current();
        run.apply(&op);
        // As a program's passes end: without it all memory is soon taken.
        if step % 100 == 99 {
            run.pass_ends();
        }
    }
    run.end();
}
