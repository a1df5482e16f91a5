//! Passes made up, plans for them, and what becomes of them.

mod clocks;
mod llama;
mod places;
mod plans;
mod recorders;
mod simulation;
mod speed;
mod tapes;
