//! The host: huge pages, the limit of locked memory, and how much memory there is to pin.

use std::path::Path;

use glake_tiers::AvailableMemory;
use glake_units::Bytes;
use rustix::process::{Resource, getrlimit};

use super::Check;

/// Less than that is soon pinned.
const LITTLE: Bytes = Bytes::gib(4);

/// A control group that leaves that much has no limit: the first version of them writes the largest number of pages.
const UNLIMITED: Bytes = Bytes::gib(1 << 20);

/// Looks at the host.
pub(crate) fn checks() -> Vec<Check> {
    let root = Path::new("/");
    let locked = getrlimit(Resource::Memlock).current.map(Bytes::new);
    vec![huge_pages(root), locked_memory(locked), memory(AvailableMemory::of_host())]
}

fn huge_pages(root: &Path) -> Check {
    const NAME: &str = "huge pages";
    const FILE: &str = "sys/kernel/mm/transparent_hugepage/enabled";
    let text = std::fs::read_to_string(root.join(FILE)).unwrap_or_default();
    match text.split_once('[').and_then(|(_, rest)| rest.split_once(']')) {
        Some((chosen @ ("always" | "madvise"), _)) => {
            Check::ok(NAME, chosen, "pinned memory lies on huge pages, which pins it sooner")
        }
        Some((chosen, _)) => {
            Check::note(NAME, chosen, format!("pinning is slower on small pages: echo madvise > /{FILE}"))
        }
        None => Check::note(NAME, "not known", format!("/{FILE} cannot be read: pinning may be slower")),
    }
}

fn locked_memory(limit: Option<Bytes>) -> Check {
    const NAME: &str = "memlock";
    match limit {
        None => Check::ok(NAME, "unlimited", "ulimit -l is in nobody's way"),
        Some(limit) => Check::note(
            NAME,
            limit.to_string(),
            "NVIDIA's driver does not count what it pins, RDMA libraries do: for those, ulimit -l unlimited",
        ),
    }
}

fn memory(available: AvailableMemory) -> Check {
    const NAME: &str = "host memory";
    let told = |bytes: Option<Bytes>, none: &str| bytes.map_or(none.to_owned(), |bytes| bytes.to_string());
    let found = format!(
        "{} free on the machine, {} left by control groups",
        told(available.machine, "not known how much"),
        told(available.groups.filter(|left| *left < UNLIMITED), "no limit"),
    );
    match available.least() {
        Some(least) if least < LITTLE => Check::note(
            NAME,
            found,
            "little of it can be pinned: raise the container's memory limit, or shrink regions to files",
        ),
        _ => Check::ok(NAME, found, "pinned memory and evicted regions are taken from it"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn little_memory_is_noted_whoever_limits_it() {
        let of = |machine, groups| memory(AvailableMemory { machine, groups });
        assert_eq!(of(Some(Bytes::gib(64)), None).state, State::Ok);
        let tight = of(Some(Bytes::gib(64)), Some(Bytes::gib(1)));
        assert_eq!(tight.state, State::Note);
        assert_eq!(tight.found, "64.00 GiB free on the machine, 1.00 GiB left by control groups");
        assert_eq!(of(None, None).state, State::Ok);
        assert!(
            of(None, Some(Bytes::new(i64::MAX as u64))).found.ends_with("no limit left by control groups")
        );
    }

    #[test]
    fn limits_are_told() {
        assert_eq!(locked_memory(None).state, State::Ok);
        assert_eq!(locked_memory(Some(Bytes::mib(8))).found, "8.00 MiB");
    }

    #[test]
    fn huge_pages_are_what_the_kernel_says() {
        let root = std::env::temp_dir().join(format!("glake-doctor-{}", std::process::id()));
        let folder = root.join("sys/kernel/mm/transparent_hugepage");
        std::fs::create_dir_all(&folder).unwrap();
        for (text, state) in [
            ("always [madvise] never\n", State::Ok),
            ("always madvise [never]\n", State::Note),
            ("", State::Note),
        ] {
            std::fs::write(folder.join("enabled"), text).unwrap();
            assert_eq!(huge_pages(&root).state, state, "{text}");
        }
        std::fs::remove_dir_all(root).unwrap();
    }
}
