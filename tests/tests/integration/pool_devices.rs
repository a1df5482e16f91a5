//! Pools side by side, and addresses that are not theirs.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use glake_device::owned::CompletionEvents;
use glake_device::{Address, DeviceId, Driver, DriverError, Stream};
use glake_sim::{Census, SimOptions, SimTopology, Simulator};
use glake_tests::pool::{Fixture, Shape, Stamp, assert_empty};
use glake_tiers::{GpuPool, PoolError, PoolOptions, PoolStream};
use glake_units::Bytes;

fn server(gpus: u32) -> Arc<Simulator> {
    let topology = SimTopology::uniform(gpus, Bytes::mib(64));
    Arc::new(Simulator::new(SimOptions { topology, ..SimOptions::default() }).unwrap())
}

#[test]
fn two_pools_do_not_disturb_each_other() {
    let sim = server(2);
    let pools: Vec<GpuPool> =
        (0..2).map(|gpu| GpuPool::new(sim.clone(), DeviceId(gpu), PoolOptions::default()).unwrap()).collect();
    let mut stamps: [Vec<Stamp>; 2] = [Vec::new(), Vec::new()];
    for round in 0..40 {
        for (gpu, pool) in pools.iter().enumerate() {
            let stream = PoolStream::of(&*sim, pool.device(), Stream::LEGACY).unwrap();
            let size = Bytes::kib(300 + (round * 977 + gpu as u64 * 131) % 9000);
            if let Ok(block) = pool.malloc(size, stream) {
                let stamp = Stamp { block, seed: round * 2 + gpu as u64 };
                stamp.write_now(pool).unwrap();
                stamps[gpu].push(stamp);
            }
            if round % 3 == 2 {
                let stamp = stamps[gpu].remove(0);
                stamp.assert_on(pool);
                pool.free(stamp.block.address).unwrap();
            }
        }
    }
    let theirs = stamps[1][0].block.address;
    assert!(
        matches!(pools[0].free(theirs), Err(PoolError::UnknownAddress { address, .. }) if address == theirs)
    );
    for stamp in stamps[0].drain(..) {
        stamp.assert_on(&pools[0]);
        pools[0].free(stamp.block.address).unwrap();
    }
    pools[0].settle().unwrap();
    pools[0].trim(Bytes::ZERO).unwrap();
    assert_empty(&pools[0]);
    stamps[1].iter().for_each(|stamp| stamp.assert_on(&pools[1]));
    drop(pools);
    assert_eq!(sim.census(), Census::default());
}

#[test]
fn a_capture_holds_the_points_of_all_pools_of_one_clock() {
    let sim = server(2);
    let driver: Arc<dyn Driver> = sim.clone();
    let completion_events = CompletionEvents::new(driver.clone());
    let options = PoolOptions { completion_events: Some(completion_events), ..PoolOptions::default() };
    let pools = [0, 1].map(|gpu| GpuPool::new(driver.clone(), DeviceId(gpu), options.clone()).unwrap());
    let stream = PoolStream::of(&*sim, DeviceId(1), Stream::LEGACY).unwrap();
    let block = pools[1].malloc(Bytes::mib(5), stream).unwrap();
    let hold = pools[0].clock().hold();
    pools[1].free(block.address).unwrap();
    assert!(matches!(pools[1].settle(), Err(PoolError::Driver(DriverError::Capturing { .. }))));
    drop(hold);
    pools[1].settle().unwrap();
    assert!(pools[1].trim(Bytes::ZERO).unwrap() > Bytes::ZERO);
}

#[test]
fn a_clock_of_another_driver_is_refused() {
    let options =
        PoolOptions { completion_events: Some(CompletionEvents::new(server(1))), ..PoolOptions::default() };
    let error = GpuPool::new(server(1), DeviceId(0), options).unwrap_err();
    assert!(matches!(error, PoolError::OtherDriver { device: DeviceId(0) }), "{error}");
}

#[test]
fn a_device_that_does_not_exist_is_named() {
    let error = GpuPool::new(server(2), DeviceId(2), PoolOptions::default()).unwrap_err();
    assert!(matches!(error, PoolError::NoSuchDevice { device: DeviceId(2), count: 2 }));
    assert_eq!(error.to_string(), "GPU 2 does not exist: the driver shows 2");
}

#[test]
fn a_request_larger_than_the_device_is_refused_and_named() {
    let fixture = Fixture::new(Shape::default());
    let error = fixture.pool.malloc(Bytes::mib(65), fixture.lane().pool).unwrap_err();
    assert!(error.is_out_of_memory());
    assert_eq!(error.to_string(), "GPU 0: 65.00 MiB wanted of a device with 64.00 MiB");
}

#[test]
fn an_address_where_no_block_begins_is_named() {
    let fixture = Fixture::new(Shape::default());
    let lane = fixture.lane();
    let (small, large) = (
        fixture.pool.malloc(Bytes::kib(3), lane.pool).unwrap(),
        fixture.pool.malloc(Bytes::mib(5), lane.pool).unwrap(),
    );
    let stranger = fixture.sim.plain_alloc(DeviceId(0), Bytes::mib(2)).unwrap();
    let before = fixture.pool.stats();
    let inside = |address: Address| Address(address.0 + 512);
    let base = fixture.pool.base();
    for wrong in [
        inside(small.address),
        inside(large.address),
        stranger,
        Address(0),
        Address(base.0 - 1),
        Address(u64::MAX),
    ] {
        let error = fixture.pool.free(wrong).unwrap_err();
        assert!(matches!(error, PoolError::UnknownAddress { address, .. } if address == wrong));
        assert!(error.to_string().contains(&wrong.to_string()), "{error}");
        assert!(!fixture.pool.record_stream(wrong, lane.pool) && fixture.pool.block(wrong).is_none());
    }
    assert_eq!(fixture.pool.stats(), before);
    assert!(!fixture.pool.clock().is_ticking(), "nothing was freed");
    assert_eq!(fixture.pool.block(large.address), Some((large.size, Bytes::mib(5))));
    for block in [small, large] {
        fixture.pool.free(block.address).unwrap();
        let twice = fixture.pool.free(block.address).unwrap_err();
        assert!(twice.to_string().contains(&block.address.to_string()), "{twice}");
    }
    assert!(fixture.pool.clock().is_ticking());
}

/// The driver of a pool that was made elsewhere keeps serving others.
#[test]
fn a_pool_that_goes_takes_nothing_with_it() {
    let sim = server(1);
    let driver: Arc<dyn Driver> = sim.clone();
    let stream = PoolStream::of(&*driver, DeviceId(0), Stream::LEGACY).unwrap();
    let kept = GpuPool::new(driver.clone(), DeviceId(0), PoolOptions::default()).unwrap();
    let stamp = Stamp { block: kept.malloc(Bytes::mib(7), stream).unwrap(), seed: 1 };
    stamp.write_now(&kept).unwrap();
    for _ in 0..5 {
        let gone = GpuPool::new(driver.clone(), DeviceId(0), PoolOptions::default()).unwrap();
        gone.malloc(Bytes::mib(30), stream).unwrap();
        std::thread::spawn(move || drop(gone)).join().unwrap();
        stamp.assert_on(&kept);
    }
    assert_eq!(sim.census().reservations, 1);
}
