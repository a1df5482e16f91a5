//! The `glake` command: arguments in, a call of the library, tables or JSON out.
//!
//! ```text
//! main.rs ─► arguments ─► config ─► replay | topo | bench | … ─► output (stdout)
//!                 └───────── failure (one line on stderr, exit code) ◄──────┘
//! ```
//!
//! Nothing is decided here that a program calling the library would have to decide again. Standard output
//! carries results only; progress, logs and errors go to standard error.

mod arguments;
mod bench;
mod checkpoint;
mod copy_bench;
mod demo;
mod doctor;
mod failure;
mod node;
mod output;
mod plan;
mod program;
mod replay;
mod run;
mod serve;
mod top;
mod topo;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory as _, FromArgMatches as _};

pub use arguments::{Arguments, Command, Global};
pub use bench::{AllocArguments, Bench, ShrinkArguments};
pub use checkpoint::CheckpointArguments;
pub use copy_bench::CopyArguments;
pub use demo::DemoArguments;
pub use doctor::DoctorArguments;
pub use failure::Failure;
pub use node::{ExplainArguments, PsArguments, WorkerArguments};
pub use plan::PlanArguments;
pub use replay::{Policy, ReplayArguments};
pub use run::RunArguments;
pub use serve::ServeArguments;
pub use top::TopArguments;
pub use topo::TopoArguments;

use glake_runtime::backend::Backend;
use glake_runtime::config::{Config, Environment};
use glake_runtime::log;
use output::Output;

/// Runs one command to its end and says how it went: 0 done, 1 failed, 2 usage.
pub fn main(arguments: impl IntoIterator<Item = OsString>, environment: Environment) -> ExitCode {
    let parsed = with_negative_numbers(Arguments::command())
        .try_get_matches_from(arguments)
        .and_then(|matches| Arguments::from_arg_matches(&matches));
    let outcome = match parsed {
        Ok(arguments) => execute(&arguments, environment),
        Err(error) => failure::from_clap(&error),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}

/// A number below zero is read as an option's value, and refused as such: not as an option that does not exist.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let is_option = |of: &clap::Arg| of.get_action().takes_values() && !of.is_positional();
    command
        .mut_args(|of| if is_option(&of) { of.allow_negative_numbers(true) } else { of })
        .mut_subcommands(with_negative_numbers)
}

fn execute(arguments: &Arguments, environment: Environment) -> Result<(), Failure> {
    let library = environment.get("GLAKE_LIBRARY").map(PathBuf::from);
    let is_plain = environment.get("NO_COLOR").is_some_and(|value| !value.is_empty())
        || environment.get("TERM").is_some_and(|terminal| terminal == "dumb");
    let mut sources = arguments.global.sources(environment);
    sources.flags.extend(arguments.command.settings());
    let config = sources.load()?;
    log::start(&config.log.filter).map_err(Failure::usage)?;
    let mut output = Output::new(arguments.global.json, !is_plain);
    match &arguments.command {
        Command::Demo(_) => demo::run(&config, &mut output),
        Command::Replay(arguments) => replay::run(arguments, &config, &mut output),
        Command::Plan(arguments) => plan::run(arguments, &mut output),
        Command::Serve(arguments) => serve::run(arguments, &config, &sources.environment, &mut output),
        Command::Ps(arguments) => node::ps(arguments, &sources, &config, &mut output),
        Command::Shrink(arguments) => node::shrink(arguments, &sources, &config, &mut output),
        Command::Refill(arguments) => node::refill(arguments, &sources, &config, &mut output),
        Command::Start(arguments) => node::start(arguments, &sources, &config, &mut output),
        Command::Stop(arguments) => node::stop(arguments, &sources, &config, &mut output),
        Command::Explain(arguments) => node::explain(arguments, &sources, &config, &mut output),
        Command::Top(arguments) => top::run(arguments, &sources, &config, &mut output),
        Command::Checkpoint(arguments) => {
            checkpoint::run(arguments, &config, &sources.environment, &mut output)
        }
        Command::Topo(arguments) => topo::run(arguments, &config, &mut output),
        Command::Bench(bench) => bench::run(bench, &config, &mut output, library),
        Command::Doctor(_) => doctor::run(&config, &sources, &mut output),
        Command::Run(run) => run::run(run, &arguments.global, &sources.environment, &config),
    }
}

/// The chosen device; says on standard error which it is where the choice was left open.
fn found(config: &Config) -> Result<Backend, Failure> {
    let backend = Backend::find(&config.device.choice)?;
    if let Some(notice) = backend.notice() {
        output::note(notice);
    }
    Ok(backend)
}
