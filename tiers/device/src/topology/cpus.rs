//! CPUs and NUMA nodes of a machine, from sysfs or libhwloc.

use std::collections::BTreeSet;
use std::path::Path;
use std::{fmt, fs};

use glake_units::Bytes;

/// Packages and NUMA nodes of a machine; empty if unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSide {
    /// Number of CPU packages (sockets).
    pub packages: u32,
    /// NUMA nodes in ascending order.
    pub nodes: Vec<NumaNode>,
}

/// Description of a NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Number of the node.
    pub id: u32,
    /// Online CPUs of the node.
    pub cpus: CpuList,
    /// Memory of the node, if known.
    pub memory: Option<Bytes>,
}

/// CPU numbers, printed as ranges (`0-3,8`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuList(pub BTreeSet<u32>);

impl CpuSide {
    /// Reads the sysfs mounted at `sys`; missing entries are left out.
    pub(super) fn read(sys: &Path) -> CpuSide {
        let line = |path: &Path| fs::read_to_string(path).unwrap_or_default();
        let root = sys.join("devices/system/node");
        let cpus = sys.join("devices/system/cpu");
        let online = CpuList::parse(&line(&cpus.join("online")));
        let nodes = CpuList::parse(&line(&root.join("online"))).0.into_iter().map(|id| {
            let node = root.join(format!("node{id}"));
            let mut listed = CpuList::parse(&line(&node.join("cpulist"))).0;
            listed.retain(|cpu| online.0.contains(cpu));
            NumaNode { id, cpus: CpuList(listed), memory: memory_of(&line(&node.join("meminfo"))) }
        });
        let package = |cpu: &u32| {
            line(&cpus.join(format!("cpu{cpu}/topology/physical_package_id"))).trim().parse::<i32>().ok()
        };
        let packages: BTreeSet<i32> = online.0.iter().filter_map(package).collect();
        CpuSide { packages: u32::try_from(packages.len()).unwrap_or(u32::MAX), nodes: nodes.collect() }
    }

    /// Adds nodes and memory sizes that only `other` knows.
    #[cfg(any(test, feature = "hwloc"))]
    pub(super) fn filled_from(mut self, other: &CpuSide) -> CpuSide {
        for node in &other.nodes {
            match self.nodes.iter_mut().find(|known| known.id == node.id) {
                Some(known) => known.memory = known.memory.or(node.memory),
                None => self.nodes.push(node.clone()),
            }
        }
        self.nodes.sort_by_key(|node| node.id);
        self
    }

    /// Builds the CPU side of a model: one node per socket, its CPUs unknown.
    pub fn of_sockets(sockets: impl Iterator<Item = u32>) -> CpuSide {
        let sockets: BTreeSet<u32> = sockets.collect();
        let node = |&id: &u32| NumaNode { id, cpus: CpuList::default(), memory: None };
        CpuSide {
            packages: u32::try_from(sockets.len()).unwrap_or(u32::MAX),
            nodes: sockets.iter().map(node).collect(),
        }
    }
}

impl CpuList {
    /// Parses the kernel's list format; malformed parts are left out.
    pub(super) fn parse(text: &str) -> CpuList {
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            if let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) {
                cpus.extend(first..=last.min(first.saturating_add(1 << 16)));
            }
        }
        CpuList(cpus)
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for &cpu in &self.0 {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        let text = |&(first, last): &(u32, u32)| {
            if first == last { first.to_string() } else { format!("{first}-{last}") }
        };
        f.pad(&ranges.iter().map(text).collect::<Vec<_>>().join(","))
    }
}

/// Parses the size from a line such as `Node 0 MemTotal:  65890324 kB`.
fn memory_of(meminfo: &str) -> Option<Bytes> {
    let line = meminfo.lines().find(|line| line.contains("MemTotal:"))?;
    let kib: u64 = line.split_whitespace().rev().nth(1)?.parse().ok()?;
    Some(Bytes::kib(kib))
}

/// Reads the CPU side from libhwloc. Nodes without CPUs are missing, and the memory of nodes is unknown. Only processing units are queried:
/// asking hwloc2 2.2.0 for NUMA nodes by type panics, because their depth is negative.
#[cfg(feature = "hwloc")]
pub(super) fn read_hwloc() -> Option<CpuSide> {
    use std::collections::BTreeMap;

    use hwloc2::{ObjectType, Topology};

    let topology = Topology::new()?;
    let mut nodes: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for unit in topology.objects_with_type(&ObjectType::PU).ok()? {
        for node in unit.nodeset().into_iter().flatten() {
            nodes.entry(node).or_default().insert(unit.os_index());
        }
    }
    let packages = topology.objects_with_type(&ObjectType::Package).ok()?.len();
    let memory: Option<Bytes> = None;
    let node = |(id, cpus)| NumaNode { id, cpus: CpuList(cpus), memory };
    Some(CpuSide { packages: u32::try_from(packages).ok()?, nodes: nodes.into_iter().map(node).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_read_back() {
        for text in ["0-3,8", "0", "0-1,4-7,9", ""] {
            assert_eq!(CpuList::parse(text).to_string(), text);
        }
        assert_eq!(CpuList::parse("x,3-1,5\n").to_string(), "5");
    }

    #[test]
    fn memory_is_in_kib() {
        assert_eq!(memory_of("\nNode 0 MemTotal:       2048 kB\nNode 0 MemFree: 1 kB"), Some(Bytes::mib(2)));
        assert_eq!(memory_of(""), None);
    }

    #[test]
    fn a_second_source_fills_gaps() {
        let node = |id, memory| NumaNode { id, cpus: CpuList::default(), memory };
        let without = CpuSide { packages: 1, nodes: vec![node(1, None)] };
        let with = CpuSide { packages: 2, nodes: vec![node(0, None), node(1, Some(Bytes::gib(1)))] };
        assert_eq!(without.filled_from(&with), CpuSide { packages: 1, ..with });
    }

    #[test]
    fn a_missing_sysfs_yields_nothing() {
        assert_eq!(CpuSide::read(Path::new("/nonexistent")), CpuSide::default());
    }

    #[test]
    fn this_machine_has_cpus() {
        let side = CpuSide::read(Path::new("/sys"));
        assert!(side.packages >= 1);
        assert!(side.nodes.iter().any(|node| !node.cpus.0.is_empty() && node.memory.is_some()));
    }
}

#[cfg(all(test, feature = "hwloc"))]
mod hwloc_tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn agrees_with_sysfs() {
        let ours = CpuSide::read(Path::new("/sys"));
        let theirs = read_hwloc().unwrap();
        let nodes = |side: &CpuSide| -> Vec<(u32, String)> {
            let with_cpus = side.nodes.iter().filter(|node| !node.cpus.0.is_empty());
            with_cpus.map(|node| (node.id, node.cpus.to_string())).collect()
        };
        assert_eq!(nodes(&ours), nodes(&theirs));
        assert_eq!(ours.packages, theirs.packages);
    }
}
