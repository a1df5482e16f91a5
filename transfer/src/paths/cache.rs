//! Stored calibration: one file for each set of devices, driver, boot and user.
//!
//! ```text
//!   $XDG_CACHE_HOME/glake/paths/d1f0c2….toml      version, key, paths
//!        └ else ~/.cache
//! ```
//!
//! Invariants: a file is written completely or not at all, and is accessible to its user only. Reading returns the graph of the requested
//! key or nothing. An unusable file causes a warning that names it and then counts as absent.

use std::fmt::Write as _;
use std::fs::{self, DirBuilder, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tracing::warn;

use super::{GpuLinks, PathGraph, Paths};
use crate::{Result, TransferError};

/// Version of the file's layout and of the meaning of its figures.
const VERSION: u32 = 2;

/// Conditions under which a calibration is valid.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheKey {
    driver: String,
    boot: String,
    user: u32,
    /// GPUs with their links to the host and to each other, which can differ between servers of the same model.
    devices: Vec<GpuLinks>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CacheFile {
    version: u32,
    key: CacheKey,
    paths: Paths,
}

/// Version field of any calibration file.
#[derive(Deserialize)]
struct Stamp {
    version: u32,
}

impl CacheKey {
    /// Creates the key of GPUs, in order of their IDs, for a driver version, a boot (the text of `/proc/sys/kernel/random/boot_id`) and a
    /// user ID.
    pub fn new(gpus: &[GpuLinks], driver: &str, boot: &str, user: u32) -> CacheKey {
        CacheKey { driver: driver.to_owned(), boot: boot.trim().to_owned(), user, devices: gpus.to_vec() }
    }

    /// Returns the file name, identical in every process and build.
    pub fn file_name(&self) -> String {
        let mut text = format!("{VERSION}\n{}\n{}\n{}\n", self.driver, self.boot, self.user);
        for device in &self.devices {
            let GpuLinks { device, name, pci, node, switch, link, peers } = device;
            let number = |number: &Option<u32>| number.map_or_else(String::new, |number| number.to_string());
            let link = link.map_or_else(String::new, |link| format!("{:016x}", link.0.to_bits()));
            let peers: Vec<String> = peers.iter().map(|peer| peer.0.to_string()).collect();
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{}\t{name}\t{}\t{}\t{}\t{link}\t{}",
                device.0,
                pci.as_deref().unwrap_or_default(),
                number(node),
                number(switch),
                peers.join(",")
            );
        }
        format!("{}.toml", digest(&text))
    }
}

/// Returns a 16-digit hash of a text, identical in every process and build.
pub fn digest(text: &str) -> String {
    format!("{:016x}", fnv1a(text.as_bytes()))
}

/// Returns the folder of calibrations for the values of `XDG_CACHE_HOME` and `HOME`; `None` if both are missing or relative.
pub fn folder(xdg_cache_home: Option<&Path>, home: Option<&Path>) -> Option<PathBuf> {
    let caches = xdg_cache_home.filter(|path| path.is_absolute()).map(Path::to_owned);
    let caches = caches.or_else(|| home.filter(|path| path.is_absolute()).map(|home| home.join(".cache")))?;
    Some(caches.join("glake/paths"))
}

/// Serializes a graph to the text of a file.
pub fn encode(key: &CacheKey, graph: &PathGraph) -> Result<String> {
    let file = CacheFile { version: VERSION, key: key.clone(), paths: graph.paths().clone() };
    toml::to_string(&file).map_err(|source| TransferError::CacheEncoding { source: Box::new(source) })
}

/// Parses the text of a file and checks its key.
pub fn decode(key: &CacheKey, text: &str) -> Result<PathGraph> {
    let malformed = |source| TransferError::CacheMalformed { source: Box::new(source) };
    let stamp: Stamp = toml::from_str(text).map_err(malformed)?;
    if stamp.version != VERSION {
        return Err(TransferError::CacheVersion { found: stamp.version, expected: VERSION });
    }
    let file: CacheFile = toml::from_str(text).map_err(malformed)?;
    if file.key != *key {
        return Err(TransferError::CacheOfOthers);
    }
    PathGraph::new(file.paths)
}

/// Loads the graph of a key from `folder`; `None` if there is no usable file.
pub fn load(folder: &Path, key: &CacheKey) -> Option<PathGraph> {
    let path = folder.join(key.file_name());
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        Err(error) => {
            warn!(target: "glake::transfer", path = %path.display(), %error, "the calibration cannot be read: going on without it");
            return None;
        }
    };
    decode(key, &text)
        .inspect_err(
            |error| warn!(target: "glake::transfer", path = %path.display(), %error, "the calibration is ignored: calibrate again"),
        )
        .ok()
}

/// Stores a graph in `folder`, which is created if missing. Returns the path of the file.
pub fn store(folder: &Path, key: &CacheKey, graph: &PathGraph) -> Result<PathBuf> {
    let text = encode(key, graph)?;
    let path = folder.join(key.file_name());
    // Keys of maps are random: no other process writes to the same draft, in another container either.
    let draft = path.with_extension(format!("{:016x}.tmp", RandomState::new().hash_one(std::process::id())));
    let written = || -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&draft, &path)
    };
    if let Err(source) = written() {
        // The first error is the one to tell.
        let _ = fs::remove_file(&draft);
        return Err(TransferError::CacheFile { path, source });
    }
    Ok(path)
}

/// Deletes the stored graph of a key from `folder`, if it exists.
pub fn remove(folder: &Path, key: &CacheKey) -> Result<()> {
    let path = folder.join(key.file_name());
    match fs::remove_file(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(TransferError::CacheFile { path, source })
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// FNV-1a hash (Fowler, Noll, Vo; 64 bits). Stable, unlike the standard library's.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use glake_device::topology::Topology;

    use super::*;

    fn gpus() -> Vec<GpuLinks> {
        GpuLinks::of(&Topology::from(&glake_sim::load("h20x8").unwrap()))
    }

    fn key() -> CacheKey {
        CacheKey::new(&gpus(), "580.159.04", "8a7c\n", 1000)
    }

    /// Creates an empty folder for one test.
    fn scratch(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("glake-paths-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn what_is_kept_comes_back() {
        let (folder, graph) = (scratch("kept"), PathGraph::conservative(&gpus()));
        assert!(load(&folder, &key()).is_none());
        let path = store(&folder, &key(), &graph).unwrap();
        store(&folder, &key(), &graph).unwrap();
        assert_eq!(load(&folder, &key()).unwrap().paths(), graph.paths());
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(&folder)), (0o600, 0o700));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no draft is left");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn every_part_of_the_key_counts() {
        let mut fewer = gpus();
        fewer.pop();
        let mut moved = gpus();
        moved[0].pci = Some("0000:3b:00.0".to_owned());
        let changed = |change: &dyn Fn(&mut GpuLinks)| {
            let mut gpus = gpus();
            change(&mut gpus[0]);
            CacheKey::new(&gpus, "580.159.04", "8a7c", 1000)
        };
        let others = [
            CacheKey::new(&fewer, "580.159.04", "8a7c", 1000),
            CacheKey::new(&moved, "580.159.04", "8a7c", 1000),
            CacheKey::new(&gpus(), "580.160.01", "8a7c", 1000),
            CacheKey::new(&gpus(), "580.159.04", "8a7d", 1000),
            CacheKey::new(&gpus(), "580.159.04", "8a7c", 1001),
            changed(&|gpu| gpu.name.push('X')),
            changed(&|gpu| gpu.node = Some(7)),
            changed(&|gpu| gpu.switch = Some(7)),
            changed(&|gpu| gpu.link = gpu.link.map(|link| glake_units::Bandwidth(link.0 / 2.0))),
            changed(&|gpu| gpu.peers.truncate(gpu.peers.len() - 1)),
        ];
        let text = encode(&key(), &PathGraph::conservative(&gpus())).unwrap();
        for other in others {
            assert_ne!(other.file_name(), key().file_name());
            assert!(matches!(decode(&other, &text), Err(TransferError::CacheOfOthers)));
        }
        assert_eq!(key().file_name(), "e5d770378f9563c5.toml", "stable over builds");
    }

    #[test]
    fn what_is_broken_is_ignored() {
        let folder = scratch("broken");
        let path = store(&folder, &key(), &PathGraph::conservative(&gpus())).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let spoilt = [
            String::new(),
            "\0\0\0".to_owned(),
            text[..text.len() / 2].to_owned(),
            text.replacen("version = 2", "version = 3", 1),
            text.replacen("rate = 53.0", "rate = -53.0", 1),
            text.replacen("rate = 53.0", "rate = nan", 1),
            text.replacen("device = 0", "device = 77", 1).replacen("target = 0", "target = 77", 1),
            text.replacen("fork = ", "spoon = ", 1),
        ];
        for spoilt in spoilt {
            assert_ne!(spoilt, text);
            fs::write(&path, &spoilt).unwrap();
            assert!(load(&folder, &key()).is_none(), "{spoilt}");
        }
        fs::write(&path, &text).unwrap();
        assert!(load(&folder, &key()).is_some());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_folder_is_the_caches() {
        let path = Path::new;
        assert_eq!(folder(Some(path("/c")), Some(path("/h"))), Some(PathBuf::from("/c/glake/paths")));
        assert_eq!(folder(Some(path("c")), Some(path("/h"))), Some(PathBuf::from("/h/.cache/glake/paths")));
        assert_eq!(folder(None, None), None);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_told_of() {
        let error = store(Path::new("/dev/null/glake"), &key(), &PathGraph::empty()).unwrap_err();
        assert!(matches!(error, TransferError::CacheFile { .. }));
        assert!(error.to_string().contains("/dev/null/glake/"), "{error}");
    }
}
