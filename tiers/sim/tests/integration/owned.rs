//! The owners over the simulated device: real bytes, real refusals, nothing left behind.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use glake_device::owned::*;
use glake_device::{
    Access, Address, DeviceId, Driver, DriverError, ExtentProperties, Place, Protection, Refusal, Touch,
};
use glake_sim::{Census, SimOptions, Simulator};
use glake_units::Bytes;
use proptest::prelude::*;

const GPU: DeviceId = DeviceId(0);
const TWO: Bytes = Bytes::mib(2);
const PROPERTIES: ExtentProperties =
    ExtentProperties { place: Place::Gpu(GPU), exportable: false, gpu_direct: false };
const ACCESS: [Access; 1] = [Access { device: GPU, protection: Protection::ReadWrite }];

fn fixture() -> (Arc<Simulator>, Arc<CompletionEvents>) {
    let sim = Arc::new(Simulator::new(SimOptions::default()).unwrap());
    let completion_events = CompletionEvents::new(sim.clone());
    (sim, completion_events)
}

fn slot(index: u64) -> Bytes {
    Bytes::mib(2 * index)
}

#[test]
fn an_alias_shows_the_same_bytes_in_another_order() {
    let (sim, completion_events) = fixture();
    let driver: Arc<dyn Driver> = sim.clone();
    let range = Reservation::new(&completion_events, GPU, Bytes::mib(64)).unwrap();
    let extents: Vec<Extent> = (0..4).map(|_| Extent::new(&driver, TWO, PROPERTIES).unwrap()).collect();
    for (index, extent) in (0..).zip(&extents) {
        range.map(slot(index), extent).unwrap();
    }
    range.set_access(slot(0), Bytes::mib(8), &ACCESS).unwrap();
    for index in 0..4_u8 {
        range.fill(slot(index.into()), TWO, index + 1).unwrap();
    }
    let order = [3, 1];
    for (at, &which) in (10..).zip(&order) {
        range.map(slot(at), &extents[which]).unwrap();
    }
    range.set_access(slot(10), Bytes::mib(4), &ACCESS).unwrap();
    drop(extents);
    let mut seam = [0; 2];
    range.read(Bytes::new(slot(11).get() - 1), &mut seam).unwrap();
    assert_eq!(seam, [4, 2]);
    range.write(slot(10), &[9, 9, 9]).unwrap();
    let mut home = [0; 4];
    range.read(slot(3), &mut home).unwrap();
    assert_eq!(home, [9, 9, 9, 4]);
    drop(range);
    assert_eq!(sim.census(), Census::default());
}

#[test]
fn work_in_flight_yields_no_proof() {
    let (sim, completion_events) = fixture();
    let driver: Arc<dyn Driver> = sim.clone();
    let range = Reservation::new(&completion_events, GPU, Bytes::mib(8)).unwrap();
    let mapping = range.map(slot(1), &Extent::new(&driver, TWO, PROPERTIES).unwrap()).unwrap();
    range.set_access(slot(1), TWO, &ACCESS).unwrap();
    let stream = OwnedStream::new(&driver, GPU).unwrap();
    let touch = Touch { address: Address(range.start().0 + slot(1).get()), size: TWO };
    sim.enqueue_kernel(GPU, stream.id(), &[], &[touch], Duration::from_millis(1), |_| {}).unwrap();
    range.retire(&[mapping], completion_events.mark()).unwrap();
    let mut point = completion_events.record(DeviceSet::of(GPU)).unwrap();
    assert!(point.poll().unwrap().is_none());
    while point.poll().unwrap().is_none() {
        assert!(sim.step());
    }
    let passed = point.poll().unwrap().unwrap();
    range.unmap(&[mapping], &passed).unwrap();
    drop((range, stream, point, completion_events));
    assert_eq!(sim.census(), Census::default());
}

#[test]
fn dropping_waits_for_work_in_flight() {
    let (sim, completion_events) = fixture();
    let driver: Arc<dyn Driver> = sim.clone();
    let range = Reservation::new(&completion_events, GPU, Bytes::mib(8)).unwrap();
    range.map(slot(0), &Extent::new(&driver, TWO, PROPERTIES).unwrap()).unwrap();
    range.set_access(slot(0), TWO, &ACCESS).unwrap();
    let stream = OwnedStream::new(&driver, GPU).unwrap();
    let touch = Touch { address: range.start(), size: TWO };
    sim.enqueue_kernel(GPU, stream.id(), &[], &[touch], Duration::from_millis(1), |_| {}).unwrap();
    drop(range);
    assert!(sim.now() >= Duration::from_millis(1));
    drop(stream);
    assert_eq!(sim.census(), Census::default());
}

#[test]
fn pinned_memory_is_known_to_the_driver_while_it_lives() {
    let (sim, completion_events) = fixture();
    let pinned = Registration::new(&completion_events, Pages::new(TWO, 1).unwrap()).unwrap();
    assert_eq!(sim.pointer_attributes(pinned.start()).unwrap().kind, glake_device::PointerKind::Pinned);
    let start = pinned.start();
    drop(pinned);
    assert_eq!(sim.pointer_attributes(start).unwrap().kind, glake_device::PointerKind::Pageable);
}

/// What a program may do with slots of 2 MiB.
#[derive(Clone, Debug)]
enum Step {
    Map(u64),
    Write(u64, u8),
    Retire(u64),
    Revive(u64),
    Pass,
    Unmap(u64, u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..8_u64).prop_map(Step::Map),
        4 => (0..8_u64, 1..255_u8).prop_map(|(slot, byte)| Step::Write(slot, byte)),
        2 => (0..8_u64).prop_map(Step::Retire),
        1 => (0..8_u64).prop_map(Step::Revive),
        2 => Just(Step::Pass),
        3 => (0..8_u64, 1..4_u64).prop_map(|(first, count)| Step::Unmap(first, count)),
    ]
}

/// A slot as a reader of the documentation would keep it.
#[derive(Clone, Copy, Debug)]
enum Model {
    Live(u8),
    Retired(Sequence, u8),
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_reservation_matches_its_model(steps in prop::collection::vec(step(), 1..60)) {
        let (sim, completion_events) = fixture();
        let driver: Arc<dyn Driver> = sim.clone();
        let range = Reservation::new(&completion_events, GPU, Bytes::mib(16)).unwrap();
        let mut model: BTreeMap<u64, Model> = BTreeMap::new();
        let mut passed = completion_events.synchronize(DeviceSet::of(GPU)).unwrap();
        let mapping = |index: u64| Mapping { offset: slot(index), size: TWO };
        for step in steps {
            match step {
                Step::Map(index) => {
                    let extent = Extent::new(&driver, TWO, PROPERTIES).unwrap();
                    let done = range.map(slot(index), &extent).is_ok();
                    prop_assert_eq!(done, !model.contains_key(&index));
                    if done {
                        range.set_access(slot(index), TWO, &ACCESS).unwrap();
                        model.insert(index, Model::Live(0));
                    }
                }
                Step::Write(index, byte) => {
                    let done = range.write(Bytes::new(slot(index).get() + 7), &[byte]).is_ok();
                    prop_assert_eq!(done, matches!(model.get(&index), Some(Model::Live(_))));
                    if done {
                        model.insert(index, Model::Live(byte));
                    }
                }
                Step::Retire(index) => {
                    let mark = completion_events.mark();
                    let done = range.retire(&[mapping(index)], mark).is_ok();
                    prop_assert_eq!(done, model.contains_key(&index));
                    if let Some(Model::Live(byte) | Model::Retired(_, byte)) = model.get(&index).copied() {
                        model.insert(index, Model::Retired(mark, byte));
                    }
                }
                Step::Revive(index) => {
                    range.revive(&[mapping(index)]).unwrap();
                    if let Some(Model::Retired(_, byte)) = model.get(&index).copied() {
                        model.insert(index, Model::Live(byte));
                    }
                }
                Step::Pass => passed = completion_events.record(DeviceSet::of(GPU)).unwrap().wait().unwrap(),
                Step::Unmap(first, count) => {
                    let wanted: Vec<u64> = (first..(first + count).min(8)).collect();
                    let allowed = |index: &u64| match model.get(index) {
                        Some(Model::Retired(mark, _)) => *mark <= passed.sequence(),
                        _ => false,
                    };
                    let expected = wanted.iter().all(allowed);
                    let mappings: Vec<Mapping> = wanted.iter().map(|&index| mapping(index)).collect();
                    match range.unmap(&mappings, &passed) {
                        Ok(()) => prop_assert!(expected),
                        Err(DriverError::Refused { reason, .. }) => {
                            prop_assert!(!expected);
                            prop_assert!(matches!(reason, Refusal::InUse | Refusal::NotMapped));
                        }
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                    if expected {
                        model.retain(|index, _| !wanted.contains(index));
                    }
                }
            }
            prop_assert_eq!(range.mappings(), model.len());
            prop_assert_eq!(sim.census().mappings, model.len());
            for (&index, state) in &model {
                let mut byte = [0];
                let read = range.read(Bytes::new(slot(index).get() + 7), &mut byte);
                match state {
                    Model::Live(expected) => prop_assert_eq!(byte[0], *expected),
                    Model::Retired(..) => prop_assert!(read.is_err()),
                }
            }
        }
        drop((range, completion_events));
        prop_assert_eq!(sim.census(), Census::default());
    }
}
