//! `glake doctor`.

use clap::Args;

use super::output::{Output, wrapped};
use super::{Failure, program};
use crate::doctor::{self, Check, State};
use glake_runtime::config::{Config, Sources};

/// Arguments of `glake doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  glake doctor                       this machine
  glake doctor --device sim:h20x8    a published server, with this host

States:      ok; note: speed or a feature is lost; problem: GLake does not work
             so
JSON fields: check, state (ok, note, problem), found, advice; one object a check
Exit code:   0 where nothing is a problem")]
pub struct DoctorArguments {}

pub(super) fn run(config: &Config, sources: &Sources, output: &mut Output) -> Result<(), Failure> {
    let python = program::found("python3".as_ref(), &sources.environment);
    let mut well = true;
    // One part after the other is told: the last of them may have to start Python.
    let parts: [&dyn Fn() -> Result<Vec<Check>, Failure>; 3] =
        [&|| Ok(doctor::device(config)?), &|| Ok(doctor::host()), &|| {
            Ok(doctor::program(sources, python.clone()))
        }];
    for part in parts {
        for check in part()? {
            well &= check.state != State::Problem;
            if output.is_json() {
                output.object(&check)?;
            } else {
                output.text(&line(&check))?;
            }
        }
    }
    if well { Ok(()) } else { Err(Failure::Told) }
}

/// Formats a check with its advice below.
fn line(check: &Check) -> String {
    const COLUMN: usize = 22;
    let state = match check.state {
        State::Ok => "ok",
        State::Note => "note",
        State::Problem => "problem",
    };
    let mut lines = wrapped(&check.found, 80 - COLUMN);
    lines.extend(wrapped(&check.advice, 80 - COLUMN));
    format!("{state:<8} {:<12} {}", check.check, lines.join(&format!("\n{:COLUMN$}", "")))
}
