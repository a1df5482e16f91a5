//! `glake demo`.

use clap::Args;

use super::Failure;
use super::output::{Output, Paint, wrapped};
use crate::demo::{self, Stage};
use glake_runtime::config::Config;

/// Arguments of `glake demo`.
#[derive(Debug, Args)]
#[command(after_help = "\
Stages:      stitch, streams, compare, copy, shrink; at the end the memory and
             the copies beside those of today
Device:      --device cuda tells it on this machine's GPUs; on the simulator
             GB/s are of the model's virtual time, and no measurement
JSON fields: stage, figures, ok
Exit code:   0 only if every byte matched")]
pub struct DemoArguments {}

/// Returns the stage's mark and name beside its sentences and its picture.
fn told_to_people(stage: &Stage, output: &Output) -> String {
    const COLUMN: usize = 11;
    let mark = if stage.ok { output.paint(Paint::Good, "✓") } else { output.paint(Paint::Bad, "✗") };
    let mut lines = wrapped(&stage.says, 80 - COLUMN);
    let picture = stage.picture.iter().flat_map(|picture| picture.lines());
    lines.extend(picture.map(|line| output.painted(line, 'S', Paint::Good)));
    let name = output.paint(Paint::Strong, &format!("{:<8}", stage.stage));
    format!("{mark} {name} {}", lines.join(&format!("\n{:COLUMN$}", "")))
}

pub(super) fn run(config: &Config, output: &mut Output) -> Result<(), Failure> {
    let backend = super::found(config)?;
    output.text(&format!("{}\n", demo::introduce(&backend).map_err(Failure::failed)?))?;
    let (mut told, mut gains) = (Ok(()), Vec::new());
    let ok = demo::run(backend, config, &mut |stage| {
        let tell = |output: &mut Output| match output.is_json() {
            true => output.object(&stage),
            false => output.text(&told_to_people(&stage, output)),
        };
        if told.is_ok() {
            told = tell(output);
        }
        gains.extend(stage.gain);
    })
    .map_err(Failure::failed)?;
    told?;
    let gains: Vec<String> = gains.iter().map(|gain| output.paint(Paint::Strong, gain)).collect();
    output.text(&format!("\n{}", gains.join("\n")))?;
    if ok { Ok(()) } else { Err(Failure::failed("demo: bytes did not match; the stage is marked above")) }
}
