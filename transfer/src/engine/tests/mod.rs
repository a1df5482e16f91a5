//! The engine over the simulated device: real bytes, real order, virtual time.

mod background;
mod bed;
mod broadcast;
mod bytes;
mod capture;
mod faults;
mod late;
mod losses;
mod order;
mod pageable;
mod rest;
mod scatter;
mod speed;
mod unchanged;
