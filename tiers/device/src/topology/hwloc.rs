//! CPUs and NUMA nodes of a machine, from libhwloc.
//!
//! Only processing units are queried: asking hwloc2 2.2.0 for NUMA nodes by type panics, because their depth is negative.

use std::collections::{BTreeMap, BTreeSet};

use glake_units::Bytes;
use hwloc2::{ObjectType, Topology};

use super::{CpuList, CpuSide, NumaNode};

/// Reads the CPU side from libhwloc. Nodes without CPUs are missing, and the memory of nodes is unknown.
pub fn read() -> Option<CpuSide> {
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
    use std::path::Path;

    use super::*;

    #[test]
    fn agrees_with_sysfs() {
        let ours = CpuSide::read(Path::new("/sys"));
        let theirs = read().unwrap();
        let nodes = |side: &CpuSide| -> Vec<(u32, String)> {
            let with_cpus = side.nodes.iter().filter(|node| !node.cpus.0.is_empty());
            with_cpus.map(|node| (node.id, node.cpus.to_string())).collect()
        };
        assert_eq!(nodes(&ours), nodes(&theirs));
        assert_eq!(ours.packages, theirs.packages);
    }
}
