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
            "off, error, warn, info, debug, trace, or levels by part, such as \"warn,glake::transfer=debug\"",
            if |filter| is_filter(filter);
    }
}

/// Whether each part is a level, or names what it is for: a lone word that is no level would turn all off that it does not name, and so
/// would a level with a space.
fn is_filter(filter: &str) -> bool {
    let is_part = |part: &str| {
        part.is_empty()
            || part.contains(['=', '['])
            || part.starts_with("glake")
            || part.parse::<tracing_subscriber::filter::LevelFilter>().is_ok()
    };
    let is_parsed = tracing_subscriber::EnvFilter::builder().parse(filter).is_ok();
    is_parsed && filter.split(',').all(is_part)
}
