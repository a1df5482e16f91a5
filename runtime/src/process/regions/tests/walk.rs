//! Random programs of uses, parks, allocations, writes, frees, seals, shrinks, refills, decommits, graphs' pools that come and go, with hooks
//! that refuse, waits that are given up and calls of the driver that fail, beside the thread that cleans: against what the bytes, and the gate, must be.
//!
//! 10,000 steps; with `GLAKE_SOAK` a million. `GLAKE_SEED` is where numbers come from.

use glake_device::{Fault, Faults, Injected, Verb, When};

use super::parks::Ending;
use super::*;
use crate::process::UseId;

const TAGS: [&str; 5] = ["weights", "cache", "scratch", "cold", "default"];
const SEALED: usize = 0;
const DISCARDED: usize = 2;
const MOST_BLOCKS: usize = 24;
const MOST_GRAPHS: u64 = 3;

/// splitmix64.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut held = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        held = (held ^ held >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        held ^ held >> 31
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }

    fn one_in(&mut self, many: usize) -> bool {
        self.below(many) == 0
    }
}

/// A live block. Of one whose bytes were given up none are known.
struct Live {
    written: Written,
    tag: String,
    known: bool,
    /// Whether none of it was decommitted since it was last committed.
    committed: bool,
}

/// What is known of a tag's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    Here,
    Away,
    /// Some of it, or nobody knows after a failure.
    Perhaps,
}

struct Walk {
    process: Arc<Process>,
    faults: Arc<Faults>,
    refuses: Arc<AtomicBool>,
    numbers: Numbers,
    live: Vec<Live>,
    uses: Vec<(UseId, Tags)>,
    /// Whether uses stand at safe points, or go on from one to the next.
    parks: bool,
    places: std::collections::BTreeMap<String, Where>,
    graphs: Vec<u64>,
    made: u64,
    sealed: bool,
}

impl Walk {
    fn new(seed: u64) -> Walk {
        let settings = "tiers.clean_after_ms = 1\ntiers.extent = \"2MiB\"\ntransfer.multi_path = \"never\"\n";
        let (process, faults) = started_with_faults(settings, |config| config.tiers.park_quantum_ms = 0);
        let of = |tag, policy, host_copy, clean| RegionOptions { clean, ..options(tag, policy, host_copy) };
        for options in [
            of(TAGS[SEALED], Policy::Sealed, CopyPolicy::Retain, false),
            of("cache", Policy::Keep, CopyPolicy::Drop, true),
            of(TAGS[DISCARDED], Policy::Discard, CopyPolicy::Drop, false),
            of("cold", Policy::Sealed, CopyPolicy::Drop, true),
        ] {
            process.regions().define(options).unwrap();
        }
        let refuses = Arc::new(AtomicBool::new(false));
        let asked = refuses.clone();
        let hook: Hook = Arc::new(move |_| i32::from(asked.load(Ordering::SeqCst)));
        process.regions().set_hooks(Some(hook), None, None);
        // Each has memory at some time: what has none is not sealed by its seal, nor known to a refill by the name of what is in no region.
        for tag in TAGS {
            let block = match tag {
                "default" => process.written(0, Bytes::kib(64), 1),
                tag => process.written_in(tag, 0, Bytes::kib(64), 1),
            };
            process.free(block.address).unwrap();
        }
        process.regions().views().unwrap();
        Walk {
            process: Arc::new(process),
            faults,
            refuses,
            numbers: Numbers(seed),
            live: Vec::new(),
            uses: Vec::new(),
            parks: false,
            places: TAGS.iter().map(|tag| ((*tag).to_owned(), Where::Here)).collect(),
            graphs: Vec::new(),
            made: 0,
            sealed: false,
        }
    }

    fn tag(&mut self) -> String {
        TAGS[self.numbers.below(TAGS.len())].to_owned()
    }

    fn tags(&mut self) -> Tags {
        match self.numbers.below(4) {
            0 => Tags::All,
            many => Tags::These((0..many).map(|_| self.tag()).collect()),
        }
    }

    fn touches(tags: &Tags, tag: &str) -> bool {
        match tags {
            Tags::All => true,
            Tags::These(tags) => tags.contains(tag) || tag == "default" || tag.starts_with("graph"),
        }
    }

    fn size(&mut self) -> Bytes {
        match self.numbers.below(12) {
            0 => Bytes::kib(512 * (1 + self.numbers.next() % 8)),
            1..=3 => Bytes::kib(64 + self.numbers.next() % 512),
            _ => Bytes::kib(1 + self.numbers.next() % 32),
        }
    }

    /// A failure of the driver, in one of so many moves.
    fn fault(&mut self) -> bool {
        if !self.numbers.one_in(12) {
            return false;
        }
        let verbs = [Verb::Map, Verb::Create, Verb::SetAccess, Verb::Copy, Verb::EventRecordContext];
        let verb = verbs[self.numbers.below(verbs.len())];
        let when = When::Nth(1 + self.numbers.next() % 12);
        self.faults.set(&[Fault { verb: Some(verb), when, error: Injected::Failed(1) }]);
        true
    }

    fn say(&mut self, tag: &str, place: Where) {
        self.places.insert(tag.to_owned(), place);
    }

    fn malloc(&mut self) {
        if self.live.len() >= MOST_BLOCKS {
            return self.free();
        }
        let (tag, size) = (self.tag(), self.size());
        self.made += 1;
        if tag == TAGS[SEALED] && self.sealed {
            self.process.regions().enter(&tag).unwrap();
            assert!(self.process.malloc(0, size, STREAM).is_err(), "what is sealed hands out nothing");
            self.process.regions().leave().unwrap();
            // What is touched comes back all the same.
            return self.say(&tag, Where::Here);
        }
        let seed = self.made;
        let named = tag != "default";
        if named {
            self.process.regions().enter(&tag).unwrap();
        }
        let address = self.process.malloc(0, size, STREAM).unwrap();
        if named {
            self.process.regions().leave().unwrap();
        }
        let written = Written { device: 0, address, size, seed };
        self.write_to(&written);
        self.say(&tag, Where::Here);
        self.live.push(Live { written, tag, known: true, committed: true });
    }

    fn write_to(&self, written: &Written) {
        let pool = &self.process.device(0).unwrap().started().unwrap().pool;
        pool.write(written.address, &bytes(written.size, written.seed)).unwrap();
    }

    fn free(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.numbers.below(self.live.len());
        let Live { written, tag, .. } = self.live.swap_remove(at);
        self.process.free(written.address).unwrap();
        let is_last = self.live.iter().all(|live| live.tag != tag);
        match self.places[&tag] {
            Where::Away if is_last && !tag.starts_with("graph") => self.say(&tag, Where::Here),
            Where::Away if !self.has_any(&tag) => self.say(&tag, Where::Perhaps),
            _ => {}
        }
    }

    /// Whether a tag has a block that has memory, or bytes that are evicted.
    fn has_any(&self, tag: &str) -> bool {
        self.live.iter().any(|live| live.tag == tag && live.committed)
    }

    fn decommit(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.numbers.below(self.live.len());
        let Live { written, tag, .. } = &self.live[at];
        let (Written { address, size, .. }, tag) = (*written, tag.clone());
        let stays = tag == TAGS[SEALED] && self.sealed || tag.starts_with("graph");
        let failing = !stays && self.fault();
        let gone = self.process.regions().decommit(address, size);
        self.faults.set(&[]);
        if stays {
            return assert!(gone.is_err(), "what is sealed stays, and what a graph may write to");
        }
        assert!(gone.is_ok() || failing, "{gone:?}");
        (self.live[at].known, self.live[at].committed) = (false, false);
        if gone.is_err() || self.places[&tag] == Where::Away && !self.has_any(&tag) {
            self.say(&tag, Where::Perhaps);
        }
    }

    /// Reads a block whose memory may be evicted: its bytes, or a refusal.
    fn read_evicted(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.numbers.below(self.live.len());
        let Live { written, known, .. } = &self.live[at];
        let mut found = vec![0; usize::try_from(written.size.get()).unwrap()];
        match self.process.regions().read_evicted(written.address, &mut found) {
            Ok(()) => assert!(!*known || pattern::matches(&found, written.seed), "{written:?}"),
            Err(error) => assert!(matches!(error, ProcessError::NotInHostMemory { .. }), "{error}"),
        }
        let place = self.places[&self.live[at].tag];
        assert!(
            place != Where::Here || self.process.regions().read_evicted(written.address, &mut found).is_err()
        );
    }

    /// As a kernel would that no use covers.
    fn write(&mut self) {
        if self.live.is_empty() {
            return;
        }
        let at = self.numbers.below(self.live.len());
        let tag = self.live[at].tag.clone();
        if self.places[&tag] != Where::Here || (tag == TAGS[SEALED] && self.sealed) {
            return;
        }
        self.made += 1;
        self.live[at].written.seed = self.made;
        let written = self.live[at].written;
        if !self.live[at].committed {
            self.process.regions().commit(written.address, written.size).unwrap();
            assert_eq!(self.process.regions().commit(written.address, written.size).unwrap(), Bytes::ZERO);
        }
        (self.live[at].known, self.live[at].committed) = (true, true);
        self.write_to(&written);
    }

    fn begin_use(&mut self) {
        if self.uses.len() >= 3 {
            return self.end_use();
        }
        let tags = self.tags();
        let (when, timeout) = match self.numbers.below(6) {
            0 | 1 => (WhenClosed::Refuse, None),
            2 => (WhenClosed::Hold, Some(Duration::ZERO)),
            _ => (WhenClosed::Refill, None),
        };
        let away = |walk: &Walk, place| {
            walk.places.iter().any(|(tag, of)| *of == place && Walk::touches(&tags, tag))
        };
        let (surely, perhaps) = (away(self, Where::Away), away(self, Where::Perhaps));
        let failing = when == WhenClosed::Refill && self.fault();
        let begun = self.process.regions().begin_use(&tags, when, timeout);
        self.faults.set(&[]);
        match begun {
            Ok(id) => {
                assert!(when == WhenClosed::Refill || !surely, "{tags:?} of {:?}", self.places);
                for (tag, place) in &mut self.places {
                    if Walk::touches(&tags, tag) {
                        *place = Where::Here;
                    }
                }
                self.uses.push((id, tags));
            }
            Err(ProcessError::Closed { .. }) => assert!(when == WhenClosed::Refuse && (surely || perhaps)),
            Err(ProcessError::HeldTooLong { .. }) => assert!(when == WhenClosed::Hold && (surely || perhaps)),
            Err(error) => {
                assert!(failing, "{error}");
                self.nobody_knows(&tags);
            }
        }
    }

    fn nobody_knows(&mut self, tags: &Tags) {
        for (tag, place) in &mut self.places {
            if Walk::touches(tags, tag) {
                *place = Where::Perhaps;
            }
        }
    }

    fn end_use(&mut self) {
        if !self.uses.is_empty() {
            let at = self.numbers.below(self.uses.len());
            let (id, _) = self.uses.swap_remove(at);
            self.process.regions().gate().end_use(id).unwrap();
        }
    }

    /// All uses come to safe points while memory leaves, and go on once it is back; meanwhile the program does this and that.
    fn park(&mut self) {
        if self.uses.is_empty() {
            return self.begin_use();
        }
        let tags = self.numbers.one_in(2).then(|| vec![self.tag(), self.tag()]);
        let failing = self.fault();
        let over = AtomicBool::new(false);
        let process = self.process.clone();
        let ask = Shrink { tags: tags.clone(), timeout: Some(Duration::from_secs(60)), ..Shrink::default() };
        std::thread::scope(|scope| {
            let _ending = Ending { regions: process.regions(), over: &over };
            for (id, _) in self.uses.clone() {
                let (gate, over) = (process.regions().gate(), &over);
                scope.spawn(move || {
                    while !over.load(Ordering::SeqCst) {
                        gate.safepoint(id);
                        std::thread::sleep(Duration::from_micros(20));
                    }
                });
            }
            let shrunk = process.regions().shrink(&ask);
            self.faults.set(&[]);
            assert!(shrunk.is_ok() || failing, "{shrunk:?}");
            self.left(&tags.map_or(Tags::All, |tags| Tags::of(&tags)), !failing);
            self.parks = true;
            for _ in 0..self.numbers.below(5) {
                match self.numbers.below(8) {
                    0 => self.malloc(),
                    1 | 2 => self.free(),
                    3 => self.graph(),
                    4 => self.shrink(),
                    5 => self.refill(),
                    6 => self.begin_use(),
                    _ => self.decommit(),
                }
                self.check();
            }
            self.parks = false;
            process.regions().refill(&Refill::default()).unwrap();
        });
        self.places.values_mut().for_each(|place| *place = Where::Here);
    }

    fn shrink(&mut self) {
        let tags = match self.numbers.below(3) {
            0 => None,
            many => Some((0..many).map(|_| self.tag()).collect::<Vec<String>>()),
        };
        let bytes = self.numbers.one_in(4).then(|| Bytes::kib(1 + self.numbers.next() % 6000));
        let refused = self.numbers.one_in(10);
        let failing = !refused && self.fault();
        let ask = Shrink { tags: tags.clone(), bytes, timeout: Some(Duration::ZERO), ..Shrink::default() };
        let tags = tags.map_or(Tags::All, |tags| Tags::of(&tags));
        let own = |tag: &str| match &tags {
            Tags::All => true,
            Tags::These(tags) => tags.contains(tag),
        };
        // Where nothing is there that could leave nobody is waited for.
        let views = self.process.regions().views().unwrap();
        let resident: Vec<&RegionView> =
            views.iter().filter(|view| own(&view.tag) && !view.resident.is_zero()).collect();
        let is_everything = ask.is_everything();
        let meets = |used: &Tags| is_everything || resident.iter().any(|view| Walk::touches(used, &view.tag));
        let used = !resident.is_empty() && self.uses.iter().any(|(_, used)| meets(used));
        self.refuses.store(refused, Ordering::SeqCst);
        let shrunk = self.process.regions().shrink(&ask);
        self.refuses.store(false, Ordering::SeqCst);
        self.faults.set(&[]);
        let moved = match shrunk {
            Ok(_) => {
                assert!(
                    !refused && (bytes.is_some() || !used || self.parks),
                    "{tags:?} left while {:?} ran",
                    self.uses
                );
                true
            }
            Err(error) if error.says("the hook") => {
                assert!(refused);
                false
            }
            Err(ProcessError::StillUsed { .. }) => {
                assert!(used, "nobody used {tags:?}");
                false
            }
            Err(error) => {
                assert!(failing || matches!(error, ProcessError::Partly { .. }), "{error}");
                true
            }
        };
        if !moved {
            return;
        }
        self.left(&tags, bytes.is_none() && !failing);
    }

    /// Memory of these tags has left; all of it, or some.
    fn left(&mut self, tags: &Tags, whole: bool) {
        let own = |tag: &str| match tags {
            Tags::All => true,
            Tags::These(tags) => tags.contains(tag),
        };
        let places: Vec<String> = self.places.keys().filter(|tag| own(tag)).cloned().collect();
        for tag in places {
            let has_any = self.has_any(&tag);
            // A graph may write to what is free in its pool: that leaves and counts as well.
            match (whole, has_any && !tag.starts_with("graph")) {
                (true, true) => self.say(&tag, Where::Away),
                _ if self.places[&tag] == Where::Here => self.say(&tag, Where::Perhaps),
                _ => {}
            }
            if tag == TAGS[DISCARDED] {
                self.live.iter_mut().filter(|live| live.tag == tag).for_each(|live| live.known = false);
            }
        }
    }

    fn refill(&mut self) {
        let tags = self.numbers.one_in(2).then(|| vec![self.tag(), self.tag()]);
        let bytes = self.numbers.one_in(4).then(|| Bytes::kib(1 + self.numbers.next() % 6000));
        let failing = self.fault();
        // What is not back by then comes while the program goes on.
        let timeout = self.numbers.one_in(6).then_some(Duration::ZERO);
        let ask = Refill { tags: tags.clone(), bytes, timeout, ..Refill::default() };
        let refilled = self.process.regions().refill(&ask);
        let comes = timeout.is_some() && matches!(refilled, Err(ProcessError::StillComing { .. }));
        assert!(refilled.is_ok() || failing || comes, "{refilled:?}");
        let whole = refilled.is_ok() && bytes.is_none() && timeout.is_none();
        self.faults.set(&[]);
        let places: Vec<String> = self.places.keys().cloned().collect();
        for tag in places.iter().filter(|tag| tags.as_ref().is_none_or(|tags| tags.contains(tag))) {
            match (whole, self.places[tag]) {
                (true, _) => self.say(tag, Where::Here),
                (false, Where::Away) => self.say(tag, Where::Perhaps),
                _ => {}
            }
        }
    }

    /// A graph's pool with a block or two, or one that is dropped.
    fn graph(&mut self) {
        if self.graphs.len() as u64 >= MOST_GRAPHS || self.numbers.one_in(2) && !self.graphs.is_empty() {
            let at = self.numbers.below(self.graphs.len());
            let id = self.graphs.swap_remove(at);
            let tag = format!("graph (0, {id})");
            let (own, others) = std::mem::take(&mut self.live).into_iter().partition(|live| live.tag == tag);
            self.live = others;
            let own: Vec<Live> = own;
            own.iter().for_each(|live| self.process.free(live.written.address).unwrap());
            self.process.pools().release(0, PoolId(0, id)).unwrap();
            self.places.remove(&tag);
            return;
        }
        self.made += 1;
        let id = self.made;
        self.process.pools().begin(0, PoolId(0, id), None).unwrap();
        let tag = format!("graph (0, {id})");
        for _ in 0..=self.numbers.below(2) {
            let size = self.size();
            self.made += 1;
            let written = self.process.written(0, size, self.made);
            self.live.push(Live { written, tag: tag.clone(), known: true, committed: true });
        }
        self.process.pools().end(0, PoolId(0, id)).unwrap();
        self.graphs.push(id);
        self.say(&tag, Where::Here);
    }

    fn seal(&mut self) {
        self.sealed = !self.sealed;
        let regions = self.process.regions();
        if self.sealed {
            regions.seal(TAGS[SEALED], false).unwrap();
        } else {
            regions.unseal(TAGS[SEALED]).unwrap();
        }
    }

    fn step(&mut self) {
        match self.numbers.below(100) {
            0..22 => self.malloc(),
            22..38 => self.free(),
            38..52 => self.write(),
            52..56 => self.read_evicted(),
            56..68 => self.begin_use(),
            68..80 => self.end_use(),
            80..86 => self.shrink(),
            86..92 => self.refill(),
            92 => self.park(),
            93..95 => self.graph(),
            95 => self.decommit(),
            96..98 => self.seal(),
            98 => _ = self.process.trim(None, Bytes::ZERO).unwrap(),
            _ => std::thread::sleep(Duration::from_millis(3)),
        }
    }

    /// Of what is surely here, and at the end of everything.
    fn check(&self) {
        for live in self.live.iter().filter(|live| live.known && self.places[&live.tag] == Where::Here) {
            self.process.check(&live.written);
        }
        for view in self.process.regions().views().unwrap() {
            assert!(view.clean.is_none_or(|counts| counts.clean <= view.live), "{view:?}");
        }
        let view = self.process.regions().gate().view();
        assert_eq!(view.uses, self.uses.len());
        for (tag, place) in &self.places {
            assert!(*place != Where::Away || view.closed.contains(tag), "{tag} is away: {view:?}");
        }
    }

    fn end(mut self) {
        while !self.uses.is_empty() {
            self.end_use();
        }
        // What goes on in the background is waited for by whoever needs the same.
        self.process.regions().refill(&Refill::default()).unwrap();
        self.places.values_mut().for_each(|place| *place = Where::Here);
        self.check();
        self.process.regions().refill(&Refill::default()).unwrap();
        while !self.graphs.is_empty() {
            self.numbers = Numbers(0);
            let id = self.graphs.pop().unwrap();
            self.process.pools().release(0, PoolId(0, id)).unwrap();
        }
        let blocks: Vec<Written> = self.live.iter().map(|live| live.written).collect();
        if self.sealed {
            self.process.regions().unseal(TAGS[SEALED]).unwrap();
        }
        Arc::into_inner(self.process).unwrap().end(blocks);
    }
}

#[test]
fn soak_random_programs_keep_every_byte_and_the_gate() {
    let steps = if std::env::var_os("GLAKE_SOAK").is_some() { 1_000_000 } else { 10_000 };
    let seed = std::env::var("GLAKE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    for (walk_number, begin) in (0..steps).step_by(2_500).enumerate() {
        let mut walk = Walk::new(seed + walk_number as u64);
        for step in begin..steps.min(begin + 2_500) {
            walk.step();
            if step % 32 == 0 {
                walk.check();
            }
        }
        walk.end();
    }
}
