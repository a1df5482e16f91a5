//! The machine as a tree: host memory, NUMA nodes, switches, GPUs; and NVLink in a sentence below.

use glake_device::topology::{DeviceNode, HostLink, Topology};
use glake_transfer::paths::PathGraph;
use termtree::{GlyphPalette, Tree};

use super::rows::together;
use super::{both_ways, rate};

/// The picture, in lines; with what the paths of each GPU give together where that was measured.
pub fn picture(topology: &Topology, calibrated: Option<&PathGraph>) -> String {
    let kind = if topology.simulated { " (simulated)" } else { "" };
    let known: Vec<u32> = topology.cpus.nodes.iter().map(|node| node.id).collect();
    let mut nodes: Vec<Tree<String>> = (topology.cpus.nodes.iter())
        .map(|node| {
            let mut label = format!("NUMA node {}", node.id);
            if !node.cpus.0.is_empty() {
                label.push_str(&format!(", CPUs {}", node.cpus));
            }
            if let Some(memory) = node.memory {
                label.push_str(&format!(", {memory}"));
            }
            tree(label, gpus(topology, calibrated, |device| device.node == Some(node.id)))
        })
        .collect();
    nodes.extend(gpus(topology, calibrated, |device| device.node.is_none_or(|node| !known.contains(&node))));
    format!(
        "{}{kind}, bandwidths in GB/s\n{}{}\n",
        topology.name,
        tree(host(topology), nodes),
        nvlink(topology)
    )
}

/// A line and what hangs from it.
fn tree(label: String, branches: Vec<Tree<String>>) -> Tree<String> {
    let glyphs = GlyphPalette { item_indent: "─ ", skip_indent: "  ", ..GlyphPalette::new() };
    Tree::new(label).with_leaves(branches).with_glyphs(glyphs)
}

fn host(topology: &Topology) -> String {
    let ceilings = &topology.host;
    let parts = [
        (ceilings.read, "read at most", ""),
        (ceilings.write, "written at most", ""),
        (ceilings.both, "", " both ways"),
        (ceilings.far_socket, "", " across sockets"),
    ];
    let known: Vec<String> = parts
        .iter()
        .filter_map(|(rate_of, before, after)| {
            let text = format!("{before} {}{after}", rate((*rate_of)?.0));
            Some(text.trim().to_owned())
        })
        .collect();
    if known.is_empty() { "host memory".to_owned() } else { format!("host memory: {}", known.join(", ")) }
}

/// The GPUs that `here` picks, those behind a switch under it.
fn gpus(
    topology: &Topology,
    calibrated: Option<&PathGraph>,
    here: impl Fn(&DeviceNode) -> bool,
) -> Vec<Tree<String>> {
    let gpu = |device: &DeviceNode| gpu(device, calibrated);
    let mut trees = Vec::new();
    let mut drawn = Vec::new();
    for device in topology.devices.iter().filter(|device| here(device)) {
        match device.switch {
            None => trees.push(gpu(device)),
            Some(switch) if !drawn.contains(&switch) => {
                drawn.push(switch);
                let behind = topology.devices.iter().filter(|d| here(d) && d.switch == Some(switch));
                let link = usize::try_from(switch).ok().and_then(|i| topology.switches.get(i)?.link);
                let label = with_link(format!("switch {switch}"), link.as_ref(), "the GPUs", "them");
                trees.push(tree(label, behind.map(&gpu).collect()));
            }
            Some(_) => {}
        }
    }
    trees
}

fn gpu(device: &DeviceNode, calibrated: Option<&PathGraph>) -> Tree<String> {
    let mut label = format!("{}, {}, {}", device.id, device.name, device.memory);
    if let Some(pci) = &device.pci {
        label.push_str(&format!(", {pci}"));
    }
    let mut label = with_link(label, device.link.as_ref(), "it", "it");
    if let Some(all) = calibrated.and_then(|graph| together(graph, device.id)) {
        label.push_str(&format!("; {all}"));
    }
    tree(label, Vec::new())
}

fn with_link(label: String, link: Option<&HostLink>, to: &str, from: &str) -> String {
    match link.map(both_ways) {
        Some((down, up)) => format!("{label}: {down} to {to}, {up} from {from}"),
        None => label,
    }
}

fn nvlink(topology: &Topology) -> String {
    let gpus = topology.devices.len();
    if topology.peers.is_empty() {
        return match gpus {
            0 | 1 => String::new(),
            _ => "NVLink: none known; peers talk over PCIe".to_owned(),
        };
    }
    let first = topology.peers[0].bandwidth;
    let alike = topology.peers.iter().all(|peer| peer.bandwidth == first);
    match first {
        Some(bandwidth) if alike && topology.peers.len() == gpus * (gpus - 1) / 2 => {
            format!("NVLink: {} each way between any two", rate(bandwidth.0))
        }
        _ => format!("NVLink: {} pairs of {gpus} GPUs", topology.peers.len()),
    }
}

#[cfg(test)]
mod tests {
    use glake_device::DeviceId;
    use glake_device::topology::{CpuSide, HostCeilings, PeerLink};
    use glake_sim::load;
    use glake_units::Bytes;

    use super::*;

    #[test]
    fn a_model_with_switches() {
        let text = picture(&Topology::from(&load("a100x8").unwrap()), None);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "a100x8 (simulated), bandwidths in GB/s");
        assert_eq!(lines[2], "├─ NUMA node 0");
        assert_eq!(lines[3], "│  ├─ switch 0: 24.3 to the GPUs, 24.3 from them");
        assert_eq!(lines[4], "│  │  ├─ GPU 0, Simulated A100, 80.00 GiB: 24.3 to it, 24.3 from it");
        assert_eq!(lines.last(), Some(&"NVLink: 250.0 each way between any two"));
        assert_eq!(lines.iter().filter(|line| line.contains("GPU ")).count(), 8);
        assert_eq!(lines.iter().filter(|line| line.contains("switch ")).count(), 4);
    }

    #[test]
    fn what_was_measured_stands_beside_each_gpu() {
        use glake_transfer::paths::GpuLinks;
        let topology = Topology::from(&load("h200x4").unwrap());
        let graph = PathGraph::conservative(&GpuLinks::of(&topology));
        let text = picture(&topology, Some(&graph));
        assert_eq!(text.matches("over all links").count(), 4, "{text}");
    }

    #[test]
    fn ceilings_are_told() {
        let text = picture(&Topology::from(&load("h200x4").unwrap()), None);
        assert!(
            text.contains("\nhost memory: read at most 213.0, written at most 160.0, 204.0 both ways\n"),
            "{text}"
        );
        let text = picture(&Topology::from(&load("h20x8").unwrap()), None);
        assert!(text.contains("60.0 across sockets"), "{text}");
    }

    #[test]
    fn what_is_not_known_is_left_out() {
        let device = |id| DeviceNode {
            id: DeviceId(id),
            name: "Some GPU".to_owned(),
            memory: Bytes::gib(8),
            pci: None,
            node: Some(3),
            link: None,
            switch: None,
        };
        let mut bare = Topology {
            name: "box".to_owned(),
            simulated: false,
            cpus: CpuSide::default(),
            host: HostCeilings::default(),
            devices: vec![device(0)],
            switches: Vec::new(),
            peers: Vec::new(),
        };
        assert_eq!(
            picture(&bare, None).trim_end(),
            "box, bandwidths in GB/s\nhost memory\n└─ GPU 0, Some GPU, 8.00 GiB"
        );
        bare.devices.push(device(1));
        assert!(picture(&bare, None).contains("NVLink: none known"));
        bare.peers.push(PeerLink { a: DeviceId(0), b: DeviceId(1), bandwidth: None, lanes: Some(4) });
        assert!(picture(&bare, None).contains("NVLink: 1 pairs of 2 GPUs"));
    }
}
