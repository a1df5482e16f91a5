//! The `glake` command.

use std::alloc::System;
use std::process::ExitCode;

use glake_runtime::cli;
use glake_runtime::config::Environment;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

/// Counts allocations, for `glake bench alloc`; in this binary only.
#[global_allocator]
static HEAP: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn main() -> ExitCode {
    cli::main(std::env::args_os(), Environment::of_process(), heap_allocations)
}

fn heap_allocations() -> u64 {
    let stats = HEAP.stats();
    (stats.allocations + stats.reallocations) as u64
}
