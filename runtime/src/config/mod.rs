//! Configuration of the runtime, and its sources.
//!
//! ```text
//!   defaults in code ◄─ preset ◄─ file (GLAKE_CONFIG, --config) ◄─ environment ◄─ flags
//!   (configs/default.toml is written from them)      each overrides the sources to its left
//! ```
//!
//! Every source except the defaults is a list of [`Setting`]s: a key, a value and its place. Each setting is checked by itself, so an error
//! always names its file and line, its variable or its flag, the key, the value and the allowed values. The environment is an argument
//! ([`Environment`]): nothing here reads the variables of the process.
//!
//! ```
//! use glake_runtime::config::{Environment, Sources};
//! use glake_units::Bytes;
//!
//! let environment = Environment::from_iter([("fragLimit", "256MiB"), ("vmmDefragment", "1")]);
//! let config = Sources { environment, ..Sources::default() }.load()?;
//! assert_eq!(config.pool.fragment_limit, Some(Bytes::mib(256)));
//! # Ok::<(), glake_runtime::config::ConfigError>(())
//! ```

mod device;
mod environment;
mod knob;
mod pool;
mod preset;
mod setting;
mod sources;
mod tables;
mod transfer;

pub use device::{Device, DeviceChoice, DeviceChoiceError};
pub use environment::{Environment, Launch};
pub use knob::Knob;
pub use pool::{Borrow, BorrowError, DefragmentLevel, Pool};
pub use preset::{Preset, UnknownPreset};
pub use setting::{ConfigError, Origin, Setting};
pub use sources::Sources;
pub(crate) use tables::is_name;
pub use tables::{Agent, Config, Lease, Log, Tiers};
pub use transfer::{Gpu, MultiPath, Transfer};
