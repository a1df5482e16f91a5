//! `glake replay`, and the policies that a trace can be replayed under.

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use glake_replay::glake::{Glake, Options};
use glake_replay::plot::{self, Curve, Panel};
use glake_replay::trace::Trace;
use glake_replay::{
    FirstOom, Outcome, Refusal, Report, Setting as ReplaySetting, Subject, Timeline, baselines, find_limit,
    replay,
};
use glake_runtime::config::{Borrow, Config, DefragmentLevel, Setting};
use glake_units::Bytes;

use super::Failure;
use super::output::{Output, Progress, table};

/// Arguments of `glake replay`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ReplayArguments {
    /// Policies to replay under, several with commas [default: all four]
    #[arg(long, value_name = "P", value_delimiter = ',', hide_default_value = true)]
    policy: Vec<Policy>,
    /// The most memory a policy may reserve [default: all of the device]
    #[arg(long, value_name = "SIZE")]
    limit: Option<Bytes>,
    /// Also find the smallest limit under which the trace completes; takes some twenty replays more
    #[arg(long, conflicts_with = "limit")]
    find_limit: bool,
    /// Lag of the GPU behind the host, in milliseconds: memory freed on one stream becomes available to another only after this time.
    /// Several with commas
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [100],
          value_parser = milliseconds)]
    gpu_lag_ms: Vec<u64>,
    /// Memory that a stream may take from another: off, completed (work that has completed) or wait (behind a wait on the GPU) [default:
    /// completed]
    #[arg(long, value_name = "B")]
    borrow: Option<Borrow>,
    /// The unit of mapping, a multiple of 2MiB [default: 16MiB]
    #[arg(long, value_name = "SIZE")]
    extent: Option<Bytes>,
    /// Write every block and compare its bytes when it is freed (slow; glake only)
    #[arg(long)]
    verify: bool,
    /// Seconds for one trace under one policy; longer replays fail [default: 40, or .1 ms an event]
    #[arg(long, value_name = "S")]
    time_limit: Option<u64>,
    /// Draw live and reserved memory over time into this file (.svg), one panel a trace, one line a policy
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Traces or snapshots to replay
    #[arg(required = true)]
    trace: Vec<PathBuf>,
}

/// A lag as it is given.
fn milliseconds(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "it is a whole number of milliseconds, 0 or more".to_owned())
}

/// Time for the replay of a short trace.
const LEAST_TIME: Duration = Duration::from_secs(40);

const EXAMPLES: &str = "\
Examples:
  glake replay tests/traces/*.gz
      every policy, as a table
  glake replay --policy glake,expandable --plot m.svg t.gz
      two policies over time, as a picture
  glake replay --policy glake --gpu-lag-ms 0,20,100,500 t.gz
      how much a late GPU costs
  glake replay --limit 32GiB t.gz
      does it fit? exit code 1 if not
  glake replay --find-limit --json t.gz | jq .fit_limit
      the least that it fits in

Columns:
  lag ms        how far the GPU is behind the host (--gpu-lag-ms); the models
                know no lag
  live GiB      the peak of requested memory, each block rounded up to 512 B:
                the same for every policy
  reserved GiB  the peak of memory taken from the device
  utilization   live / reserved
  limit GiB     the least that the trace completes in (--find-limit)
  OOMs          allocations that failed
  stitches      ranges made of pieces that were not neighbours
  maps          pieces of physical memory mapped, once for each address they are
                mapped at
  waits         times that a stream was made to wait for another
  driver ms     calls into the driver for memory: measured on a GPU, by a cost
                table elsewhere
  late ms       of these, what came after the first fifth of the events
  ns/op         an allocation or a completed free, over the whole replay

JSON fields (memory in bytes, null where a figure does not apply):
  trace, policy, device, gpu_lag_ms, borrow, events, allocations,
  requested_peak, active_peak, reserved_peak, utilization, fit_limit, ooms,
  stitches, extent_maps, stream_waits, driver_calls, driver_us, driver_us_late,
  ns_per_op

Exit codes:
  0 done, 1 out of memory or failed, 2 usage or a trace that cannot be read";

impl ReplayArguments {
    pub(super) fn settings(&self) -> Vec<Setting> {
        // Past 2^63 no integer of TOML, but still a size.
        let size = |size: Bytes| match i64::try_from(size.get()) {
            Ok(bytes) => toml::Value::from(bytes),
            Err(_) => toml::Value::from(size.get().to_string()),
        };
        [
            self.limit.map(|limit| Setting::flag("--limit", "pool.limit", size(limit))),
            self.extent.map(|extent| Setting::flag("--extent", "pool.extent", size(extent))),
            self.borrow.map(|borrow| Setting::flag("--borrow", "pool.borrow", borrow.to_string())),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    fn policies(&self) -> &[Policy] {
        if self.policy.is_empty() { &Policy::ALL } else { &self.policy }
    }

    /// Returns the variants to replay. The models have no lag.
    fn variants(&self) -> Vec<Variant> {
        let lags = |policy| if policy == Policy::Glake { self.gpu_lag_ms.as_slice() } else { &[0] };
        self.policies()
            .iter()
            .flat_map(|&policy| lags(policy).iter().map(move |&gpu_lag_ms| Variant { policy, gpu_lag_ms }))
            .collect()
    }
}

pub(super) fn run(arguments: &ReplayArguments, config: &Config, output: &mut Output) -> Result<(), Failure> {
    if let Some(path) = &arguments.plot {
        plot::check(path).map_err(Failure::usage)?;
    }
    let traces: Vec<_> = arguments
        .trace
        .iter()
        .map(|path| Trace::open(path).map_err(Failure::usage))
        .collect::<Result<_, _>>()?;
    let subjects = Subjects::open(config, arguments.policies(), arguments.verify)?;
    let variants = arguments.variants();

    let events: u64 = traces.iter().map(|trace| trace.events().len() as u64).sum();
    let progress = Progress::new(events * variants.len() as u64);
    let (mut reports, mut panels, mut first) = (Vec::new(), Vec::new(), None);
    let mut done = 0;
    for trace in &traces {
        let begin_us = trace.events().first().map_or(0, |event| event.at_us());
        let mut panel = Panel { title: trace.name().to_owned(), begin_us, curves: Vec::new() };
        for &variant in &variants {
            let mut timeline = arguments.plot.as_ref().map(|_| Timeline::new());
            let seconds = arguments.time_limit.map_or_else(|| time_of(trace), Duration::from_secs);
            let task = Task { trace, variant, subjects: &subjects, progress: &progress, done, seconds };
            let Outcome { mut report, first_oom } = task.replay(config.pool.limit, timeline.as_mut())?;
            if arguments.find_limit && report.ooms == 0 {
                report.fit_limit = Some(task.find_limit(report.reserved_peak)?);
            }
            done += trace.events().len() as u64;
            first = first.or_else(|| first_oom.map(|oom| out_of_memory(&report, oom)));
            if output.is_json() {
                progress.pause(|| output.object(&report))?;
            }
            panel.curves.extend(timeline.map(|timeline| curve(&report, &variants, &timeline)));
            reports.push(report);
        }
        panels.push(panel);
    }
    drop(progress);
    output.text(&figures(&reports, arguments.find_limit))?;
    if let Some(path) = &arguments.plot {
        plot::write(path, &panels).map_err(Failure::failed)?;
    }
    first.map_or(Ok(()), Err)
}

/// Replay of one trace under one policy.
struct Task<'a> {
    trace: &'a Trace,
    variant: Variant,
    subjects: &'a Subjects<'a>,
    progress: &'a Progress,
    /// Events of the replays before.
    done: u64,
    /// Time after which the replay is given up.
    seconds: Duration,
}

/// Returns the time for one replay of a trace: many times what recorded programs take, so that no file keeps the command for ever.
fn time_of(trace: &Trace) -> Duration {
    (Duration::from_micros(100) * u32::try_from(trace.events().len()).unwrap_or(u32::MAX)).max(LEAST_TIME)
}

/// Replay that was given up.
#[derive(Debug, thiserror::Error)]
#[error(
    "{events} of {all} events took {seconds} s, the time for a file of its length: give --time-limit, or replay the models alone \
     (--policy caching,expandable)"
)]
struct TooLong {
    events: u64,
    all: usize,
    seconds: u64,
}

impl Task<'_> {
    fn replay(&self, limit: Option<Bytes>, timeline: Option<&mut Timeline>) -> Result<Outcome, Failure> {
        self.progress.say(format!("{} {}", self.trace.name(), self.variant.policy));
        let refused = |error| self.failed(&error);
        let mut subject = self.subjects.make(self.trace, self.variant, limit).map_err(refused)?;
        let begin = Instant::now();
        let mut reach = |events| {
            self.progress.reach(self.done + events);
            let (all, seconds) = (self.trace.events().len(), self.seconds.as_secs());
            match begin.elapsed() > self.seconds {
                true => Err(Refusal::Failed(Box::new(TooLong { events, all, seconds }))),
                false => Ok(()),
            }
        };
        replay(self.trace, subject.as_mut(), &self.subjects.setting(self.variant), timeline, &mut reach)
            .map_err(refused)
    }

    fn find_limit(&self, ceiling: Bytes) -> Result<Bytes, Failure> {
        let make = |limit| self.subjects.make(self.trace, self.variant, Some(limit));
        let name =
            |replays| format!("{} {} limit, try {}", self.trace.name(), self.variant.policy, replays + 1);
        self.progress.say(name(0));
        find_limit(self.trace, ceiling, make, &mut |replays| self.progress.say(name(replays)))
            .map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &dyn std::error::Error) -> Failure {
        Failure::failed(format!("{} under {}: {error}", self.trace.name(), self.variant.policy))
    }
}

fn out_of_memory(report: &Report, oom: FirstOom) -> Failure {
    Failure::failed(format!(
        "{} under {} ran out of memory {} times, first at line {}: {} wanted with {} reserved; give a higher --limit, \
         or look for the least with --find-limit",
        report.trace, report.policy, report.ooms, oom.line, oom.wanted, oom.reserved
    ))
}

fn curve(report: &Report, variants: &[Variant], timeline: &Timeline) -> Curve {
    let several = variants.iter().filter(|variant| variant.policy == Policy::Glake).count() > 1;
    let variant = match report.gpu_lag_ms {
        Some(lag) if several => format!("{lag} ms"),
        _ => String::new(),
    };
    Curve {
        policy: report.policy.clone(),
        variant,
        peak: report.reserved_peak,
        points: timeline.points().to_vec(),
    }
}

/// The table for people.
fn figures(reports: &[Report], limits: bool) -> String {
    let mut headers =
        vec!["trace", "policy", "lag ms", "live GiB", "reserved GiB", "utilization", "limit GiB", "OOMs"];
    headers.extend(["stitches", "maps", "waits", "driver ms", "late ms", "ns/op"]);
    let mut rows: Vec<_> = reports.iter().map(row).collect();
    // A trace's name stands once.
    for place in (1..rows.len()).rev() {
        if reports[place].trace == reports[place - 1].trace {
            rows[place][0].clear();
        }
    }
    if !limits {
        headers.retain(|header| *header != "limit GiB");
        rows.iter_mut().for_each(|row| drop(row.remove(6)));
    }
    table(2, &headers, &rows)
}

fn row(report: &Report) -> Vec<String> {
    let gib = |bytes: Bytes| format!("{:.2}", bytes.as_gib());
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    vec![
        report.trace.clone(),
        report.policy.clone(),
        known(report.gpu_lag_ms.map(|lag| lag.to_string())),
        gib(report.active_peak),
        gib(report.reserved_peak),
        known(report.utilization.map(|part| format!("{:.1} %", part * 100.0))),
        known(report.fit_limit.map(gib)),
        report.ooms.to_string(),
        report.stitches.to_string(),
        report.extent_maps.to_string(),
        report.stream_waits.to_string(),
        format!("{:.1}", report.driver_us / 1e3),
        format!("{:.1}", report.driver_us_late / 1e3),
        format!("{:.0}", report.ns_per_op),
    ]
}

/// Allocation policy of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// The product, on a device
    Glake,
    /// A model of the GMLake paper
    Gmlake,
    /// A model of PyTorch's caching allocator
    Caching,
    /// A model of PyTorch's expandable segments
    Expandable,
}

impl Policy {
    /// Policies in the order of the table.
    pub const ALL: [Policy; 4] = [Policy::Glake, Policy::Gmlake, Policy::Caching, Policy::Expandable];
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Policy::Glake => "glake",
            Policy::Gmlake => "gmlake",
            Policy::Caching => "caching",
            Policy::Expandable => "expandable",
        })
    }
}

/// Variant of a replay: its policy, and for the product the lag of the GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Variant {
    pub(super) policy: Policy,
    pub(super) gpu_lag_ms: u64,
}

/// Makes the subjects of the replays; opens the device once, where the product is among them.
pub(super) struct Subjects<'a> {
    config: &'a Config,
    glake: Option<Glake>,
    verify: bool,
}

impl<'a> Subjects<'a> {
    pub(super) fn open(config: &'a Config, policies: &[Policy], verify: bool) -> Result<Self, Failure> {
        let glake = match policies.contains(&Policy::Glake) {
            true => Some(Glake::open(super::found(config)?, config).map_err(Failure::failed)?),
            false => None,
        };
        Ok(Subjects { config, glake, verify })
    }

    /// Returns the variant's name and settings for the report.
    pub(super) fn setting(&self, variant: Variant) -> ReplaySetting {
        let policy = variant.policy.to_string();
        match &self.glake {
            Some(glake) if variant.policy == Policy::Glake => ReplaySetting {
                policy,
                device: glake.device().to_owned(),
                gpu_lag_ms: Some(variant.gpu_lag_ms),
                borrow: Some(self.config.pool.borrow.to_string()),
            },
            _ => ReplaySetting { policy, device: "model".to_owned(), gpu_lag_ms: None, borrow: None },
        }
    }

    /// A fresh allocator, which may reserve no more than `limit`.
    pub(super) fn make<'s>(
        &'s self,
        trace: &'s Trace,
        variant: Variant,
        limit: Option<Bytes>,
    ) -> Result<Box<dyn Subject + 's>, Refusal> {
        let most = limit.unwrap_or(Bytes::MAX);
        match (variant.policy, &self.glake) {
            (Policy::Glake, Some(glake)) => {
                glake.subject(trace, Options { gpu_lag_ms: variant.gpu_lag_ms, limit, verify: self.verify })
            }
            (Policy::Glake, None) => Err(Refusal::Failed("the device was not opened".into())),
            (Policy::Gmlake, _) => Ok(Box::new(baselines::GmLake::new(self.paper(), most))),
            (Policy::Caching, _) => Ok(Box::new(baselines::Caching::new(most))),
            (Policy::Expandable, _) => Ok(Box::new(baselines::Expandable::new(most))),
        }
    }

    /// GMLake's own knobs mean the same to its model; what is not set is the tutorial's.
    fn paper(&self) -> baselines::Knobs {
        let pool = &self.config.pool;
        baselines::Knobs {
            fragment_limit: pool.fragment_limit.unwrap_or(baselines::Knobs::default().fragment_limit),
            reuse_limit: pool.reuse_limit,
            stitch_last: pool.defragment_level == DefragmentLevel::WhenFull,
            auto_gc: pool.auto_gc_limit,
        }
    }
}
