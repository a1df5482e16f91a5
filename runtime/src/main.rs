//! The `glake` command.

use std::process::ExitCode;

use glake_runtime::cli;
use glake_runtime::config::Environment;

fn main() -> ExitCode {
    cli::main(std::env::args_os(), Environment::of_process())
}
