//! Passes made up, plans for them, and what becomes of them.

mod budgets;
mod clocks;
mod leaves;
mod llama;
mod plans;
mod recorders;
mod simulation;
mod sites;
mod speed;
mod tapes;
