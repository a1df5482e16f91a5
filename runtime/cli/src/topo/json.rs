//! The topology as one JSON object. Bandwidths are GB/s, memory bytes; what is not known is null.

use glake_device::topology::{HostLink, Topology};
use glake_transfer::paths::PathGraph;
use serde_json::{Value, json as object};

use super::paths::paths_json;

/// Returns the JSON object: name, simulated, packages, nodes, host, devices, switches, links, calibrated (null, or the paths).
pub fn json(topology: &Topology, calibrated: Option<&PathGraph>) -> Value {
    let node = |node: &glake_device::topology::NumaNode| {
        let cpus = if node.cpus.0.is_empty() { Value::Null } else { node.cpus.to_string().into() };
        object!({"node": node.id, "cpus": cpus, "memory": node.memory})
    };
    let device = |device: &glake_device::topology::DeviceNode| {
        object!({
            "device": device.id.0,
            "name": device.name,
            "pci": device.pci,
            "node": device.node,
            "memory": device.memory,
            "switch": device.switch,
            "pcie": device.link.as_ref().map(link),
        })
    };
    let peer = |peer: &glake_device::topology::PeerLink| {
        object!({
            "between": [peer.a.0, peer.b.0],
            "kind": "nvlink",
            "lanes": peer.lanes,
            "gbps": peer.bandwidth.map(|bandwidth| bandwidth.0),
        })
    };
    let host = &topology.host;
    object!({
        "name": topology.name,
        "simulated": topology.simulated,
        "packages": topology.cpus.packages,
        "nodes": topology.cpus.nodes.iter().map(node).collect::<Vec<_>>(),
        "host": {
            "read_gbps": host.read.map(|bandwidth| bandwidth.0),
            "write_gbps": host.write.map(|bandwidth| bandwidth.0),
            "both_gbps": host.both.map(|bandwidth| bandwidth.0),
            "far_socket_gbps": host.far_socket.map(|bandwidth| bandwidth.0),
        },
        "devices": topology.devices.iter().map(device).collect::<Vec<_>>(),
        "switches": topology.switches.iter().map(|switch| switch.link.as_ref().map(link)).collect::<Vec<_>>(),
        "calibrated": calibrated.map(paths_json),
        "links": topology.peers.iter().map(peer).collect::<Vec<_>>(),
    })
}

fn link(link: &HostLink) -> Value {
    object!({
        "to_gpu_gbps": link.to_gpu.0,
        "from_gpu_gbps": link.from_gpu.0,
        "nominal": link.nominal,
    })
}

#[cfg(test)]
mod tests {
    use glake_sim::load;

    use super::*;

    #[test]
    fn one_line_with_devices_and_links() {
        let value = json(&Topology::from(&load("h20x8").unwrap()), None);
        assert!(!value.to_string().contains('\n'));
        assert_eq!(value["devices"][7]["node"], 1);
        assert_eq!(value["devices"][7]["pcie"]["to_gpu_gbps"], 53.0);
        assert_eq!(value["links"].as_array().unwrap().len(), 28);
        assert_eq!(
            value["links"][0],
            object!({"between": [0, 1], "kind": "nvlink", "lanes": null, "gbps": 367.0})
        );
        assert_eq!(value["host"]["far_socket_gbps"], 60.0);
        assert!(value["nodes"][0]["cpus"].is_null());
    }
}
