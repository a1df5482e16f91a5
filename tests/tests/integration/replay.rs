//! The product on the recorded traces, on the simulator: what it must reach.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::sync::OnceLock;

use glake_replay::baselines::{Caching, Expandable, GmLake, Knobs};
use glake_replay::glake::{Glake, Options};
use glake_replay::machine::Machine;
use glake_replay::trace::{BlockId, StreamIndex, Trace};
use glake_replay::{Counters, Refusal, Report, Setting, Subject, replay};
use glake_runtime::backend::Backend;
use glake_runtime::config::{Borrow, Pool};
use glake_units::Bytes;

const ONE_STREAM: [&str; 3] = ["opt13_LR", "gpt2_full", "convmix"];
const SEVERAL_STREAMS: [&str; 2] = ["fsdp_llama_full", "wavelet_bert"];
const LAGS_MS: [u64; 4] = [0, 20, 100, 500];

fn all() -> impl Iterator<Item = &'static str> {
    ONE_STREAM.into_iter().chain(SEVERAL_STREAMS)
}

/// Read once: several tests use each.
fn trace(name: &'static str) -> &'static Trace {
    static TRACES: OnceLock<Vec<Trace>> = OnceLock::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces");
    let open = |name| Trace::open(&folder.join(format!("{name}.trace.gz"))).unwrap();
    let traces = TRACES.get_or_init(|| all().map(open).collect());
    traces.iter().find(|trace| trace.name() == name).unwrap()
}

fn glake(borrow: Borrow) -> Glake {
    let backend = Backend::find(&"sim".parse().unwrap()).unwrap();
    Glake::on(Machine::open(&backend).unwrap(), Pool { borrow, ..Pool::default() })
}

fn lag(gpu_lag_ms: u64) -> Options {
    Options { gpu_lag_ms, ..Options::default() }
}

fn on(glake: &Glake, trace: &Trace, options: Options) -> Report {
    run(trace, glake.subject(trace, options).unwrap().as_mut())
}

fn run(trace: &Trace, subject: &mut dyn Subject) -> Report {
    replay(trace, subject, &Setting::default(), None, &mut |_| Ok(())).unwrap().report
}

fn expandable(trace: &Trace) -> Report {
    run(trace, &mut Expandable::new(Bytes::MAX))
}

#[test]
fn one_stream_wastes_next_to_nothing() {
    let glake = glake(Borrow::Completed);
    let mut sum = 0.0;
    for name in ONE_STREAM {
        let utilization = on(&glake, trace(name), lag(100)).utilization.unwrap();
        assert!(utilization >= 0.975, "{name}: {utilization:.4}");
        sum += utilization;
    }
    assert!(sum / 3.0 >= 0.985, "mean {:.4}", sum / 3.0);
}

/// A subject that is asked for a part of each size: the program with a smaller model.
struct Smaller<'a> {
    subject: &'a mut dyn Subject,
    trace: &'a Trace,
    divisor: u64,
    live: u64,
    peak: u64,
}

impl Smaller<'_> {
    fn of(&self, bytes: Bytes) -> Bytes {
        Bytes::new((bytes.get() / self.divisor).max(1))
    }

    /// Returns the utilization of a replay.
    fn utilization(trace: &Trace, subject: &mut dyn Subject, divisor: u64) -> f64 {
        let mut smaller = Smaller { subject, trace, divisor, live: 0, peak: 0 };
        let report = run(trace, &mut smaller);
        assert_eq!(report.ooms, 0);
        Bytes::new(smaller.peak).fraction_of(report.reserved_peak)
    }
}

impl Subject for Smaller<'_> {
    fn allocate(
        &mut self,
        block: BlockId,
        bytes: Bytes,
        stream: StreamIndex,
        now_us: u64,
    ) -> Result<(), Refusal> {
        let bytes = self.of(bytes);
        self.live += bytes.get().next_multiple_of(512);
        self.peak = self.peak.max(self.live);
        self.subject.allocate(block, bytes, stream, now_us)
    }

    fn free_requested(&mut self, block: BlockId, now_us: u64) -> Result<(), Refusal> {
        self.subject.free_requested(block, now_us)
    }

    fn free_completed(&mut self, block: BlockId, now_us: u64) -> Result<(), Refusal> {
        self.live -= self.of(self.trace.size_of(block)).get().next_multiple_of(512);
        self.subject.free_completed(block, now_us)
    }

    fn record_stream(&mut self, block: BlockId, stream: StreamIndex, now_us: u64) -> Result<(), Refusal> {
        self.subject.record_stream(block, stream, now_us)
    }

    fn reserved(&self) -> Bytes {
        self.subject.reserved()
    }

    fn counters(&self) -> Counters {
        self.subject.counters()
    }
}

#[test]
fn a_small_program_wastes_little_too() {
    let glake = glake(Borrow::Completed);
    for (divisor, bar) in [(4, 0.97), (10, 0.95)] {
        let utilizations = ONE_STREAM.map(|name| {
            let mut subject = glake.subject(trace(name), lag(100)).unwrap();
            Smaller::utilization(trace(name), subject.as_mut(), divisor)
        });
        let mean = utilizations.iter().sum::<f64>() / 3.0;
        assert!(mean >= bar, "a {divisor}th: mean {mean:.4} of {utilizations:.4?}");
    }
}

#[test]
fn several_streams_share_what_is_done() {
    let glake = glake(Borrow::Completed);
    for name in SEVERAL_STREAMS {
        let peer = expandable(trace(name)).reserved_peak;
        for gpu_lag_ms in LAGS_MS {
            let report = on(&glake, trace(name), lag(gpu_lag_ms));
            let bar = match (name, gpu_lag_ms) {
                ("fsdp_llama_full", 0 | 20) => 0.86,
                ("fsdp_llama_full", _) => 0.95,
                _ => 1.01,
            };
            let ratio = report.reserved_peak.fraction_of(peer);
            assert!(ratio <= bar, "{name} at {gpu_lag_ms} ms: {ratio:.3} of expandable's, bar {bar}");
            assert_eq!((report.stream_waits, report.ooms), (0, 0), "{name} at {gpu_lag_ms} ms");
        }
    }
}

#[test]
fn waits_make_streams_one() {
    let glake = glake(Borrow::Wait);
    for name in SEVERAL_STREAMS {
        for gpu_lag_ms in LAGS_MS {
            let utilization = on(&glake, trace(name), lag(gpu_lag_ms)).utilization.unwrap();
            let bar = if name == "fsdp_llama_full" { 0.955 } else { 0.98 };
            assert!(utilization >= bar, "{name} at {gpu_lag_ms} ms: {utilization:.4}");
        }
    }
}

/// Each limit is one step of `glake replay --find-limit`, 2 MiB, below the least in which expandable segments complete.
#[test]
fn a_trace_completes_in_little_more_than_is_live_where_others_do_not() {
    let limits = [
        ("opt13_LR", 27298),
        ("gpt2_full", 61458),
        ("convmix", 14370),
        ("fsdp_llama_full", 14628),
        ("wavelet_bert", 26814),
    ];
    let glake = glake(Borrow::Completed);
    for (name, mib) in limits {
        let (trace, limit) = (trace(name), Bytes::mib(mib));
        let ratio = limit.fraction_of(trace.peaks().active);
        assert!(ratio <= 1.02, "{name}: {limit}, {ratio:.4} of what is live");
        assert_eq!(on(&glake, trace, Options { limit: Some(limit), ..lag(100) }).ooms, 0, "{name}: {limit}");
        assert!(run(trace, &mut Caching::new(limit)).ooms > 0, "{name}: {limit}");
        assert!(run(trace, &mut Expandable::new(limit)).ooms > 0, "{name}: {limit}");
    }
}

#[test]
fn a_tenth_of_the_paper_s_mappings_does_at_least_as_well() {
    let glake = glake(Borrow::Completed);
    for name in all() {
        let paper = run(trace(name), &mut GmLake::new(Knobs::default(), Bytes::MAX));
        let own = on(&glake, trace(name), lag(100));
        let (a, b) = (own.utilization.unwrap(), paper.utilization.unwrap());
        assert!(a >= b - 0.001, "{name}: {a:.4}, the paper's {b:.4}");
        let maps = (own.extent_maps, paper.extent_maps);
        assert!(maps.0 * 10 <= maps.1, "{name}: {} extents mapped, the paper's {}", maps.0, maps.1);
    }
}

/// By the table of costs; on a GPU the same is measured.
#[test]
fn the_driver_is_left_alone_once_the_program_has_warmed_up() {
    let glake = glake(Borrow::Completed);
    let mut parts = Vec::new();
    for name in all() {
        let report = on(&glake, trace(name), lag(100));
        let part = report.driver_us_late / trace(name).duration_us() as f64;
        assert!(part <= 0.01, "{name}: {:.2} % of the recorded time", part * 100.0);
        parts.push(part);
    }
    let mean = parts.iter().sum::<f64>() / parts.len() as f64;
    assert!(mean <= 0.004, "mean {:.3} %", mean * 100.0);
}

#[test]
fn bytes_stay_where_they_were_written() {
    for borrow in [Borrow::Off, Borrow::Completed, Borrow::Wait] {
        let glake = glake(borrow);
        for name in all() {
            let verified = on(&glake, trace(name), Options { verify: true, ..lag(20) });
            let plain = on(&glake, trace(name), lag(20));
            assert_eq!(verified.reserved_peak, plain.reserved_peak, "{name}: looking changes nothing");
            assert_eq!(verified.driver_calls, plain.driver_calls, "{name}: stamps are not counted");
        }
    }
}

#[test]
fn two_replays_are_the_same() {
    let (first, second) = (glake(Borrow::Completed), glake(Borrow::Completed));
    for name in all() {
        let timeless = |glake: &Glake| Report { ns_per_op: 0.0, ..on(glake, trace(name), lag(20)) };
        let report = timeless(&first);
        assert_eq!(report, timeless(&first), "{name} on the same device again");
        assert_eq!(report, timeless(&second), "{name} on another");
    }
}

#[test]
fn a_limit_holds_and_nothing_is_left_behind() {
    let glake = glake(Borrow::Completed);
    let (before, free) = (glake.machine().census().unwrap(), glake.machine().free_memory().unwrap());
    for name in ["convmix", "wavelet_bert"] {
        let limit = Bytes::new(trace(name).peaks().active.get() / 10 * 9);
        let report = on(&glake, trace(name), Options { limit: Some(limit), ..lag(100) });
        assert!(
            report.reserved_peak <= limit && report.ooms > 0 && report.utilization.is_none(),
            "{report:?}"
        );
        assert_eq!(glake.machine().census().unwrap(), before, "{name}");
        assert_eq!(glake.machine().free_memory().unwrap(), free, "{name}");
    }
}

/// A million events a second where it is built to be fast; checks cost some of it.
/// Returns the CPU time of this thread, which the load of the machine does not change.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[test]
fn replays_are_quick() {
    let glake = glake(Borrow::Completed);
    for name in all() {
        let events = trace(name).events().len() as f64;
        // What disturbs a replay makes it slower, never faster.
        let seconds = (0..3).map(|_| {
            let mut subject = glake.subject(trace(name), lag(100)).unwrap();
            let begin = cpu_seconds();
            run(trace(name), subject.as_mut());
            cpu_seconds() - begin
        });
        let rate = events / seconds.fold(f64::INFINITY, f64::min);
        let bar = if cfg!(debug_assertions) { 2e5 } else { 1e6 };
        assert!(rate >= bar, "{name}: {rate:.0} events a second");
    }
}
