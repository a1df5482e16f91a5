//! The topology and the paths of each GPU as table rows, and as one JSON object: bandwidths in GB/s, memory in bytes, null if unknown.

use glake_device::DeviceId;
use glake_device::topology::{HostLink, Topology};
use glake_transfer::paths::{Direction, PathGraph, PathRate, Way};
use serde_json::{Value, json as object};

use super::{both_ways, rate};

/// Table whose first `names` columns are text and the others figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Number of text columns.
    pub names: usize,
    /// Headers, one per column.
    pub headers: Vec<String>,
    /// Rows, with one cell per column.
    pub rows: Vec<Vec<String>>,
}

const UNKNOWN: &str = "?";

/// The GPUs, one a row. Bandwidths are GB/s.
pub fn devices(topology: &Topology) -> Rows {
    let unknown = || UNKNOWN.to_owned();
    let row = |device: &glake_device::topology::DeviceNode| {
        let (to, from) = device.link.as_ref().map_or_else(|| (unknown(), unknown()), both_ways);
        vec![
            device.id.to_string(),
            device.name.clone(),
            device.pci.clone().unwrap_or_else(unknown),
            device.memory.to_string(),
            device.node.map_or_else(unknown, |node| node.to_string()),
            to,
            from,
        ]
    };
    let headers = ["device", "name", "PCI", "memory", "NUMA", "to GPU", "from GPU"];
    Rows {
        names: 3,
        headers: headers.map(str::to_owned).into(),
        rows: topology.devices.iter().map(row).collect(),
    }
}

/// NVLink between each two GPUs, GB/s each way; `None` where there is none.
pub fn peers(topology: &Topology) -> Option<Rows> {
    if topology.peers.is_empty() {
        return None;
    }
    let ids = || topology.devices.iter().map(|device| device.id);
    let cell = |a, b| match topology.peer(a, b) {
        _ if a == b => "·".to_owned(),
        None => "-".to_owned(),
        Some(peer) => match (peer.bandwidth, peer.lanes) {
            (Some(bandwidth), _) => rate(bandwidth.0),
            (None, Some(lanes)) => format!("{lanes} links"),
            (None, None) => UNKNOWN.to_owned(),
        },
    };
    let headers = std::iter::once("NVLink".to_owned()).chain(ids().map(|id| id.to_string()));
    let row =
        |a: glake_device::DeviceId| std::iter::once(a.to_string()).chain(ids().map(|b| cell(a, b))).collect();
    Some(Rows { names: 1, headers: headers.collect(), rows: ids().map(row).collect() })
}

/// The paths, by target and direction, its own link first: GB/s alone and microseconds besides.
pub fn paths(graph: &PathGraph) -> Rows {
    let mut rows = Vec::new();
    for (target, direction) in targets(graph) {
        for (number, path) in graph.rates(target, direction).enumerate() {
            let first = |text: String| if number == 0 { text } else { String::new() };
            rows.push(vec![
                first(target.to_string()),
                first(way_of(direction).to_owned()),
                over(&path),
                format!("{:.1}", path.rate.0),
                format!("{:.1}", path.latency.0),
                first(format!("{:.1}", graph.together(target, direction).0)),
            ]);
        }
    }
    let headers = ["target", "direction", "over", "GB/s", "besides, us", "together GB/s"];
    Rows { names: 3, headers: headers.map(str::to_owned).into(), rows }
}

/// The same as a list of objects.
pub(super) fn paths_json(graph: &PathGraph) -> Value {
    let of_target = |(target, direction): (DeviceId, Direction)| {
        let path = move |path: PathRate| {
            object!({
                "relay": path.relay.0, "way": path.way, "gbps": path.rate.0, "latency_us": path.latency.0,
            })
        };
        object!({
            "target": target.0,
            "direction": direction,
            "together_gbps": graph.together(target, direction).0,
            "paths": graph.rates(target, direction).map(path).collect::<Vec<Value>>(),
        })
    };
    targets(graph).map(of_target).collect()
}

/// Returns the combined rates of all paths for a GPU's line in the picture.
pub(super) fn together(graph: &PathGraph, device: DeviceId) -> Option<String> {
    let all = |direction| graph.together(device, direction).0;
    let (to, from) = (all(Direction::ToGpu), all(Direction::FromGpu));
    (to > 0.0 && from > 0.0).then(|| format!("{} and {} over all links", rate(to), rate(from)))
}

fn targets(graph: &PathGraph) -> impl Iterator<Item = (DeviceId, Direction)> {
    graph.paths().links.iter().map(|link| (link.device, link.direction))
}

fn over(path: &PathRate) -> String {
    match path.way {
        Way::Direct => "its own link".to_owned(),
        Way::ZeroStaging => format!("{}, pool memory", path.relay),
        Way::Staged => format!("{}, other memory", path.relay),
    }
}

fn way_of(direction: Direction) -> &'static str {
    match direction {
        Direction::ToGpu => "to it",
        Direction::FromGpu => "from it",
    }
}

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
    fn every_row_has_every_column() {
        for name in ["h200x4", "h20x8", "a100x8"] {
            let topology = Topology::from(&load(name).unwrap());
            for rows in [devices(&topology), peers(&topology).unwrap()] {
                assert_eq!(rows.rows.len(), topology.devices.len());
                assert!(rows.rows.iter().all(|row| row.len() == rows.headers.len()));
            }
        }
    }

    #[test]
    fn cells() {
        let mut topology = Topology::from(&load("h200x4").unwrap());
        let gpus = devices(&topology);
        assert_eq!(gpus.rows[1], ["GPU 1", "Simulated H200", "?", "140.40 GiB", "0", "55.5", "55.4"]);
        let nvlink = peers(&topology).unwrap();
        assert_eq!(nvlink.rows[2], ["GPU 2", "396.0", "396.0", "·", "396.0"]);
        if let Some(link) = &mut topology.devices[0].link {
            link.nominal = true;
        }
        assert_eq!(devices(&topology).rows[0][5], "≤ 55.5");
        topology.peers.clear();
        assert_eq!(peers(&topology), None);
    }
}

#[cfg(test)]
mod paths_tests {
    use glake_device::topology::Topology;
    use glake_sim::load;
    use glake_transfer::paths::GpuLinks;

    use super::*;

    fn assumed(name: &str) -> PathGraph {
        PathGraph::conservative(&GpuLinks::of(&Topology::from(&load(name).unwrap())))
    }

    #[test]
    fn a_target_s_own_link_comes_first() {
        let rows = paths(&assumed("h200x4"));
        assert!(rows.rows.iter().all(|row| row.len() == rows.headers.len()));
        assert_eq!(rows.rows[0][..3], ["GPU 0", "to it", "its own link"]);
        assert_eq!(rows.rows[1][..2], ["", ""]);
        assert!(rows.rows[1][2].starts_with("GPU 1, "));
        assert_eq!(rows.rows.iter().filter(|row| row[2] == "its own link").count(), 8);
    }

    #[test]
    fn figures_as_json_and_in_the_picture() {
        let graph = assumed("h200x4");
        let value = paths_json(&graph);
        assert_eq!(value.as_array().map(Vec::len), Some(8));
        assert_eq!(value[0]["paths"][0]["way"], "direct");
        assert!(together(&graph, DeviceId(0)).is_some_and(|text| text.ends_with("over all links")));
        assert_eq!(together(&PathGraph::empty(), DeviceId(0)), None);
    }
}

#[cfg(test)]
mod json_tests {
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
