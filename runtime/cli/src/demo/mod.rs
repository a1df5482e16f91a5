//! Demonstration of every feature on real bytes: `glake demo`.
//!
//! ```text
//! stitch ─────────► streams ─► compare ─────────► copy ─► shrink     a stage each, told when it is over
//! └ one pool of 2 GiB, its blocks stamped, its trace ┘     └ all GPUs ┘
//! ```

mod compare;
mod shrink;
mod stitch;

use std::sync::Arc;

use glake_device::{DriverError, Recorder, Stream};
use glake_tiers::{GpuPool, HostError, PoolError, PoolOptions, PoolStream, RegionError};
use glake_transfer::TransferError;
use glake_units::Bytes;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::copies::CopyError;
use crate::rig::RigError;
use glake_replay::machine::Machine;
use glake_replay::stamps::StampError;
use glake_replay::trace::TraceError;
use glake_replay::{FitError, Refusal};
use glake_runtime::backend::{Backend, BackendError};
use glake_runtime::config::{self, Config};
use stitch::{Churn, Home};

/// Memory limit of the demo's pool.
const LIMIT: Bytes = Bytes::gib(2);

/// Completed step of the demo.
#[derive(Clone, Debug, Serialize)]
pub struct Stage {
    /// Its name, a word.
    pub stage: &'static str,
    /// Sentences for people that say what happened.
    #[serde(skip)]
    pub says: String,
    /// Result to repeat at the end of the demo: a word and two figures.
    #[serde(skip)]
    pub gain: Option<String>,
    /// A drawing of it, if there is one: lines.
    #[serde(skip)]
    pub picture: Option<String>,
    /// The figures of the sentence, by name and unit: `reserved_bytes`.
    pub figures: Map<String, Value>,
    /// Whether it came out as it should, byte by byte.
    pub ok: bool,
}

/// Why the story broke off.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// The device cannot be had.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// Error of the driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Error of the pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Error of a replay.
    #[error(transparent)]
    Replay(#[from] Refusal),
    /// No limit was found under which a program completes.
    #[error(transparent)]
    Fit(#[from] FitError),
    /// A trace that is part of the program cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The server cannot be opened.
    #[error(transparent)]
    Rig(#[from] RigError),
    /// A copy was refused.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// There is no pinned host memory.
    #[error(transparent)]
    Host(#[from] HostError),
    /// A region could not be shrunk or refilled.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Bytes are not what was written.
    #[error("{0}")]
    Bytes(String),
}

impl From<StampError> for DemoError {
    fn from(error: StampError) -> Self {
        match error {
            StampError::Pool(error) => DemoError::Pool(error),
            mismatch => DemoError::Bytes(mismatch.to_string()),
        }
    }
}

impl From<CopyError> for DemoError {
    fn from(error: CopyError) -> Self {
        match error {
            CopyError::Driver(error) => DemoError::Driver(error),
            CopyError::Transfer(error) => DemoError::Transfer(error),
            CopyError::Host(error) => DemoError::Host(error),
        }
    }
}

/// Builds an object of figures by name.
macro_rules! figures {
    ($($name:literal: $value:expr),* $(,)?) => {
        match serde_json::json!({ $($name: $value),* }) {
            serde_json::Value::Object(figures) => figures,
            _ => serde_json::Map::new(),
        }
    };
}
use figures;

/// Returns one line of at most 80 columns about the device of the demo.
pub fn introduce(backend: &Backend) -> Result<String, DemoError> {
    let topology = backend.topology()?;
    let gpus = topology.devices.len();
    let kind = if matches!(backend, Backend::Sim { .. }) { ", a simulated server" } else { "" };
    let plural = if gpus == 1 { "" } else { "s" };
    Ok(format!("GLake on {}{kind}: {gpus} GPU{plural}. Every byte is compared.", topology.name))
}

/// Runs every stage on the configured device and tells each; true where every byte matched.
///
/// # Errors
/// [`DemoError`]: a stage could not be run at all, or a block lost its bytes.
pub fn run(backend: Backend, config: &Config, tell: &mut dyn FnMut(Stage)) -> Result<bool, DemoError> {
    let mut ok = true;
    let mut tell = |stage: Stage| {
        ok &= stage.ok;
        tell(stage);
    };
    let topology = backend.topology()?;
    let machine = Machine::open(&backend)?;
    let (stage, trace) = stitch::stage(&machine, &topology, config)?;
    tell(stage);
    tell(compare::streams(&machine, config)?);
    tell(compare::stage(&machine, &trace, config)?);
    drop(machine);
    tell(shrink::copy(&backend, config)?);
    tell(shrink::stage(&backend, config)?);
    Ok(ok)
}

/// The pool of the story and what lies in it.
struct Story<'a> {
    machine: &'a Machine,
    recorder: Arc<Recorder>,
    pool: GpuPool,
    stream: PoolStream,
    churn: Churn,
    home: Home,
}

impl<'a> Story<'a> {
    fn new(machine: &'a Machine, config: &Config) -> Result<Self, DemoError> {
        let recorder = Arc::new(machine.recorder().with_log());
        let settings = machine.settings(&pool(config));
        let pool = GpuPool::new(
            recorder.clone(),
            machine.id(),
            PoolOptions { settings: Some(settings), ..PoolOptions::default() },
        )?;
        let stream = PoolStream::of(&**machine.driver(), machine.id(), Stream::LEGACY)?;
        Ok(Story { machine, recorder, pool, stream, churn: Churn::default(), home: Home::default() })
    }
}

/// Returns the configured pool with the settings that the demo needs: small, and with aliases for large requests only, so that its own
/// stage makes the first one.
fn pool(config: &Config) -> config::Pool {
    config::Pool {
        alias: true,
        fragment_limit: Some(config.pool.extent),
        limit: Some(LIMIT),
        ..config.pool.clone()
    }
}
