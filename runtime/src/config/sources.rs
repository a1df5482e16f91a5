//! Sources of a configuration and their precedence, and the reader of TOML files, which keeps the line number of each setting.

use std::path::{Path, PathBuf};

use toml::Value;
use toml::de::{DeTable, DeValue};

use super::knob::is_table;
use super::{Config, ConfigError, Environment, Launch, Origin, Preset, Setting};

/// Sources of a configuration. The default value, without sources, gives the defaults.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Preset, which overrides the defaults.
    pub preset: Option<Preset>,
    /// File, which overrides the preset; `None`: the file that `GLAKE_CONFIG` names.
    pub file: Option<PathBuf>,
    /// Environment, which overrides the file.
    pub environment: Environment,
    /// Flags, which override all other sources.
    pub flags: Vec<Setting>,
    /// Folder that relative paths begin at; `None`: the working directory.
    pub directory: Option<PathBuf>,
}

impl Sources {
    /// Adds the settings of a TOML text above all others. `name` is the source's name in errors.
    ///
    /// # Errors
    /// The first wrong line.
    pub fn with_overrides(mut self, name: &str, text: &str) -> Result<Sources, ConfigError> {
        self.flags.extend(self::settings(Path::new(name), text)?);
        Ok(self)
    }

    /// Returns the path of the file in effect, if any.
    pub fn file_in_effect(&self) -> Option<PathBuf> {
        self.file.clone().or_else(|| self.environment.config_file())
    }

    /// Reads and checks every source and merges them by precedence.
    ///
    /// # Errors
    /// The first error, in the order of the sources.
    pub fn load(&self) -> Result<Config, ConfigError> {
        let mut settings: Vec<Setting> = self.environment.cache_folder().into_iter().collect();
        if let Some(preset) = self.preset {
            let path = PathBuf::from(format!("configs/{preset}.toml"));
            settings.extend(self::settings(&path, preset.text())?);
        }
        if let Some(path) = self.file_in_effect() {
            let path = self.directory.as_ref().map_or(path.clone(), |folder| folder.join(&path));
            settings.extend(self::settings(&path, &read(&path)?)?);
        }
        let mut variables = self.environment.settings()?;
        // `GLAKE_MULTI_PATH` chooses between on request and from the start; "always" and "never" are the machine's.
        let is_multi_path = |setting: &Setting| setting.key() == MULTI_PATH;
        if settings.iter().rfind(|setting| is_multi_path(setting)).is_some_and(Setting::is_text) {
            variables.retain(|setting| !is_multi_path(setting));
        }
        settings.extend(variables);
        self.flags.iter().try_for_each(Setting::check)?;
        settings.extend(self.flags.iter().cloned());

        let mut document = toml::Table::new();
        settings.iter().for_each(|setting| setting.put(&mut document));
        let config: Config = document.try_into().map_err(|error: toml::de::Error| ConfigError::Syntax {
            path: PathBuf::from("(all layers)"),
            line: 0,
            reason: error.message().to_owned(),
        })?;
        let mut config = Config { launch: Launch::of(&self.environment), ..config };
        self.make_absolute("tiers.files", &mut config.tiers.files)?;
        self.make_absolute("transfer.calibrations", &mut config.transfer.calibrations)?;
        Ok(config)
    }

    /// Makes the path of a setting absolute: the program may change its working directory before the path is used, or between two uses.
    fn make_absolute(&self, key: &'static str, path: &mut Option<PathBuf>) -> Result<(), ConfigError> {
        let Some(path) = path.as_mut().filter(|path| path.is_relative() && !path.as_os_str().is_empty())
        else {
            return Ok(());
        };
        let directory = self.directory.clone().map_or_else(std::env::current_dir, Ok);
        let directory =
            directory.map_err(|source| ConfigError::WorkingDirectory { key, path: path.clone(), source })?;
        *path = directory.join(&*path);
        Ok(())
    }
}

/// Key that `GLAKE_MULTI_PATH` switches.
const MULTI_PATH: &str = "transfer.multi_path";

fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })
}

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
    use super::super::{Borrow, DeviceChoice};
    use super::*;
    use glake_units::Bytes;

    #[test]
    fn the_switch_of_multi_path_keeps_always_and_never() {
        use super::super::MultiPath;
        for (in_file, switched) in [
            ("\"never\"", [MultiPath::Never; 2]),
            ("\"always\"", [MultiPath::Always; 2]),
            ("false", [MultiPath::OnRequest, MultiPath::FromStart]),
            ("true", [MultiPath::OnRequest, MultiPath::FromStart]),
        ] {
            let file = written("multi-path.toml", &format!("transfer.multi_path = {in_file}\n"));
            let loaded = ["0", "1"].map(|value| {
                let path = file.to_str().unwrap();
                let variables = [("GLAKE_CONFIG", path), ("GLAKE_MULTI_PATH", value)];
                let environment = Environment::from_iter(variables);
                Sources { environment, ..Sources::default() }.load().unwrap().transfer.multi_path
            });
            assert_eq!(loaded, switched, "{in_file}");
        }
    }

    fn written(name: &str, text: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("glake-config-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn nothing_gives_the_defaults() {
        assert_eq!(Sources::default().load().unwrap(), Config::default());
    }

    #[test]
    fn a_later_layer_wins() {
        let path =
            written("layers.toml", "pool = { extent = \"4MiB\", reuse_limit = 3, borrow = \"off\" }\n");
        let sources = Sources {
            preset: Some(Preset::Serverless),
            file: Some(path.clone()),
            environment: [("reuseLimit", "4"), ("GLAKE_DEVICE", "sim"), ("GLAKE_CONFIG", "/not/read")]
                .into_iter()
                .collect(),
            flags: vec![Setting::flag("--device", "device.choice", "cuda")],
            directory: None,
        };
        let config = sources.load().unwrap();
        std::fs::remove_file(path).unwrap();
        assert_eq!(config.pool.extent, Bytes::mib(4));
        assert_eq!(config.pool.borrow, Borrow::Off);
        assert_eq!(config.pool.reuse_limit.to_bits(), 4.0_f64.to_bits());
        assert_eq!(config.device.choice, DeviceChoice::Cuda);
        let preset = Sources { preset: Some(Preset::Serverless), ..Sources::default() }.load().unwrap();
        assert_ne!(preset.pool.auto_gc_limit, Config::default().pool.auto_gc_limit);
        assert_eq!(config.pool.auto_gc_limit, preset.pool.auto_gc_limit);
    }

    #[test]
    fn the_environment_names_the_file() {
        let path = written("named.toml", "[pool]\nlimit = \"3GiB\"\n");
        let environment = [("GLAKE_CONFIG", path.as_os_str())].into_iter().collect();
        let config = Sources { environment, ..Sources::default() }.load().unwrap();
        std::fs::remove_file(path).unwrap();
        assert_eq!(config.pool.limit, Some(Bytes::gib(3)));
    }

    #[test]
    fn paths_keep_their_meaning_if_the_working_directory_changes() {
        let path = written("paths.toml", "tiers.files = \"f\"\ntransfer.calibrations = \"../c\"\n");
        let file = Some(path.clone());
        let config = Sources { file: file.clone(), ..Sources::default() }.load().unwrap();
        let here = std::env::current_dir().unwrap();
        let paths = (config.tiers.files.unwrap(), config.transfer.calibrations.unwrap());
        assert_eq!(paths, (here.join("f"), here.join("../c")));
        // The file is named by a relative path too.
        let directory = path.parent().map(Path::to_owned);
        let named = Sources { file: path.file_name().map(PathBuf::from), directory, ..Sources::default() };
        assert_eq!(named.load().unwrap().tiers.files, Some(path.with_file_name("f")));
        std::fs::remove_file(path).unwrap();
        let empty = Sources::default().with_overrides("test", "transfer.calibrations = \"\"\n").unwrap();
        assert_eq!(empty.load().unwrap().transfer.calibrations, Some(PathBuf::new()));
    }

    #[test]
    fn a_missing_file_is_named() {
        let sources = Sources { file: Some("/no/such.toml".into()), ..Sources::default() };
        let message = sources.load().unwrap_err().to_string();
        assert!(message.starts_with("/no/such.toml: No such file"), "{message}");
    }

    #[test]
    fn overrides_are_over_the_environment() {
        let environment = [("reuseLimit", "4"), ("GLAKE_DEVICE", "sim")].into_iter().collect();
        let sources = Sources { environment, ..Sources::default() };
        let config =
            sources.clone().with_overrides("enable()", "pool.reuse_limit = 5.0").unwrap().load().unwrap();
        assert_eq!(config.pool.reuse_limit.to_bits(), 5.0_f64.to_bits());
        let error = sources.with_overrides("enable()", "[pool]\nextend = 1").unwrap_err().to_string();
        assert!(error.starts_with("enable():2: unknown key pool.extend"), "{error}");
    }

    #[test]
    fn a_bad_flag_is_named() {
        let flags = vec![Setting::flag("--extent", "pool.extent", "3MiB")];
        assert_eq!(
            Sources { flags, ..Sources::default() }.load().unwrap_err().to_string(),
            "command line: --extent = \"3MiB\": allowed is a multiple of 2MiB above 0, such as \"16MiB\""
        );
    }
}

#[cfg(test)]
mod file_tests {
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
             replaces false; remove the line for \"auto\""
        );
        assert_eq!(
            error("[expert]\n"),
            "my.toml:1: expert is no key any more: remove the section: its keys have become constants"
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
