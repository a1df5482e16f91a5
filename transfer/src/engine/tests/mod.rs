//! The engine over the simulated device: real bytes, real order, virtual time.

mod bed;
mod bytes;
mod faults;
mod losses;
mod order;
mod speed;
