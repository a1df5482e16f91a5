//! Configuration of logging.

use super::knob::knobs;

knobs! {
    /// Configuration of logging.
    Log as log {
        [log]
        /// Tracing filter: a level, or levels by target.
        ///
        /// Logs go to standard error. `off` disables them, `trace` logs everything (`info` logs one event per stitch).
        filter: String = "warn".to_owned(),
            "off, error, warn, info, debug, trace, or levels by part, such as \"warn,glake::transfer=debug\"",
            if |filter| is_filter(filter);
    }
}

/// Returns whether every part is a level or names its target. A lone word that is no level, or a level with a space, would disable all
/// other targets.
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
