//! The device, and what is known of the server that it stands in.

use glake_device::topology::Topology;

use super::{Stage, figures};
use glake_replay::machine::Machine;

pub(super) fn stage(machine: &Machine, topology: &Topology) -> Stage {
    let gpu = machine.gpu();
    let kind = if machine.is_simulated() { "a simulated server in virtual time" } else { "this machine" };
    let link = topology.devices.first().and_then(|device| device.link);
    let says = format!(
        "{}, {kind}: {} GPUs{}; the story runs on GPU {}, {}, {}{}",
        topology.name,
        topology.devices.len(),
        if topology.peers.is_empty() { "" } else { " with NVLink between them" },
        gpu.id.0,
        gpu.name,
        gpu.memory,
        link.map_or(String::new(), |link| format!(", {:.1} GB/s from the host", link.to_gpu.0)),
    );
    let short = format!("{}, {} GPUs", machine.name(), topology.devices.len());
    let figures = figures! {
        "device": machine.name(),
        "simulated": machine.is_simulated(),
        "gpus": topology.devices.len(),
        "memory_bytes": gpu.memory.get(),
        "link_gbps": link.map(|link| link.to_gpu.0),
    };
    Stage { stage: "device", says, short, picture: None, figures, ok: true }
}
