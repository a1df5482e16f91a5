//! The splitter on random graphs: what holds whatever the links, the sizes, the relays and the load.

#![allow(missing_docs)]
// What goes wrong here fails the test.
#![allow(clippy::unwrap_used)]

use glake_device::DeviceId;
use glake_device::owned::DeviceSet;
use glake_transfer::paths::{
    Ask, Ceiling, Direction, GRAIN, GpuLinks, LinkRate, Load, PathGraph, Paths, RelayRate, SLICE, Way, split,
};
use glake_units::{Bandwidth, Bytes, Micros};
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Server {
    rates: Vec<f64>,
    latencies: Vec<f64>,
    relays: Vec<(usize, usize, bool, f64)>,
    ceilings: Vec<(u8, f64, Option<usize>, u32)>,
    fork: f64,
}

fn server() -> impl Strategy<Value = Server> {
    (1..=10usize).prop_flat_map(|gpus| {
        (
            prop::collection::vec(2.0..60.0, gpus),
            prop::collection::vec(0.0..40.0, gpus),
            prop::collection::vec((0..gpus, 0..gpus, any::<bool>(), 2.0..60.0), 0..3 * gpus),
            prop::collection::vec((any::<u8>(), 5.0..200.0, prop::option::of(0..gpus), 1..4u32), 0..5),
            0.0..5.0,
        )
            .prop_map(|(rates, latencies, relays, ceilings, fork)| Server {
                rates,
                latencies,
                relays,
                ceilings,
                fork,
            })
    })
}

fn id(index: usize) -> DeviceId {
    DeviceId(u32::try_from(index).unwrap())
}

fn graph(server: &Server) -> PathGraph {
    let direction = Direction::ToGpu;
    let gpus = (0..server.rates.len()).map(id).map(|device| GpuLinks {
        device,
        name: "random".to_owned(),
        pci: None,
        node: None,
        switch: None,
        link: None,
        peers: Vec::new(),
    });
    let links =
        server.rates.iter().zip(&server.latencies).enumerate().map(|(index, (rate, latency))| LinkRate {
            device: id(index),
            direction,
            rate: Bandwidth(*rate),
            latency: Micros(*latency),
            break_even: Bytes::kib(512),
        });
    let relays = server.relays.iter().map(|&(target, relay, staged, rate)| RelayRate {
        target: id(target),
        relay: id(relay),
        direction,
        way: if staged { Way::Staged } else { Way::ZeroStaging },
        rate: Bandwidth(rate),
        latency: Micros(server.latencies[relay] + 7.0),
    });
    let ceilings = server.ceilings.iter().map(|&(links, rate, target, reached_by)| Ceiling {
        direction,
        links: (0..server.rates.len()).filter(|index| links >> (index % 8) & 1 == 1).map(id).collect(),
        target: target.map(id),
        rate: Bandwidth(rate),
        reached_by,
    });
    let paths = Paths {
        calibrated: true,
        fork: Micros(server.fork),
        gpus: gpus.collect(),
        links: links.collect(),
        relays: relays.collect(),
        ceilings: ceilings.collect(),
    };
    PathGraph::new(paths).unwrap()
}

fn size() -> impl Strategy<Value = Bytes> {
    prop_oneof![0..4u64 << 20, 0..1u64 << 28, 0..1u64 << 34].prop_map(Bytes::new)
}

fn set() -> impl Strategy<Value = DeviceSet> {
    any::<u16>().prop_map(|bits| (0..16).filter(|bit| bits >> bit & 1 == 1).map(DeviceId).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn shares_cover_the_copy_once_and_never_predict_worse(
        server in server(),
        size in size(),
        target in 0..10u32,
        (zero_staging, staged) in (set(), set()),
        flights in prop::collection::vec((0..10u32, 0..10u32, 0..1u64 << 30), 0..4),
    ) {
        let graph = graph(&server);
        let load = Load::new();
        for (target, relay, bytes) in flights {
            load.begin(DeviceId(target), DeviceId(relay), Direction::ToGpu, Bytes::new(bytes));
        }
        let target = DeviceId(target);
        let ask = Ask { target, direction: Direction::ToGpu, size, zero_staging, staged, load: &load, expected: 0 };
        let shares = split(&graph, &ask);

        let mut offset = Bytes::ZERO;
        for share in &shares {
            prop_assert_eq!(share.offset, offset);
            prop_assert!(share.offset.is_aligned(GRAIN));
            offset = offset.checked_add(share.size).unwrap();
            let open = match share.way {
                Way::Direct => share.relay == target,
                Way::ZeroStaging => zero_staging.contains(share.relay) && share.relay != target,
                Way::Staged => staged.contains(share.relay) && share.relay != target,
            };
            prop_assert!(open, "{share:?}");
            if shares.len() > 1 {
                prop_assert!(share.size.saturating_add(GRAIN) >= SLICE, "{share:?}");
            }
        }
        prop_assert_eq!(offset, size);
        let mut relays: Vec<DeviceId> = shares.iter().map(|share| share.relay).collect();
        relays.sort_unstable();
        relays.dedup();
        prop_assert_eq!(relays.len(), shares.len());

        prop_assert!(shares.predicted().0 <= shares.direct().0);
        if size < Bytes::kib(512) {
            prop_assert!(shares.len() == 1 && shares[0].way == Way::Direct);
        }
        prop_assert_eq!(&shares, &split(&graph, &ask), "once more, from the table");
        prop_assert_eq!(&shares, &split(&graph.clone(), &ask), "and from an empty table");
    }

    /// Times are not only what the splitter believes: shares sent over their paths at the rates that max-min gives end then.
    #[test]
    fn idle_links_are_never_asked_for_more_than_they_give(server in server(), size in 1u64 << 20..1 << 32) {
        let graph = graph(&server);
        let (load, target) = (Load::new(), DeviceId(0));
        let ask = Ask {
            target,
            direction: Direction::ToGpu,
            size: Bytes::new(size),
            zero_staging: DeviceSet::ALL,
            staged: DeviceSet::ALL,
            load: &load,
            expected: 0,
        };
        let shares = split(&graph, &ask);
        // What a share must be given on the average to be there in time.
        let needed = |relay: DeviceId| {
            let share = shares.iter().find(|share| share.relay == relay);
            share.map_or(0.0, |share| share.size.get() as f64 / shares.predicted().0 / 1000.0)
        };
        for share in &shares {
            let path = graph.rates(target, Direction::ToGpu).find(|path| (path.relay, path.way) == (share.relay, share.way));
            prop_assert!(needed(share.relay) <= path.unwrap().rate.0 * 1.01);
        }
        for ceiling in &graph.paths().ceilings {
            if ceiling.target.is_none_or(|only| only == target) && shares.len() > 1 {
                let sum: f64 = ceiling.links.iter().map(|link| needed(*link)).sum();
                prop_assert!(sum <= ceiling.rate.0 * 1.01, "{sum} of {ceiling:?}");
            }
        }
    }
}
