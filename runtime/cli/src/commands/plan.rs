//! `glake plan`.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use flate2::bufread::MultiGzDecoder;
use glake_arbiter::node::NodeFile;
use glake_arbiter::plan::{self, Calibration, Figures, Load, PlanError, Policy, Tally, Trace, TraceError};
use glake_replay::plot::{self, Distribution};
use glake_units::Bytes;

use super::Failure;
use super::output::{Output, Progress, note, table};

/// Arguments of `glake plan`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct PlanArguments {
    /// The server and its workers: examples/workers.toml is one
    #[arg(value_name = "WORKERS.toml")]
    workers: PathBuf,
    /// Requests (CSV, gzip or plain): t_s,worker,context_tokens,generated_tokens, or Azure's rows with --assign:
    /// TIMESTAMP,ContextTokens,GeneratedTokens
    trace: PathBuf,
    /// Draw whom each request is for, whatever the trace says: zipf:S asks the n-th worker as often as 1 / n^S, zipf:0
    /// all alike
    #[arg(long, value_name = "zipf:S", value_parser = zipf)]
    assign: Option<f64>,
    /// Requests a second in all, at random times; the trace then gives their lengths [default: as in the trace]
    #[arg(long, value_name = "R", value_parser = positive)]
    rate: Option<f64>,
    /// For how many seconds [default: as long as the trace]
    #[arg(long, value_name = "S", value_parser = positive)]
    duration: Option<f64>,
    /// The first seed of what is drawn
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Number of seeds to run; the interval of the 99th percentile is over them
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    seeds: u64,
    /// Times the tokens of each request
    #[arg(long, value_name = "F", default_value_t = 1.0, value_parser = positive)]
    lengths: f64,
    /// Whether workers that run share the GPU's compute, or are each as fast as alone
    #[arg(long, value_name = "on|off", default_value = "on")]
    contention: Contention,
    /// Measured speeds of this machine (TOML) [default: an H200]
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Also find how many such workers have their first token within S seconds 99 times in a hundred
    #[arg(long, value_name = "S", value_parser = positive)]
    slo: Option<f64>,
    /// Policies, separated by commas: start-stop, drain-per-tensor, glake, glake-no-preempt [default: all]
    #[arg(long, value_name = "P", value_delimiter = ',', hide_default_value = true)]
    policy: Vec<Policy>,
    /// Draw how many requests had their first token by when into this file (.svg), a line a policy
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Whether workers contend for the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Contention {
    /// Workers share the GPU in proportion to the time their steps compute
    On,
    /// Workers do not slow each other down
    Off,
}

const EXAMPLES: &str = "\
Examples:
  glake plan examples/workers.toml examples/requests.csv
  glake plan workers.toml azure.csv.gz --assign zipf:1 --rate 1 \\
      --duration 600 --seeds 20
  glake plan workers.toml azure.csv.gz --assign zipf:0 --rate 0.2 \\
      --slo 2 --policy glake,start-stop
  glake plan workers.toml requests.csv --json | jq '{policy, ttft_p99_s}'

Policies:
  start-stop        workers are started and stopped, least recently used first
  drain-per-tensor  whole workers leave once their requests have ended, copied
                    tensor by tensor
  glake-no-preempt  GLake's arbiter, where no worker is parked
  glake             GLake's arbiter: busy workers are parked between two steps

Calibration (each key has the value of one H200 where it is not given):
  refill_gbps, shrink_gbps  host to GPU, and back
  clean_ms_per_gib          for what leaves and has a copy
  switch_ms                 of a shrink or a refill, beside its bytes
  park_ms                   from the end of a step
  start_s, start_gbps, stop_s, per_tensor_refill_gbps, per_tensor_shrink_gbps,
  per_tensor_switch_ms      of the policies start-stop and drain-per-tensor
  [worker.NAME]             prefill_tok_s and decode_ms in place of the file's;
                            step_ms: the part of a step in which the GPU
                            computes, where it waits in the rest

Columns (times in seconds, from when a request came):
  requests       that came, of all seeds
  TTFT p50, p99  to the first token: the median, and the 99th percentile
  low, high      the 5th and the 95th percentile of the seeds' 99th
  end p50, p99   to the last token
  gap p99        the longest time between two tokens of a request
  hits           requests that found their worker's memory on the GPU
  GPU s          GPUs times seconds, for each request served
  GiB/req        copied to the GPUs, for each request served
  link           the part of the time in which a link was busy with refills
  denied         requests that were not served: they count nowhere else
  density        how many such workers keep to --slo: the file's in turn, each
                 asked as often

JSON fields (times in seconds, null where a figure does not apply):
  policy, requests, ttft_p50_s, ttft_p99_s, ttft_p99_low_s, ttft_p99_high_s,
  e2e_p50_s, e2e_p99_s, max_gap_p99_s, hit_rate, gpu_seconds_per_request,
  refilled_bytes, bytes_per_request, link_duty, denied, density";

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| *number > 0.0 && *number <= 1e9);
    number.ok_or_else(|| "it is a number above 0, at most 1e9".to_owned())
}

fn zipf(text: &str) -> Result<f64, String> {
    let power = text.strip_prefix("zipf:").and_then(|power| power.parse().ok());
    power
        .filter(|power: &f64| power.is_finite() && *power >= 0.0)
        .ok_or_else(|| "it is zipf:S, S 0 or more".to_owned())
}

pub(super) fn run(arguments: &PlanArguments, output: &mut Output) -> Result<(), Failure> {
    if let Some(path) = &arguments.plot {
        plot::check(path).map_err(Failure::usage)?;
    }
    let asked = Asked::read(arguments)?;
    let policies = if arguments.policy.is_empty() { &Policy::ALL[..] } else { &arguments.policy };
    let seeds = asked.seeds();
    if seeds < arguments.seeds {
        let reason = "without --rate and --assign no seed changes the requests";
        note(format_args!("one run instead of {}: {reason}", arguments.seeds));
    }
    let progress = Progress::new(policies.len() as u64 * seeds);
    let (mut figures, mut curves) = (Vec::new(), Vec::new());
    for (place, &policy) in policies.iter().enumerate() {
        let mut tally = Tally::default();
        for seed in 0..seeds {
            progress.say(policy.name());
            tally.add(asked.run(policy, arguments.seed.saturating_add(seed)).map_err(Failure::usage)?);
            progress.reach(place as u64 * seeds + seed + 1);
        }
        if arguments.plot.is_some() {
            curves.push(Distribution { name: policy.name().to_owned(), values: tally.ttft.clone() });
        }
        let density = arguments.slo.map(|slo| {
            asked.density(policy, slo, &mut |count| progress.say(format!("{policy}, {count} workers")))
        });
        let density = density.transpose().map_err(Failure::usage)?;
        let of_one = tally.figures(policy.name(), density);
        if output.is_json() {
            progress.pause(|| output.object(&of_one))?;
        }
        figures.push(of_one);
    }
    drop(progress);
    output.text(&rows(&figures, arguments.slo.is_some()))?;
    if let Some(path) = &arguments.plot {
        let title = format!("{}: time to first token", asked.name);
        plot::write_distributions(path, &title, &curves).map_err(Failure::failed)?;
    }
    Ok(())
}

/// Input of the plan.
struct Asked<'a> {
    arguments: &'a PlanArguments,
    name: String,
    file: NodeFile,
    calibration: Calibration,
    trace: Trace,
    load: Load,
}

impl<'a> Asked<'a> {
    fn read(arguments: &'a PlanArguments) -> Result<Self, Failure> {
        let of = |path: &Path, error: &dyn std::fmt::Display| {
            Failure::usage(format!("{}: {error}", path.display()))
        };
        let workers = &arguments.workers;
        let file = NodeFile::parse(&settings(workers)?).map_err(|error| of(workers, &error))?;
        file.check_fit().map_err(|error| of(workers, &error))?;
        let calibration = match &arguments.calibration {
            Some(path) => {
                Calibration::parse(&settings(path)?, &file.workers).map_err(|error| of(path, &error))?
            }
            None => Calibration::of(&file.node),
        };
        let trace = trace(&arguments.trace)?;
        let load = Load {
            rate: arguments.rate,
            duration: arguments.duration.map(Duration::from_secs_f64),
            zipf: arguments.assign,
            lengths: arguments.lengths,
        };
        if load.zipf.is_none() {
            load.check(&trace, &file.workers).map_err(|error| of(&arguments.trace, &error))?;
        }
        if load.rate.is_some() && load.duration.is_none() && trace.span().is_zero() {
            return Err(of(&arguments.trace, &"its requests come all at once: say how long with --duration"));
        }
        let seeds = if load.is_fixed() { 1 } else { arguments.seeds };
        load.check_count(&trace, seeds).map_err(|error| of(&arguments.trace, &error))?;
        let name = arguments.trace.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Asked { arguments, name, file, calibration, trace, load })
    }

    /// Returns the number of runs: one if no seed changes the requests.
    fn seeds(&self) -> u64 {
        if self.load.is_fixed() { 1 } else { self.arguments.seeds }
    }

    fn run(&self, policy: Policy, seed: u64) -> Result<Tally, PlanError> {
        let names: Vec<&str> = self.file.workers.iter().map(|worker| worker.name.as_str()).collect();
        let requests = self.load.draw(&self.trace, &names, seed)?;
        plan::run(&self.file, &self.calibration, &requests, policy, self.contention())
    }

    fn density(&self, policy: Policy, slo: f64, done: &mut dyn FnMut(usize)) -> Result<usize, PlanError> {
        let seeds = self.arguments.seed..self.arguments.seed.saturating_add(self.arguments.seeds);
        let question = plan::Density {
            file: &self.file,
            calibration: &self.calibration,
            trace: &self.trace,
            load: self.load,
            seeds,
            contention: self.contention(),
        };
        question.most(policy, slo, done)
    }

    fn contention(&self) -> bool {
        self.arguments.contention == Contention::On
    }
}

/// Maximum size of a file of settings.
const MOST_SETTINGS: Bytes = Bytes::mib(1);

/// Reads the text of a file of settings.
fn settings(path: &Path) -> Result<String, Failure> {
    let (file, _) = open(path)?;
    let mut text = Vec::new();
    file.take(MOST_SETTINGS.get() + 1).read_to_end(&mut text).map_err(|error| unreadable(path, &error))?;
    if text.len() as u64 > MOST_SETTINGS.get() {
        let reason = format!("it is larger than {MOST_SETTINGS}, more than any file of settings");
        return Err(unreadable(path, &reason));
    }
    String::from_utf8(text).map_err(|_| unreadable(path, &"it is no text"))
}

/// Reads the requests, which may be compressed.
fn trace(path: &Path) -> Result<Trace, Failure> {
    let (file, size) = open(path)?;
    // Also of a pipe, whose size is zero, and which may be endless.
    let most = size.get().saturating_mul(64).max(512 << 20);
    let mut from = BufReader::new(file.take(most));
    let packed = from.fill_buf().is_ok_and(|begin| begin.starts_with(&[0x1f, 0x8b]));
    let (read, left) = if packed {
        let mut unpacked = BufReader::new(MultiGzDecoder::new(from).take(most));
        (Trace::read(&mut unpacked, size), unpacked.into_inner().limit())
    } else {
        (Trace::read(&mut from, size), from.into_inner().limit())
    };
    if left == 0 {
        let reason = format!(
            "its content is larger than {}, the bound for a file of its size: write it to a file without compression",
            Bytes::new(most)
        );
        return Err(unreadable(path, &reason));
    }
    read.map_err(|error| match error {
        TraceError::Unreadable(error) => unreadable(path, &error),
        _ => Failure::usage(format!("{}: {error}", path.display())),
    })
}

/// Opens a file, and returns its size; zero for a pipe.
fn open(path: &Path) -> Result<(File, Bytes), Failure> {
    let open = || {
        let file = File::open(path)?;
        let size = Bytes::new(file.metadata()?.len());
        Ok((file, size))
    };
    open().map_err(|error: io::Error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::usage(format!("cannot read {}: {error}", path.display()))
}

/// The table for people.
fn rows(figures: &[Figures], density: bool) -> String {
    let mut headers =
        vec!["policy", "requests", "TTFT p50", "p99", "low", "high", "end p50", "end p99", "gap p99"];
    headers.extend(["hits", "GPU s", "GiB/req", "link", "denied", "density"]);
    let mut rows: Vec<_> = figures.iter().map(row).collect();
    if !density {
        headers.pop();
        rows.iter_mut().for_each(|row| _ = row.pop());
    }
    table(1, &headers, &rows)
}

fn row(figures: &Figures) -> Vec<String> {
    let known = |figure: Option<f64>| figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.2}"));
    let part = |part: f64| format!("{:.0} %", part * 100.0);
    vec![
        figures.policy.clone(),
        figures.requests.to_string(),
        known(figures.ttft_p50_s),
        known(figures.ttft_p99_s),
        known(figures.ttft_p99_low_s),
        known(figures.ttft_p99_high_s),
        known(figures.e2e_p50_s),
        known(figures.e2e_p99_s),
        known(figures.max_gap_p99_s),
        part(figures.hit_rate),
        known(figures.gpu_seconds_per_request),
        known(figures.bytes_per_request.map(|bytes| bytes / f64::from(1 << 30))),
        part(figures.link_duty),
        figures.denied.to_string(),
        figures.density.map_or_else(|| "-".to_owned(), |density| density.to_string()),
    ]
}
