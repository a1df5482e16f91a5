//! What holds at every step, whatever workers do.

mod away;
mod exhaustive;
mod invariants;
mod random;
mod scenarios;
mod speed;
mod starvation;
mod world;
