//! What is logged.

use serde::{Deserialize, Serialize};

/// The log table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// A tracing filter (`GLAKE_LOG`, `--log`): `info`, or `warn,glake::transfer=debug` for one part
    /// (docs/TUNING.md lists the parts). Logs go to standard error.
    ///
    /// Default `warn`. `off` says nothing, `trace` everything (one event a stitch is at `info`).
    pub filter: String,
}

impl Log {
    /// Whether the filter can be used.
    pub(super) fn is_valid(&self) -> bool {
        tracing_subscriber::EnvFilter::builder().parse(&self.filter).is_ok()
    }
}

impl Default for Log {
    fn default() -> Self {
        Log { filter: "warn".to_owned() }
    }
}
