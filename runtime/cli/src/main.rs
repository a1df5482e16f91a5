//! The `glake` command.

use std::process::ExitCode;

use glake::commands;
use glake_runtime::config::Environment;

fn main() -> ExitCode {
    commands::main(std::env::args_os(), Environment::of_process())
}
