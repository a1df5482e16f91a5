//! The engine over the simulated device: real bytes, real order, virtual time.

mod background;
mod broadcast;
mod bytes;
mod capture;
mod duplex;
mod faults;
mod fixture;
mod losses;
mod order;
mod pageable;
mod scatter;
mod speed;
mod suspension;
mod unchanged;
mod unjoined;
mod unordered;
