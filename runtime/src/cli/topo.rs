//! `glake topo`.

use clap::Args;

use super::Failure;
use super::output::{Output, table};
use crate::config::Config;
use crate::topo::{self, Rows};

/// What `glake topo` can be asked.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  glake topo                          this machine, or the default model where no driver answers
  glake topo --device sim:h20x8       a model of a server: h200x4, h20x8, a100x8, h200x4-direct, pcie4x4
  glake topo --device sim:mine.toml   a server of your own; configs/topologies shows how

Figures:     GB/s (10^9 bytes a second); ? where nothing tells. ≤ marks what the wires carry: copies
             reach nine tenths of it at best
JSON fields: name, simulated, packages, nodes, host, devices, switches, links")]
pub struct TopoArguments {}

pub(super) fn run(config: &Config, output: &mut Output) -> Result<(), Failure> {
    let backend = super::found(config)?;
    let topology = backend.topology()?;
    if output.is_json() {
        return output.object(&topo::json(&topology));
    }
    output.text(&topo::picture(&topology))?;
    for rows in [Some(topo::devices(&topology)), topo::peers(&topology)].into_iter().flatten() {
        output.text(&format!("{}\n", figures(&rows)))?;
    }
    Ok(())
}

fn figures(rows: &Rows) -> String {
    let headers: Vec<&str> = rows.headers.iter().map(String::as_str).collect();
    table(rows.names, &headers, &rows.rows)
}
