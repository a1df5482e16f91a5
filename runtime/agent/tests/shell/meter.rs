//! Simulated meter of a GPU: a folder with one file per process, named by its id, with its memory.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use glake_meter::{GpuMemory, Meter, MeterError, ProcessMemory};
use glake_units::Bytes;

/// Time for which a dead process still uses memory.
const RECLAIM: Duration = Duration::from_millis(50);

/// Name of the file that makes the meter hang.
pub(crate) const HANGS: &str = "hangs";

#[derive(Debug)]
pub(crate) struct FolderMeter {
    folder: PathBuf,
    total: Bytes,
}

impl FolderMeter {
    pub(crate) fn new(folder: &Path, total: Bytes) -> Self {
        FolderMeter { folder: folder.to_owned(), total }
    }

    /// Returns whether a dead process's memory is free; the first caller records the death.
    fn is_reclaimed(&self, pid: u32) -> bool {
        let found = self.folder.join(format!("{pid}.dead"));
        // Another process may have the number by now.
        if !found.exists() && is_alive(pid) {
            return false;
        }
        let _ = fs::File::create_new(&found);
        fs::metadata(&found).unwrap().modified().unwrap().elapsed().is_ok_and(|since| since > RECLAIM)
    }
}

/// Writes the memory of a process in place, because a reader of the folder could miss a renamed file.
pub(crate) fn write(folder: &Path, pid: u32, used: Bytes) {
    let mut options = fs::File::options();
    let file = options.create(true).truncate(false).write(true).open(folder.join(pid.to_string())).unwrap();
    file.write_all_at(format!("{:020}", used.get()).as_bytes(), 0).unwrap();
}

/// Returns whether a process lives; a zombie is dead.
fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, fields)| fields.split_whitespace().next());
    state.is_some_and(|state| !matches!(state, "Z" | "X"))
}

impl Meter for FolderMeter {
    fn gpus(&self) -> Vec<String> {
        vec!["0".to_owned()]
    }

    fn read(&self, _: &str) -> Result<GpuMemory, MeterError> {
        while self.folder.join(HANGS).exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut processes = Vec::new();
        let mut used = Bytes::ZERO;
        for entry in fs::read_dir(&self.folder).unwrap().map(Result::unwrap) {
            let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
            let Ok(text) = fs::read_to_string(entry.path()) else { continue };
            if self.is_reclaimed(pid) {
                continue;
            }
            let bytes = Bytes::new(text.parse().unwrap_or(0));
            used = used.saturating_add(bytes);
            if is_alive(pid) && !self.folder.join(format!("{pid}.dead")).exists() {
                processes.push(ProcessMemory { pid, used: bytes });
            }
        }
        Ok(GpuMemory { total: self.total, used, reserved: Bytes::ZERO, processes })
    }
}
