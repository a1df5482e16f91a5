//! `glake demo`.

use clap::Args;

use super::Failure;
use super::output::Output;
use crate::config::Config;
use crate::demo;

/// What `glake demo` can be asked.
#[derive(Debug, Args)]
#[command(after_help = "\
JSON fields: stage, figures, ok
Exit code:   0 only if every byte matched")]
pub struct DemoArguments {}

pub(super) fn run(config: &Config, output: &mut Output) -> Result<(), Failure> {
    let mut told = Ok(());
    let ok = demo::run(super::found(config)?, config, &mut |stage| {
        let mark = if stage.ok { "ok" } else { "WRONG" };
        let tell = |output: &mut Output| match output.is_json() {
            true => output.object(&stage),
            false => output.text(&format!("{:<10} {mark:<6} {}", stage.stage, stage.says)),
        };
        if told.is_ok() {
            told = tell(output);
        }
    })
    .map_err(Failure::failed)?;
    told?;
    if ok { Ok(()) } else { Err(Failure::failed("demo: bytes did not match; the stage is marked above")) }
}
