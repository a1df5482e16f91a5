//! Routes of copies: the pipes that each copy goes through.
//!
//! - Between pinned host memory and *mapped* memory of GPU *o*, enqueued on a stream of GPU *k*: over *k*'s own link and then over NVLink,
//!   without staging, unless the topology disables it. This is the relay that lets a transfer use every link at once. *k* has one copy engine
//!   for such copies in both directions, as fast as one link.
//! - Plain memory, or *k* = *o*: over *o*'s link.
//! - Between GPUs: over NVLink if both have it; else over both links. Plain memory that *k* has no access to: through host memory, over
//!   both links.
//! - Over a link of another socket than the owner's: shares the owner's limit for that.

use super::flow::Route;
use super::topology::{Bandwidth, SimLink, SimTopology};

/// One end of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Memory of a GPU; `mapped` unless it is plain.
    Gpu { index: usize, mapped: bool },
    /// GPU memory that the copying GPU cannot access: the driver copies it.
    Foreign { index: usize },
    /// Host memory that a GPU can access directly.
    Pinned,
    /// Host memory that the driver copies through its own staging buffers.
    Pageable,
}

impl End {
    /// Returns the GPU that owns the memory.
    pub(super) fn gpu(self) -> Option<usize> {
        match self {
            End::Gpu { index, .. } | End::Foreign { index } => Some(index),
            End::Pinned | End::Pageable => None,
        }
    }
}

/// Pipes of a server, by index.
#[derive(Debug)]
pub(super) struct Plumbing {
    capacity: Vec<f64>,
    gpus: Vec<Pipes>,
    switches: Vec<Duplex>,
    host: Duplex,
    pageable_to_gpu: f64,
    pageable_from_gpu: f64,
    /// Whether a copy on a peer's stream uses the peer's link.
    relay: bool,
}

#[derive(Clone, Copy, Debug)]
struct Duplex {
    to_gpu: usize,
    from_gpu: usize,
    both: Option<Both>,
}

/// A pipe of capacity 1 shared by both directions, and the share that one GB/s of each takes.
#[derive(Clone, Copy, Debug)]
struct Both {
    pipe: usize,
    to_gpu: f64,
    from_gpu: f64,
}

#[derive(Debug)]
struct Pipes {
    link: Duplex,
    nvlink: Option<Duplex>,
    far: Option<Duplex>,
    local: usize,
    /// Engine for copies between host memory and other GPUs' memory.
    crossing: usize,
    socket: u32,
    switch: Option<usize>,
}

/// Direction through a [`Duplex`].
#[derive(Clone, Copy)]
enum Direction {
    ToGpu,
    FromGpu,
}

impl Plumbing {
    pub(super) fn new(topology: &SimTopology) -> Self {
        let mut capacity = Vec::new();
        let mut pipe = |bandwidth: Bandwidth| {
            capacity.push(bandwidth.0);
            capacity.len() - 1
        };
        let mut duplex = |to_gpu: Bandwidth, from_gpu: Bandwidth, both: Option<Bandwidth>| Duplex {
            to_gpu: pipe(to_gpu),
            from_gpu: pipe(from_gpu),
            // An even mix fills the pipe at `both`; the slower direction takes more of it per byte.
            both: both.map(|both| {
                let scale = 2.0 / (both.0 * (1.0 / to_gpu.0 + 1.0 / from_gpu.0));
                let (to_gpu, from_gpu) = (scale / to_gpu.0, scale / from_gpu.0);
                Both { pipe: pipe(Bandwidth(1.0)), to_gpu, from_gpu }
            }),
        };
        let host = duplex(topology.host.read, topology.host.write, topology.host.both);
        let switches: Vec<Duplex> =
            topology.switches.iter().map(|link| duplex(link.to_gpu, link.from_gpu, link.both)).collect();
        let gpus = topology
            .gpus
            .iter()
            .map(|gpu| Pipes {
                link: duplex(gpu.link.to_gpu, gpu.link.from_gpu, gpu.link.both),
                nvlink: gpu.nvlink.map(|bandwidth| duplex(bandwidth, bandwidth, None)),
                far: topology.host.far_socket.map(|bandwidth| duplex(bandwidth, bandwidth, None)),
                local: duplex(gpu.local, gpu.local, None).to_gpu,
                crossing: duplex(wider(gpu.link), wider(gpu.link), None).to_gpu,
                socket: gpu.socket,
                switch: gpu.switch.map(|index| index as usize).filter(|index| *index < switches.len()),
            })
            .collect();
        Plumbing {
            capacity,
            gpus,
            switches,
            host,
            pageable_to_gpu: topology.host.pageable_to_gpu.0,
            pageable_from_gpu: topology.host.pageable_from_gpu.0,
            relay: topology.relay,
        }
    }

    /// Returns the capacity of each pipe, by index.
    pub(super) fn capacity(&self) -> Vec<f64> {
        self.capacity.clone()
    }

    /// Returns the pipe of data leaving a GPU over its link.
    pub(super) fn link_from(&self, gpu: usize) -> Option<usize> {
        self.gpus.get(gpu).map(|pipes| pipes.link.from_gpu)
    }

    /// Returns the route of a copy enqueued on a stream of GPU `by`, and its maximum rate alone.
    pub(super) fn route(&self, from: End, to: End, by: usize) -> (Route, f64) {
        let mut pipes = Vec::with_capacity(6);
        let mut cap = f64::INFINITY;
        match (from.gpu(), to.gpu()) {
            (Some(a), Some(b)) if a == b => pipes.push((self.gpus[a].local, 1.0)),
            (Some(a), Some(b)) => {
                let staged = [from, to].iter().any(|end| matches!(end, End::Foreign { .. }));
                if staged {
                    through(self.host, Direction::FromGpu, &mut pipes);
                    through(self.host, Direction::ToGpu, &mut pipes);
                }
                if staged || !self.over_nvlink(a, b, &mut pipes) {
                    self.over_link(a, Direction::FromGpu, &mut pipes);
                    self.over_link(b, Direction::ToGpu, &mut pipes);
                }
            }
            (Some(owner), None) => {
                self.to_host(owner, self.is_relayed(from, to), by, Direction::FromGpu, &mut pipes);
                if to == End::Pageable {
                    cap = self.pageable_from_gpu;
                }
            }
            (None, Some(owner)) => {
                self.to_host(owner, self.is_relayed(to, from), by, Direction::ToGpu, &mut pipes);
                if from == End::Pageable {
                    cap = self.pageable_to_gpu;
                }
            }
            (None, None) => {
                through(self.host, Direction::ToGpu, &mut pipes);
                through(self.host, Direction::FromGpu, &mut pipes);
            }
        }
        pipes.sort_unstable_by_key(|(pipe, _)| *pipe);
        pipes.dedup_by(|again, first| {
            let same = again.0 == first.0;
            if same {
                first.1 += again.1;
            }
            same
        });
        (pipes.into(), cap)
    }

    /// Returns the route of bytes moved by a kernel or fill inside GPU `by`.
    pub(super) fn local(&self, by: usize) -> Route {
        [(self.gpus[by].local, 1.0)].into()
    }

    fn is_relayed(&self, device: End, host: End) -> bool {
        self.relay && matches!(device, End::Gpu { mapped: true, .. }) && host == End::Pinned
    }

    fn to_host(
        &self,
        owner: usize,
        relayed: bool,
        by: usize,
        direction: Direction,
        pipes: &mut Vec<(usize, f64)>,
    ) {
        through(self.host, direction, pipes);
        let crossed = relayed
            && by != owner
            && match direction {
                Direction::ToGpu => self.over_nvlink(by, owner, pipes),
                Direction::FromGpu => self.over_nvlink(owner, by, pipes),
            };
        if crossed {
            pipes.push((self.gpus[by].crossing, 1.0));
        }
        let link = if crossed { by } else { owner };
        self.over_link(link, direction, pipes);
        if let Some(far) = self.gpus[owner].far
            && self.gpus[link].socket != self.gpus[owner].socket
        {
            through(far, direction, pipes);
        }
    }

    fn over_link(&self, gpu: usize, direction: Direction, pipes: &mut Vec<(usize, f64)>) {
        through(self.gpus[gpu].link, direction, pipes);
        if let Some(switch) = self.gpus[gpu].switch {
            through(self.switches[switch], direction, pipes);
        }
    }

    fn over_nvlink(&self, from: usize, to: usize, pipes: &mut Vec<(usize, f64)>) -> bool {
        match (self.gpus[from].nvlink, self.gpus[to].nvlink) {
            (Some(out), Some(into)) => {
                pipes.extend([(out.from_gpu, 1.0), (into.to_gpu, 1.0)]);
                true
            }
            _ => false,
        }
    }
}

/// Returns the rate of a link in its faster direction.
fn wider(link: SimLink) -> Bandwidth {
    if link.to_gpu < link.from_gpu { link.from_gpu } else { link.to_gpu }
}

fn through(duplex: Duplex, direction: Direction, pipes: &mut Vec<(usize, f64)>) {
    let (own, both) = match direction {
        Direction::ToGpu => (duplex.to_gpu, duplex.both.map(|both| (both.pipe, both.to_gpu))),
        Direction::FromGpu => (duplex.from_gpu, duplex.both.map(|both| (both.pipe, both.from_gpu))),
    };
    pipes.push((own, 1.0));
    pipes.extend(both);
}

#[cfg(test)]
mod tests {
    use super::super::flow::{FlowNet, Load};
    use super::*;

    /// Returns the GB/s of `bytes` split evenly over copies enqueued on each GPU, to memory of GPU 0.
    fn speed(topology: &SimTopology, mapped: bool, to_gpu: bool, by: usize) -> f64 {
        let plumbing = Plumbing::new(topology);
        let mut net = FlowNet::new(plumbing.capacity());
        let bytes = 1 << 30;
        for gpu in 0..by {
            let ends = (End::Pinned, End::Gpu { index: 0, mapped });
            let (from, to) = if to_gpu { ends } else { (ends.1, ends.0) };
            let (route, cap) = plumbing.route(from, to, gpu);
            net.begin(0, 0, &[Load { route, bytes, cap }]);
        }
        let mut now = 0;
        while let Some(next) = net.next() {
            now = next;
            net.end(now);
        }
        (bytes * by as u64) as f64 / now as f64
    }

    #[test]
    fn both_directions_reach_measured_rates() {
        let plumbing = Plumbing::new(&crate::load("h200x4").unwrap());
        let ways = |gpu| {
            let device = End::Gpu { index: gpu, mapped: true };
            [(End::Pinned, device), (device, End::Pinned)].map(|(from, to)| plumbing.route(from, to, gpu).0)
        };
        for (gpus, expected) in [(1, 101.7), (4, 204.0)] {
            let mut net = FlowNet::new(plumbing.capacity());
            let bytes = 1 << 30;
            let routes: Vec<Route> = (0..gpus).flat_map(ways).collect();
            for route in &routes {
                net.begin(0, 0, &[Load { route: route.clone(), bytes, cap: f64::INFINITY }]);
            }
            let speed = (bytes * routes.len() as u64) as f64 / net.next().unwrap() as f64;
            assert!((speed - expected).abs() < 0.1, "{gpus}: {speed}");
        }
    }

    /// decision 13: 54.8 GB/s in all where both of a relay's copies cross NVLink by themselves, 98.6 where each has a slot in the
    /// relay's memory, and its other half is the other GPU's copy.
    #[test]
    fn both_ways_over_a_relay_share_its_engine() {
        let plumbing = Plumbing::new(&crate::load("h200x4").unwrap());
        let [own, relay] = [0, 1].map(|index| End::Gpu { index, mapped: true });
        let out = plumbing.route(own, End::Pinned, 1);
        for (to, expected) in [(own, 55.5), (relay, 101.7)] {
            let mut net = FlowNet::new(plumbing.capacity());
            let bytes = 1 << 30;
            for (route, cap) in [out.clone(), plumbing.route(End::Pinned, to, 1)] {
                net.begin(0, 0, &[Load { route, bytes, cap }]);
            }
            let speed = 2.0 * bytes as f64 / net.next().unwrap() as f64;
            assert!((speed - expected).abs() < 0.1, "{expected}: {speed}");
        }
    }

    #[test]
    fn relays_reach_measured_rates() {
        let model = |name| crate::load(name).unwrap();
        let h200 = model("h200x4");
        for (mapped, to_gpu, by, expected) in [
            (true, true, 1, 55.5),
            (true, true, 2, 111.0),
            (true, true, 4, 213.0),
            (true, false, 4, 160.0),
            (false, true, 4, 55.5),
        ] {
            let got = speed(&h200, mapped, to_gpu, by);
            assert!((got - expected).abs() < 0.1, "{mapped} {to_gpu} {by}: {got}");
        }
        assert!((speed(&model("a100x8"), true, true, 8) - 97.2).abs() < 0.1);
        // Four near links plus the far socket's limit, at the pace of the slowest slice.
        assert!((speed(&model("h20x8"), true, true, 8) - 8.0 * 15.0).abs() < 0.1);
    }
}
