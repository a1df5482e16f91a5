//! How much memory the host can give before something else has to give it up.

use std::fs;
use std::path::Path;

use glake_units::Bytes;

/// What the machine, and every control group (version 2) that this process is in, still has; `None` where nothing is known.
/// `root` is the root of the file system.
pub(super) fn available(root: &Path) -> Option<Bytes> {
    let machine = read(&root.join("proc/meminfo"))
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse().ok())
        .map(Bytes::kib);
    let groups = read(&root.join("proc/self/cgroup"));
    let group =
        groups.lines().find_map(|line| line.strip_prefix("0::/")).map(|path| path.trim_end().to_owned());
    let tree = root.join("sys/fs/cgroup");
    let own = group.map(|path| tree.join(path));
    let limits = own.iter().flat_map(|own| own.ancestors()).take_while(|dir| dir.starts_with(&tree));
    machine.into_iter().chain(limits.filter_map(left)).min()
}

/// What a control group may still take. File pages that nobody uses are given up by themselves.
fn left(group: &Path) -> Option<Bytes> {
    let number = |name| read(&group.join(name)).trim().parse().ok().map(Bytes::new);
    let limit: Bytes = number("memory.max")?;
    let taken: Bytes = number("memory.current")?;
    let stat = read(&group.join("memory.stat"));
    let idle = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse().ok());
    Some(limit.saturating_sub(taken.saturating_sub(Bytes::new(idle.unwrap_or(0)))))
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
        let of = |files: &[_]| available(host(files).path());
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

    #[test]
    fn this_host_has_memory() {
        assert!(available(Path::new("/")).is_some_and(|bytes| bytes > Bytes::mib(1)));
    }
}
