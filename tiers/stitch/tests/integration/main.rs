//! Tests of the allocator's core from outside, in one binary because each binary costs seconds to build.

mod held;
mod model;
mod released;
mod scale;
mod streams;
mod uses;
mod withheld;
