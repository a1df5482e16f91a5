//! The allocator's core from outside: one binary, because each costs seconds to build.

mod held;
mod model;
mod released;
mod scale;
mod streams;
mod uses;
mod withheld;
