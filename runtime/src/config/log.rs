//! What is logged.

use super::knob::knobs;

knobs! {
    /// The log table.
    Log as log {
        [log]
        /// A tracing filter: a level, or levels by part.
        ///
        /// Logs go to standard error. `off` says nothing, `trace` everything (one event a stitch is at `info`).
        filter: String = "warn".to_owned(),
            "a tracing filter, such as \"info\" or \"warn,glake::transfer=debug\"",
            if |filter| tracing_subscriber::EnvFilter::builder().parse(filter).is_ok();
    }
}
