//! `glake demo`.

use clap::Args;

use super::Failure;
use super::output::{Output, table};
use crate::demo::{self, Stage};
use glake_runtime::config::Config;

/// Arguments of `glake demo`.
#[derive(Debug, Args)]
#[command(after_help = "\
Stages:      device, churn, stitch, streams, compare, replay, trim, copy, shrink; a table at the end
Device:      --device cuda tells it on this machine's GPUs; on the simulator GB/s are of the model's virtual
             time, and no measurement
JSON fields: stage, figures, ok
Exit code:   0 only if every byte matched")]
pub struct DemoArguments {}

/// The name, the mark and the sentence; the sentence and the picture stand in one column.
fn told_to_people(stage: &Stage, mark: &str) -> String {
    const COLUMN: usize = 15;
    let mut lines = vec![String::new()];
    for word in stage.says.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) if COLUMN + line.chars().count() + 1 + word.chars().count() <= 100 => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.extend(stage.picture.iter().flat_map(|picture| picture.lines()).map(|line| format!("  {line}")));
    format!("{:<8} {mark:<5} {}", stage.stage, lines.join(&format!("\n{:COLUMN$}", "")))
}

/// Returns a table of all stages.
fn summed_up(rows: &[Vec<String>]) -> String {
    format!("\n{}", table(3, &["stage", "figures", "ok"], rows))
}

pub(super) fn run(config: &Config, output: &mut Output) -> Result<(), Failure> {
    let (mut told, mut rows) = (Ok(()), Vec::new());
    let ok = demo::run(super::found(config)?, config, &mut |stage| {
        let mark = if stage.ok { "ok" } else { "WRONG" };
        rows.push([stage.stage, &stage.short, mark].map(str::to_owned).to_vec());
        let tell = |output: &mut Output| match output.is_json() {
            true => output.object(&stage),
            false => output.text(&told_to_people(&stage, mark)),
        };
        if told.is_ok() {
            told = tell(output);
        }
    })
    .map_err(Failure::failed)?;
    told?;
    output.text(&summed_up(&rows))?;
    if ok { Ok(()) } else { Err(Failure::failed("demo: bytes did not match; the stage is marked above")) }
}
