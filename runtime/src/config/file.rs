//! Reads a TOML file as settings, each with its line number.

use std::path::Path;

use toml::Value;
use toml::de::{DeTable, DeValue};

use super::knob::is_table;
use super::{ConfigError, Origin, Setting};

/// Returns the settings of `text`, each checked by itself, in the order of their lines. `path` is used only in errors.
pub(super) fn settings(path: &Path, text: &str) -> Result<Vec<Setting>, ConfigError> {
    let refused = |error: toml::de::Error| ConfigError::Syntax {
        path: path.to_owned(),
        line: line_of(text, error.span().map_or(0, |span| span.start)),
        reason: error.message().replace('\n', " "),
    };
    let spanned = DeTable::parse(text).map_err(refused)?;
    let values = text.parse::<toml::Table>().map_err(refused)?;

    let mut found = Vec::new();
    collect(spanned.get_ref(), &values, "", &mut found);
    found.sort_by_key(|(offset, ..)| *offset);
    let settings: Vec<_> = found
        .into_iter()
        .map(|(offset, key, value)| {
            Setting::new(key, value, Origin::Line { file: path.to_owned(), line: line_of(text, offset) })
        })
        .collect();
    settings.iter().try_for_each(Setting::check)?;
    Ok(settings)
}

/// Collects the leaves of a table, and its empty tables (an error if the table is unknown), as offset, key and value.
fn collect(spanned: &DeTable<'_>, values: &toml::Table, path: &str, found: &mut Vec<(usize, String, Value)>) {
    for (name, inner) in spanned {
        let Some(value) = values.get(name.get_ref().as_ref()) else { continue };
        // A dot within a name is not one between names.
        let quote = if name.get_ref().contains('.') { "\"" } else { "" };
        let dot = if path.is_empty() { "" } else { "." };
        let key = format!("{path}{dot}{quote}{}{quote}", name.get_ref());
        match (inner.get_ref(), value) {
            (DeValue::Table(inner), Value::Table(values)) if !values.is_empty() || is_table(&key) => {
                collect(inner, values, &key, found);
            }
            _ => found.push((name.span().start, key, value.clone())),
        }
    }
}

fn line_of(text: &str, offset: usize) -> usize {
    text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        settings(Path::new("my.toml"), text).unwrap_err().to_string()
    }

    #[test]
    fn names_the_line_of_a_bad_value() {
        assert_eq!(
            error("# mine\n[pool]\nalias = true\nextent = \"16 parsecs\"\n"),
            "my.toml:4: pool.extent = \"16 parsecs\": allowed is a multiple of 2MiB above 0, such as \"16MiB\""
        );
        assert_eq!(
            error("[tiers]\n\nhost_spare = -1\n"),
            "my.toml:3: tiers.host_spare = -1: allowed is a size: bytes, or a number and a unit such as \
             \"512MiB\" or \"32GiB\""
        );
    }

    #[test]
    fn refuses_what_no_knob_allows() {
        for text in [
            "pool.extent = 0",
            "pool.extent = \"3MiB\"",
            "pool.alias = 1",
            "pool.fragment_limit = -1",
            "pool.reuse_limit = -0.5",
            "pool.reuse_limit = nan",
            "pool.defragment_level = 2",
            "pool.auto_gc_limit = \"1GB\"",
            "pool.borrow = \"maybe\"",
            "pool.completion_interval_us = -1",
            "transfer.multi_path = \"on\"",
            "transfer.multi_path = 1",
            "transfer.exclude = 3",
            "transfer.exclude = [\"GPU 3\"]",
            "transfer.exclude = [-1]",
            "transfer.pageable_threads = \"all\"",
            "tiers.extent = \"3MiB\"",
            "tiers.drain_timeout_ms = -1",
            "device.choice = \"tpu\"",
            "log.filter = \"loud=very\"",
            "pool = 3",
            "pool.extent = { size = 3 }",
        ] {
            let message = error(text);
            assert!(
                message.starts_with("my.toml:1: ") && message.contains("allowed is"),
                "{text}: {message}"
            );
            assert!(!message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn lists_what_is_allowed_beside_an_unknown_key() {
        assert_eq!(
            error("[device]\nchoise = \"sim\"\n"),
            "my.toml:2: unknown key device.choise; allowed: device.choice"
        );
        assert_eq!(
            error("[expert]\nslab = \"4MiB\"\n"),
            "my.toml:2: expert.slab is no key any more: a slab has 2 MiB"
        );
        assert_eq!(
            error("transfer.relays = true"),
            "my.toml:1: transfer.relays is no key any more: transfer.multi_path = \"always\" replaces true, and \"never\" \
             replaces false"
        );
        assert!(error("\"pool.alias\" = true").contains("my.toml:1: unknown key \"pool.alias\"; "));
        assert!(error("[pol]\n").contains("my.toml:1: unknown key pol; allowed: pool.extent, "));
        assert!(error("[pool.waits]\nsplit = true").contains("my.toml:2: unknown key pool.waits.split"));
    }

    #[test]
    fn says_where_it_stops_being_toml() {
        let message = error("[pool]\nextent = \n");
        assert!(message.starts_with("my.toml:2: not TOML: "), "{message}");
        let message = error("[pool]\nalias = true\nalias = false\n");
        assert!(message.starts_with("my.toml:3: not TOML: ") && !message.contains('\n'), "{message}");
    }

    #[test]
    fn empty_tables_and_files_set_nothing() {
        assert_eq!(settings(Path::new("my.toml"), "").unwrap(), []);
        assert_eq!(settings(Path::new("my.toml"), "[pool]\n[tiers]\n[log]\n").unwrap(), []);
    }
}
