//! Paths that were given up are tried again: what was seen of them may have been of a moment in which something else kept the links busy,
//! and copies that no longer take them say nothing of them.
//!
//! ```text
//!   over both links ─► gains nothing ─► own link alone, 16 GiB ─► over both ─► gains nothing ─► own link alone, 32 GiB ─► ...
//! ```

use glake_device::DeviceId;
use glake_units::Bytes;

use super::{Direction, PathGraph};

/// After so many bytes they are tried again. A trial is of some 6 GiB: one copy in four is timed.
const FIRST: Bytes = Bytes::gib(16);
/// After twice as many each time, up to these.
const LAST: Bytes = Bytes::gib(256);

/// What is copied over one link of those that were assumed to help.
#[derive(Debug)]
pub(crate) struct Retrial {
    /// What was assumed before copies refined it.
    assumed: PathGraph,
    alone: Bytes,
    after: Bytes,
}

impl Retrial {
    /// Of a graph that nothing was seen of yet.
    pub(crate) fn new(assumed: PathGraph) -> Retrial {
        Retrial { assumed, alone: Bytes::ZERO, after: FIRST }
    }

    /// So many bytes of a target's memory went over its own link alone, though others serve it. The graph to begin anew with, once that was
    /// enough.
    pub(crate) fn note(&mut self, target: DeviceId, direction: Direction, size: Bytes) -> Option<PathGraph> {
        self.assumed.rates(target, direction).nth(1)?;
        self.alone = self.alone.saturating_add(size);
        if self.alone < self.after {
            return None;
        }
        self.alone = Bytes::ZERO;
        self.after = self.after.saturating_add(self.after).min(LAST);
        Some(self.assumed.clone())
    }
}

#[cfg(test)]
mod tests {
    use glake_units::Bandwidth;

    use super::super::GpuLinks;
    use super::*;

    const GPU: DeviceId = DeviceId(0);

    /// Of two GPUs that are joined, and a third that is not.
    fn assumed() -> PathGraph {
        let gpu = |id: u32| GpuLinks {
            device: DeviceId(id),
            name: "GPU".to_owned(),
            pci: None,
            node: None,
            switch: None,
            link: Some(Bandwidth(50.0)),
            peers: if id < 2 { vec![DeviceId(1 - id)] } else { Vec::new() },
        };
        PathGraph::conservative(&(0..3).map(gpu).collect::<Vec<_>>())
    }

    /// How many copies over the own link it takes until paths are tried again.
    fn patience(retrial: &mut Retrial, target: DeviceId) -> Option<usize> {
        (1..1000).find(|_| retrial.note(target, Direction::FromGpu, Bytes::gib(1)).is_some())
    }

    #[test]
    fn what_is_not_taken_is_tried_again_ever_more_seldom() {
        let mut retrial = Retrial::new(assumed());
        let seen: Vec<usize> = (0..6).map(|_| patience(&mut retrial, GPU).unwrap()).collect();
        assert_eq!(seen, [16, 32, 64, 128, 256, 256]);
    }

    #[test]
    fn a_gpu_that_nothing_helps_waits_for_nothing() {
        assert_eq!(patience(&mut Retrial::new(assumed()), DeviceId(2)), None);
        assert_eq!(patience(&mut Retrial::new(PathGraph::empty()), GPU), None);
    }
}
