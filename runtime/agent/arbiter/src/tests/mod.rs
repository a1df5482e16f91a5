//! What holds at every step, whatever workers do.

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
