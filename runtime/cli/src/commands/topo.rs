//! `glake topo`.

use clap::Args;
use glake_device::topology::Topology;
use glake_transfer::paths::PathGraph;

use super::Failure;
use super::output::{Output, Progress, note, table};
use crate::topo::{self, Rows};
use glake_runtime::backend::Backend;
use glake_runtime::calibrations::Calibrations;
use glake_runtime::config::Config;

/// Arguments of `glake topo`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  glake topo
      this machine, or the default model where no driver answers
  glake topo --calibrate
      and what its paths give, measured and kept for this boot
  glake topo --device sim:h20x8
      a published server; models: h200x4, h20x8, a100x8
  glake topo --device sim:mine.toml
      a server of your own; configs/topologies shows how

Figures:     GB/s (10^9 bytes a second); ? where nothing tells. ≤ marks what the
             wires carry: copies reach nine tenths of it at best
Calibration: kept in transfer.calibrations, by default glake/paths in the user's
             cache folder, for these GPUs, this driver and this boot; copies
             use it, and so does glake bench copy
JSON fields: name, simulated, packages, nodes, host, devices, switches, links,
             calibrated (null, or for each target and direction together_gbps
             and paths: relay, way, gbps, latency_us)")]
pub struct TopoArguments {
    /// Measure what each path gives, alone and beside the others, in about two seconds, and keep it
    #[arg(long)]
    calibrate: bool,
}

pub(super) fn run(arguments: &TopoArguments, config: &Config, output: &mut Output) -> Result<(), Failure> {
    let backend = super::found(config)?;
    let topology = backend.topology()?;
    let calibrations = Calibrations::of(&topology, config.transfer.calibrations.as_deref());
    let graph = match arguments.calibrate {
        true => Some(calibrate(backend, &calibrations)?),
        false => calibrations.measured(),
    };
    show(&topology, graph.as_ref(), output)
}

fn calibrate(backend: Backend, calibrations: &Calibrations) -> Result<PathGraph, Failure> {
    let progress = Progress::new(100);
    progress.say("measuring the links");
    let measured = calibrations.measure(backend, &mut |at| {
        progress.reach((at.done * 100 / at.planned.max(1)) as u64);
    });
    drop(progress);
    let found = measured.map_err(Failure::failed)?;
    note(format_args!("{} trials in {:.1} s", found.trials, found.took.as_secs_f64()));
    if found.unfinished > 0 {
        note(format_args!(
            "{} more found no time: what they would have shown is taken for absent",
            found.unfinished
        ));
    }
    for gpu in found.excluded.iter() {
        note(format_args!("{gpu} is no relay: it failed, or bytes that it relayed were wrong"));
    }
    match calibrations.keep(&found.graph).map_err(Failure::failed)? {
        Some(path) => note(format_args!("kept in {}", path.display())),
        None => note("not kept: transfer.calibrations names no folder"),
    }
    Ok(found.graph)
}

fn show(topology: &Topology, graph: Option<&PathGraph>, output: &mut Output) -> Result<(), Failure> {
    if output.is_json() {
        return output.object(&topo::json(topology, graph));
    }
    output.text(&topo::picture(topology, graph))?;
    let tables = [Some(topo::devices(topology)), topo::peers(topology), graph.map(topo::paths)];
    for rows in tables.into_iter().flatten() {
        output.text(&format!("{}\n", figures(&rows)))?;
    }
    Ok(())
}

fn figures(rows: &Rows) -> String {
    let headers: Vec<&str> = rows.headers.iter().map(String::as_str).collect();
    table(rows.names, &headers, &rows.rows)
}
