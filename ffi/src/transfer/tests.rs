//! Copies over a driver that does some of them by half: what is waited for and compared is right, whatever way it went.

use std::ffi::c_void;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use glake_abi::{
    GLAKE_COPY_BLOCKING, GLAKE_COPY_DEVICE, GLAKE_COPY_DIRECT, GLAKE_COPY_FROM_GPU, GLAKE_COPY_PTDS,
    GLAKE_COPY_TO_GPU, GLAKE_COPY_VERIFY, GLAKE_INVALID,
};
use glake_device::owned::{CompletionEvents, Lent, Pages, Registration};
use glake_device::{
    Address, CopyRequest, DeviceId, Driver, Fault, Faults, Injected, Refusal, Stream, Verb, When,
};
use glake_runtime::config::{Environment, Sources};
use glake_runtime::process::{CopyAsk, Form as CallForm, Process};
use glake_tiers::RegionOptions;
use glake_transfer::paths::Direction;
use glake_units::Bytes;

use crate::status::Failure;

const LENGTH: usize = 6 << 20;
const SIZE: u64 = LENGTH as u64;

/// A process whose driver fails by rule.
struct Fixture {
    faults: Arc<Faults>,
    process: Process,
    /// Whether the memory that is copied is a region's.
    in_region: bool,
}

/// Each way that a copy can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    ToGpu,
    FromGpu,
    Pageable,
    Small,
    Direct,
    BetweenGpus,
    WithinGpu,
    List,
    FewLarge,
    ToAll,
}

const FORMS: [Form; 10] = [
    Form::ToGpu,
    Form::FromGpu,
    Form::Pageable,
    Form::Small,
    Form::Direct,
    Form::BetweenGpus,
    Form::WithinGpu,
    Form::List,
    Form::FewLarge,
    Form::ToAll,
];

impl Fixture {
    fn new(settings: &str) -> Fixture {
        let environment = Environment::from_iter([("GLAKE_DEVICE", "sim:h200x4")]);
        let sources = Sources { environment, ..Sources::default() }.with_overrides("test", settings).unwrap();
        let mut faults = None;
        let process = Process::start_on(sources.load().unwrap(), |driver| {
            let around = Arc::new(Faults::new(driver));
            faults = Some(around.clone());
            around
        });
        let (process, faults) = (process.unwrap(), faults.unwrap());
        process.copies().multi_path(true).unwrap();
        process.regions().define(RegionOptions::of("cache")).unwrap();
        let fixture = Fixture { faults, process, in_region: false };
        // Other threads prepare relays, and give them access to pools.
        while tried(&fixture, None, false, &[]) != Ok(true) {
            std::thread::sleep(Duration::from_millis(1));
        }
        fixture
    }

    fn in_region(settings: &str) -> Fixture {
        Fixture { in_region: true, ..Fixture::new(settings) }
    }

    /// Bytes that were carried over other GPUs' links than those of the copies' own.
    fn relayed(&self) -> u64 {
        let paths = self.process.copies().statistics().paths;
        paths.iter().filter(|path| path.relay != path.target).map(|path| path.bytes).sum()
    }

    fn fill(&self, device: u32, at: Address, seed: u8) {
        // SAFETY: blocks of this size, which nothing uses now.
        unsafe { self.process.driver().write_now(DeviceId(device), at, pattern(seed)) }.unwrap();
    }

    fn read(&self, device: u32, at: Address) -> Vec<u8> {
        let mut bytes = vec![0; LENGTH];
        self.process.driver().read_now(DeviceId(device), at, &mut bytes).unwrap();
        bytes
    }

    /// Makes copies of a form; whether every byte arrived.
    fn copy(&self, form: Form, flags: u32, faults: &[Fault]) -> Result<bool, i32> {
        let process = &self.process;
        let completion_events = CompletionEvents::new(self.faults.clone() as Arc<dyn Driver>);
        let mut host =
            Registration::new(&completion_events, Pages::new(Bytes::new(SIZE), 1).unwrap()).unwrap();
        let mut pageable = vec![0_u8; LENGTH];
        if self.in_region {
            process.regions().enter("cache").unwrap();
        }
        let gpus = [0, 1, 0].map(|device| process.malloc(device, Bytes::new(SIZE), Stream(0)).unwrap());
        if self.in_region {
            process.regions().leave().unwrap();
        }
        let whole = |to, from| CopyRequest { to, from, size: Bytes::new(SIZE) };
        let blocks = |to: Address, from: Address, count: u64| -> Vec<CopyRequest> {
            let at = |start: Address, offset: u64| Address(start.0 + offset);
            let size = SIZE / count;
            let offsets = (0..count).map(|index| index * size);
            offsets
                .map(|offset| CopyRequest {
                    to: at(to, offset),
                    from: at(from, offset),
                    size: Bytes::new(size),
                })
                .collect()
        };
        host.as_mut_slice()[..LENGTH].copy_from_slice(pattern(1));
        pageable.copy_from_slice(pattern(1));
        gpus.iter().zip([0, 1, 0]).for_each(|(at, device)| self.fill(device, *at, 2));
        let (pinned, own) = (host.start(), Address(pageable.as_mut_ptr() as u64));
        let asked = super::parse_flags(std::ptr::null_mut::<c_void>(), flags, false).unwrap();
        self.faults.set(faults);
        let list = |requests: Vec<CopyRequest>, form, asked: &CopyAsk| {
            // SAFETY: all of it lives until the copies are done, and nothing else touches it.
            process.copies().copy(unsafe { Lent::new(&requests) }, form, asked)
        };
        let one = |request, asked: &CopyAsk| list(vec![request], CallForm::One, asked);
        let done = {
            match form {
                Form::ToGpu => one(whole(gpus[0], pinned), &asked),
                Form::FromGpu => one(whole(pinned, gpus[0]), &asked),
                Form::Pageable => one(whole(gpus[0], own), &asked),
                Form::Small => {
                    blocks(gpus[0], pinned, 48).into_iter().try_fold(0, |_, request| one(request, &asked))
                }
                Form::Direct => {
                    let flags = flags | GLAKE_COPY_DIRECT;
                    let asked = super::parse_flags(std::ptr::null_mut::<c_void>(), flags, false).unwrap();
                    one(whole(gpus[0], pinned), &asked)
                }
                Form::BetweenGpus => {
                    self.fill(1, gpus[1], 1);
                    one(whole(gpus[0], gpus[1]), &asked)
                }
                Form::WithinGpu => {
                    self.fill(0, gpus[2], 1);
                    one(whole(gpus[0], gpus[2]), &asked)
                }
                Form::List => list(blocks(gpus[0], pinned, 384), CallForm::List, &asked),
                Form::FewLarge => list(blocks(gpus[0], pinned, 6), CallForm::List, &asked),
                Form::ToAll => {
                    list(vec![whole(gpus[0], pinned), whole(gpus[1], pinned)], CallForm::ToAll, &asked)
                }
            }
        };
        self.faults.set(&[]);
        let equal = match form {
            Form::FromGpu => &host.as_slice()[..LENGTH] == pattern(2),
            Form::ToAll => self.read(0, gpus[0]) == pattern(1) && self.read(1, gpus[1]) == pattern(1),
            _ => self.read(0, gpus[0]) == pattern(1),
        };
        gpus.into_iter().for_each(|at| process.free(at).unwrap());
        done.map(|_| equal).map_err(|error| Failure::from(error).status)
    }
}

/// Bytes that tell where they belong, of seed 1 or 2.
fn pattern(seed: u8) -> &'static [u8] {
    static BOTH: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
        let byte = |value: usize| value.to_le_bytes()[0];
        let of = |seed: u8| (0..LENGTH).map(|at| byte(at % 251) ^ byte(at >> 12) ^ seed).collect();
        [of(59), of(118)]
    });
    &BOTH[usize::from(seed) - 1]
}

fn short(verb: Verb, when: When) -> Fault {
    Fault { verb: Some(verb), when, error: Injected::Short }
}

#[test]
fn every_copy_that_is_waited_for_is_compared_whatever_way_it_went() {
    let shapes = [Fixture::new(""), Fixture::in_region("")];
    for (fixture, form) in shapes.iter().flat_map(|fixture| FORMS.map(|form| (fixture, form))) {
        let mut hurt = 0;
        for (verb, n) in
            [(Verb::Copy, 1), (Verb::Copy, 3), (Verb::CopyBatch, 1), (Verb::Launch, 1), (Verb::Launch, 2)]
        {
            let faults = [short(verb, When::Nth(n))];
            hurt += u32::from(!fixture.copy(form, GLAKE_COPY_BLOCKING, &faults).unwrap());
            let verified = fixture.copy(form, GLAKE_COPY_BLOCKING | GLAKE_COPY_VERIFY, &faults).unwrap();
            assert!(verified, "{form:?}: call {n} of {verb}");
        }
        assert!(hurt > 0, "{form:?}: nothing was lost, so that nothing was tested");
    }
}

#[test]
fn regions_go_over_other_links_and_are_opened_to_relays_with_the_first_list() {
    let fixture = Fixture::in_region("");
    let begin = Instant::now();
    // Slots are created on first use, and access to memory is set on another thread.
    for form in [Form::ToGpu, Form::FromGpu, Form::List] {
        let before = fixture.relayed();
        while fixture.relayed() == before {
            assert_eq!(fixture.copy(form, GLAKE_COPY_BLOCKING, &[]), Ok(true), "{form:?}");
            assert!(begin.elapsed() < Duration::from_secs(60), "{form:?} takes one link");
        }
    }
}

/// Whether copies of a form come to take other GPUs' links: slots are made when they are first wanted, and memory is opened on another thread.
fn comes_to_relay(fixture: &Fixture, form: Form) -> bool {
    let (begin, before) = (Instant::now(), fixture.relayed());
    while fixture.relayed() == before && begin.elapsed() < Duration::from_secs(20) {
        assert_eq!(fixture.copy(form, GLAKE_COPY_BLOCKING, &[]), Ok(true), "{form:?}");
    }
    fixture.relayed() > before
}

#[test]
fn a_gpu_that_is_let_in_takes_no_relay_away_from_regions() {
    for in_region in [false, true] {
        // GPUs 2 and 3 are relays; GPU 1 belongs to the program.
        let fixture = Fixture { in_region, ..Fixture::new("transfer.exclude = [1]") };
        fixture.process.sharing().enable_peer(1, 0).unwrap();
        for form in [Form::ToGpu, Form::FromGpu] {
            assert!(comes_to_relay(&fixture, form), "{in_region} {form:?}");
        }
    }
}

#[test]
fn a_broadcast_opens_the_regions_that_it_goes_to() {
    for in_region in [false, true] {
        let fixture = Fixture { in_region, ..Fixture::new("transfer.shared_gpus = true") };
        assert!(comes_to_relay(&fixture, Form::ToAll), "{in_region}");
    }
}

#[test]
fn a_region_that_could_not_be_opened_is_asked_for_again() {
    let fixture = Fixture::in_region("");
    let process = &fixture.process;
    // Its extent stays, so that no other memory needs access.
    process.regions().enter("cache").unwrap();
    let kept = process.malloc(0, Bytes::new(SIZE), Stream(0)).unwrap();
    process.regions().leave().unwrap();
    let fault = Fault { verb: Some(Verb::SetAccess), when: When::From(1), error: Injected::Failed(1) };
    let pinned = CompletionEvents::new(fixture.faults.clone() as Arc<dyn Driver>);
    let host = Registration::new(&pinned, Pages::new(Bytes::new(SIZE), 1).unwrap()).unwrap();
    let asked = super::parse_flags(std::ptr::null_mut::<c_void>(), GLAKE_COPY_BLOCKING, false).unwrap();
    let size = Bytes::new(SIZE / 384);
    let at = |start: Address, index: u64| Address(start.0 + index * size.get());
    let block = |index| CopyRequest { to: at(kept, index), from: at(host.start(), index), size };
    let list: Vec<CopyRequest> = (0..384).map(block).collect();
    // SAFETY: all of it lives until the copies are done, and nothing else touches it.
    let copy = || process.copies().copy(unsafe { Lent::new(&list) }, CallForm::List, &asked).unwrap();
    fixture.faults.set(&[fault]);
    copy();
    std::thread::sleep(Duration::from_millis(50));
    fixture.faults.set(&[]);
    let (begin, before) = (Instant::now(), fixture.relayed());
    while fixture.relayed() == before {
        copy();
        assert!(begin.elapsed() < Duration::from_secs(20), "it is closed for good");
    }
    process.free(kept).unwrap();
}

#[test]
fn what_differs_after_a_second_copy_too_is_an_error() {
    let fixture = Fixture::new("");
    for form in [Form::ToGpu, Form::Small, Form::Direct, Form::List, Form::FewLarge, Form::ToAll] {
        let faults = [short(Verb::Copy, When::From(1)), short(Verb::CopyBatch, When::From(1))];
        let faults = [faults[0], faults[1], short(Verb::Launch, When::From(1))];
        let answer = fixture.copy(form, GLAKE_COPY_BLOCKING | GLAKE_COPY_VERIFY, &faults);
        assert_eq!(answer, Err(glake_abi::GLAKE_DRIVER), "{form:?}");
    }
}

#[test]
fn the_configuration_asks_for_all_of_it_too() {
    let fixture = Fixture::new("transfer.verify = true");
    for form in [Form::Direct, Form::WithinGpu, Form::List, Form::ToAll] {
        for verb in [Verb::Copy, Verb::CopyBatch, Verb::Launch] {
            assert_eq!(
                fixture.copy(form, GLAKE_COPY_BLOCKING, &[short(verb, When::Nth(1))]),
                Ok(true),
                "{form:?} {verb}"
            );
        }
    }
}

/// What `glake_copy_try` does of a copy to a GPU: taken or not, or the driver's number.
fn tried(
    fixture: &Fixture,
    way: Option<Direction>,
    back: bool,
    faults: &[Fault],
) -> Result<bool, Option<i32>> {
    let process = &fixture.process;
    let completion_events = CompletionEvents::new(fixture.faults.clone() as Arc<dyn Driver>);
    let host = Registration::new(&completion_events, Pages::new(Bytes::new(SIZE), 1).unwrap()).unwrap();
    let gpu = process.malloc(0, Bytes::new(SIZE), Stream(0)).unwrap();
    let (to, from) = if back { (host.start(), gpu) } else { (gpu, host.start()) };
    let asked = super::parse_flags(std::ptr::null_mut::<c_void>(), GLAKE_COPY_BLOCKING, false).unwrap();
    fixture.faults.set(faults);
    let request = [CopyRequest { to, from, size: Bytes::new(SIZE) }];
    // SAFETY: both live until the copy is done, and nothing else touches them.
    let taken = process.copies().attempt(unsafe { Lent::new(&request) }, &asked, way);
    fixture.faults.set(&[]);
    process.streams().synchronize(Some(0), Stream(0)).unwrap();
    process.free(gpu).unwrap();
    taken.map_err(|error| Failure::from(error).driver_error())
}

#[test]
fn a_copy_the_other_way_round_is_left_to_the_driver() {
    let fixture = Fixture::new("");
    for back in [false, true] {
        let (own, other) = match back {
            false => (Direction::ToGpu, Direction::FromGpu),
            true => (Direction::FromGpu, Direction::ToGpu),
        };
        for (way, taken) in [(None, true), (Some(own), true), (Some(other), false)] {
            assert_eq!(tried(&fixture, way, back, &[]), Ok(taken), "{way:?} {back}");
        }
    }
    for flags in [GLAKE_COPY_TO_GPU, GLAKE_COPY_FROM_GPU, GLAKE_COPY_TO_GPU | GLAKE_COPY_FROM_GPU] {
        let stream = std::ptr::null_mut::<c_void>();
        assert_eq!(
            super::parse_flags(stream, flags, false).unwrap_err().status,
            GLAKE_INVALID,
            "of glake_copy_try alone"
        );
        assert_eq!(
            super::parse_try_flags(stream, flags).is_ok(),
            flags != (GLAKE_COPY_TO_GPU | GLAKE_COPY_FROM_GPU)
        );
    }
}

#[test]
fn what_is_refused_before_it_is_enqueued_is_left_to_the_driver_and_later_its_number_is_told() {
    let fixture = Fixture::new("");
    let fault = |verb, error| [Fault { verb: Some(verb), when: When::From(1), error }];
    let errors = [
        (Injected::Refused(Refusal::InvalidValue), 1),
        (Injected::Refused(Refusal::UnknownHandle), 400),
        (Injected::OutOfMemory, 2),
        (Injected::NotReady, 600),
        (Injected::Capturing, 900),
        (Injected::Unsupported, 801),
        (Injected::Refused(Refusal::NoPeerAccess), 705),
        (Injected::Failed(46), 46),
    ];
    for (error, number) in errors {
        for verb in [Verb::StreamDevice, Verb::CaptureState] {
            assert_eq!(tried(&fixture, None, false, &fault(verb, error)), Ok(false), "{verb} {error:?}");
        }
        // Memory found pinned recently is not queried again.
        assert!(tried(&fixture, None, false, &fault(Verb::PointerAttributes, error)).is_ok(), "{error:?}");
        let refused = tried(&fixture, None, false, &fault(Verb::Copy, error));
        assert_eq!(refused, Err(Some(-number)), "{error:?}");
    }
}

#[test]
fn default_streams_are_those_of_the_device_that_is_named() {
    let fixture = Fixture::new("");
    let process = &fixture.process;
    let device = |flags| {
        let asked = super::parse_flags(std::ptr::null_mut::<c_void>(), flags, false).unwrap();
        process.streams().with_default_of(asked.device, || process.streams().device_of(asked.stream).unwrap())
    };
    assert_eq!(device(0).unwrap(), DeviceId(0));
    for number in 0..4 {
        for ptds in [0, GLAKE_COPY_PTDS] {
            assert_eq!(device(ptds | ((number + 1) * GLAKE_COPY_DEVICE)).unwrap(), DeviceId(number));
        }
    }
    assert!(device(5 * GLAKE_COPY_DEVICE).is_err());
    assert_eq!(device(0).unwrap(), DeviceId(0), "said for one call");
}

/// A copy that the driver refuses because it leaves its block names the block and both sizes, at both ends, with relays and without.
#[test]
fn a_refused_copy_names_the_block_that_it_leaves() {
    let fixture = Fixture::new("");
    let process = &fixture.process;
    let block = process.malloc(0, Bytes::mib(4), Stream(0)).unwrap();
    let inside = Address(block.0 + (1 << 20));
    let size = Bytes::mib(512);
    let mut memory = vec![0_u8; 512 << 20];
    let host = Address(memory.as_mut_ptr() as u64);
    for flags in [0, GLAKE_COPY_BLOCKING, GLAKE_COPY_DIRECT] {
        let asked = super::parse_flags(std::ptr::null_mut::<c_void>(), flags, false).unwrap();
        for request in
            [CopyRequest { to: block, from: host, size }, CopyRequest { to: host, from: inside, size }]
        {
            let requests = [request];
            // SAFETY: the host memory lives as long, nothing else touches it, and the driver refuses the other end.
            let copied = process.copies().copy(unsafe { Lent::new(&requests) }, CallForm::One, &asked);
            let error = copied.unwrap_err();
            let (text, failure) = (error.to_string(), Failure::from(error));
            let (asked, own) =
                (format!("a copy of {size} at 0x"), format!("which has {} at {block}", Bytes::mib(4)));
            assert!(text.starts_with(&asked) && text.contains(&own), "{text}");
            assert_eq!(failure.status, glake_abi::GLAKE_DRIVER, "{text}");
        }
    }
    process.free(block).unwrap();
}
