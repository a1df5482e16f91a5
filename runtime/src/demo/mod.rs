//! The whole story on real bytes: `glake demo`.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::backend::Backend;
use crate::config::Config;

/// One step of the story, told when it is over.
#[derive(Clone, Debug, Serialize)]
pub struct Stage {
    /// Its name, a word.
    pub stage: &'static str,
    /// What happened, in a sentence for people.
    #[serde(skip)]
    pub says: String,
    /// The figures of the sentence, by name and unit: `reserved_bytes`.
    pub figures: Map<String, Value>,
    /// Whether it came out as it should, byte by byte.
    pub ok: bool,
}

/// Why the story broke off.
#[non_exhaustive]
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// There is no story in this build.
    #[error("the demo is not part of this build")]
    Absent,
}

/// Runs every stage on the configured device and tells each; true where every byte matched.
///
/// # Errors
/// [`DemoError`]: a stage could not be run at all.
pub fn run(backend: Backend, config: &Config, tell: &mut dyn FnMut(Stage)) -> Result<bool, DemoError> {
    let _ = (backend, config, tell);
    Err(DemoError::Absent)
}
