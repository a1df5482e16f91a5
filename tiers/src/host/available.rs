//! Available memory of the host, before reclaim affects other processes.

use std::fs;
use std::path::Path;

use glake_units::Bytes;

/// Available host memory; a field is `None` if unknown or unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AvailableMemory {
    /// Available memory of the machine.
    pub machine: Option<Bytes>,
    /// Memory left by the control groups of this process. Both versions of control groups count if mounted: a machine may have both.
    pub groups: Option<Bytes>,
}

impl AvailableMemory {
    /// Returns the available memory of the host of this process.
    pub fn of_host() -> Self {
        Self::at(Path::new("/"))
    }

    /// Returns the smaller of the two limits.
    pub fn least(self) -> Option<Bytes> {
        self.machine.into_iter().chain(self.groups).min()
    }

    /// Reads the limits below `root`, the root of the file system.
    fn at(root: &Path) -> Self {
        let machine = read(&root.join("proc/meminfo"))
            .lines()
            .find_map(|line| line.strip_prefix("MemAvailable:"))
            .and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse().ok())
            .map(Bytes::kib);
        let groups = read(&root.join("proc/self/cgroup"));
        AvailableMemory { machine, groups: groups.lines().filter_map(|line| least(root, line)).min() }
    }
}

/// File names of one version of control groups.
struct Names {
    /// Mount point of the groups.
    tree: &'static str,
    limit: &'static str,
    taken: &'static str,
    /// Keys of reclaimable file pages in `memory.stat`, for a group and its descendants, like `taken`.
    idle: &'static [&'static str],
}

const VERSION_1: Names = Names {
    tree: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    taken: "memory.usage_in_bytes",
    // The second key exists if groups do not count their descendants.
    idle: &["total_inactive_file ", "inactive_file "],
};
const VERSION_2: Names =
    Names { tree: "sys/fs/cgroup", limit: "memory.max", taken: "memory.current", idle: &["inactive_file "] };

/// Returns the least memory left by the group on a line of `/proc/self/cgroup` (`number:controllers:/path`) and by its ancestors. In a
/// container the path may be the machine's, while only the last group is mounted, as the root: missing groups are no limit.
fn least(root: &Path, line: &str) -> Option<Bytes> {
    let mut fields = line.trim_end().splitn(3, ':');
    let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?.strip_prefix('/')?);
    let names = match controllers {
        "" if number == "0" => VERSION_2,
        _ if controllers.split(',').any(|controller| controller == "memory") => VERSION_1,
        _ => return None,
    };
    let tree = root.join(names.tree);
    let own = tree.join(path);
    own.ancestors().take_while(|dir| dir.starts_with(&tree)).filter_map(|dir| left(dir, &names)).min()
}

/// Returns the memory a control group may still use. Reclaimable file pages do not count as used.
fn left(group: &Path, names: &Names) -> Option<Bytes> {
    let number = |name| read(&group.join(name)).trim().parse().ok().map(Bytes::new);
    let limit: Bytes = number(names.limit)?;
    let taken: Bytes = number(names.taken)?;
    let stat = read(&group.join("memory.stat"));
    let of = |name| stat.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    let idle = names.idle.iter().find_map(of).unwrap_or(0);
    Some(limit.saturating_sub(taken.saturating_sub(Bytes::new(idle))))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn the_tightest_of_machine_and_groups_counts() {
        let meminfo = ("proc/meminfo", "MemTotal: 9 kB\nMemAvailable:    4096 kB\n");
        let member = ("proc/self/cgroup", "0::/outer/inner\n");
        let unlimited = ("sys/fs/cgroup/outer/inner/memory.max", "max\n");
        let of = |files: &[_]| AvailableMemory::at(host(files).path()).least();
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[meminfo]), Some(Bytes::mib(4)));
        assert_eq!(of(&[meminfo, member, unlimited]), Some(Bytes::mib(4)));
        let outer = [
            ("sys/fs/cgroup/outer/memory.max", "1000000\n"),
            ("sys/fs/cgroup/outer/memory.current", "700000\n"),
            ("sys/fs/cgroup/outer/memory.stat", "anon 1\ninactive_file 50000\nactive_file 3\n"),
        ];
        let files = [&[meminfo, member, unlimited], &outer[..]].concat();
        assert_eq!(of(&files), Some(Bytes::new(350_000)));
        let inner = [
            ("sys/fs/cgroup/outer/inner/memory.max", "1000"),
            ("sys/fs/cgroup/outer/inner/memory.current", "2000"),
        ];
        assert_eq!(of(&[&[meminfo, member], &outer[..], &inner[..]].concat()), Some(Bytes::ZERO));
    }

    /// Version 1 names the memory group on its own line; inside a container only the container's own group is mounted.
    #[test]
    fn groups_of_version_1_count_too() {
        let meminfo = ("proc/meminfo", "MemAvailable:    4096 kB\n");
        let member = (
            "proc/self/cgroup",
            "12:cpu,cpuacct:/outer\n4:memory:/outer/inner\n1:name=systemd:/\n0::/outer\n",
        );
        let unlimited = [
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "123456\n"),
        ];
        let of = |files: &[_]| AvailableMemory::at(host(files).path()).least();
        assert_eq!(of(&[&[meminfo, member], &unlimited[..]].concat()), Some(Bytes::mib(4)));
        let outer = [
            ("sys/fs/cgroup/memory/outer/memory.limit_in_bytes", "1000000\n"),
            ("sys/fs/cgroup/memory/outer/memory.usage_in_bytes", "700000\n"),
            (
                "sys/fs/cgroup/memory/outer/memory.stat",
                "inactive_file 1\nhierarchical_memory_limit 9\ntotal_inactive_file 50000\n",
            ),
        ];
        assert_eq!(of(&[&[meminfo, member], &unlimited[..], &outer[..]].concat()), Some(Bytes::new(350_000)));
        let container = [
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 7\n"),
        ];
        assert_eq!(of(&[&[meminfo, member], &container[..]].concat()), Some(Bytes::new(1_500_007)));
        // Beside groups of version 2 that hold no memory, and with some that do.
        let unified = [
            ("sys/fs/cgroup/outer/memory.max", "400000\n"),
            ("sys/fs/cgroup/outer/memory.current", "300000\n"),
        ];
        let both = [&[meminfo, member], &container[..], &unified[..]].concat();
        assert_eq!(of(&both), Some(Bytes::new(100_000)));
    }

    #[test]
    fn this_host_has_memory() {
        assert!(AvailableMemory::of_host().least().is_some_and(|bytes| bytes > Bytes::mib(1)));
    }
}
