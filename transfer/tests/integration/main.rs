//! Copies by the public API, on simulated servers: one binary, because each costs seconds to build.

mod calibrate;
mod calibration;
mod drift;
mod idle;
mod published;
mod split;
