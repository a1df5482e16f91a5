//! The benches of the command, over this library: one binary, because each costs seconds to build.

mod bench;
mod copy_bench;
mod critical_bench;
