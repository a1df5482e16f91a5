//! NUMA nodes that pinned memory is spread over.

use glake_device::owned::DeviceSet;
use glake_device::topology::Topology;

/// Returns the NUMA nodes near the GPUs of a copy's paths, so that each link reads as much from its own node as from others. Empty if the
/// nodes are unknown, or there is only one.
pub fn nodes_of(topology: &Topology, paths: DeviceSet) -> Vec<u32> {
    let exists = |id: u32| topology.cpus.nodes.iter().any(|node| node.id == id);
    let near =
        topology.devices.iter().filter(|device| paths.contains(device.id)).filter_map(|device| device.node);
    let mut nodes: Vec<u32> = near.filter(|&node| exists(node)).collect();
    nodes.sort_unstable();
    nodes.dedup();
    if nodes.len() > 1 { nodes } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use glake_device::DeviceId;
    use glake_sim::load;

    use super::*;

    #[test]
    fn nodes_are_those_of_the_paths() {
        let mut topology = Topology::from(&load("h20x8").unwrap());
        let set = |ids: &[u32]| ids.iter().copied().map(DeviceId).collect::<DeviceSet>();
        assert_eq!(nodes_of(&topology, DeviceSet::ALL), [0, 1]);
        assert_eq!(nodes_of(&topology, set(&[0, 7])), [0, 1]);
        assert!(nodes_of(&topology, set(&[0, 1])).is_empty());
        assert!(nodes_of(&topology, DeviceSet::EMPTY).is_empty());
        topology.cpus.nodes.truncate(1);
        assert!(nodes_of(&topology, DeviceSet::ALL).is_empty());
    }
}
