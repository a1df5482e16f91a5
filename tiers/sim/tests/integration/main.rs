//! The simulated device from outside: one binary, because each costs seconds to build.

mod buffers;
mod completion;
mod digests;
mod faults;
mod gather;
mod owned;
