//! `glake bench shrink`.

use std::io::{self, Write as _};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use glake_units::Bytes;

use super::Failure;
use super::output::{Output, table};
use super::progress::Progress;
use crate::bench::{self, BenchError, ShrinkNews, ShrinkOptions, ShrinkPhase, ShrinkReport, ShrinkTier};
use glake_runtime::config::Config;

/// Arguments of `glake bench shrink`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct ShrinkArguments {
    /// The region's bytes [default: 16GiB, or 64MiB on the simulator]
    #[arg(long, value_name = "SIZE")]
    bytes: Option<Bytes>,
    /// In how many blocks
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65536))]
    tensors: u32,
    /// Destination of the bytes: host (pinned memory), peer (another GPU's), file. Several with commas
    #[arg(long, value_name = "TIER", value_delimiter = ',', default_value = "host")]
    tier: Vec<Tier>,
    /// Number of GPUs whose links serve the copies, the region's own included; 1: no relays [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    paths: Option<u32>,
    /// Index of the GPU to measure
    #[arg(long, value_name = "GPU", default_value_t = 0)]
    target: u32,
    /// Number of shrink and refill cycles after the first
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Pin the host memory before the first shrink
    #[arg(long)]
    prepare: bool,
    /// Seal the region, so that it leaves without another copy once there is one
    #[arg(long)]
    sealed: bool,
    /// Take digests before bytes leave and compare them when they are back, timed with the rest
    #[arg(long)]
    verify: bool,
    /// The GPU that lends its memory [default: the first other one]
    #[arg(long, value_name = "GPU")]
    peer: Option<u32>,
    /// Folder of the files, whose disk is measured [default: the system's temporary files]
    #[arg(long, value_name = "DIR", value_parser = folder)]
    folder: Option<PathBuf>,
}

/// A folder that is there, or can be made in one that is.
fn folder(text: &str) -> Result<PathBuf, String> {
    let folder = PathBuf::from(text);
    match folder.parent() {
        Some(parent) if !parent.as_os_str().is_empty() && !parent.is_dir() => {
            Err(format!("{} is not there: make it first", parent.display()))
        }
        _ => Ok(folder),
    }
}

const EXAMPLES: &str = "\
Examples:
  glake bench shrink                                   16 GiB of GPU 0 to the host and back over every link
  glake bench shrink --paths 1                         over its own link alone
  glake bench shrink --prepare                         the first shrink as fast as the others
  glake bench shrink --bytes 32GiB --sealed            a clean region, shrunk again
  glake bench shrink --tier host,peer --verify --json
  glake bench shrink --tier file --folder /nvme/glake --bytes 4GiB

Figures:
  GB/s are 10^9 bytes a second: all of the region's, by the time until the call returned, mappings
  included; the first time, and the median of the others. The link's are one copy of cuMemcpyAsync
  over the GPU's own link, in turns with these. Every byte is compared after each refill, untimed.
  Leaked is what the GPU (and a peer) has less than before, after everything was freed. The first
  time nothing of the region's host memory is pinned, unless --prepare does; relays are ready.

JSON fields: device, phase (shrink, refill), tier (host, peer, file), bytes, tensors, paths, warm, link_gbps, gbps,
copied_bytes, leaked_bytes, verified; and target, runs, us, prepared, sealed,
checked (by digests), calibrated, driver (calls and us of each kind, the last time)";

/// Destination of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Tier {
    Host,
    Peer,
    File,
}

impl ShrinkArguments {
    fn options(&self) -> ShrinkOptions {
        let tier = |tier: &Tier| match tier {
            Tier::Host => ShrinkTier::Host,
            Tier::Peer => ShrinkTier::Peer,
            Tier::File => ShrinkTier::File,
        };
        ShrinkOptions {
            bytes: self.bytes,
            tensors: self.tensors,
            tiers: self.tier.iter().map(tier).collect(),
            paths: self.paths,
            target: self.target,
            runs: self.runs,
            prepare: self.prepare,
            sealed: self.sealed,
            verify: self.verify,
            peer: self.peer,
            folder: self.folder.clone(),
        }
    }
}

pub(super) fn run(arguments: &ShrinkArguments, config: &Config, output: &mut Output) -> Result<(), Failure> {
    if arguments.bytes.is_some_and(|bytes| bytes.get() < u64::from(arguments.tensors)) {
        return Err(Failure::usage(format!(
            "bench shrink: --bytes must be 1 byte a tensor or more, and {} were asked for",
            arguments.tensors
        )));
    }
    let options = arguments.options();
    let backend = super::found(config)?;
    let progress = Progress::new(bench::shrink_steps(&options));
    let (mut reports, mut untold) = (Vec::new(), None);
    let measured = bench::shrink(&backend, config, &options, |news| {
        let told = match news {
            ShrinkNews::Next(what, done) => {
                progress.say(what);
                progress.reach(done);
                Ok(())
            }
            ShrinkNews::Note(text) => {
                // Whoever closed standard error does not want to hear it.
                progress.pause(|| drop(writeln!(io::stderr(), "glake: {text}")));
                Ok(())
            }
            ShrinkNews::Shrink(report) if output.is_json() => progress.pause(|| output.object(&report)),
            ShrinkNews::Shrink(report) => {
                reports.push(report);
                Ok(())
            }
        };
        told.map_err(|failure| {
            untold = Some(failure);
            BenchError::Untold
        })
    });
    drop(progress);
    // What was measured before a failure is told all the same.
    if !reports.is_empty() {
        output.text(&shrink_table(&reports))?;
    }
    match (measured, untold) {
        (_, Some(failure)) => Err(failure),
        (Err(error), None) if error.is_usage() => Err(Failure::usage(format!("bench shrink: {error}"))),
        (measured, None) => measured.map_err(Failure::failed),
    }
}

fn shrink_table(reports: &[ShrinkReport]) -> String {
    let headers = [
        "tier",
        "phase",
        "",
        "bytes",
        "tensors",
        "paths",
        "link GB/s",
        "GB/s",
        "of link",
        "ms",
        "copied",
        "leaked",
    ];
    let row = |report: &ShrinkReport| {
        let phase = match report.phase {
            ShrinkPhase::Shrink => "shrink",
            ShrinkPhase::Refill => "refill",
        };
        vec![
            format!("{:?}", report.tier).to_lowercase(),
            phase.to_owned(),
            if report.warm { "warm" } else { "first" }.to_owned(),
            Bytes::new(report.bytes).to_string(),
            report.tensors.to_string(),
            report.paths.to_string(),
            format!("{:.1}", report.link_gbps),
            format!("{:.1}", report.gbps),
            format!("{:.2}", report.gbps / report.link_gbps),
            format!("{:.1}", report.us / 1e3),
            Bytes::new(report.copied_bytes).to_string(),
            Bytes::new(report.leaked_bytes).to_string(),
        ]
    };
    table(3, &headers, &reports.iter().map(row).collect::<Vec<_>>())
}
