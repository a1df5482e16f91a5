//! Benches of the command over this library, in one binary because each binary costs seconds to build.

mod bench;
mod copy_bench;
mod critical_bench;
