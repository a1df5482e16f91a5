//! Random programs, each block's bytes known: what comes back is what went, whoever had the memory meanwhile.
//!
//! 48 programs; a hundred thousand steps: `PROPTEST_CASES=2500 cargo nextest run --locked -p glake-runtime offload::tests::programs`.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Op {
    Malloc { kib: u64 },
    Write { which: usize },
    Check { which: usize },
    Offload { which: usize, from: u64, words: u64, frees: bool },
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
}

fn op() -> impl Strategy<Value = Op> {
    let kib = prop_oneof![1 => 1..1024u64, 3 => 1025..5000u64, 1 => 5000..11_000u64];
    let any = any::<usize>;
    prop_oneof![
        6 => kib.clone().prop_map(|kib| Op::Malloc { kib }),
        4 => any().prop_map(|which| Op::Write { which }),
        2 => any().prop_map(|which| Op::Check { which }),
        8 => (any(), 0..2000u64, 1..2_000_000u64, prop::bool::weighted(0.7))
            .prop_map(|(which, from, words, frees)| Op::Offload { which, from, words, frees }),
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
    /// Where its last way back goes, as long as that block is there.
    target: Option<Address>,
}

struct Run {
    scene: Scene,
    blocks: Vec<Block>,
    packed: Vec<Packed>,
    seed: u64,
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
        for packed in self.packed.iter_mut().filter(|packed| packed.target == Some(address)) {
            packed.target = None;
        }
        self.scene.write_on(self.scene.own, written, US(self.seed * 7 % 41));
        self.blocks[index].written = Some(written);
    }

    fn check(&self, index: usize) {
        if let Some(written) = self.blocks[index].written {
            self.scene.check_on(self.scene.own, written, US(self.seed % 13));
        }
    }

    fn offload(&mut self, index: usize, from: u64, words: u64, frees: bool) {
        let Some(written) = self.blocks[index].written else { return };
        let all = written.size.get() / 8;
        let from = from.min(all - 1);
        let part = written.part(from, words.min(all - from));
        let id = self.scene.offload.offload(self.scene.own, part.address, part.size).unwrap();
        self.packed.push(Packed { id, written: part, target: None });
        self.blocks[index].is_read = true;
        if frees {
            self.free(index);
        }
    }

    fn free(&mut self, index: usize) {
        let Block { address, .. } = self.blocks.swap_remove(index);
        self.packed.iter_mut().filter(|packed| packed.target == Some(address)).for_each(|packed| {
            packed.target = None;
        });
        self.scene.free(address);
    }

    fn begin(&mut self, which: usize) {
        let Packed { id, written, .. } = self.packed[which];
        let Some(index) = self.malloc(written.size) else { return };
        let address = self.blocks[index].address;
        self.scene.offload.begin_reload(id, self.scene.own, address).unwrap();
        (self.blocks[index].written, self.blocks[index].is_loading) = (None, true);
        self.packed[which].target = Some(address);
    }

    fn wait(&mut self, which: usize) {
        let Packed { id, written, target } = self.packed[which];
        let Some(address) = target else { return };
        self.scene.offload.wait_reload(id, self.scene.own).unwrap();
        self.packed[which].target = None;
        let block = self.blocks.iter_mut().find(|block| block.address == address).unwrap();
        (block.written, block.is_loading) = (Some(Written { address, ..written }), false);
        self.scene.check_on(self.scene.own, Written { address, ..written }, US(3));
    }

    fn apply(&mut self, op: &Op) {
        let (blocks, packed) = (self.blocks.len(), self.packed.len());
        match *op {
            Op::Malloc { kib } => drop(self.malloc(Bytes::kib(kib))),
            Op::Write { which } if blocks > 0 => self.write(which % blocks),
            Op::Check { which } if blocks > 0 => self.check(which % blocks),
            Op::Offload { which, from, words, frees } if blocks > 0 => {
                self.offload(which % blocks, from, words, frees);
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
            Op::Shrink => self.scene.shrink(),
            _ => {}
        }
        self.scene.pool().check().unwrap_or_else(|broken| panic!("{broken}"));
        assert_eq!(self.scene.stats().entries, self.packed.len() as u64);
    }

    fn end(mut self) {
        (0..self.packed.len()).for_each(|which| self.wait(which));
        (0..self.blocks.len()).for_each(|index| self.check(index));
        for Packed { id, .. } in std::mem::take(&mut self.packed) {
            self.scene.offload.release(id).unwrap();
        }
        while !self.blocks.is_empty() {
            self.free(0);
        }
        self.scene.end();
    }
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(48)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 600, ..ProptestConfig::default() })]

    #[test]
    fn what_comes_back_is_what_went(program in prop::collection::vec(op(), 1..80)) {
        let mut run = Run { scene: Scene::new(), blocks: Vec::new(), packed: Vec::new(), seed: 0 };
        program.iter().for_each(|op| run.apply(op));
        run.end();
    }
}
