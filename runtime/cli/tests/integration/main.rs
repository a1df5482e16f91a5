//! The command as a person runs it: one binary, because each costs seconds to build.

mod checkpoint;
mod command;
mod page;
mod product;
mod rights;
mod run;
mod supervise;
mod systemd;
