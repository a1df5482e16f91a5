//! Sources of a configuration, and their precedence.

use std::path::{Path, PathBuf};

use super::{Config, ConfigError, Environment, Launch, Preset, Setting, file};

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
}

impl Sources {
    /// Adds the settings of a TOML text above all others. `name` is the source's name in errors.
    ///
    /// # Errors
    /// The first wrong line.
    pub fn with_overrides(mut self, name: &str, text: &str) -> Result<Sources, ConfigError> {
        self.flags.extend(file::settings(Path::new(name), text)?);
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
            settings.extend(file::settings(&path, preset.text())?);
        }
        if let Some(path) = self.file_in_effect() {
            settings.extend(file::settings(&path, &read(&path)?)?);
        }
        settings.extend(self.environment.settings()?);
        self.flags.iter().try_for_each(Setting::check)?;
        settings.extend(self.flags.iter().cloned());

        let mut document = toml::Table::new();
        settings.iter().for_each(|setting| setting.put(&mut document));
        let config: Config = document.try_into().map_err(|error: toml::de::Error| ConfigError::Syntax {
            path: PathBuf::from("(all layers)"),
            line: 0,
            reason: error.message().to_owned(),
        })?;
        Ok(Config { launch: Launch::of(&self.environment), ..config })
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    std::fs::read_to_string(path).map_err(|source| ConfigError::Unreadable { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::super::{Borrow, DeviceChoice};
    use super::*;
    use glake_units::Bytes;

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
