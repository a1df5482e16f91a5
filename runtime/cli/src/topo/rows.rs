//! The tables below the picture.

use glake_device::topology::Topology;

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
