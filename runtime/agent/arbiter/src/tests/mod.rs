//! Tests of the arbiter: scenarios, exhaustive and random events.

mod away;
mod deadlines;
mod drains;
mod exhaustive;
mod growths;
mod invariants;
mod random;
mod scenarios;
mod speed;
mod starts;
mod starvation;
mod turns;
mod world;
